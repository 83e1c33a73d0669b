"""What does libllama say about this file? The reference that our logits, text and speed are compared with.

Uses llama-cpp-python's low-level bindings of the very library whose CPU kernels ftgguf's CPU executor calls.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from compat import amx

F32 = NDArray[np.float32]

_LOG_ERROR, _LOG_CONTINUE = 3, 5
_errors: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _collect_errors(level: int, text: bytes, _user: Any) -> None:
    """Keep libllama's errors for our own exception, drop the rest."""
    if level == _LOG_ERROR:
        _errors.append(text.decode("utf-8", "replace").strip())


class OracleError(RuntimeError):
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


class Oracle:
    """A GGUF file loaded into libllama, one sequence.

    Args:
        path: the file (first shard of a split).
        n_ctx: cells of the KV cache.
        n_threads, n_threads_batch: for decode and for prefill (default: the same). One is quickest for tiny files, as
            libllama's threads spin at every operator; give the cores' number for timings.
        repack: let libllama repack weights for the CPU (`use_extra_bufts`), as llama.cpp does by default. False keeps
            the mapped file, whose kernels are the ones a plain-layout engine uses.
        n_batch, n_ubatch: llama.cpp's logical and physical batch.
        type_k, type_v: ggml type of the KV cache, by name (`f16`, `f32`, `q8_0` ...).
        flash_attn: None lets libllama choose.
        avoid_amx: leave out ggml's AMX buffers where they crash (`compat.amx`).

    Raises:
        OracleError: the file does not load.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_ctx: int = 512,
        n_threads: int = 1,
        *,
        n_threads_batch: int | None = None,
        repack: bool = False,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: bool | None = None,
        avoid_amx: bool = True,
    ) -> None:
        self.model: Any = None
        self.context: Any = None
        llama_cpp.llama_log_set(_collect_errors, ctypes.c_void_p(0))
        _errors.clear()
        if avoid_amx:
            # Even without repack: the first model that loads settles for the process whether ggml uses AMX.
            avoided = amx.avoid_if_broken()
            if repack and amx.broken() and not avoided:
                raise OracleError("ggml's AMX kernels crash here and this process has them already: use repack=False")
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self.model:
            raise OracleError(f"libllama cannot load {path}: {'; '.join(_errors) or 'no reason given'}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, min(n_batch, n_ctx), min(n_ubatch, n_ctx)
        params.n_threads, params.n_threads_batch = n_threads, n_threads_batch or n_threads
        params.type_k, params.type_v = _ggml_type(type_k), _ggml_type(type_v)
        if flash_attn is not None:
            params.flash_attn_type = int(flash_attn)
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            reason = "; ".join(_errors) or "no reason given"
            self.close()
            raise OracleError(f"libllama cannot make a context for {path}: {reason}")
        self.n_batch = int(params.n_batch)
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.context))
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.n_past = 0

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the model. Safe to call twice."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = None
        if self.model:
            llama_cpp.llama_model_free(self.model)
            self.model = None

    # ------------------------------------------------------------------------------------------- evaluation

    def reset(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.n_past = 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Recurrent models cannot; OracleError."""
        if not llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1):
            raise OracleError(f"libllama cannot cut this model's memory back to {length} tokens")
        self.n_past = length

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
            raise OracleError(f"llama_decode returned {code}: {'; '.join(_errors[-3:]) or 'no reason given'}")
        self.n_past += n

    def _logits(self, rows: int) -> F32:
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, shape=(rows * self.n_vocab,)).reshape(rows, self.n_vocab).copy()

    # ------------------------------------------------------------------------------------------- vocabulary

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS/EOS where the file says so."""
        raw = text.encode() if isinstance(text, str) else text
        size = len(raw) + 8
        buffer = (llama_cpp.llama_token * size)()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), buffer, size, add_special, parse_special)
        if n < 0:
            raise OracleError(f"llama_tokenize needs {-n} places for {len(raw)} bytes")
        return list(buffer[:n])

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


def _ggml_type(name: str) -> int:
    value = getattr(llama_cpp, f"GGML_TYPE_{name.upper()}", None)
    if value is None:
        raise ValueError(f"unknown KV cache type '{name}'")
    return int(value)
