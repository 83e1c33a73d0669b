"""Arena plans by arithmetic, and resizes against what must stay true: bytes in place, no slot over another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.experts import key, residency, slots

MB = 1 << 20


def spans(plan: slots.ArenaPlan) -> list[tuple[int, int, int]]:
    """(offset, end, class) of every slot."""
    classes = np.repeat(np.arange(len(plan.classes)), plan.counts())
    return [(int(o), int(o) + plan.classes[c].slot_bytes, int(c)) for o, c in zip(plan.offsets(), classes, strict=True)]


def assert_sound(plan: slots.ArenaPlan, layer_bytes: list[int], budget: int) -> None:
    ordered = sorted(spans(plan))
    assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    assert not ordered or ordered[-1][1] <= min(plan.bytes, budget)
    assert all(o % slots.ALIGN == 0 for o, _, _ in ordered)
    for layer, c in enumerate(plan.layer_class(len(layer_bytes))):
        assert plan.classes[c].slot_bytes >= layer_bytes[layer]


def test_q4_k_m_is_uniform() -> None:
    """Qwen3-30B-A3B Q4_K_M: gate and up Q4_K, down Q6_K in half of the layers (2048 x 768): 7 to 8 % waste by hand,
    so one size of slots."""
    q4, q6 = 768 * 2048 * 144 // 256, 768 * 2048 * 210 // 256
    layer_bytes = [2 * q4 + (q6 if i % 2 else q4) for i in range(48)]
    assert slots.waste_of_uniform(layer_bytes) == pytest.approx((q6 - q4) / (2 * (2 * q4 + q6)), abs=1e-3)
    plan = slots.plan_arena(layer_bytes, 128, 8 << 30)
    assert len(plan.classes) == 1
    assert plan.counts() == [(8 << 30) // slots.aligned(max(layer_bytes))]
    assert "one size" in plan.reason


def test_very_different_sizes_get_slabs() -> None:
    """Experts of 1 and 3 MB waste a third in one size: two classes, slabs of about 32 MB, shares alike."""
    layer_bytes = [1 * MB if i % 2 else 3 * MB for i in range(10)]
    plan = slots.plan_arena(layer_bytes, 64, 640 * MB)
    assert_sound(plan, layer_bytes, 640 * MB)
    assert [c.slot_bytes for c in plan.classes] == [MB, 3 * MB]
    assert 24 * MB <= plan.slab_bytes <= 64 * MB
    share = [n / c.experts for n, c in zip(plan.counts(), plan.classes, strict=True)]
    assert share[0] == pytest.approx(share[1], rel=0.35)
    assert sum(n * c.slot_bytes for n, c in zip(plan.counts(), plan.classes, strict=True)) > 0.9 * 600 * MB


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1000, 5 * MB), min_size=1, max_size=6), st.integers(1, 64),
    st.integers(0, 300 * MB), st.integers(0, 300 * MB),
)  # fmt: skip
def test_plans_and_resizes_are_sound(layer_bytes: list[int], experts: int, budget: int, other: int) -> None:
    """Slots never overlap, fit the budget and their layers; a resize keeps every slab below both budgets in place."""
    plan = slots.plan_arena(layer_bytes, experts, budget)
    assert_sound(plan, layer_bytes, budget)
    for i, (n, c) in enumerate(zip(plan.counts(), plan.classes, strict=True)):
        assert n < c.experts + plan.per_slab(i)
    changed = slots.resize(plan, other)
    assert_sound(changed, layer_bytes, max(other, 0))
    kept = min(len(plan.slabs), len(changed.slabs))
    assert plan.slabs[:kept] == changed.slabs[:kept]


def test_everything_fits() -> None:
    """A budget above the pool: a slot for every expert and no more."""
    assert slots.plan_arena([MB] * 3, 8, 1 << 40).counts() == [24]
    assert slots.plan_arena([MB] * 3, 8, MB - 1).counts() == [0]
    with pytest.raises(ValueError, match="cannot plan"):
        slots.plan_arena([], 8, MB)


def warm(plan: slots.ArenaPlan, layers: int, experts: int, largest: int, steps: int = 60) -> residency.Residency:
    state = slots.new_state(plan, layers, experts, largest, base=1 << 40)
    rng = np.random.default_rng(2)
    for _ in range(steps):
        for layer in range(layers):
            # Layers with an even number use few experts again and again, the others many.
            few = 4 if layer % 2 == 0 else experts
            residency.step(state, layer, rng.permutation(few)[None, :2], int(layer == 0))
    residency.check(state)
    return state


def contents(state: residency.Residency) -> dict[int, int]:
    """Flat id by device address."""
    return {int(state.slot_addr[i]): int(o) for i, o in enumerate(state.owner_of) if o >= 0}


@pytest.mark.parametrize("sizes", [[MB] * 6, [MB, 3 * MB] * 3], ids=["uniform", "two classes"])
def test_resize_keeps_contents(sizes: list[int]) -> None:
    """Shrink with rescue, then grow: whatever stays lies at the address where its bytes were (or were copied to),
    the experts that are lost are worth no more than those kept, and the cache goes on working."""
    plan = slots.plan_arena(sizes, 32, 150 * MB)
    state = warm(plan, 6, 32, 200 * MB)
    before, worth = contents(state), dict(zip(state.owner_of.tolist(), slots.scores(state).tolist(), strict=True))
    smaller = slots.resize(plan, 80 * MB)
    moves = slots.rescue(plan, smaller, state)
    copied = {int(state.slot_addr[b]): before[int(state.slot_addr[a])] for a, b in moves}
    classes = {int(o): state.layer_class[o // state.e_pad] for o in before.values()}
    slots.renumber(state, plan, smaller, 1 << 40, moves)
    residency.check(state)
    after = contents(state)
    assert moves
    assert after
    for address, flat in after.items():
        assert copied.get(address, before.get(address)) == flat
        assert address < (1 << 40) + 80 * MB
    for c in set(classes.values()):
        kept = [worth[f] for f in after.values() if classes[f] == c]
        lost = [worth[f] for f in before.values() if classes[f] == c and f not in after.values()]
        assert not lost or max(lost) <= min(kept)
    larger = slots.resize(smaller, 200 * MB)
    slots.renumber(state, smaller, larger, 1 << 40)
    residency.check(state)
    assert contents(state) == after
    for layer in range(6):
        residency.step(state, layer, np.array([[1, 30]]), int(layer == 0))
    residency.check(state)


def test_slab_moves_to_the_class_in_need() -> None:
    """Even layers (1 MB) reuse four experts, odd ones (3 MB) use all 32: slabs go to the odd ones' class until the
    classes' least scores are close; what lay in a moved slab is gone, the rest stays where it was."""
    plan = slots.plan_arena([MB, 3 * MB] * 3, 32, 200 * MB)
    state = warm(plan, 6, 32, 200 * MB)
    moved = 0
    while (found := slots.move_slab(plan, state)) is not None and moved < 20:
        new, slab = found
        before = contents(state)
        slots.renumber(state, plan, new, 1 << 40)
        residency.check(state)
        lost = {a for a in before if a not in contents(state)}
        assert all(slab * plan.slab_bytes <= a - (1 << 40) < (slab + 1) * plan.slab_bytes for a in lost)
        assert plan.slabs[slab] == 0
        assert new.slabs[slab] == 1
        plan, moved = new, moved + 1
    assert 0 < moved < 20
    assert slots.plan_arena([MB] * 2, 8, 10 * MB) is not None
    assert slots.move_slab(slots.plan_arena([MB] * 6, 32, 50 * MB), state) is None


def test_renumber_needs_room() -> None:
    plan = slots.plan_arena([MB] * 2, 32, 10 * MB)
    state = slots.new_state(plan, 2, 32, 10 * MB, 0, key.LRU)
    with pytest.raises(ValueError, match="room for 10"):
        slots.renumber(state, plan, slots.resize(plan, 20 * MB), 0)
