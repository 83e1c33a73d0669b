"""The plan of the arena: which sizes slots have, where they lie, and what a resize keeps.

Addresses are offsets from the arena's base, which never moves. Layers differ in their experts' bytes (a Q4_K_M file
mixes Q4_K and Q6_K in `down`). While slots of the largest size waste at most 10 %, there is one size. Otherwise the
arena is cut into slabs of about 32 MB, each cut into slots of one class; at a safe point a slab goes from the class
whose least valued expert is worth least to the one that must throw out better ones (`move_slab`).

Slot numbers of a class are contiguous for the residency kernel; the plan's tables give every slot's offset, and
`renumber` carries the cache's state from one plan to another by offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ftgguf.experts import key
from ftgguf.experts.residency import FREE, Residency, create

ALIGN = 256
"""Slots begin at multiples of this: the widest load a kernel issues, and cuMemMap's granule is a multiple of it."""
SLAB = 32 << 20
MAX_WASTE = 0.10


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Slots of `slot_bytes` for the experts of `layers` (MoE layer numbers); `experts` of them in all."""

    slot_bytes: int
    layers: tuple[int, ...]
    experts: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """`slabs[i]` is the class of slab i, which lies at `i * slab_bytes` and holds `slab_bytes // slot_bytes` slots.
    A plan of one class has one slab of its own size per slot, so that it can end anywhere."""

    classes: tuple[SizeClass, ...]
    slab_bytes: int
    slabs: tuple[int, ...]
    waste: float
    reason: str

    @property
    def bytes(self) -> int:
        """Length of the arena that the plan uses."""
        return len(self.slabs) * self.slab_bytes

    def per_slab(self, c: int) -> int:
        """Slots in a slab of class `c`."""
        return self.slab_bytes // self.classes[c].slot_bytes

    def counts(self) -> list[int]:
        """Slots of each class, `Residency.class_count`."""
        return [self.slabs.count(c) * self.per_slab(c) for c in range(len(self.classes))]

    def layer_class(self, layers: int) -> list[int]:
        """The class of each of `layers` layers."""
        of = {layer: c for c, size in enumerate(self.classes) for layer in size.layers}
        return [of[layer] for layer in range(layers)]

    def offsets(self) -> NDArray[np.int64]:
        """int64 [sum of counts]: every slot's offset from the base, by slot number (classes one after the other)."""
        out: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for c, size in enumerate(self.classes):
            base = np.flatnonzero(np.asarray(self.slabs, np.int64) == c) * self.slab_bytes
            inside = np.arange(self.per_slab(c)) * size.slot_bytes
            out.append((base[:, None] + inside[None, :]).reshape(-1))
        return np.concatenate(out)


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def waste_of_uniform(layer_bytes: Sequence[int]) -> float:
    """Share of the arena lost if every slot has the largest expert's size, layers weighted alike."""
    sizes = [aligned(b) for b in layer_bytes]
    return 1 - sum(sizes) / (len(sizes) * max(sizes))


