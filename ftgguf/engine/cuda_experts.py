"""Where routed experts are when a layer needs them: the seam between the forward pass and residency.

The forward pass (ops.cuda) knows only this: a store turns a layer's routed expert numbers into slots, and the slots'
device addresses are in a table. For each layer of each pass it calls

    ids, weights = store.routed(layer, ids, weights)   # what the router chose, written down or replaced by a benchmark
    placement = store.place(layer, x, ids, weights)    # before the products
    ... gate and up over placement.slots and placement.slot_addr, negative slots skipped ...
    store.complete(layer, placement, hidden)           # hidden rows that were computed elsewhere, if any
    ... down over placement.down_slots ...
    share = store.collect(layer, placement)            # weighted sum of the experts computed elsewhere, or None

All of it runs on the current stream and may be captured: no host synchronisation, no allocation outside torch's
allocator. `ResidentStore` keeps every expert on the device, so `place` is free and `collect` gives None.

A store that caches implements the same three methods: `load` reads its host bank, `place` runs the residency kernel
(ids -> slots, negative for the CPU's), publishes x and the CPU list and queues the fills, and `collect` waits for the
CPU and returns its share, float32 [rows, n_embd], which `combine` adds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ftgguf.engine.cuda_weights import ExpertTensor, Reader
from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.engine.survey import aligned
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.formats import Type
from ftgguf.kernels.matrix import ExpertMatrix, ExpertWeights
from ftgguf.layers.params import Experts, Linear
from ftgguf.models.config import ModelError

ACTIVATION_NAMES = {
    "silu": "silu", "gelu": "gelu", "relu": "relu", "relu_sqr": "relu2", "swiglu_oai": "swiglu_oai",
}  # fmt: skip
"""layers.params' names -> the kernels'."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """One layer's experts: `parts` are its tensors with their place in a slot, `weights` what the kernels read.

    A slot holds one expert: each part's bytes at a multiple of 16, `slot_bytes` in all (a multiple of 256).
    """

    layer: int
    experts: int
    parts: tuple[tuple[ExpertTensor, int], ...]
    weights: ExpertWeights
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pass finds its experts. `slots` int32 [rows, k] index `slot_addr`, int64 device addresses; negative:
    not on the device. `down_slots` likewise for the down product; an expert may be there for that alone, its hidden
    rows coming from elsewhere. `parts`, where the store has done the products itself, is float32 [rows * k, n_embd],
    whole after `collect`. `ticket` is the store's own."""

    slots: torch.Tensor
    slot_addr: torch.Tensor
    ticket: Any = None
    down: torch.Tensor | None = None
    parts: torch.Tensor | None = None

    @property
    def down_slots(self) -> torch.Tensor:
        return self.slots if self.down is None else self.down


