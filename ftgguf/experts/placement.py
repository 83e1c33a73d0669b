"""Where weights, KV and experts live: `-ngl`, `-ot`, `-cmoe`, `-ncmoe`, `--moe-mode` and budgets to one plan.

The order is weights, then KV for the asked context, then experts. llama.cpp's rules hold for tensors: `-ngl N` is the
output layer and the last N - 1 blocks, the token embedding stays in host memory, overrides are searched in order and
the first match decides. They bound what is in VRAM at load; what is left becomes the expert cache, unless it is
switched off (`--expert-cache 0`), which gives llama.cpp's static placement. Unlike `--fit`, a context the user asked
for is never cut, and a context left open is cut only to leave half of the room to the experts.

Every decision leaves a sentence in `Plan.reasons`; what cannot work is refused with the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
"""llama.cpp's pattern of `-cmoe`: routed experts, not shared ones."""
BLOCK = re.compile(r"^blk\.(\d+)\.")
CONTEXT_PAD = 256
AUTO_LAYERS = -1
ALL_LAYERS = -2
HOST_RESERVE = 0.10
"""Share of the expert pool that must remain available in host memory besides it."""


class PlacementError(ValueError):
    """The plan cannot work; the message has the numbers and what would help."""


class Tensor(Protocol):
    """What is needed of a tensor (gguf's `TensorInfo` has it)."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Override(Protocol):
    """One `-ot` (or what `-cmoe` and `-ncmoe` stand for)."""

    @property
    def pattern(self) -> str: ...
    @property
    def buffer(self) -> str: ...


class MoeMode(Enum):
    """`--moe-mode`. `resident`: all experts in VRAM. `offload`: in host memory, every miss is filled. `hybrid`: misses
    are split between link and CPU. `cpu`: experts run on the CPU only."""

    AUTO = "auto"
    RESIDENT = "resident"
    OFFLOAD = "offload"
    HYBRID = "hybrid"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Wishes:
    """The flags, sizes in bytes. `context` 0: left open. `expert_cache` None: what is left."""

    gpu_layers: int = AUTO_LAYERS
    overrides: Sequence[Override] = ()
    mode: MoeMode = MoeMode.AUTO
    context: int = 0
    fit_context: int = 4096
    expert_cache: int | None = None
    expert_disk: bool = False
    pin_budget: int | None = None
    kv_offload: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """`vram`: bytes the engine may use in all (0: no GPU); `host`: bytes available in host memory."""

    vram: int
    host: int


@dataclass(frozen=True, slots=True)
class Model:
    """`kv_bytes(layers, context)`: KV and state of that many blocks. `workspace`: device bytes besides weights and
    KV, with the cache's staging. Blocks are numbered 0 .. n_layer - 1."""

    tensors: Sequence[Tensor]
    n_layer: int
    context_train: int
    kv_bytes: Callable[[int, int], int]
    workspace: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The result. `gpu_layers` as llama.cpp counts them (blocks + 1 for the output). `device` of every tensor that is
    not an expert: `CPU` or `CUDA0`. Layers are block numbers. `cache`: bytes of slots; `pool`: bytes of experts in
    host memory; `pinned` layers may be copied, the others of the pool run on the CPU. `preload`: layers whose experts
    are put into slots at load; `static`: layers that keep them for ever (cache off, or everything resident).
    """

    mode: MoeMode
    gpu_layers: int
    context: int
    device: dict[str, str]
    weights: int
    kv: int
    workspace: int
    cache: int
    pool: int
    static: tuple[int, ...]
    preload: tuple[int, ...]
    pinned: tuple[int, ...]
    host: int
    reasons: tuple[str, ...] = field(repr=False)


def mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def block_of(name: str, n_layer: int) -> int:
    """The block of a tensor; -1 for the input (embedding and the like), `n_layer` for the output."""
    found = BLOCK.match(name)
    if found:
        return int(found.group(1))
    return n_layer if name.startswith("output") else -1


def override_of(name: str, overrides: Sequence[Override]) -> str | None:
    """The buffer of the first override whose pattern is found in `name`."""
    return next((o.buffer for o in overrides if re.search(o.pattern, name)), None)


def _is_device(buffer: str) -> bool:
    return buffer not in ("CPU", "CUDA_Host")


class _Sizes:
    """Bytes by block: dense ones as they fall on GPU or CPU, and experts."""

    def __init__(self, model: Model, wishes: Wishes) -> None:
        self.model, self.wishes = model, wishes
        self.experts: dict[int, int] = {}
        self.asked: dict[int, str] = {}
        self.dense: list[tuple[Tensor, int]] = []
        for t in model.tensors:
            block = block_of(t.name, model.n_layer)
            if EXPERTS.search(t.name):
                self.experts[block] = self.experts.get(block, 0) + t.nbytes
                buffer = override_of(t.name, wishes.overrides)
                # One tensor of a layer on the CPU keeps the whole layer's experts from being loaded to VRAM.
                if buffer is not None and self.asked.get(block) != "CPU":
                    self.asked[block] = "CUDA" if _is_device(buffer) else "CPU"
            else:
                self.dense.append((t, block))

    def devices(self, gpu_layers: int) -> dict[str, str]:
        """Every dense tensor's device with `gpu_layers`, overrides included."""
        first = self.model.n_layer + 1 - gpu_layers
        out = {}
        for t, block in self.dense:
            buffer = override_of(t.name, self.wishes.overrides)
            on_gpu = block >= first if buffer is None else _is_device(buffer)
            out[t.name] = "CUDA0" if on_gpu and not (buffer is None and block < 0) else "CPU"
        return out

    def on_gpu(self, gpu_layers: int) -> int:
        devices = self.devices(gpu_layers)
        return sum(t.nbytes for t, _ in self.dense if devices[t.name] != "CPU")

    def kv(self, gpu_layers: int, context: int) -> int:
        blocks = min(gpu_layers - 1, self.model.n_layer) if self.wishes.kv_offload else 0
        return self.model.kv_bytes(blocks, context) if blocks > 0 else 0