def plan_arena(
    layer_bytes: Sequence[int], experts: int, budget: int, slab: int = SLAB, max_waste: float = MAX_WASTE
) -> ArenaPlan:
    """Plan `budget` bytes for layers whose experts have `layer_bytes[l]` bytes each, `experts` per layer.

    Never more slots than experts. A budget below one slot gives a plan without slots. Raises ValueError for sizes
    that are not positive.
    """
    if not layer_bytes or min(layer_bytes) <= 0 or experts <= 0 or budget < 0:
        raise ValueError(f"cannot plan {budget} bytes for experts of {list(layer_bytes)} bytes, {experts} a layer")
    waste = waste_of_uniform(layer_bytes)
    sizes = sorted({aligned(b) for b in layer_bytes})
    if waste <= max_waste or len(sizes) == 1:
        whole = SizeClass(sizes[-1], tuple(range(len(layer_bytes))), experts * len(layer_bytes))
        count = min(budget // sizes[-1], whole.experts)
        reason = f"slots of one size, {sizes[-1]} bytes: {100 * waste:.1f} % of them unused"
        return ArenaPlan((whole,), sizes[-1], (0,) * count, waste, reason)
    classes = []
    for size in sizes:
        layers = tuple(i for i, b in enumerate(layer_bytes) if aligned(b) == size)
        classes.append(SizeClass(size, layers, experts * len(layers)))
    # A slab as near to `slab` as wastes least over the classes; slabs smaller than a slot make no sense.
    multiples = range(max(1, slab // sizes[-1]), slab // sizes[-1] + 8)
    slab_bytes = min((m * sizes[-1] for m in multiples), key=lambda s: _slab_waste(s, classes))
    reason = (
        f"{len(sizes)} sizes of slots ({', '.join(map(str, sizes))} bytes) in slabs of {slab_bytes}: one size would "
        f"waste {100 * waste:.1f} %"
    )
    plan = ArenaPlan(tuple(classes), slab_bytes, (), _slab_waste(slab_bytes, classes), reason)
    return grow(plan, budget)


def _slab_waste(slab_bytes: int, classes: Sequence[SizeClass]) -> float:
    total = sum(c.experts * c.slot_bytes for c in classes)
    return sum(c.experts * c.slot_bytes / total * (slab_bytes % c.slot_bytes) / slab_bytes for c in classes)


def grow(plan: ArenaPlan, budget: int) -> ArenaPlan:
    """The plan with slabs added at the end up to `budget` bytes: each to the class with the smallest share of its
    experts covered. Slabs there already keep their place and class. A smaller budget returns the plan unchanged."""
    slabs = list(plan.slabs)
    held = [float(n) for n in plan.counts()]
    while (len(slabs) + 1) * plan.slab_bytes <= budget:
        open_classes = [c for c, size in enumerate(plan.classes) if held[c] < size.experts]
        if not open_classes:
            break
        c = min(open_classes, key=lambda c: held[c] / plan.classes[c].experts)
        slabs.append(c)
        held[c] += plan.per_slab(c)
    return replace(plan, slabs=tuple(slabs))


def shrink(plan: ArenaPlan, budget: int) -> ArenaPlan:
    """The plan without the slabs that end beyond `budget` bytes."""
    return replace(plan, slabs=plan.slabs[: max(0, budget // plan.slab_bytes)])


def resize(plan: ArenaPlan, budget: int) -> ArenaPlan:
    """The plan for a new budget: the base and every slab that stays keep their place."""
    return grow(plan, budget) if budget >= plan.bytes else shrink(plan, budget)


def new_state(
    plan: ArenaPlan, layers: int, experts: int, largest_budget: int, base: int, policy: key.KeyPolicy = key.DECAY
) -> Residency:
    """An empty cache for `plan`, with slot numbers reserved for any plan up to `largest_budget` bytes."""
    counts = plan.counts()
    most = largest_budget // plan.slab_bytes * max(plan.per_slab(c) for c in range(len(plan.classes)))
    capacity = [*counts[:-1], max(most - sum(counts[:-1]), counts[-1])]
    s = create(layers, experts, counts, plan.layer_class(layers), policy, capacity)
    offsets = plan.offsets()
    s.slot_addr[: len(offsets)] = base + offsets
    return s


def scores(s: Residency) -> NDArray[np.int64]:
    """int64 [slots]: what each slot's expert is worth at a safe point (between steps); free slots least."""
    taken = s.owner_of >= 0
    flat = np.where(taken, s.owner_of, 0)
    fast, slow = (plane.reshape(-1)[flat] for plane in s.key)
    value = key.score(s.policy, fast, slow, flat // s.e_pad, int(s.clock[0]), s.layers - 1, s.layers)
    return np.where(taken, value.astype(np.int64), -(1 << 31))


def rescue(plan: ArenaPlan, smaller: ArenaPlan, s: Residency) -> list[tuple[int, int]]:
    """Copies that save the best experts of slots that go: (from slot, to slot), numbers of `plan`, within a class.

    Each takes the place of the least valued expert that would stay, as long as it is worth more. `s` is the state
    under `plan`.
    """
    value, offsets = scores(s), plan.offsets()
    going = offsets >= smaller.bytes
    moves = []
    begin = 0
    for count in plan.counts():
        numbers = np.arange(begin, begin + count)
        begin += count
        leave, stay = numbers[going[numbers]], numbers[~going[numbers]]
        best = leave[np.argsort(-value[leave], kind="stable")]
        worst = stay[np.argsort(value[stay], kind="stable")]
        for a, b in zip(best.tolist(), worst.tolist(), strict=False):
            if value[a] <= value[b] or s.owner_of[a] < 0:
                break
            moves.append((a, b))
    return moves


def move_slab(plan: ArenaPlan, s: Residency, margin: int = key.ONE // 2) -> tuple[ArenaPlan, int] | None:
    """The plan after giving one slab to the class that needs it most, and the slab's number; None if none should move.

    A class needs memory if its least valued expert is worth more than another's by `margin` (1/4096 of log2: half a
    unit is 1.4 times as likely to be used). Worth is by expert, not by byte: a large expert costs more VRAM, and
    saves as many more bytes of transfer. The slab given is the one whose best expert is worth least.
    """
    counts = plan.counts()
    if len(plan.classes) < 2:
        return None
    value = scores(s)
    starts = np.concatenate(([0], np.cumsum(counts)))
    wants: list[tuple[int, int]] = []
    gives: list[tuple[int, int, int]] = []
    for c, size in enumerate(plan.classes):
        mine = value[starts[c] : starts[c + 1]]
        if counts[c] < size.experts:
            wants.append((int(mine.min()) if len(mine) else 0, c))
        if len(mine):
            worst_slab = mine.reshape(-1, plan.per_slab(c)).max(1)
            gives.append((int(mine.min()), c, int(np.argmin(worst_slab))))
    if not wants or not gives:
        return None
    need, taker = max(wants)
    least, giver, nth = min(gives)
    if taker == giver or need <= least + margin:
        return None
    slab = [i for i, c in enumerate(plan.slabs) if c == giver][nth]
    slabs = list(plan.slabs)
    slabs[slab] = taker
    return replace(plan, slabs=tuple(slabs)), slab


def renumber(s: Residency, old: ArenaPlan, new: ArenaPlan, base: int, moves: Sequence[tuple[int, int]] = ()) -> None:
    """Carry the state from plan `old` to `new` in place, at a safe point; `base` is the arena's device address.

    `moves` are `rescue`'s copies, already made on the device. Experts in slots that are gone, or whose slab has
    changed its class, are no longer resident. `s.slot_addr` has room for both plans before its last
    entry, which is no slot's and stays; raises ValueError otherwise.
    """
    old_at, new_at = old.offsets(), new.offsets()
    if len(new_at) > len(s.owner_of):
        raise ValueError(f"{len(new_at)} slots planned, state has room for {len(s.owner_of)}")
    owner = s.owner_of.copy()
    for source, target in moves:
        owner[target], owner[source] = owner[source], FREE
    layer_class = np.asarray(new.layer_class(s.layers))
    new_class = np.repeat(np.arange(len(new.classes)), new.counts())
    at = {int(offset): number for number, offset in enumerate(new_at)}
    s.owner_of[:] = FREE
    s.slot_of[:] = FREE
    for number in np.flatnonzero(owner[: len(old_at)] >= 0).tolist():
        target_number = at.get(int(old_at[number]), -1)
        flat = int(owner[number])
        if target_number >= 0 and new_class[target_number] == layer_class[flat // s.e_pad]:
            s.owner_of[target_number] = flat
            s.slot_of.reshape(-1)[flat] = target_number
    counts = new.counts()
    s.layer_class[:] = layer_class
    s.class_count[:] = counts
    s.class_begin[:] = np.concatenate(([0], np.cumsum(counts)[:-1]))
    s.hand[:] = 0
    s.slot_addr[:-1] = 0
    s.slot_addr[: len(new_at)] = base + new_at
