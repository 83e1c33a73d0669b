"""How a prompt chunk's layers get their missing experts: streamed whole, gathered, or gathered and shared with the CPU.

A long chunk routes to nearly every expert, so a layer's missing experts can be copied before its routing is known,
while the layers before compute. A short one routes to few: copying only those is cheaper although it must wait for the
routing, and for very short ones the CPU takes a part. Each layer takes what is predicted to be cheapest from measured
`a + b * bytes` costs. Residents are used in place and stay; all others go through the ring's two buffers in pieces
(experts/ring.py), whichever way they were chosen: a piece is copied while the one before is computed with, so that two
layers of slots are not needed. This is `prefill_pass` in numbers; where that changes, so must `choose`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil


class Mode(Enum):
    """How a layer's missing experts are served."""

    STREAM = "stream"
    GATHER = "gather"
    SHARE = "gather+cpu"
    CPU = "cpu"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds = fixed + per_byte * bytes + per_entry * entries (an entry is one row at one expert)."""

    fixed: float
    per_byte: float
    per_entry: float = 0.0

    def seconds(self, bytes: float, entries: float = 0.0) -> float:
        """0 for nothing."""
        return self.fixed + self.per_byte * bytes + self.per_entry * entries if bytes or entries else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured on this machine for one type: `stream` and `gather` the copies of a layer, `cpu` experts in place, `gpu`
    the products of one piece (bytes: weights read). `look`: seconds until the host knows the routing and goes on."""

    stream: Cost
    gather: Cost
    cpu: Cost
    gpu: Cost
    look: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """A MoE layer before a chunk. `resident` of its `experts` are in slots; `dense` seconds of attention and the like
    come before its experts run; `on_cpu`: its bytes cannot be copied (not pinned)."""

    experts: int
    k: int
    expert_bytes: int
    resident: int
    dense: float
    costs: Costs
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """`seconds` predicted from the end of the dense part to the end of the experts; `link_idle` what of this layer's
    time (dense part included) the link has left for the next one. `alternatives` by mode, for the log."""

    mode: Mode
    seconds: float
    link_idle: float
    alternatives: dict[Mode, float]


def expected_union(experts: int, k: int, rows: int) -> float:
    """Distinct experts of `rows` rows with k uniform choices each: E * (1 - (1 - k/E)^rows). Real routing: fewer."""
    return experts * (1.0 - (1.0 - k / experts) ** rows)


class UnionEstimate:
    """How many distinct experts a chunk really touches, as a share of `expected_union`, learned by chunk size."""

    def __init__(self, smoothing: float = 0.25) -> None:
        self._share: dict[int, float] = {}
        self._smoothing = smoothing

    def observe(self, experts: int, k: int, rows: int, distinct: int) -> None:
        """Take in a layer's count; sizes are told apart by powers of two."""
        seen = distinct / expected_union(experts, k, rows)
        old = self._share.get(rows.bit_length(), seen)
        self._share[rows.bit_length()] = old + self._smoothing * (seen - old)

    def union(self, experts: int, k: int, rows: int) -> float:
        """Predicted distinct experts; of an unseen size as the nearest one seen, or uniform."""
        bucket = rows.bit_length()
        near = min(self._share, key=lambda b: (abs(b - bucket), b), default=None)
        share = 1.0 if near is None else self._share[near]
        return min(float(experts), share * expected_union(experts, k, rows))


def cpu_share(missing: int, entries: Sequence[float], layer: Layer) -> tuple[int, float]:
    """How many missing experts to gather so that link and CPU end soonest, and the seconds to the later of both.

    `entries` per missing expert, ascending: the CPU's cost grows with rows while the copy's does not, so the CPU takes
    the experts with the fewest. The GPU's own product is the same in all modes and left out.
    """
    best, best_seconds = missing, layer.costs.gather.seconds(missing * layer.expert_bytes)
    on_cpu = 0.0
    for cpu in range(1, missing + 1):
        on_cpu += entries[cpu - 1]
        copy = layer.costs.gather.seconds((missing - cpu) * layer.expert_bytes)
        seconds = max(copy, layer.costs.cpu.seconds(cpu * layer.expert_bytes, on_cpu))
        if seconds < best_seconds:
            best, best_seconds = missing - cpu, seconds
    return best, best_seconds


def choose(layer: Layer, rows: int, union: float, link_head_start: float, ring_slots: int) -> Choice:
    """The cheapest way to serve one layer of a chunk of `rows` rows that is expected to touch `union` experts.

    `link_head_start`: seconds for which the link was free before the layer's experts are needed. `ring_slots`: slots
    of the ring's two buffers; without any, everything missing runs on the CPU.
    """
    absent = layer.experts - layer.resident
    missing = union * absent / layer.experts
    entries = rows * layer.k
    if missing < 0.5:
        compute = layer.costs.gpu.seconds(union * layer.expert_bytes, entries)
        return Choice(Mode.RESIDENT, compute, layer.dense + compute, {Mode.RESIDENT: compute})
    whole = max(1, round(missing))
    each = entries / max(union, 1.0)
    look, costs = layer.costs.look, layer.costs
    here = costs.gpu.seconds((union - missing) * layer.expert_bytes, (union - missing) * each)
    cpu_all = look + max(costs.cpu.seconds(missing * layer.expert_bytes, missing * each), here)
    if layer.on_cpu or ring_slots < 1:
        return Choice(Mode.CPU, cpu_all, layer.dense + cpu_all, {Mode.CPU: cpu_all})
    piece = max(1, ring_slots // 2)

    def through_ring(copied: float, used: float, waits: float) -> float:
        """Residents compute while the first piece is copied, the last piece's product comes after all copies."""
        pieces = max(1, ceil(copied / piece))
        products = costs.gpu.seconds(used * layer.expert_bytes, used * each) + (pieces - 1) * costs.gpu.fixed
        return max(waits, here + products * (1 - 1 / pieces)) + products / pieces

    stream = costs.stream.seconds(absent * layer.expert_bytes)
    ahead = min(link_head_start, costs.stream.seconds(min(absent, 2 * piece) * layer.expert_bytes))
    gather = costs.gather.seconds(whole * layer.expert_bytes)
    q, _ = cpu_share(whole, [each] * whole, layer)
    shared = costs.gather.seconds(q * layer.expert_bytes)
    on_cpu = costs.cpu.seconds((whole - q) * layer.expert_bytes, (whole - q) * each)
    ways = {
        Mode.STREAM: through_ring(absent, missing, stream - ahead),
        Mode.GATHER: look + through_ring(whole, missing, gather),
        Mode.SHARE: look + max(through_ring(q, missing * q / whole, shared), on_cpu),
        Mode.CPU: cpu_all,
    }
    # The number breaks ties, so that equal predictions do not alternate.
    mode = min(ways, key=lambda m: (ways[m], list(Mode).index(m)))
    busy = {Mode.STREAM: stream - ahead, Mode.GATHER: gather, Mode.SHARE: shared}
    return Choice(mode, ways[mode], max(0.0, layer.dense + ways[mode] - busy.get(mode, 0.0)), ways)


def plan_chunk(layers: Sequence[Layer], rows: int, unions: UnionEstimate, ring_slots: int) -> list[Choice]:
    """One choice for each layer of a chunk, in order. The first layer's stream has only its dense part as a start."""
    choices: list[Choice] = []
    idle = 0.0
    for layer in layers:
        union = unions.union(layer.experts, layer.k, rows)
        choice = choose(layer, rows, union, idle + layer.dense, ring_slots)
        choices.append(choice)
        idle = max(0.0, choice.link_idle - layer.dense)
    return choices
