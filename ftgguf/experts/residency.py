"""What one MoE layer does to the expert cache in one step: the NumPy mirror of `kernels/residency.py`, bit for bit.

Routed ids go in; for every (row, choice) the slot of its expert or -1 comes out, with the list of fills (host bytes to
a slot) and the list of experts that the CPU runs in place. State is a handful of integer arrays (`Residency`), the
same on both sides, so that tests compare the whole of it.

Words: a *lane* is an expert's index within its layer, padded to a power of two `e_pad`; a *flat id* is
`layer * e_pad + lane`; `layer` counts MoE layers in the order they run; a *class* is a set of slots of one size, whose
numbers are contiguous: `class_begin[c] .. + class_count[c]`.

Victims: the candidates are `window` slots of the layer's class, beginning at a hand that moves on by as many after
each look. Of them the smallest score goes, never one used in this step. With no more slots than `window` that is the
exact minimum; with more it is the least of a sample of 1024, which on a real trace costs 0.001 to 0.003 of the hits at
3 to 7 times as many slots (docs/measurements/cache.md), and the cost of a step does not depend on the number of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ftgguf.experts import key as keys
from ftgguf.experts.split import PHI_ONE, split_misses

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

PARTS = 3
"""Host pieces of an expert: gate, up, down. With fewer (fused gate and up) the last ones have zero bytes."""
WINDOW = 1024
FREE = -1
_FREE_SCORE = -(1 << 31) + 1
"""Below every score: free slots go first."""
_NOTHING = np.empty(0, np.int32)


class Stat(IntEnum):
    """Columns of `Residency.stats`; sums since start. Experts are counted once per layer step, entries per row."""

    STEPS = 0
    ENTRIES = 1
    EXPERTS = 2
    HITS = 3
    MISSES = 4
    FILLS = 5
    CPU = 6
    CPU_ENTRIES = 7
    SHARED = 8


STAT_COLUMNS = 16
"""Of `Residency.stats`: `Stat`'s, up to a power of two."""


@dataclass(slots=True)
class Residency:
    """The cache's state, and the addresses a fill needs. Everything that changes in service is an array.

    slot_of int32 [layers, e_pad]: slot of an expert, or -1. owner_of int32 [capacity]: flat id in a slot, or -1.
    key int32 [2, layers, e_pad]: fast and slow key (`experts/key.py`). clock int32 [1]: the step, from 1.
    class_begin, class_count, hand int32 [classes]; layer_class int32 [layers].
    split int32 [layers, 2]: Q16 share of the misses to fill, and the least number of fills when something is missed
    (`experts/split.py`); (65536, 1) fills all, (0, 0) leaves all to the CPU. late int32 [layers]: the rule's `late`.
    part int32 [layers, 2]: the rule's `link` and `cpu` of a shared expert; (0, 0): none is shared.
    slot_addr int64 [capacity + 1]: device address of each slot, then of the place for a shared expert's down.
    host_base, host_stride int64 [layers, 3]: where the bytes of each part of expert 0 lie in host memory, and the
    distance to the next expert's. stats int64 [layers, STAT_COLUMNS]: see `Stat`.
    """

    experts: int
    policy: keys.KeyPolicy
    window: int
    slot_of: I32
    owner_of: I32
    key: I32
    clock: I32
    class_begin: I32
    class_count: I32
    hand: I32
    layer_class: I32
    split: I32
    late: I32
    part: I32
    slot_addr: I64
    host_base: I64
    host_stride: I64
    stats: I64

    @property
    def layers(self) -> int:
        return int(self.slot_of.shape[0])

    @property
    def e_pad(self) -> int:
        return int(self.slot_of.shape[1])


