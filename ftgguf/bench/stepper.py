"""An engine driven step by step without sampling: what llama-bench times, for ours and for libllama alike."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ftgguf import __version__
from ftgguf.bench.plan import SpeedTest, Tokens
from ftgguf.engine.layout import NO_KERNELS, NO_TYPES
from ftgguf.engine.load import load_engine, open_model
from ftgguf.flags import ServerConfig
from ftgguf.nouns import F32, Batch
from ftgguf.vocab import Vocab


@dataclass(frozen=True, slots=True)
class Facts:
    """What a loaded engine is; sizes in bytes. `isa` are the instruction sets its kernels were built for."""

    engine: str
    build: str
    isa: tuple[str, ...]
    layout: str
    n_vocab: int
    description: str
    load_seconds: float
    device: str = "CPU"
    notes: tuple[str, ...] = ()
    one_layout: str = ""
    """Why there is one layout of weights for this file here, for llama.cpp as well; empty where there are two."""


class Stepper(Protocol):
    """One sequence on one loaded model."""

    @property
    def facts(self) -> Facts: ...

    @property
    def n_past(self) -> int:
        """Tokens evaluated so far."""

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Evaluate `tokens` in the engine's batches, logits of the last one."""

    def step(self, token: int) -> None:
        """Evaluate one token with its logits."""

    def logits(self) -> F32:
        """Float32 [n_vocab] after the last token; valid until the next call."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids with BOS where the file says so."""

    def ends(self) -> list[int]:
        """Ids of the tokens that end a text."""

    def close(self) -> None: ...


class OursStepper:
    """ftgguf's own executor of a resolved configuration. Errors of `load_engine` pass through."""

    def __init__(self, config: ServerConfig, progress: Callable[[str, float], None] = lambda s, f: None) -> None:
        started = time.perf_counter()
        self._engine = load_engine(config, progress)
        info = self._engine.info
        self._executor = self._engine.executor
        # one sequence whose cell is its position: the layout that an idle server gives its first request
        self._table = np.arange(self._executor.n_cells, dtype=np.int32)
        self._n_batch = min(config.context.n_ubatch, config.context.n_batch, self._executor.max_rows)
        self._config = config
        self._vocab: Vocab | None = None
        self.n_past = 0
        self._logits: F32 | None = None
        self.info = info
        self.facts = Facts(
            engine="ftgguf",
            build=f"{__version__} (ggml {info['ggml']})" if "ggml" in info else __version__,
            isa=tuple(info.get("cpu_features", ())),
            layout=str(info.get("layout", "")),
            n_vocab=self._executor.n_vocab,
            description=f"{info['architecture']} {info['file_type']}",
            load_seconds=time.perf_counter() - started,
            device=str(info.get("device", "CPU")),
            notes=tuple(info.get("notes", ())),
            one_layout=why if (why := str(info.get("layout_reason", ""))) in (NO_KERNELS, NO_TYPES) else "",
        )

    def rewind(self, length: int) -> None:
        self.n_past = length

    def prefill(self, tokens: Sequence[int]) -> None:
        ids = np.asarray(tokens, np.int32)
        for start in range(0, len(ids), self._n_batch):
            chunk = ids[start : start + self._n_batch]
            self._forward(chunk, last=start + len(chunk) == len(ids))

    def step(self, token: int) -> None:
        self._forward(np.array([token], np.int32), last=True)

    def _forward(self, ids: Any, *, last: bool) -> None:
        n, end = len(ids), self.n_past + len(ids)
        if end > self._executor.n_cells:
            raise ValueError(f"{end} tokens do not fit a context of {self._executor.n_cells}")
        position = self._table[self.n_past : end]
        output = np.array([n - 1] if last else [], np.int32)
        batch = Batch(ids, position, np.zeros(n, np.int32), position, (self._table[:end],), output)
        result = self._executor.forward(batch)
        self._logits = result[0] if last else None
        self.n_past = end

    def logits(self) -> F32:
        if self._logits is None:
            raise ValueError("no logits: nothing was evaluated")
        return self._logits

    def tokenize(self, text: str) -> list[int]:
        return self._loaded_vocab().tokenize(text, add_special=True)

    def ends(self) -> list[int]:
        return sorted(self._loaded_vocab().eog_ids)

    def _loaded_vocab(self) -> Vocab:
        if self._vocab is None:
            self._vocab = Vocab.load(open_model(self._config))
        return self._vocab

    def close(self) -> None:
        """Nothing: the executor goes with its last reference."""


