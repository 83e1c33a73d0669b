"""When does a model's experts go to host memory with a cache on the GPU, and with how much of it?

Plain arithmetic on the survey, then the store. `--moe-mode auto` caches where the experts do not all fit beside
weights, KV and workspace; the modes `offload`, `hybrid` and `cpu` always do. With -cmoe, -ncmoe or -ot on expert
tensors the cache takes what is left, unless --expert-cache is 0.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftgguf.engine import cores
from ftgguf.engine.fit import CONTEXT, MIB, Fit, Parts, parts_of, workspace_bytes
from ftgguf.engine.pass_sizes import graph_rows
from ftgguf.engine.survey import Survey
from ftgguf.flags.config import GPU_LAYERS_ALL, GPU_LAYERS_AUTO, ServerConfig, pad
from ftgguf.layers.params import Moe
from ftgguf.models.config import Numbers
from ftgguf.models.source import Use

if TYPE_CHECKING:
    from ftgguf.engine.device_memory import DeviceMemory
    from ftgguf.experts.store import CachedStore

log = logging.getLogger("ftgguf.engine")

WORKSPACE_SHARE = 6
"""A prompt's wide passes may take this part of the budget for their workspace: 525 MiB for 2048 rows of the
Qwen3-30B-A3B shape, so that 4 GB has them; 512 rows would read each expert over the link four times as often."""
SHORT_ROWS = (16, 32, 64)
"""Prompts of so many rows run as decode's do, in a graph: a pass that the host leads takes 4 ms a layer of 128 experts
(16 rows, an H200), of which the link and the CPU need less than 2."""
KV_AT_ONCE = 8
"""Cells that take at most this part of what they and the experts share have memory from the start: when KV grows, every
graph is captured again by the request that wants it next, 2 ms a layer each, and a context that somebody asked for is
meant to be used."""
GRAPHS = 96 * MIB
"""Captured decode graphs and the cache's own tables."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`fit` has every block on the GPU and no expert bytes; `budget` bytes are for slots and the prefill ring."""

    fit: Fit
    budget: int
    mode: str
    """`hybrid`, `offload` or `cpu`: who serves misses."""
    start_cells: int = 0
    """KV cells that have memory at first; the others take it from the experts when they are needed."""
    least: int = 0
    """Bytes that stay for ring and slots when every cell has memory."""

    @property
    def elastic(self) -> bool:
        return self.start_cells < self.fit.n_cells


def plan_prompts(
    survey: Survey, numbers: Numbers, config: ServerConfig, budget: int, context: int = CONTEXT
) -> tuple[CachePlan | None, ServerConfig]:
    """`plan_cache`, and the configuration with the physical batch that goes with it.

    Every pass of a prompt reads nearly all experts over the link, whatever its rows: 17 GB in 0.35 s for a model of 48
    layers on an H200, four times for a prompt of 2048 tokens at llama.cpp's default of 512. Where -ub was not given, a
    pass is as wide as the logical batch if its workspace leaves the experts enough.
    """
    plan = plan_cache(survey, numbers, config, budget, context)
    c = config.context
    if plan is None or "context.n_ubatch" in config.given or c.n_ubatch >= c.n_batch:
        return plan, config
    if workspace_bytes(survey, c.n_batch, cached=True) > budget // WORKSPACE_SHARE:
        return plan, config
    wide = replace(config, context=replace(c, n_ubatch=c.n_batch))
    try:
        wider = plan_cache(survey, numbers, wide, budget, context)
    except MemoryError:
        return plan, config
    if wider is None:
        return plan, config
    line = (
        f"prompts go in passes of {c.n_batch} rows instead of {c.n_ubatch}: each reads the experts once (-ub sets it)"
    )
    return replace(wider, fit=replace(wider.fit, lines=(*wider.fit.lines, line))), wide


