"""How much of a model goes on the GPU: bytes of every part, and the layers and context that a budget holds.

Plain arithmetic on the file's header (engine.survey); nothing is loaded and no GPU is touched. Segments are whole
blocks, the last ones on the GPU as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftgguf.engine.survey import ALIGN, Survey, Taken, aligned
from ftgguf.flags.config import GPU_LAYERS_ALL, GPU_LAYERS_AUTO, ServerConfig, pad
from ftgguf.layers.params import Attention, Moe
from ftgguf.models.config import Numbers
from ftgguf.models.source import Use

MIB = 1 << 20
CONTEXT = 736 * MIB
"""A CUDA context with the kernels' modules and the graphs' nodes where nothing has been measured, and the most that is
counted for one (an H200 with driver 580 took 520 MiB before the first kernel, 654 to 678 in service of 12 layers)."""
KV_WIDTH = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5}
"""Bits of one element of a device cell; the 4- and 5-bit types are stored as q8_0."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on the device by purpose."""

    weights: int
    experts: int
    kv: int
    workspace: int
    context: int = CONTEXT

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.kv + self.workspace + self.context


@dataclass(frozen=True, slots=True)
class Fit:
    """Blocks [first, n_layer) on the GPU with `n_cells` cells; `lines` say what was decided and why."""

    first: int
    n_layer: int
    n_cells: int
    parts: Parts
    lines: tuple[str, ...] = field(default_factory=tuple)

    @property
    def on_gpu(self) -> int:
        return self.n_layer - self.first


def kv_bytes(attentions: Sequence[Attention], n_cells: int, type_k: str, type_v: str) -> int:
    """Bytes of `n_cells` cells; K and V share the wider type on the device (engine.cuda_cells.kv_kind)."""
    bits = max(KV_WIDTH.get(type_k, KV_WIDTH["q8_0"]), KV_WIDTH.get(type_v, KV_WIDTH["q8_0"]))
    elements = sum(a.kv_heads * (a.head_dim + a.v_dim) for a in attentions)
    return int(n_cells * elements * bits / 8)


