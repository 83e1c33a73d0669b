"""From a resolved configuration to an engine that can take requests: file, numbers, weights, executor, vocabulary."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ftgguf import _ggml_cpu as native
from ftgguf.engine.devices import choose as choose_device
from ftgguf.engine.embeddings import load_embeddings
from ftgguf.engine.engine import Engine
from ftgguf.engine.ggml_executor import GgmlExecutor
from ftgguf.engine.ggml_weights import GgmlSource
from ftgguf.engine.layout import NO_TYPES, Layout, choose
from ftgguf.engine.lora import Adapter, AdapterWeights, read_adapters
from ftgguf.engine.memory import available_memory, check_kv
from ftgguf.experts.trace import open_trace, pool_bytes
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf.reader import GGUFFile
from ftgguf.models.config import ModelError, Numbers, read_numbers
from ftgguf.models.registry import family
from ftgguf.pull import ollama_gguf
from ftgguf.vocab import Vocab

Progress = Callable[[str, float], None]
"""(stage, 0..1)."""


def open_model(config: ServerConfig) -> GGUFFile:
    """The GGUF of `config.model.path` with `--override-kv` applied, an Ollama `gptoss` as `gpt-oss`. GGUFError."""
    return ollama_gguf.open_model(Path(config.model.path), {o.key: o.value for o in config.model.override_kv})


def load_engine(config: ServerConfig, progress: Progress) -> Engine:
    """Load the model that `config` names. Raises GGUFError, ModelError or MemoryError with one clear line."""
    started = time.monotonic()
    progress("reading the file's header", 0.0)
    gguf = open_model(config)
    numbers = read_numbers(gguf)
    family(gguf.architecture, str(gguf.path))
    progress("loading the vocabulary", 0.0)
    vocab = Vocab.load(gguf)
    if config.cpu.cpus:
        os.sched_setaffinity(0, config.cpu.cpus)
    pooled = load_embeddings(gguf, numbers.n_embd, config.http.pooling, config.http.embedding)
    adapters = read_adapters(config.model.lora, gguf)
    loaded = _load_model(config, gguf, numbers, progress, adapters)
    engine = Engine(loaded.executor, vocab, config, n_ctx_train=numbers.n_ctx_train)
    if config.context.warmup or loaded.on_gpu:  # a GPU captures its graphs here
        progress("warming up", 0.0)
        loaded.executor.warm_up()
    engine.embeddings = pooled
    engine.info = _info(config, gguf, numbers, loaded, time.monotonic() - started)
    engine.info["pooling"] = pooled.pooling
    engine.info["lora"] = [
        {"path": each.path, "task_name": each.task_name, "prompt_prefix": each.prompt_prefix} for each in adapters
    ]
    progress("ready", 1.0)
    return engine


@dataclass(slots=True)
class Loaded:
    """An executor and what `_info` says about it beyond the file's own facts."""

    executor: Any
    details: dict[str, Any]
    on_gpu: bool = False


def _load_model(
    config: ServerConfig, gguf: GGUFFile, numbers: Numbers, progress: Progress, adapters: tuple[Adapter, ...]
) -> Loaded:
    """The whole model on the CPU, or its last blocks (most often all) on a GPU."""
    device, reason = choose_device(config.placement)
    if device is None:
        cells = config.context.cells(numbers.n_ctx_train)
        return _load_cpu(config, gguf, numbers, 0, None, cells, progress, reason, adapters)
    if adapters:
        raise ModelError("--lora: adapters are applied on the CPU only, and a GPU would run this model: add -ngl 0")
    from ftgguf.engine.load_cuda import load_gpu  # torch, Triton and the kernels: only where a GPU is used

    parts: list[Loaded] = []

    def cpu_segment(first: int, last: int, cells: int) -> Any:
        parts.append(_load_cpu(config, gguf, numbers, first, last, cells, progress, reason))
        return parts[-1].executor

    gpu = load_gpu(config, gguf, numbers, device, progress, cpu_segment)
    if isinstance(gpu, str):
        cells = config.context.cells(numbers.n_ctx_train)
        return _load_cpu(config, gguf, numbers, 0, None, cells, progress, gpu)
    details = {**parts[0].details, **gpu.details} if parts else gpu.details
    return Loaded(gpu.executor, details, on_gpu=True)


