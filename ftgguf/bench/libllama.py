"""libllama in this process: one model, one sequence, its tokens evaluated in llama.cpp's batches.

The library is the one that llama-cpp-python installs, whose CPU kernels ftgguf's CPU executor calls too, so a
comparison against it differs in nothing but the engine. Used by `ftgguf bench --against llama.cpp` and by the oracle.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np

from ftgguf.bench import amx
from ftgguf.nouns import F32

_LOG_ERROR = 4
"""GGML_LOG_LEVEL_ERROR."""
_errors: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _collect_errors(level: int, text: bytes, _user: Any) -> None:
    """Keep libllama's errors for our own exception, drop the rest."""
    if level == _LOG_ERROR:
        _errors.append(text.decode("utf-8", "replace").strip())


class LibllamaError(RuntimeError):
    """libllama could not load or run the file."""


def last_errors() -> str:
    """What libllama said last when something failed, in one line."""
    return "; ".join(_errors[-3:]) or "no reason given"


def ggml_type(name: str) -> int:
    """ggml's number of a KV cache type (`f16`, `q8_0` ...). ValueError."""
    value = getattr(llama_cpp, f"GGML_TYPE_{name.upper()}", None)
    if value is None:
        raise ValueError(f"unknown KV cache type '{name}'")
    return int(value)


def system_info() -> str:
    """llama.cpp's line of instruction sets and options of this build."""
    info: bytes = llama_cpp.llama_print_system_info()
    return info.decode().strip()


class Libllama:
    """A GGUF file loaded into libllama, one sequence.

    Args:
        path: the file (first shard of a split).
        n_ctx: cells of the KV cache.
        n_threads, n_threads_batch: for decode and for prefill (default: the same). One is quickest for tiny files, as
            libllama's threads spin at every operator; give the cores' number for timings.
        repack: let libllama repack weights for the CPU (`use_extra_bufts`), as llama.cpp does by default. False keeps
            the mapped file, whose kernels are the ones a plain-layout engine uses.
        n_batch, n_ubatch: llama.cpp's logical and physical batch.
        type_k, type_v: ggml type of the KV cache, by name.
        flash_attn: None lets libllama choose.
        avoid_amx: leave out ggml's AMX buffers where they crash (`bench.amx`).

    Raises:
        LibllamaError: the file does not load.
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
                raise LibllamaError("ggml's AMX kernels crash here and this process has them already: use repack=False")
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self.model:
            raise LibllamaError(f"libllama cannot load {path}: {last_errors()}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, min(n_batch, n_ctx), min(n_ubatch, n_ctx)
        params.n_threads, params.n_threads_batch = n_threads, n_threads_batch or n_threads
        params.type_k, params.type_v = ggml_type(type_k), ggml_type(type_v)
        if flash_attn is not None:
            params.flash_attn_type = int(flash_attn)
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            reason = last_errors()
            self.close()
            raise LibllamaError(f"libllama cannot make a context for {path}: {reason}")
        self.n_batch = int(params.n_batch)
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.context))
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.n_past = 0
        self._ids = (llama_cpp.llama_token * self.n_batch)()

    def __enter__(self) -> Self:
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

    @property
    def description(self) -> str:
        """llama.cpp's own name for the model: size class and quantisation."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.model, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def reset(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.n_past = 0

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Recurrent models cannot; LibllamaError."""
        if not llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1):
            raise LibllamaError(f"libllama cannot cut this model's memory back to {length} tokens")
        self.n_past = length

    def append(self, tokens: Sequence[int]) -> None:
        """Evaluate `tokens` after those of the sequence, logits of the last one, and wait until it is done."""
        if self.n_past + len(tokens) > self.n_ctx:
            raise LibllamaError(f"{self.n_past} + {len(tokens)} tokens do not fit a context of {self.n_ctx}")
        for start in range(0, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            self._ids[: len(chunk)] = chunk
            code = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(self._ids, len(chunk)))
            if code != 0:
                raise LibllamaError(f"llama_decode returned {code}: {last_errors()}")
            self.n_past += len(chunk)
        llama_cpp.llama_synchronize(self.context)

    def last_logits(self) -> F32:
        """Float32 [n_vocab] after the last token: libllama's memory, valid until the next evaluation."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, -1)
        if not pointer:
            raise LibllamaError("libllama has no logits: nothing was evaluated")
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def end_tokens(self) -> list[int]:
        """Ids of the tokens that end a text or a turn."""
        return [i for i in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(self.vocab, i)]

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS/EOS where the file says so."""
        raw = text.encode() if isinstance(text, str) else text
        size = len(raw) + 8
        buffer = (llama_cpp.llama_token * size)()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), buffer, size, add_special, parse_special)
        if n < 0:
            raise LibllamaError(f"llama_tokenize needs {-n} places for {len(raw)} bytes")
        return list(buffer[:n])
