"""How a prompt chunk's layers get their missing experts: streamed whole, gathered, or gathered and shared with the CPU.

A long chunk routes to nearly every expert, so a layer's missing experts can be copied before its routing is known,
while the layers before compute. A short one routes to few: copying only those is cheaper although it must wait for the
routing, and for very short ones the CPU takes a part. Each layer takes what is predicted to be cheapest from measured
`a + b * bytes` costs. Residents are used in place and stay; streamed experts go through a ring of borrowed slots, in
pieces, so that two layers of slots are not needed: two pieces keep the link busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ftgguf.experts.residency import FREE, Residency
from ftgguf.experts.slots import scores

PIECE_BYTES = 32 << 20
"""A copy of this size runs at the link's full rate (16 MiB: 54.7 of 55.0 GB/s on an H200), and at 50 GB/s takes 0.6 ms,
far more than the launches around it."""


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
    """Measured on this machine for one type: `stream` by the copy engine, `gather` by the kernel, `cpu` experts in
    place, `gpu` the expert products on the GPU (bytes: weights read)."""

    stream: Cost
    gather: Cost
    cpu: Cost
    gpu: Cost


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
    for copies; without any, everything missing runs on the CPU.
    """
    absent = layer.experts - layer.resident
    missing = union * absent / layer.experts
    entries = rows * layer.k
    compute = layer.costs.gpu.seconds(union * layer.expert_bytes, entries)
    if missing < 0.5:
        return Choice(Mode.RESIDENT, compute, layer.dense + compute, {Mode.RESIDENT: compute})
    whole = max(1, round(missing))
    each = entries / max(union, 1.0)
    cpu_all = max(
        layer.costs.cpu.seconds(missing * layer.expert_bytes, missing * each), compute * (1 - missing / union)
    )
    if layer.on_cpu or ring_slots < 1:
        return Choice(Mode.CPU, cpu_all, layer.dense + cpu_all, {Mode.CPU: cpu_all})
    pieces = max(1, ceil(absent / max(1, ring_slots // 2)))
    stream = layer.costs.stream.seconds(absent * layer.expert_bytes)
    waits = max(0.0, stream - link_head_start)
    gather = layer.costs.gather.seconds(whole * layer.expert_bytes)
    q, shared = cpu_share(whole, [each] * whole, layer)
    ways = {
        # A ring of one slot cannot copy and compute at once.
        Mode.STREAM: max(waits, compute) + compute / pieces if ring_slots > 1 else stream + compute,
        # Hits are computed while the copies run; the last piece's product comes after them.
        Mode.GATHER: max(gather, compute) + compute / max(2, whole) if ring_slots > 1 else gather + compute,
        Mode.SHARE: max(shared, compute * (1 - (whole - q) / max(union, 1.0))) + compute / max(2, whole),
        Mode.CPU: cpu_all,
    }
    # The number breaks ties, so that equal predictions do not alternate.
    mode = min(ways, key=lambda m: (ways[m], list(Mode).index(m)))
    busy = {Mode.STREAM: waits, Mode.GATHER: gather, Mode.SHARE: layer.costs.gather.seconds(q * layer.expert_bytes)}
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


# ------------------------------------------------------------------------------------------------ the ring


@dataclass(frozen=True, slots=True)
class Piece:
    """Copy `experts` of `layer` to `slots`, after piece `wait_for` was computed with (-1: at once)."""

    number: int
    layer: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]
    wait_for: int


def ring_size(layers: Sequence[Layer], link_rate: float, free_slots: int) -> int:
    """Slots to borrow: two pieces, and what the link can bring during the longest dense part, when nothing is consumed.

    At most two layers' missing experts (more is never ahead of use) and `free_slots`, never more than all slots.
    """
    if not layers or free_slots <= 0:
        return 0
    largest = max(layer.expert_bytes for layer in layers)
    absent = max(layer.experts - layer.resident for layer in layers)
    ahead = link_rate * max(layer.dense for layer in layers)
    wanted = 2 * max(1, PIECE_BYTES // largest) + ceil(ahead / largest)
    return max(0, min(wanted, 2 * absent, free_slots))


def pieces(missing: Sequence[tuple[int, Sequence[int]]], ring: Sequence[int]) -> Iterator[Piece]:
    """Cut the streamed layers' missing experts, (layer, experts) in order, into pieces on a ring of slots.

    A piece is at most half of the ring, so that one is copied while another is computed with; a ring of one slot gives
    pieces of one expert without overlap. Raises ValueError for an empty ring.
    """
    if not ring:
        raise ValueError("no slots to stream through: the layers must be gathered or run on the CPU")
    size = max(1, len(ring) // 2)
    used_by = [-1] * len(ring)
    at = number = 0
    for layer, experts in missing:
        for start in range(0, len(experts), size):
            part = tuple(experts[start : start + size])
            places = [(at + i) % len(ring) for i in range(len(part))]
            yield Piece(number, layer, part, tuple(ring[p] for p in places), max(used_by[p] for p in places))
            for p in places:
                used_by[p] = number
            at = (at + len(part)) % len(ring)
            number += 1


def borrow(s: Residency, size_class: int, count: int) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
    """Take the last `count` slots of a class out of the cache, at a safe point, for a ring.

    Returns their numbers (int32) and the copies (from slot, to slot) that must be made on the device first: the best
    experts among them take the places of worse ones that stay. Decode steps may run meanwhile: the class is smaller.
    Raises ValueError if the class is too small.
    """
    begin, have = int(s.class_begin[size_class]), int(s.class_count[size_class])
    if not 0 <= count <= have:
        raise ValueError(f"cannot borrow {count} slots of class {size_class}, which has {have}")
    value = scores(s)[begin : begin + have]
    stay, ring = np.arange(have - count), np.arange(have - count, have)
    best = ring[np.argsort(-value[ring], kind="stable")]
    worst = stay[np.argsort(value[stay], kind="stable")]
    slot_of, moves = s.slot_of.reshape(-1), []
    for a, b in zip((best + begin).tolist(), (worst + begin).tolist(), strict=False):
        if s.owner_of[a] < 0 or value[a - begin] <= value[b - begin]:
            break
        if s.owner_of[b] >= 0:
            slot_of[s.owner_of[b]] = FREE
        s.owner_of[b], s.owner_of[a] = s.owner_of[a], FREE
        slot_of[s.owner_of[b]] = b
        moves.append((a, b))
    numbers = (begin + ring).astype(np.int32)
    owners = s.owner_of[numbers]
    slot_of[owners[owners >= 0]] = FREE
    s.owner_of[numbers] = FREE
    s.class_count[size_class] = have - count
    if s.hand[size_class] >= s.class_count[size_class]:
        s.hand[size_class] = 0
    return numbers, moves


def give_back(s: Residency, size_class: int, ring: NDArray[np.int32]) -> None:
    """Return `borrow`'s slots to the class, empty. Raises ValueError if they are not the ones just after its end."""
    end = int(s.class_begin[size_class] + s.class_count[size_class])
    if len(ring) and (int(ring[0]) != end or int(ring[-1]) != end + len(ring) - 1):
        raise ValueError(f"slots {ring[0]}..{ring[-1]} do not follow class {size_class}, which ends at {end}")
    s.class_count[size_class] += len(ring)