def plan_cache(
    survey: Survey, numbers: Numbers, config: ServerConfig, budget: int, context: int = CONTEXT
) -> CachePlan | None:
    """The plan, or None where the model is to be loaded without a cache. Raises MemoryError where a cache was asked for
    and the rest does not fit."""
    p = config.placement
    n_layer = len(survey.model.blocks)
    if not any(isinstance(b.ffn, Moe) for b in survey.model.blocks) or p.moe_mode == "resident":
        return None
    if p.gpu_layers not in (GPU_LAYERS_AUTO, GPU_LAYERS_ALL) and p.gpu_layers <= n_layer:
        return None  # the user splits the model by layers
    kept = {t.use for t in survey.tensors.values() if t.layer >= 0 and p.buffer_of(t.info.name) == "CPU"}
    if kept - {Use.EXPERTS}:
        return None  # attention or dense tensors are kept off the GPU as well: whole blocks run on the CPU
    cells = config.context.cells(numbers.n_ctx_train)
    whole = parts_of(survey, 0, cells, config, context)
    asked = bool(kept) or p.moe_mode in ("offload", "hybrid", "cpu") or p.expert_cache is not None
    if not asked and whole.total <= budget:
        return None
    shrinks = p.fit and not config.context.size
    while True:
        parts = parts_of(survey, 0, cells, config, context, cached=True)
        left = budget - parts.total - GRAPHS
        # a context nobody asked for leaves half of the room to the experts
        if not shrinks or cells // 2 < pad(p.fit_ctx) or left >= parts.kv:
            break
        cells = pad(cells // 2)
    if p.expert_cache == 0 and p.moe_mode == "auto" and not _all_experts(survey, config):
        return None  # llama.cpp's static placement
    if left < 0:
        if not asked:
            return None
        raise MemoryError(
            f"the model without its experts does not fit: weights {parts.weights // MIB}, KV of {cells} tokens "
            f"{parts.kv // MIB}, workspace {parts.workspace // MIB}, CUDA {parts.context // MIB}, graphs "
            f"{GRAPHS // MIB} MiB, and the budget is {budget // MIB} MiB. Lower -c, -ub or -ngl, use -ctk/-ctv "
            "q8_0, or raise --vram-budget"
        )
    start, least = cells, left
    grows = parts.kv * KV_AT_ONCE > left + parts.kv
    if grows and p.expert_cache is None and p.moe_mode != "cpu" and left < whole.experts:
        start = min(cells, max(pad(p.fit_ctx), pad(cells // 4)))
        begin = parts_of(survey, 0, start, config, context, cached=True)
        left, parts = left + parts.kv - begin.kv, begin
    size = min(left, whole.experts + 256 * MIB)
    if p.expert_cache is not None:
        size = min(size, p.expert_cache * MIB)
    if p.moe_mode == "cpu":
        size = 0
    return CachePlan(_fit(n_layer, cells, start, parts, size, whole), size, _mode(config), start, least)


def _all_experts(survey: Survey, config: ServerConfig) -> bool:
    """Whether every expert tensor is kept off the GPU."""
    experts = [t.info.name for t in survey.tensors.values() if t.use is Use.EXPERTS]
    return all(config.placement.buffer_of(name) == "CPU" for name in experts)


def _mode(config: ServerConfig) -> str:
    return {"offload": "offload", "cpu": "cpu"}.get(config.placement.moe_mode, "hybrid")


def _fit(n_layer: int, cells: int, start: int, parts: Parts, size: int, whole: Parts) -> Fit:
    grows = f" at first (up to {cells} when they are needed)" if start < cells else ""
    line = (
        f"experts of {whole.experts // MIB} MiB stay in host memory; {size // MIB} MiB of VRAM cache them beside "
        f"weights {parts.weights // MIB}, KV of {start} tokens{grows} {parts.kv // MIB}, workspace "
        f"{parts.workspace // MIB} MiB"
    )
    return Fit(0, n_layer, cells, replace(parts, experts=size), (line,))


def make_store(plan: CachePlan, config: ServerConfig, numbers: Numbers, memory: DeviceMemory) -> CachedStore:
    """The store of `plan`, empty."""
    from ftgguf.experts import key
    from ftgguf.experts.bank import LimitedPinner
    from ftgguf.experts.control import Arm
    from ftgguf.experts.measure import stored_costs
    from ftgguf.experts.pinning import cuda_pinner
    from ftgguf.experts.store import RING_BYTES, RING_SHARE, CachedStore

    p = config.placement
    pinner = cuda_pinner(memory.device)
    claimed = cores.claim(config.cpu.threads - 1)
    if claimed.line:
        log.info("%s", claimed.line)
    cpus = claimed.cpus
    arm = {"offload": Arm.FILL, "cpu": Arm.CPU}.get(plan.mode, Arm.SPLIT)
    store = CachedStore(
        memory,
        budget=plan.budget,
        top_k=numbers.top_k,
        ring_bytes=min(plan.budget // RING_SHARE, RING_BYTES, plan.least) if plan.elastic else None,
        decode_rows=graph_rows(max(1, config.context.n_parallel))[-1],
        short_rows=min(SHORT_ROWS[-1], config.context.n_ubatch),
        cpus=cpus,
        pinner=pinner if p.pin_budget is None else LimitedPinner(p.pin_budget * MIB, pinner),
        policy=key.policy(p.expert_policy),
        costs=stored_costs(memory.device, len(cpus)),
        arm=arm,
        rails=plan.mode == "hybrid",
        probe=plan.mode == "hybrid",
        disk=p.expert_disk,
    )
    weakref.finalize(store, claimed.release)
    return store