class LibllamaStepper:
    """libllama on the same numbers as OursStepper. `layout`: `repacked` (llama.cpp's default) or `plain`."""

    def __init__(self, config: ServerConfig, layout: str) -> None:
        import llama_cpp

        from ftgguf.bench import amx
        from ftgguf.bench.libllama import Libllama, system_info

        started = time.perf_counter()
        flash = {"on": True, "off": False}.get(config.context.flash_attn)
        self._session = Libllama(
            config.model.path,
            config.context.size,
            config.cpu.threads,
            n_threads_batch=config.cpu.threads_batch,
            repack=layout == "repacked",
            n_batch=config.context.n_batch,
            n_ubatch=config.context.n_ubatch,
            type_k=config.context.type_k,
            type_v=config.context.type_v,
            flash_attn=flash,
        )
        notes: tuple[str, ...] = ()
        if layout == "repacked" and amx.broken():
            notes = ("its default crashes here in ggml's AMX kernels, so it runs without them",)
        self.facts = Facts(
            engine="llama.cpp",
            build=f"libllama of llama-cpp-python {llama_cpp.__version__}",
            isa=parse_isa(system_info()),
            layout=layout,
            n_vocab=self._session.n_vocab,
            description=self._session.description,
            load_seconds=time.perf_counter() - started,
            notes=notes,
        )

    @property
    def n_past(self) -> int:
        return self._session.n_past

    def rewind(self, length: int) -> None:
        if length:
            self._session.truncate(length)
        else:
            self._session.reset()

    def prefill(self, tokens: Sequence[int]) -> None:
        self._session.append(tokens)

    def step(self, token: int) -> None:
        self._session.append((token,))

    def logits(self) -> F32:
        return self._session.last_logits()

    def tokenize(self, text: str) -> list[int]:
        return self._session.tokenize(text)

    def ends(self) -> list[int]:
        return self._session.end_tokens()

    def close(self) -> None:
        self._session.close()


def parse_isa(system_info: str) -> tuple[str, ...]:
    """Instruction sets of llama.cpp's `CPU : SSE3 = 1 | AVX2 = 1 | ...` line, in lower case, those that are on. Other
    backends' options, in the same line, are none."""
    names = []
    system_info = re.split(r"\bCPU\s*:", system_info)[-1]
    for part in system_info.replace(":", "|").split("|"):
        name, equals, value = part.partition("=")
        if equals and value.strip().split(" ")[0] == "1":
            names.append(name.strip().split(" ")[-1].lower())
    return tuple(n for n in names if n not in ("openmp", "llamafile", "repack", "accelerate", "kleidiai"))


# ------------------------------------------------------------------------------------------------------- measuring


class Timer:
    """Runs tests on a stepper."""

    def __init__(self, stepper: Stepper, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.stepper = stepper
        self._clock = clock
        self._depth: list[int] = []

    def run(self, test: SpeedTest, tokens: Tokens) -> int:
        """Nanoseconds of `test`; evaluating its context is not counted."""
        self._go_to_depth(tokens.depth)
        start = self._clock()
        if test.n_prompt:
            self.stepper.prefill(tokens.prompt)
        for token in tokens.gen:
            self.stepper.step(token)
        return self._clock() - start

    def warm_up(self, test: SpeedTest, tokens: Tokens) -> None:
        """llama-bench's: the whole prompt once, one generated token."""
        self._go_to_depth(tokens.depth)
        if test.n_prompt:
            self.stepper.prefill(tokens.prompt)
        if test.n_gen:
            self.stepper.step(tokens.gen[0])

    def _go_to_depth(self, depth: list[int]) -> None:
        """Between repetitions only what the test added is cut off, as llama-bench restores its saved state."""
        if depth and self._depth == depth:
            self.stepper.rewind(len(depth))
            return
        self._depth = []
        self.stepper.rewind(0)
        if depth:
            self.stepper.prefill(depth)
            self._depth = depth

    def greedy(
        self, prompt: Sequence[int], n: int, forced: Sequence[int] = (), *, ignore_ends: bool = False
    ) -> list[tuple[int, float]]:
        """`n` tokens after `prompt`, the most probable each, and the gap of its log-probability to the next (nats).

        `forced` come before them, evaluated one by one as if they had been chosen. `ignore_ends`: tokens that end a
        text are none, as with llama-server's `ignore_eos`.
        """
        self._depth = []
        self.stepper.rewind(0)
        self.stepper.prefill(prompt)
        for token in forced:
            self.stepper.step(token)
        ends = self.stepper.ends() if ignore_ends else []
        found = []
        for _ in range(n):
            logits = self.stepper.logits()
            if ends:
                logits = logits.copy()
                logits[ends] = -np.inf
            second, first = np.partition(logits, -2)[-2:]
            found.append((int(logits.argmax()), float(first - second)))
            self.stepper.step(found[-1][0])
        return found


def resident() -> dict[str, int]:
    """Bytes of this process's resident set: `now`, and `peak` where the system keeps it."""
    status = Path("/proc/self/status")
    if not status.exists():
        import psutil

        now = int(psutil.Process(os.getpid()).memory_info().rss)
        return {"now": now, "peak": now}
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return {"now": int(fields["VmRSS"].split()[0]) << 10, "peak": int(fields["VmHWM"].split()[0]) << 10}
