"""The GPU part of loading: budget, placement, weights, executor; the CPU's segment where layers stay there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ftgguf.engine.cuda_cells import kv_kind
from ftgguf.engine.cuda_compile import Helpers, Job
from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.engine.cuda_experts import ExpertStore, ResidentStore, expert_spec
from ftgguf.engine.cuda_weights import CudaSource, Reader
from ftgguf.engine.device_memory import DeviceMemory, context_overhead
from ftgguf.engine.devices import Device, free_memory
from ftgguf.engine.elastic import Elastic
from ftgguf.engine.fit import MIB, Fit, budget_of, embedding_in_host_memory, fit
from ftgguf.engine.load_cached import SHORT_ROWS, make_store, plan_prompts
from ftgguf.engine.segments import Segment, SegmentedExecutor
from ftgguf.engine.survey import Survey, survey
from ftgguf.experts.routing import RoutingRecorder
from ftgguf.experts.status import start_line
from ftgguf.experts.trace import open_trace
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf.reader import GGUFFile
from ftgguf.layers.params import Moe
from ftgguf.models.config import ModelError, Numbers
from ftgguf.models.registry import family

Progress = Callable[[str, float], None]
CpuSegment = Callable[[int, int, int], Segment]
"""(first block, last block, cells) -> that segment on the CPU."""


class GpuModel:
    """What `load_gpu` gives: the executor, and what start-up prints about it."""

    def __init__(self, executor: CudaExecutor | SegmentedExecutor, gpu: CudaExecutor, details: dict[str, Any]) -> None:
        self.executor = executor
        self.gpu = gpu
        self.details = details


def claim(device: Device) -> tuple[torch.device, int, int]:
    """Make this process's CUDA context: (the device, bytes the context takes, bytes that are free besides)."""
    on = torch.device("cuda", device.index)
    overhead = context_overhead(on)  # before anything else makes the context
    torch.cuda.set_device(on)
    return on, overhead, free_memory(device.index) or torch.cuda.mem_get_info(on)[0]


def load_gpu(
    config: ServerConfig,
    gguf: GGUFFile,
    numbers: Numbers,
    device: Device,
    progress: Progress,
    cpu_segment: CpuSegment,
) -> GpuModel | str:
    """Load the model with as many blocks on `device` as -ngl and the budget say, or the reason why none goes there.

    Raises ModelError, MemoryError with one clear line.
    """
    on, overhead, free = claim(device)
    budget, source_of_budget = budget_of(config, free + overhead)
    found = survey(gguf, numbers, config.context)
    cached, config = plan_prompts(found, numbers, config, budget, overhead)
    chosen = fit(found, numbers, config, budget, overhead) if cached is None else cached.fit
    if chosen.on_gpu == 0:
        return "; ".join(chosen.lines)
    if chosen.first and config.placement.record_routing:
        why = "; ".join(chosen.lines) or f"-ngl keeps {chosen.first} of {chosen.n_layer} layers on the CPU"
        raise ModelError(
            f"--record-routing: only where one device runs the whole model ({why}): use -ngl all or -ngl 0"
        )
    memory = DeviceMemory(on, budget, overhead)
    memory.limit_allocator()
    segments: list[Segment] = []
    if chosen.first:
        segments.append(cpu_segment(0, chosen.first, chosen.n_cells))
    job = Job(
        path=str(gguf.path),
        capability=device.capability[0] * 10 + device.capability[1],
        first=chosen.first,
        n_cells=chosen.n_cells,
        max_rows=min(config.context.n_ubatch, config.context.n_batch),
        decode_rows=config.context.n_parallel,
        kv=kv_kind(
            config.context.type_k, config.context.type_v, [b.attention for b in found.model.blocks[chosen.first :]]
        )[0],
        short_rows=() if cached is None else SHORT_ROWS,
    )
    helpers = Helpers(job, found)
    try:
        store = None if cached is None else make_store(cached, config, numbers, memory)
        cells = None if cached is None else cached.start_cells
        gpu, notes = gpu_segment(config, gguf, numbers, found, chosen, memory, progress, store, cells)
        if cached is not None:
            gpu.expert_room = cached.least
        if store is not None:  # also where every cell has memory from the start: passes borrow from the experts
            gpu.elastic = Elastic(gpu, store)
        if config.placement.record_routing:
            record(config.placement.record_routing, gpu)
        progress("compiling kernels", 0.0)
        notes.append(helpers.wait())
        if store is not None:
            progress("measuring the link and the CPU", 0.0)
            store.calibrate()
            notes.append(start_line(store))
    except BaseException:
        helpers.stop()
        raise
    gpu.after_warm_up = helpers.complete
    executor = SegmentedExecutor((*segments, gpu)) if segments else gpu
    details = {
        "device": device.id,
        "device_name": device.name,
        "gpu_layers": chosen.on_gpu,
        "n_layer": chosen.n_layer,
        "vram_budget": budget,
        "vram_budget_reason": source_of_budget,
        "cells": gpu.n_cells,
        "kv_bytes": memory.held.get("KV", 0),
        "kv_layout": f"GPU from block {chosen.first} on, {gpu.cells.kind}",
        "vram": dict(memory.held),
        "notes": [*chosen.lines, *notes],
    }
    return GpuModel(executor, gpu, details)


