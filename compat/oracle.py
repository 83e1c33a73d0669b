"""What does libllama say about this file? The reference that our logits, text and speed are compared with.

Uses llama-cpp-python's low-level bindings of the very library whose CPU kernels ftgguf's CPU executor calls.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ftgguf.bench.libllama import Libllama, LibllamaError, last_errors

F32 = NDArray[np.float32]

OracleError = LibllamaError
"""libllama could not load or run the file."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one test over `len(samples)` repetitions, as llama-bench reports it."""

    name: str
    n_tokens: int
    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.samples)

    @property
    def std(self) -> float:
        return stdev(self.samples) if len(self.samples) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy decoding: the tokens, their bytes, and per token the gap between the two best logits."""

    tokens: list[int]
    text: bytes
    gaps: list[float]


class Oracle(Libllama):
    """A GGUF file loaded into libllama, one sequence (arguments: `Libllama`): logits, greedy text, speed."""

    # ------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, tokens: Sequence[int], *, all_logits: bool = True) -> F32:
        """Append `tokens` to the sequence; float32 logits [len(tokens), n_vocab], or [1, n_vocab] of the last."""
        if not tokens:
            raise ValueError("no tokens to evaluate")
        bad = next((t for t in tokens if not 0 <= t < self.n_vocab), None)
        if bad is not None:
            raise ValueError(f"token {bad} is outside the vocabulary of {self.n_vocab}")
        if self.n_past + len(tokens) > self.n_ctx:
            raise OracleError(f"{self.n_past} + {len(tokens)} tokens do not fit a context of {self.n_ctx}")
        out: list[F32] = []
        for start in range(0, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            self._decode(chunk, all_logits, last=start + len(chunk) == len(tokens))
            n = len(chunk) if all_logits else 1
            if all_logits or start + len(chunk) == len(tokens):
                out.append(self._logits(n))
        return np.concatenate(out)

    def prefill_logits(self, tokens: Sequence[int]) -> F32:
        """Float32 logits [len(tokens), n_vocab] of a fresh sequence evaluated in batches."""
        self.reset()
        return self.evaluate(tokens)

    def decode_logits(self, tokens: Sequence[int], *, fresh: bool = True) -> F32:
        """Float32 logits [len(tokens), n_vocab], one token a step over the KV cache."""
        if fresh:
            self.reset()
        return np.concatenate([self.evaluate([t]) for t in tokens])

    def greedy(self, prompt: Sequence[int], n: int, *, stop_at_end: bool = True) -> Greedy:
        """Up to `n` tokens after `prompt` (fresh sequence), always the most probable one."""
        self.reset()
        logits = self.evaluate(prompt, all_logits=False)[0]
        tokens: list[int] = []
        gaps: list[float] = []
        while len(tokens) < n:
            second, first = np.partition(logits, -2)[-2:]
            token = int(logits.argmax())
            if stop_at_end and self.is_end(token):
                break
            tokens.append(token)
            gaps.append(float(first - second))
            if len(tokens) < n:
                logits = self.evaluate([token], all_logits=False)[0]
        return Greedy(tokens, self.detokenize(tokens), gaps)

    def _decode(self, chunk: Sequence[int], all_logits: bool, last: bool) -> None:
        n = len(chunk)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(chunk):
                batch.token[i], batch.pos[i] = token, self.n_past + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = all_logits or (last and i == n - 1)
            code = llama_cpp.llama_decode(self.context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if code != 0:
            raise OracleError(f"llama_decode returned {code}: {last_errors()}")
        self.n_past += n

    def _logits(self, rows: int) -> F32:
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, shape=(rows * self.n_vocab,)).reshape(rows, self.n_vocab).copy()

    # ------------------------------------------------------------------------------------------- vocabulary

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`."""
        buffer = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:n]

    def detokenize(self, tokens: Iterable[int], *, special: bool = True) -> bytes:
        """The joined pieces of `tokens`."""
        return b"".join(self.piece(t, special=special) for t in tokens)

    def is_end(self, token: int) -> bool:
        """Whether generation ends at `token`."""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    # ------------------------------------------------------------------------------------------- speed

    def bench_prefill(self, n: int = 512, repetitions: int = 3, seed: int = 1) -> Speed:
        """`pp<n>`: random tokens into an empty cache, logits of the last one; a warm-up run first."""
        tokens = np.random.default_rng(seed).integers(0, self.n_vocab, n).tolist()
        self._timed_prefill(tokens[: min(n, self.n_batch)])
        return Speed(f"pp{n}", n, tuple(n / self._timed_prefill(tokens) for _ in range(repetitions)))

    def bench_decode(self, n: int = 128, repetitions: int = 3, seed: int = 1) -> Speed:
        """`tg<n>`: random tokens one at a time from an empty cache; one warm-up token first."""
        tokens = np.random.default_rng(seed).integers(0, self.n_vocab, n).tolist()
        self._timed_decode(tokens[:1])
        return Speed(f"tg{n}", n, tuple(n / self._timed_decode(tokens) for _ in range(repetitions)))

    def _timed_prefill(self, tokens: Sequence[int]) -> float:
        self.reset()
        start = time.perf_counter()
        self.evaluate(tokens, all_logits=False)
        return time.perf_counter() - start

    def _timed_decode(self, tokens: Sequence[int]) -> float:
        self.reset()
        start = time.perf_counter()
        for token in tokens:
            self.evaluate([token], all_logits=False)
        return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------- comparing


def nmse(got: F32, expected: F32) -> float:
    """Normalised mean squared error: sum((got - expected)^2) / sum(expected^2), over all elements."""
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(((a - b) ** 2).sum() / max((b**2).sum(), sys.float_info.min))


def log_softmax(logits: F32) -> NDArray[np.float64]:
    """Log-probabilities along the last axis, in float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def kld(got: F32, expected: F32) -> float:
    """Mean over rows of KL(expected || got) in nats, logits [rows, n_vocab]."""
    p, q = log_softmax(expected), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