def plan(model: Model, wishes: Wishes, machine: Machine) -> Plan:
    """Decide everything. Raises PlacementError with numbers where the wishes do not fit the machine."""
    sizes, reasons = _Sizes(model, wishes), list[str]()
    layers = _gpu_layers(sizes, machine, reasons)
    context = _context(sizes, layers, machine, reasons)
    weights, kv = sizes.on_gpu(layers), sizes.kv(layers, context)
    workspace = model.workspace if layers > 0 else 0
    left = machine.vram - weights - kv - workspace
    if left < 0:
        raise PlacementError(
            f"weights {mib(weights)}, KV of {context} tokens {mib(kv)} and workspace {mib(workspace)} need "
            f"{mib(weights + kv + workspace)} of VRAM, {mib(machine.vram)} may be used: lower -c or -ngl"
        )
    mode = _mode(sizes, layers, left, reasons)
    static, preload, cache = _experts(sizes, layers, mode, left, reasons)
    in_pool = [b for b in sorted(sizes.experts) if b not in static]
    pool = sum(sizes.experts[b] for b in in_pool)
    pinned = _pinned(sizes, in_pool if cache else [], wishes.pin_budget, reasons)
    devices = sizes.devices(layers)
    host = pool + sum(t.nbytes for t, _ in sizes.dense if devices[t.name] == "CPU")
    if not wishes.kv_offload or layers <= model.n_layer:
        host += model.kv_bytes(
            model.n_layer - (min(max(layers - 1, 0), model.n_layer) if wishes.kv_offload else 0), context
        )
    _check_host(host, pool, wishes, machine, reasons)
    return Plan(
        mode, layers, context, devices, weights, kv, workspace, cache,
        pool, static, preload, pinned, host, tuple(reasons),
    )  # fmt: skip


def _gpu_layers(sizes: _Sizes, machine: Machine, reasons: list[str]) -> int:
    every, asked = sizes.model.n_layer + 1, sizes.wishes.gpu_layers
    if machine.vram <= 0:
        if asked > 0:
            reasons.append("no GPU: -ngl has no effect")
        return 0
    if asked >= 0 or asked <= ALL_LAYERS:
        return every if asked <= ALL_LAYERS else min(asked, every)
    context = sizes.wishes.context or min(sizes.wishes.fit_context, sizes.model.context_train)
    for layers in range(every, 0, -1):
        need = sizes.on_gpu(layers) + sizes.kv(layers, context) + sizes.model.workspace
        if need <= machine.vram:
            if layers < every:
                reasons.append(
                    f"{layers} of {every} layers on the GPU: one more would need more than {mib(machine.vram)}"
                )
            return layers
    reasons.append(
        f"nothing fits {mib(machine.vram)} of VRAM beside a workspace of {mib(sizes.model.workspace)}: CPU only"
    )
    return 0