def workspace_bytes(survey: Survey, max_rows: int, *, cached: bool = False) -> int:
    """What passes of up to `max_rows` rows take for their own: hidden states and one block's intermediate rows, twice
    (eager and captured passes keep theirs apart), the logits of 64 rows, the graphs, and the staging of weights.
    An H200 took 700 MiB for 2048 rows of the Qwen3-30B-A3B shape, for which this says 780.

    `cached`: wide passes of a model whose experts are in host memory are led by the host, none is captured, and an
    eighth on top of one pass is for what the allocator cannot use: 525 MiB for that shape, where twice left 280 of
    4096 MiB unused, and with 392 a pass had to borrow from the experts.
    """
    model = survey.model
    widest = 0
    for block in model.blocks:
        a = block.attention
        attention = 4 * (2 * a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.v_dim) + a.heads * a.v_dim)
        ffn = 0
        if isinstance(block.ffn, Moe):
            k = block.ffn.router.top_k
            width = block.ffn.experts.down.weight.shape[0]
            ffn = k * (4 * model.n_embd + 2 * width + 64) + 8 * block.ffn.router.experts
        else:
            ffn = 14 * int(block.ffn.down.weight.shape[0])
        widest = max(widest, attention, ffn)
    rows = max_rows * (widest + 26 * model.n_embd)
    return (rows + rows // 8 if cached else 2 * rows) + 2 * 64 * 4 * model.n_vocab + 160 * MIB


def embedding_in_host_memory(survey: Survey, config: ServerConfig) -> Taken | None:
    """The embedding that a model with experts in host memory leaves there as well, pinned, as llama.cpp leaves it on
    the CPU: a token reads one row of it over the link (1152 bytes of Q4_K for 2048 columns), and 166 MiB of VRAM hold
    53 experts more of the Qwen3-30B-A3B shape. None where the head is the same matrix, or pinned memory is bounded."""
    return survey.lone_embedding() if config.placement.pin_budget is None else None


def parts_of(
    survey: Survey, first: int, n_cells: int, config: ServerConfig, context: int = CONTEXT, *, cached: bool = False
) -> Parts:
    """Bytes with blocks [first, n_layer) on the device; `cached`: without experts, which have slots of a cache."""
    n_layer = len(survey.model.blocks)
    layers = range(first, n_layer)
    moe = [i for i in layers if isinstance(survey.model.blocks[i].ffn, Moe)]
    slots = sum(_slot_padding(survey, i) for i in moe)
    on_host = embedding_in_host_memory(survey, config) if cached and first == 0 else None
    return Parts(
        weights=survey.outside(embedding=first == 0, head=True)
        + sum(survey.of_layer(i, experts=False) for i in layers)
        - (0 if on_host is None else aligned(on_host.info.nbytes)),
        experts=0 if cached else sum(survey.of_layer(i, experts=True) for i in layers) + slots,
        kv=kv_bytes(
            [survey.model.blocks[i].attention for i in layers], n_cells, config.context.type_k, config.context.type_v
        ),
        workspace=workspace_bytes(survey, min(config.context.n_ubatch, config.context.n_batch), cached=cached),
        context=context,
    )


def _slot_padding(survey: Survey, layer: int) -> int:
    ffn = survey.model.blocks[layer].ffn
    return ALIGN * ffn.router.experts if isinstance(ffn, Moe) else 0


def held_back(survey: Survey, config: ServerConfig) -> tuple[int, str]:
    """The first block that may go on the GPU under -ot, -cmoe and -ncmoe, and why.

    A block any of whose tensors is kept off the GPU runs on the CPU as a whole, and so do those before it.
    """
    kept = [t for t in survey.tensors.values() if t.layer >= 0 and config.placement.buffer_of(t.info.name) == "CPU"]
    if config.placement.moe_mode == "cpu":
        kept += [t for t in survey.tensors.values() if t.use is Use.EXPERTS]
    if not kept:
        return 0, ""
    last = max(kept, key=lambda t: t.layer)
    why = f"tensor '{last.info.name}' is kept off the GPU, so its block and those before it run on the CPU"
    return last.layer + 1, why


def fit(survey: Survey, numbers: Numbers, config: ServerConfig, budget: int, context: int = CONTEXT) -> Fit:
    """Choose the blocks and the cells for `budget` bytes. Raises MemoryError where -ngl asks for what does not fit."""
    n_layer = len(survey.model.blocks)
    asked = config.placement.gpu_layers
    cells = config.context.cells(numbers.n_ctx_train)
    floor, why = held_back(survey, config)
    lines = [why] if why else []
    if asked not in (GPU_LAYERS_AUTO, GPU_LAYERS_ALL):
        # llama.cpp counts the output layer as one more
        first = max(floor, n_layer + 1 - asked, 0)
        return _exact(survey, first, cells, config, budget, context, lines)
    if asked == GPU_LAYERS_ALL:
        return _exact(survey, floor, cells, config, budget, context, lines)
    shrinks = config.placement.fit and not config.context.size
    for n_cells in _contexts(cells, config.placement.fit_ctx) if shrinks else [cells]:
        parts = parts_of(survey, floor, n_cells, config, context)
        if parts.total <= budget:
            if n_cells < cells:
                lines.append(f"context of {n_cells} tokens instead of {cells}, so that the model fits (-c sets it)")
            return Fit(floor, n_layer, n_cells, parts, tuple(lines))
    n_cells = min(cells, pad(config.placement.fit_ctx)) if shrinks else cells
    for first in range(floor + 1, n_layer):
        parts = parts_of(survey, first, n_cells, config, context)
        if parts.total <= budget:
            lines.append(f"{n_layer - first} of {n_layer} layers fit into {budget // MIB} MiB of GPU memory")
            return Fit(first, n_layer, n_cells, parts, tuple(lines))
    needed = parts_of(survey, n_layer - 1, n_cells, config, context).total
    lines.append(
        f"no layer fits into {budget // MIB} MiB of GPU memory: with one, KV of {n_cells} tokens, workspace and CUDA "
        f"itself it is {needed // MIB} MiB; raise --vram-budget, or lower -c or -ub"
    )
    return Fit(n_layer, n_layer, n_cells, Parts(0, 0, 0, 0, 0), tuple(lines))


def _contexts(cells: int, least: int) -> list[int]:
    """The full context, then halves of it down to `least`."""
    found = [cells]
    while found[-1] // 2 > least:
        found.append(pad(found[-1] // 2))
    if found[-1] > least:
        found.append(max(pad(least), 256))
    return found


def _exact(
    survey: Survey, first: int, cells: int, config: ServerConfig, budget: int, context: int, lines: list[str]
) -> Fit:
    n_layer = len(survey.model.blocks)
    if first >= n_layer:
        return Fit(n_layer, n_layer, cells, Parts(0, 0, 0, 0, 0), (*lines, "no whole layer goes on the GPU"))
    parts = parts_of(survey, first, cells, config, context)
    if parts.total > budget:
        raise MemoryError(
            f"{n_layer - first} layers do not fit on the GPU: weights {parts.weights // MIB}, experts "
            f"{parts.experts // MIB}, KV of {cells} tokens {parts.kv // MIB}, workspace {parts.workspace // MIB}, CUDA "
            f"{parts.context // MIB} MiB, and the budget is {budget // MIB} MiB. Lower -ngl (or -ngl auto), -c or -ub, "
            "use -ctk/-ctv q8_0, or raise --vram-budget"
        )
    return Fit(first, n_layer, cells, parts, tuple(lines))


def budget_of(config: ServerConfig, free: int) -> tuple[int, str]:
    """Bytes the engine may hold with `free` bytes unused now, and where the number comes from."""
    p = config.placement
    if p.vram_budget is not None:
        asked = p.vram_budget * MIB
        return (asked, "--vram-budget") if asked <= free else (free, f"free, less than --vram-budget {p.vram_budget}")
    if p.fit and p.fit_target:
        return max(0, free - p.fit_target[0] * MIB), f"free memory less --fit-target ({p.fit_target[0]} MiB)"
    return free, "free memory"
