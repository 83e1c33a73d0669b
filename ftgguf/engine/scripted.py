"""An executor that emits given tokens: exact tests of streaming, stop strings, tool calls, cancel and disconnect.

`-m scripted:FILE.json` runs the whole engine on it. The file:

    {"vocab": "model.gguf",          // whose tokenizer (and chat template) to use, relative to the JSON file
     "scripts": [
       {"tokens": [5, 6, 7]},        // ids,
       {"text": "Hello<|im_end|>"},  // or text, tokenized with control tokens read,
       {"pieces": ["K", " L"]},      // or texts tokenized one by one;
       {"when": "weather", "text": "sunny"}],   // used for prompts whose text contains "weather"
     "delay_ms": 0,                  // added to every step
     "prompt_delay_ms": 0}           // added to every step that holds prompt rows

A prompt gets the first script whose `when` it contains, else the next of the scripts without `when` (round and round).
After its last token a script goes on with the end-of-generation token, or starts again with `"loop": true`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftgguf.engine.engine import Engine
from ftgguf.engine.executor import NotSupported
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.nouns import F32, I32, Batch
from ftgguf.vocab import Vocab

PREFIX = "scripted:"
N_CTX_TRAIN = 32768
CHOSEN, OTHERS = 30.0, -30.0
"""Logits: far enough apart that every sampler takes the scripted token."""
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Script:
    """Tokens to emit, for prompts that contain `when` (empty: any prompt)."""

    tokens: tuple[int, ...]
    when: str = ""
    loop: bool = False


class ScriptedExecutor:
    """Emits the scripts' tokens as nearly one-hot logits (engine.executor.Executor).

    It recognises a running sequence by its tokens: the history it has seen plus the token it has just emitted. So it
    keeps no tie to requests, and works with shared prefixes, preemption and context shift off.
    """

    recurrent = False

    def __init__(
        self,
        scripts: list[Script],
        *,
        n_vocab: int,
        eog: int,
        n_cells: int = 8192,
        max_rows: int = 512,
        text_of: Callable[[list[int]], str] | None = None,
        delay_s: float = 0.0,
        prompt_delay_s: float = 0.0,
    ) -> None:
        if any(script.when for script in scripts) and text_of is None:
            raise ValueError("scripts with 'when' need text_of")
        self.n_vocab, self.n_cells, self.max_rows = n_vocab, n_cells, max_rows
        self._special = [script for script in scripts if script.when]
        self._general = [script for script in scripts if not script.when] or [Script(())]
        self._eog, self._text_of = eog, text_of
        self._delay_s, self._prompt_delay_s = delay_s, prompt_delay_s
        self._next = 0
        self._tokens: I32 = np.zeros(n_cells, dtype=np.int32)
        self._expected: dict[bytes, list[tuple[Script, int]]] = {}
        self.steps = 0

    def forward(self, batch: Batch) -> F32:
        """See engine.executor.Executor.forward."""
        self.steps += 1
        has_prompt = batch.rows > len(batch.outputs)
        if pause := self._delay_s + (self._prompt_delay_s if has_prompt else 0.0):
            time.sleep(pause)
        self._tokens[batch.cell] = batch.token
        logits = np.full((len(batch.outputs), self.n_vocab), OTHERS, dtype=np.float32)
        for i, row in enumerate(batch.outputs.tolist()):
            table = batch.tables[int(batch.sequence[row])]
            history = self._tokens[table[: int(batch.position[row]) + 1]]
            logits[i, self._emit(history)] = CHOSEN
        return logits

    def _emit(self, history: I32) -> int:
        waiting = self._expected.pop(history.tobytes(), [])
        script, index = waiting.pop(0) if waiting else (self._choose(history), 0)
        if waiting:
            self._expected[history.tobytes()] = waiting
        if script.loop and script.tokens:
            index %= len(script.tokens)
        if index >= len(script.tokens):
            return self._eog
        token = script.tokens[index]
        following = np.append(history, np.int32(token)).tobytes()
        self._expected.setdefault(following, []).append((script, index + 1))
        while len(self._expected) > _REMEMBERED:
            del self._expected[next(iter(self._expected))]
        return token

    def _choose(self, prompt: I32) -> Script:
        if self._special:
            assert self._text_of is not None
            text = self._text_of(prompt.tolist())
            for script in self._special:
                if script.when in text:
                    return script
        script = self._general[self._next % len(self._general)]
        self._next += 1
        return script

    def copy_cells(self, src: I32, dst: I32) -> None:
        self._tokens[dst] = self._tokens[src]

    def shift_cells(self, cells: I32, delta: int) -> None:
        raise NotSupported("a scripted model's context cannot be shifted")

    def read_cells(self, cells: I32) -> bytes:
        return self._tokens[cells].astype("<i4").tobytes()

    def write_cells(self, cells: I32, data: bytes) -> None:
        if len(data) != 4 * len(cells):
            raise ValueError(f"{len(data)} bytes for {len(cells)} cells of 4")
        self._tokens[cells] = np.frombuffer(data, dtype="<i4")


# ------------------------------------------------------------------------------------------------ from a file


def is_scripted(path: str) -> bool:
    """Whether a model path names a script instead of a model."""
    return path.startswith(PREFIX)


def read(path: str) -> tuple[Path, dict[str, Any]]:
    """(the GGUF with the tokenizer, the file's contents) of `scripted:FILE.json`. Raises ValueError, OSError."""
    file = Path(path.removeprefix(PREFIX))
    try:
        content = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("vocab"), str):
        raise ValueError(f'{file}: a script needs "vocab": the path of a GGUF file with a tokenizer')
    return file.parent / content["vocab"], content