def _load_cpu(
    config: ServerConfig,
    gguf: GGUFFile,
    numbers: Numbers,
    first: int,
    last: int | None,
    n_cells: int,
    progress: Progress,
    reason: str,
    adapters: tuple[Adapter, ...] = (),
) -> Loaded:
    """Blocks [first, last) on the CPU. `reason`: why no GPU has them."""
    backend = native.Backend(config.cpu.threads)
    layout, why = choose(
        config.placement.weights_layout,
        repack=config.placement.repack,
        can_repack=backend.can_repack(),
        size=gguf.size,
        available=available_memory(),
    )
    fraction = numbers.top_k / numbers.n_expert if numbers.n_expert else 1.0
    source = GgmlSource(gguf, backend, layout, fraction, None if last is None else range(first, last))
    model = family(gguf.architecture, str(gguf.path))(source, numbers, config.context)
    _place(config, gguf, layout)
    if source.packed_bytes:
        source.pack(config.cpu.threads_batch, lambda f: progress("repacking weights", f))
    elif layout is not Layout.PLAIN:
        layout, why = Layout.PLAIN, NO_TYPES
    executor = GgmlExecutor(
        source,
        model,
        n_cells=n_cells,
        max_rows=min(config.context.n_ubatch, config.context.n_batch),
        threads=config.cpu.threads,
        threads_batch=config.cpu.threads_batch,
        type_k=config.context.type_k,
        type_v=config.context.type_v,
        first=first,
        last=last,
        adapters=AdapterWeights(adapters, backend) if adapters else None,
    )
    if config.placement.record_routing and last is None:
        executor.trace = open_trace(config.placement.record_routing, model.blocks, pool_bytes(gguf.tensors))
    if "context.size" in config.given:
        check_kv(executor.n_cells, executor.n_cells * executor.cells.cell_bytes)
    details = {
        "device": "CPU",
        "device_reason": reason,
        "cells": executor.n_cells,
        "kv_bytes": executor.n_cells * executor.cells.cell_bytes,
        "layout": layout.value,
        "layout_reason": why,
        "packed_bytes": source.packed_bytes,
        "notes": list(model.notes),
    }
    return Loaded(executor, details)


def _place(config: ServerConfig, gguf: GGUFFile, layout: Layout) -> None:
    """`--load-mode` for the mapped file: have the system read ahead, or keep the pages in memory."""
    for shard in gguf.shards:
        if layout is not Layout.REPACKED and hasattr(mmap, "MADV_WILLNEED"):
            shard.map.madvise(mmap.MADV_WILLNEED)
        if "mlock" in config.placement.load_mode:
            _lock(shard.map, shard.path)


def _lock(mapped: mmap.mmap, path: Path) -> None:
    import numpy as np

    view = np.frombuffer(mapped, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes)) != 0:
        raise MemoryError(
            f"{path}: cannot lock {view.nbytes / 2**30:.1f} GiB in memory ({os.strerror(ctypes.get_errno())}): "
            "raise the limit (ulimit -l) or leave mlock out of --load-mode"
        )


def _info(config: ServerConfig, gguf: GGUFFile, numbers: Numbers, loaded: Loaded, seconds: float) -> dict[str, Any]:
    """What start-up prints and /props, /v1/models show; sizes in bytes."""
    features = [name for name, there in native.cpu_features().items() if there]
    return {
        "path": str(gguf.path),
        "name": gguf.name,
        "architecture": gguf.architecture,
        "file_type": gguf.file_type,
        "n_params": gguf.n_params,
        "size": gguf.size,
        "n_vocab": numbers.n_vocab,
        "n_embd": numbers.n_embd,
        "n_layer": numbers.n_layer,
        "n_ctx_train": numbers.n_ctx_train,
        "n_expert": numbers.n_expert,
        "n_expert_used": numbers.top_k,
        "threads": config.cpu.threads,
        "threads_batch": config.cpu.threads_batch,
        "kv_types": [config.context.type_k, config.context.type_v],
        "metadata": {"tokenizer.ggml.model": gguf.get("tokenizer.ggml.model", "", str)},
        "resident": psutil.Process().memory_info().rss,
        "cpu_features": features,
        "ggml": native.ggml_version(),
        "load_seconds": seconds,
        **loaded.details,
    }