@dataclass(frozen=True, slots=True)
class Step:
    """What one layer step decided.

    place int32 [rows, k]: slot of each entry's expert, or -1: it is on the CPU (or the id was negative: padding).
    fill_expert, fill_slot int32 [q]: lanes and the slots they go to. fill_src int64 [q, 3]: host address of each
    part; fill_dst int64 [q]: device address of the slot. cpu_expert int32 [c], ascending: lanes the CPU runs;
    cpu_start int32 [c + 1] and cpu_rows int32: the entries (row * k + choice, ascending) of CPU expert i are
    `cpu_rows[cpu_start[i] : cpu_start[i + 1]]`, so that its bytes are read once. shared: whether the CPU only computes
    the hidden rows of the first of them, whose down the GPU has at `place_down`, int32 [rows, k]: `place`, and slot
    number `capacity` for the shared expert's entries; `part_src`, its host address (0: none).
    """

    place: I32
    hits: int
    fill_expert: I32
    fill_slot: I32
    fill_src: I64
    fill_dst: I64
    cpu_expert: I32
    cpu_start: I32
    cpu_rows: I32 = field(repr=False)
    shared: bool
    place_down: I32
    part_src: int


def pad_experts(experts: int) -> int:
    """The power of two that holds `experts` lanes, at least 16 (Triton's blocks are powers of two)."""
    return max(16, 1 << (experts - 1).bit_length())


def create(
    layers: int,
    experts: int,
    class_count: Sequence[int],
    layer_class: Sequence[int] | None = None,
    policy: keys.KeyPolicy = keys.DECAY,
    capacity: Sequence[int] | None = None,
    window: int = WINDOW,
) -> Residency:
    """An empty cache of `class_count[c]` slots for each class; addresses are zero until the owner sets them.

    `capacity[c]` reserves slot numbers, so that a class can grow in place. Raises ValueError on impossible sizes.
    """
    capacity = list(class_count) if capacity is None else list(capacity)
    layer_class = [0] * layers if layer_class is None else list(layer_class)
    if layers < 1 or experts < 1 or window < 1 or window & (window - 1) or window > 4096:
        raise ValueError(f"{layers=}, {experts=} must be positive and {window=} a power of two up to 4096")
    if len(layer_class) != layers or any(not 0 <= c < len(class_count) for c in layer_class):
        raise ValueError(f"layer_class must name one of {len(class_count)} classes for each of {layers} layers")
    if any(not 0 <= n <= cap for n, cap in zip(class_count, capacity, strict=True)):
        raise ValueError(f"class_count {list(class_count)} must be within capacity {capacity}")
    e_pad = pad_experts(experts)
    if layers * e_pad >= 1 << 20:
        raise ValueError(f"{layers} layers x {e_pad} experts do not fit the 20 bits of a flat id")
    total = sum(capacity)
    split = np.empty((layers, 2), np.int32)
    split[:] = (PHI_ONE, 1)
    return Residency(
        experts=experts,
        policy=policy,
        window=window,
        slot_of=np.full((layers, e_pad), FREE, np.int32),
        owner_of=np.full(total, FREE, np.int32),
        key=np.full((2, layers, e_pad), keys.NONE, np.int32),
        clock=np.ones(1, np.int32),
        class_begin=np.concatenate(([0], np.cumsum(capacity)[:-1])).astype(np.int32),
        class_count=np.asarray(class_count, np.int32),
        hand=np.zeros(len(class_count), np.int32),
        layer_class=np.asarray(layer_class, np.int32),
        split=split,
        late=np.zeros(layers, np.int32),
        part=np.zeros((layers, 2), np.int32),
        slot_addr=np.zeros(total + 1, np.int64),
        host_base=np.zeros((layers, PARTS), np.int64),
        host_stride=np.zeros((layers, PARTS), np.int64),
        stats=np.zeros((layers, STAT_COLUMNS), np.int64),
    )