def _context(sizes: _Sizes, layers: int, machine: Machine, reasons: list[str]) -> int:
    model, wishes = sizes.model, sizes.wishes
    if wishes.context:
        return wishes.context
    full = model.context_train
    room = machine.vram - sizes.on_gpu(layers) - model.workspace
    experts = sum(sizes.experts.values()) if layers else 0
    if layers == 0 or sizes.kv(layers, full) + experts <= room:
        return full
    share = room if experts == 0 else max(room / 2, room - experts)
    context = full
    while context > wishes.fit_context and sizes.kv(layers, context) > share:
        context = max(wishes.fit_context, (context * 15 // 16) // CONTEXT_PAD * CONTEXT_PAD)
    if context < full:
        what = "half of the room after the weights goes to experts" if experts else "its KV does not fit"
        reasons.append(f"context {context} instead of the trained {full}: {what}; ask for more with -c")
    return context


def _mode(sizes: _Sizes, layers: int, left: int, reasons: list[str]) -> MoeMode:
    wanted, total = sizes.wishes.mode, sum(sizes.experts.values())
    if not sizes.experts:
        return MoeMode.RESIDENT
    on_cpu = [b for b, where in sizes.asked.items() if where == "CPU"]
    whole = layers == sizes.model.n_layer + 1
    if wanted is MoeMode.RESIDENT:
        if on_cpu or not whole:
            raise PlacementError(
                "--moe-mode resident contradicts -ngl, -cmoe, -ncmoe or -ot, which keep experts out of VRAM"
            )
        if total > left:
            raise PlacementError(
                f"--moe-mode resident needs {mib(total)} for experts, {mib(left)} are left after weights and KV: "
                "use --moe-mode auto, or a smaller context"
            )
        return wanted
    if layers == 0:
        if wanted in (MoeMode.OFFLOAD, MoeMode.HYBRID):
            raise PlacementError(f"--moe-mode {wanted.value} needs a GPU that holds the other weights: none is in use")
        reasons.append("experts on the CPU: nothing else is on the GPU")
        return MoeMode.CPU
    if wanted is not MoeMode.AUTO:
        reasons.append(f"--moe-mode {wanted.value}: asked for")
        return wanted
    if total <= left and not on_cpu and whole and sizes.wishes.expert_cache is None:
        reasons.append(f"resident: all {mib(total)} of experts fit the {mib(left)} left after weights and KV")
        return MoeMode.RESIDENT
    reasons.append(f"hybrid: experts take {mib(total)}, {mib(left)} are left after weights and KV")
    return MoeMode.HYBRID


def _experts(
    sizes: _Sizes, layers: int, mode: MoeMode, left: int, reasons: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(static, preload, cache bytes)."""
    blocks = sorted(sizes.experts)
    if mode is MoeMode.RESIDENT:
        return tuple(blocks), (), 0
    if mode is MoeMode.CPU:
        return (), (), 0
    first = sizes.model.n_layer + 1 - layers
    # llama.cpp would load these: blocks on the GPU that no override keeps out, and those an override puts there.
    may = [b for b in blocks if sizes.asked.get(b, "CUDA" if b >= first else "CPU") == "CUDA"]
    asked = sizes.wishes.expert_cache
    if asked == 0:
        total = sum(sizes.experts[b] for b in may)
        if total > left:
            enough = next(n for n in range(max(may) + 2) if sum(sizes.experts[b] for b in may if b >= n) <= left)
            raise PlacementError(
                f"--expert-cache 0 places experts as llama.cpp does: {len(may)} layers with {mib(total)} in VRAM, "
                f"{mib(left)} are left: add -ncmoe {enough}, or leave the cache on"
            )
        reasons.append(f"--expert-cache 0: {len(may)} layers' experts stay in VRAM, the others run on the CPU")
        return tuple(may), (), 0
    if asked is not None and asked > left:
        raise PlacementError(f"--expert-cache asks for {mib(asked)}, {mib(left)} are left after weights and KV")
    cache = min(left if asked is None else asked, sum(sizes.experts.values()))
    preload: list[int] = []
    room = cache
    for b in reversed(may):  # as llama.cpp fills: the last layers first
        if sizes.experts[b] > room:
            break
        preload.append(b)
        room -= sizes.experts[b]
    share = 100 * cache / sum(sizes.experts.values())
    reasons.append(f"expert cache {mib(cache)}, {share:.0f} % of all experts; {len(preload)} layers loaded at start")
    return (), tuple(sorted(preload)), cache


def _pinned(sizes: _Sizes, blocks: Sequence[int], budget: int | None, reasons: list[str]) -> tuple[int, ...]:
    if budget is None:
        return tuple(blocks)
    out, room = [], budget
    for b in blocks:
        if sizes.experts[b] <= room:
            out.append(b)
            room -= sizes.experts[b]
    if len(out) < len(blocks):
        reasons.append(
            f"{mib(budget)} of host memory may be pinned: the experts of {len(blocks) - len(out)} of {len(blocks)} "
            "layers run on the CPU only"
        )
    return tuple(out)


def _check_host(host: int, pool: int, wishes: Wishes, machine: Machine, reasons: list[str]) -> None:
    need = host + int(HOST_RESERVE * pool)
    if need <= machine.host:
        return
    if wishes.expert_disk and host - pool <= machine.host:
        reasons.append(f"--expert-disk: {mib(pool)} of experts are read from the file, {mib(machine.host)} available")
        return
    raise PlacementError(
        f"host memory: {mib(host)} are needed ({mib(pool)} of them experts, with {mib(need - host)} in reserve), "
        f"{mib(machine.host)} are available: use a smaller file, more VRAM, or --expert-disk to read experts from disk"
    )
