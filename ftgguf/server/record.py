"""Writing down what is asked: prompts as files (`--log-prompts-dir`) and requests for replay (`--record`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ftgguf.bench.recording import Entry, Recorder
from ftgguf.flags.config import ServerConfig

if TYPE_CHECKING:
    from ftgguf.server.generation import Sequence

log = logging.getLogger("ftgguf.server")


class Vocabulary(Protocol):
    """What is needed to show a prompt."""

    def detokenize(self, ids: tuple[int, ...], special: bool = ...) -> bytes: ...


class RequestLog:
    """Both, as the configuration asks for. OSError if the folder or the file cannot be made."""

    def __init__(self, config: ServerConfig, vocab: Any) -> None:
        self._vocab: Vocabulary = vocab
        self._recorder = Recorder(config.http.record) if config.http.record else None
        self._prefix = config.http.api_prefix
        self._folder = Path(config.log.prompts_dir) if config.log.prompts_dir else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._started = time.strftime("%Y%m%d-%H%M%S")

    def begin(self, path: str, body: Any, sequences: list[Sequence]) -> RunningEntry | None:
        """A request to `path` is about to run; None unless requests are recorded."""
        if self._folder is not None:
            for sequence in sequences:
                self._write_prompt(self._folder, sequence)
        if self._recorder is None or not isinstance(body, dict):
            return None
        return RunningEntry(self._recorder.begin(path.removeprefix(self._prefix), body), sequences)

    def _write_prompt(self, folder: Path, sequence: Sequence) -> None:
        text = self._vocab.detokenize(sequence.request.prompt, special=True)
        name = f"{self._started}-{sequence.request.id:06d}.txt"
        try:
            (folder / name).write_bytes(text)
        except OSError as error:  # a full disk must not fail the request
            log.warning("the prompt was not written: %s", error)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


class RunningEntry:
    """A recorded request while it is answered."""

    def __init__(self, entry: Entry, sequences: Iterable[Sequence]) -> None:
        self._entry = entry
        self._sequences = list(sequences)
        self._started = time.monotonic()

    def end(self) -> None:
        """The answer is complete, or was broken off."""
        now = time.monotonic()
        given = self._sequences
        first = min((sequence.first_at for sequence in given if sequence.first_at), default=now)
        try:
            self._entry.end(
                prompt_n=sum(sequence.prompt_n for sequence in given),
                cached_n=sum(sequence.cached for sequence in given),
                predicted_n=sum(sequence.predicted_n for sequence in given),
                ttft_ms=(first - self._started) * 1e3,
                total_ms=(now - self._started) * 1e3,
            )
        except OSError as error:
            log.warning("the request was not recorded: %s", error)