def _candidates(s: Residency, layer: int, used: NDArray[np.bool_]) -> tuple[I64, I64]:
    """Slot numbers in the window, and their scores; a slot whose expert this step uses is left out."""
    c = int(s.layer_class[layer])
    begin, count, hand = int(s.class_begin[c]), int(s.class_count[c]), int(s.hand[c])
    width = min(count, s.window)
    at = hand + np.arange(width)
    slots = begin + np.where(at >= count, at - count, at)
    s.hand[c] = hand + width - (count if hand + width >= count else 0)
    owner = s.owner_of[slots]
    free = owner < 0
    flat = np.where(free, 0, owner)
    owner_layer = flat // s.e_pad
    fast, slow = (plane.reshape(-1)[flat] for plane in s.key)
    value = keys.score(s.policy, fast, slow, owner_layer, int(s.clock[0]), layer, s.layers)
    value = np.where(free, _FREE_SCORE, value).astype(np.int64)
    keep = free | (owner_layer != layer) | ~used[flat % s.e_pad]
    return slots[keep], value[keep]


def _fill(s: Residency, layer: int, missing: I64, used: NDArray[np.bool_], may_share: bool) -> tuple[I32, I32, bool]:
    """Choose which of the missing lanes are filled and where; updates the maps. Returns (lanes, slots), int32 [q], and
    whether one of the others is shared.

    The missing expert with the highest score gets the slot with the lowest, and so on; ties go to the lower lane
    and to the slot nearer to the hand.
    """
    share, least = (int(x) for x in s.split[layer])
    link, cpu = (int(x) for x in s.part[layer])
    q, shared = split_misses(len(missing), share, least, int(s.late[layer]), link if may_share else 0, cpu)
    if s.class_count[s.layer_class[layer]] == 0:
        return _NOTHING, _NOTHING, False
    if q == 0:
        return _NOTHING, _NOTHING, shared
    slots, value = _candidates(s, layer, used)
    q = min(q, len(slots))
    fast, slow = s.key[:, layer, missing]
    wanted = keys.score(s.policy, fast, slow, layer, int(s.clock[0]), layer, s.layers).astype(np.int64)
    lanes = missing[np.argsort(-wanted, kind="stable")[:q]].astype(np.int32)
    victims = slots[np.argsort(value, kind="stable")[:q]].astype(np.int32)
    old = s.owner_of[victims]
    s.slot_of.reshape(-1)[old[old >= 0]] = FREE
    s.owner_of[victims] = layer * s.e_pad + lanes
    s.slot_of[layer, lanes] = victims
    return lanes, victims, shared