def _script(entry: dict[str, Any], vocab: Vocab) -> Script:
    if "tokens" in entry:
        tokens = [int(token) for token in entry["tokens"]]
    elif "pieces" in entry:
        tokens = [token for piece in entry["pieces"] for token in vocab.tokenize(piece, False, True)]
    else:
        tokens = vocab.tokenize(str(entry["text"]), False, True)
    if any(not 0 <= token < vocab.n_vocab for token in tokens):
        raise ValueError(f"a script holds token ids outside 0..{vocab.n_vocab - 1}")
    return Script(tuple(tokens), str(entry.get("when", "")), bool(entry.get("loop", False)))


def load_engine(config: ServerConfig, progress: Callable[[str, float], None]) -> Engine:
    """An engine over the script that `config.model.path` names."""
    progress("reading the script", 0.0)
    gguf_path, content = read(config.model.path)
    gguf = open_gguf(gguf_path)
    vocab = Vocab.load(gguf)
    if not vocab.eog_ids:
        raise ValueError(f"{gguf_path}: a scripted model needs an end-of-generation token")
    ends = [token for token in (vocab.eot, vocab.eos) if token is not None] or sorted(vocab.eog_ids)
    context = config.context
    executor = ScriptedExecutor(
        [_script(entry, vocab) for entry in content.get("scripts", [])],
        n_vocab=vocab.n_vocab,
        eog=ends[0],
        n_cells=context.cells(N_CTX_TRAIN),
        max_rows=min(context.n_ubatch, context.n_batch),
        text_of=lambda ids: vocab.detokenize(ids).decode("utf-8", "replace"),
        delay_s=float(content.get("delay_ms", 0)) / 1e3,
        prompt_delay_s=float(content.get("prompt_delay_ms", 0)) / 1e3,
    )
    engine = Engine(executor, vocab, config, n_ctx_train=N_CTX_TRAIN)
    engine.info = {
        "path": str(gguf_path),
        "name": gguf_path.stem,
        "architecture": "scripted",
        "file_type": "scripted",
        "n_params": 0,
        "size": 0,
        "n_vocab": vocab.n_vocab,
        "n_embd": 0,
        "n_layer": 0,
        "n_ctx_train": N_CTX_TRAIN,
    }
    progress("ready", 1.0)
    return engine