def record(path: str, gpu: CudaExecutor) -> None:
    """Write decode's routes to `path` (`--record-routing`). Raises ModelError where there is nothing to write."""
    specs = gpu.store.specs
    pool = sum(spec.experts * spec.slot_bytes for spec in specs.values())
    trace = open_trace(path, gpu.model.blocks, pool)
    gpu.store.hook = RoutingRecorder(trace, sorted(specs), gpu.decode_top, gpu.device)


def gpu_segment(
    config: ServerConfig,
    gguf: GGUFFile,
    numbers: Numbers,
    found: Survey,
    chosen: Fit,
    memory: DeviceMemory,
    progress: Progress,
    store: ExpertStore | None = None,
    start_cells: int | None = None,
) -> tuple[CudaExecutor, list[str]]:
    """Blocks [chosen.first, n_layer) on the device, and lines about what is not as asked. `store` None: every expert
    resident."""
    first, last = chosen.first, chosen.n_layer
    on_host = embedding_in_host_memory(found, config) if store is not None and first == 0 else None
    source = CudaSource(gguf, memory, found, first, last, on_host)
    model = family(gguf.architecture, str(gguf.path))(source, numbers, config.context)
    kind, notes = kv_kind(config.context.type_k, config.context.type_v, [b.attention for b in model.blocks[first:last]])
    store = ResidentStore(memory) if store is None else store
    for i in range(first, last):
        ffn = model.blocks[i].ffn
        if isinstance(ffn, Moe):
            store.add(expert_spec(i, ffn.experts))
    started = time.monotonic()
    reader = Reader(gguf, memory.device, max(1, min(config.cpu.threads, 16)))
    try:
        source.load(reader, lambda f: progress("reading weights to the GPU", f))
        store.load(reader, lambda f: progress("reading experts to the GPU", f))
    finally:
        reader.close()
    seconds = time.monotonic() - started
    executor = CudaExecutor(
        memory,
        model,
        store,
        n_cells=chosen.n_cells,
        max_rows=min(config.context.n_ubatch, config.context.n_batch),
        decode_rows=config.context.n_parallel,
        max_sequences=config.context.n_parallel,
        kv=kind,
        eager=config.placement.debug_eager,
        first=first,
        last=last,
        start_cells=start_cells,
        short_rows=() if isinstance(store, ResidentStore) else SHORT_ROWS,
    )
    size = sum(memory.held.get(k, 0) for k in ("weights", "experts"))
    notes.append(
        f"{size / MIB:.0f} MiB read to the GPU in {seconds:.1f} s ({size / max(seconds, 1e-9) / 1e9:.1f} GB/s)"
    )
    return executor, notes