def step(s: Residency, layer: int, ids: NDArray[np.integer], advance: int = 0, may_share: bool = True) -> Step:
    """Run one layer step on `ids`, integers [rows, k], negative for padding; changes `s`. `may_share` False rules out a
    shared expert whatever `s.part` says.

    `advance` is added to the clock first: 1 in the first MoE layer of a step, 0 in the others. Raises ValueError for
    an id that is no expert, or a clock that should have been rebased.
    """
    s.clock[0] += advance
    now = int(s.clock[0])
    if now >= s.policy.clock_limit(s.layers):
        raise ValueError(f"clock {now} passed {s.policy.clock_limit(s.layers)}: rebase the keys at a safe point")
    entries = np.maximum(ids.reshape(-1), -1).astype(np.int64)
    if entries.size and entries.max() >= s.experts:
        raise ValueError(f"routed id {entries.max()} in layer {layer}, but there are {s.experts} experts")
    valid = entries >= 0
    used = np.zeros(s.e_pad, bool)
    used[entries[valid]] = True
    lanes = np.flatnonzero(used)
    resident = s.slot_of[layer, lanes] >= 0
    missing = lanes[~resident]
    fast, slow = s.key[:, layer, lanes]
    s.key[0, layer, lanes], s.key[1, layer, lanes] = keys.touch(s.policy, fast, slow, now, layer, s.layers)
    if len(missing):
        fill_lanes, fill_slots, shared = _fill(s, layer, missing, used, may_share)
    else:
        fill_lanes = fill_slots = _NOTHING
        shared = False
    place = s.slot_of[layer, entries]  # an id of -1 reads the last lane, and is masked below
    if not valid.all():
        place = np.where(valid, place, FREE).astype(np.int32)
    if len(missing) > len(fill_lanes):
        cpu_expert = lanes[s.slot_of[layer, lanes] < 0].astype(np.int32)
        cpu_entry = np.flatnonzero(valid & (place < 0))
        cpu_rows = cpu_entry[np.argsort(entries[cpu_entry], kind="stable")].astype(np.int32)
        per_expert = np.bincount(entries[cpu_entry], minlength=s.e_pad)[cpu_expert]
        cpu_start = np.concatenate(([0], np.cumsum(per_expert))).astype(np.int32)
    else:
        cpu_expert, cpu_start, cpu_rows = _NOTHING, np.zeros(1, np.int32), _NOTHING
    hits = len(lanes) - len(missing)
    counts = (1, valid.sum(), len(lanes), hits, len(missing), len(fill_lanes), len(cpu_expert), len(cpu_rows))
    s.stats[layer, : len(counts)] += np.asarray(counts, np.int64)
    shared = shared and len(cpu_expert) > 0
    s.stats[layer, Stat.SHARED] += shared
    place_down, part_src = place, 0
    if shared:
        place_down = np.where(entries == cpu_expert[0], len(s.owner_of), place).astype(np.int32)
        part_src = int(s.host_base[layer, 0] + int(cpu_expert[0]) * s.host_stride[layer, 0])
    return Step(
        place=place.reshape(ids.shape),
        hits=hits,
        fill_expert=fill_lanes,
        fill_slot=fill_slots,
        fill_src=s.host_base[layer] + fill_lanes[:, None].astype(np.int64) * s.host_stride[layer],
        fill_dst=s.slot_addr[fill_slots],
        cpu_expert=cpu_expert,
        cpu_start=cpu_start,
        cpu_rows=cpu_rows,
        shared=shared,
        place_down=place_down.reshape(ids.shape),
        part_src=part_src,
    )


def needs_rebase(s: Residency) -> bool:
    """Whether the keys should be moved back at the next safe point (at half of what they can bear)."""
    return int(s.clock[0]) >= s.policy.clock_limit(s.layers) // 2


def rebase(s: Residency) -> None:
    """Move the keys back; a safe point only."""
    s.clock[0] = keys.rebase(s.policy, s.key, int(s.clock[0]), s.layers)


def seed(s: Residency, layer: int, lanes: NDArray[np.integer]) -> None:
    """Count a use of `lanes` of `layer` without touching the slots: what a prompt's last rows were routed to.

    Prefill streams layers past the cache; afterwards decode begins with these keys instead of cold ones.
    """
    fast, slow = s.key[:, layer, lanes]
    s.key[0, layer, lanes], s.key[1, layer, lanes] = keys.touch(s.policy, fast, slow, int(s.clock[0]), layer, s.layers)


def check(s: Residency) -> None:
    """Raise ValueError if the maps contradict each other: each a function of the other, classes kept, bounds kept."""
    for slot in np.flatnonzero(s.owner_of >= 0):
        layer, lane = divmod(int(s.owner_of[slot]), s.e_pad)
        if s.slot_of[layer, lane] != slot:
            raise ValueError(
                f"slot {slot} holds expert {lane} of layer {layer}, whose slot is {s.slot_of[layer, lane]}"
            )
        c = int(s.layer_class[layer])
        if not s.class_begin[c] <= slot < s.class_begin[c] + s.class_count[c]:
            raise ValueError(f"slot {slot} of expert {lane}, layer {layer}, lies outside its class {c}")
    if np.count_nonzero(s.slot_of >= 0) != np.count_nonzero(s.owner_of >= 0):
        raise ValueError("an expert points at a slot that another one owns")