def expert_spec(layer: int, p: Experts) -> ExpertSpec:
    """The slot layout of a block's experts. Raises ModelError where a part cannot be addressed."""
    parts: list[tuple[ExpertTensor, int]] = []
    end = 0

    def place(tensor: ExpertTensor) -> int:
        nonlocal end
        start = -(-end // 16) * 16
        parts.append((tensor, start))
        end = start + tensor.nbytes
        return start

    if p.gate_up is not None:
        both: ExpertTensor = p.gate_up.weight
        start, half = place(both), both.n // 2
        gate: ExpertMatrix | None = _matrix(p.gate_up, start, 0, half)
        up = _matrix(p.gate_up, start + both.nbytes // 2, half, both.n)
    else:
        if p.up is None:
            raise ModelError(f"block {layer} has experts without an up projection")
        gate = None if p.gate is None else _matrix(p.gate, place(p.gate.weight), 0, p.gate.weight.n)
        up = _matrix(p.up, place(p.up.weight), 0, p.up.weight.n)
    down = _matrix(p.down, place(p.down.weight), 0, p.down.weight.n)
    weights = ExpertWeights(gate, up, down, ACTIVATION_NAMES[p.activation])
    return ExpertSpec(layer, p.down.weight.experts, tuple(parts), weights, aligned(end))


def _matrix(p: Linear, offset: int, first: int, last: int) -> ExpertMatrix:
    """Rows [first, last) of an expert tensor whose bytes for them start `offset` into the slot."""
    tensor: ExpertTensor = p.weight
    if offset % 16:
        raise ModelError(f"tensor '{tensor.info.name}': its halves do not start at multiples of 16 bytes: use -ngl 0")
    # A view: the bias is not loaded yet. `ExpertStore.settle` makes it contiguous once it is.
    bias = None if p.bias is None else p.bias[:, first:last]
    return ExpertMatrix(Type(int(tensor.info.type)), last - first, tensor.k, offset, bias, p.scale)


def _settled(m: ExpertMatrix) -> ExpertMatrix:
    return m if m.bias is None or m.bias.is_contiguous() else replace(m, bias=m.bias.contiguous())


class RouterHook(Protocol):
    """Sees every layer's routing of a pass, on the device and perhaps while it is captured."""

    def __call__(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids (int32 [rows, k]) and weights (float32 [rows, k]) to go on with."""

    def start(self) -> None:
        """A pass is about to be queued."""

    def finish(self, rows: int, waited: bool) -> None:
        """A pass of `rows` rows was queued and, if `waited`, is done."""

    def close(self) -> None:
        """No pass follows."""


class ExpertStore(ABC):
    """See the module. `specs[layer]` is what `add` was given; layers are the model's block numbers."""

    captures_prompts = True
    """Whether a prompt's pass may be captured; passes of few rows always may."""
    prompting = False
    """Whether the pass that is queued is a prompt's (`start`)."""

    def __init__(self) -> None:
        self.specs: dict[int, ExpertSpec] = {}
        self.hook: RouterHook | None = None
        """Set before the first pass is captured."""

    def add(self, spec: ExpertSpec) -> None:
        """Announce a layer; all are announced before `load`."""
        self.specs[spec.layer] = spec

    @abstractmethod
    def load(self, reader: Reader, progress: Callable[[float], None]) -> None:
        """Take the memory and read the experts in, once the weights outside of them are loaded."""

    def settle(self) -> None:
        """Make the kernels' biases contiguous; part of `load`."""
        for layer, spec in self.specs.items():
            w = spec.weights
            gate = None if w.gate is None else _settled(w.gate)
            self.specs[layer] = replace(spec, weights=replace(w, gate=gate, up=_settled(w.up), down=_settled(w.down)))

    def routed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's routing, before `place`."""
        return (ids, weights) if self.hook is None else self.hook(layer, ids, weights)

    @abstractmethod
    def place(self, layer: int, x: Activations, ids: torch.Tensor, weights: torch.Tensor) -> Placement:
        """Queue what makes `ids` (int32 [rows, k], all valid) available. x float32 [rows, n_embd] are the experts'
        inputs, weights float32 [rows, k]."""

    def complete(self, layer: int, placement: Placement, hidden: torch.Tensor) -> None:
        """Put in the rows of `hidden` (float32 [rows * k, n_ff]) whose pairs have a down slot only."""
        return

    def collect(self, layer: int, placement: Placement) -> torch.Tensor | None:
        """float32 [rows, n_embd]: the weighted sum of the experts with negative slots, ready on this stream."""
        return None

    def takes_short(self, rows: int) -> bool:
        """Whether `rows` rows of a prompt may run as decode's rows do (CudaExecutor's `short_rows`)."""
        return False

    def start(self, prompt: bool = False, rows: int = 1) -> None:
        """A pass of `rows` rows is about to be queued: a prompt's that does not run as decode's rows do, or another."""
        self.prompting = prompt
        if self.hook is not None:
            self.hook.start()

    def overlap(self) -> None:
        """The device runs a pass and the host has nothing to do."""
        return

    def finish(self, rows: int, waited: bool) -> None:
        """A pass of `rows` rows was queued and, if `waited`, is done. Raises ExecutorLost when it cannot be right."""
        if self.hook is not None:
            self.hook.finish(rows, waited)

    def abandon(self) -> int:
        """A pass ended for want of memory. How many bytes the store can do without, 0 for none."""
        return 0

    def close(self) -> None:
        """No pass follows."""
        if self.hook is not None:
            self.hook.close()


class ResidentStore(ExpertStore):
    """Every expert in device memory; slot numbers are expert numbers."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()
        self.memory = memory
        self.slot_addr: dict[int, torch.Tensor] = {}
        self._slabs: list[torch.Tensor] = []

    def load(self, reader: Reader, progress: Callable[[float], None]) -> None:
        self.settle()
        specs: Sequence[ExpertSpec] = list(self.specs.values())
        total = sum(spec.experts * spec.slot_bytes for spec in specs) or 1
        done = 0
        for spec in specs:
            slab = self.memory.tensor("experts", (spec.experts, spec.slot_bytes), torch.uint8)
            self._slabs.append(slab)
            for tensor, offset in spec.parts:
                reader.copy(tensor.info, slab[:, offset : offset + tensor.nbytes])
            first = slab.data_ptr()
            addresses = [first + e * spec.slot_bytes for e in range(spec.experts)]
            self.slot_addr[spec.layer] = torch.tensor(addresses, dtype=torch.int64, device=self.memory.device)
            done += spec.experts * spec.slot_bytes
            progress(done / total)

    def place(self, layer: int, x: Activations, ids: torch.Tensor, weights: torch.Tensor) -> Placement:
        return Placement(ids, self.slot_addr[layer])
