"""What does libllama say about embeddings, scores and adapters? What `engine.embeddings` and `lora` are held to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np

from compat import amx
from compat.oracle import F32, Oracle, OracleError
from compat.reranker import POOLING
from ftgguf.bench.libllama import ggml_type, last_errors


def pooled(
    path: str | os.PathLike[str], prompts: Sequence[Sequence[int]], pooling: str, *, n_ctx: int = 1024, kv: str = "f16"
) -> list[F32]:
    """float32 [1, n_embd] of each prompt alone; [tokens, n_embd] for `none`, [1, labels] for `rank`.

    `llama_get_embeddings_seq` (or `llama_get_embeddings`) of one batch, from weights in the file's layout. OracleError.
    """
    amx.avoid_if_broken()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers, model_params.use_extra_bufts = 0, False
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        raise OracleError(f"libllama cannot load {path}: {last_errors()}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
    params.n_threads = params.n_threads_batch = 1
    params.embeddings, params.pooling_type = True, POOLING[pooling]
    params.type_k = params.type_v = ggml_type(kv)
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        width = llama_cpp.llama_model_n_cls_out(model) if pooling == "rank" else llama_cpp.llama_model_n_embd(model)
        return [_pooled(context, prompt, pooling, width) for prompt in prompts]
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def _pooled(context: object, prompt: Sequence[int], pooling: str, width: int) -> F32:
    n = len(prompt)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    try:
        batch.n_tokens = n
        for i, token in enumerate(prompt):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = True
        code = llama_cpp.llama_decode(context, batch)
    finally:
        llama_cpp.llama_batch_free(batch)
    if code != 0:
        raise OracleError(f"llama_decode returned {code}: {last_errors()}")
    if pooling == "none":
        pointer, rows = llama_cpp.llama_get_embeddings(context), n
    else:
        pointer, rows = llama_cpp.llama_get_embeddings_seq(context, 0), 1
    return np.ctypeslib.as_array(pointer, shape=(rows * width,)).reshape(rows, width).copy()


@contextmanager
def adapted(
    path: str | os.PathLike[str], adapters: Sequence[tuple[Path, float]], n_ctx: int = 512, kv: str = "f16"
) -> Iterator[Oracle]:
    """libllama on a model with LoRA adapters (file, scale) in use. OracleError where one does not fit."""
    with Oracle(path, n_ctx, type_k=kv, type_v=kv) as oracle:
        handles = []
        for file, _ in adapters:
            handle = llama_cpp.llama_adapter_lora_init(oracle.model, os.fsencode(file))
            if not handle:
                raise OracleError(f"libllama does not take {file}: {last_errors()}")
            handles.append(handle)
        n = len(handles)
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*handles)
        scales = (ctypes.c_float * n)(*[scale for _, scale in adapters])
        if llama_cpp.llama_set_adapters_lora(oracle.context, pointers, n, scales) != 0:
            raise OracleError(f"libllama does not apply the adapters: {last_errors()}")
        yield oracle
