"""Choices per layer against the arithmetic of the methods, and the ring against a replay that watches every slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.experts import prefill, residency, synthetic
from ftgguf.experts.prefill import Cost, Costs, Layer, Mode, UnionEstimate

# Qwen3.6-35B-A3B Q4_K_M over a 25 GB/s link, 63 GB/s of host memory: the example of peers' short suffixes.
COSTS = Costs(
    stream=Cost(20e-6, 1 / 25.1e9),
    gather=Cost(10e-6, 1 / 23e9),
    cpu=Cost(30e-6, 1 / 38e9, 3e-6),
    gpu=Cost(20e-6, 1 / 1e12),
)
LAYER = Layer(experts=256, k=8, expert_bytes=1_870_000, resident=102, dense=100e-6, costs=COSTS)


def modes(rows: int, layer: Layer = LAYER, ring: int = 64, layers: int = 40) -> list[Mode]:
    return [c.mode for c in prefill.plan_chunk([layer] * layers, rows, UnionEstimate(), ring)]


def test_expected_union() -> None:
    """Against a simulation of uniform routing, and the published table: 16 tokens of 8 in 256 touch 40 %."""
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(16) for e in rng.choice(256, 8, replace=False)}) for _ in range(300)]
    assert prefill.expected_union(256, 8, 16) == pytest.approx(np.mean(drawn), rel=0.02)
    assert prefill.expected_union(256, 8, 16) / 256 == pytest.approx(0.40, abs=0.01)


def test_long_chunks_stream_and_short_ones_share() -> None:
    """8192 rows: the union is everything, streaming ahead wins. 1 to 4 rows: few bytes, the CPU takes a part."""
    assert set(modes(8192)[1:]) == {Mode.STREAM}
    assert set(modes(2)) <= {Mode.SHARE, Mode.CPU}
    assert set(modes(4)) == {Mode.SHARE}


def test_choice_is_the_least_of_its_alternatives() -> None:
    """For many chunk sizes; and a 16-row chunk is several times faster than streaming the pool whole."""
    for rows in (1, 2, 8, 16, 64, 200, 1000, 8192):
        for c in prefill.plan_chunk([LAYER] * 4, rows, UnionEstimate(), 64):
            assert c.seconds == min(c.alternatives.values())
    short = sum(c.seconds for c in prefill.plan_chunk([LAYER] * 40, 16, UnionEstimate(), 64))
    whole = 40 * COSTS.stream.seconds(256 * LAYER.expert_bytes)
    assert whole / short > 4


def test_slow_cpu_is_not_asked() -> None:
    slow = replace(LAYER, costs=replace(COSTS, cpu=Cost(20e-3, 1 / 1e9)))
    assert set(modes(16, slow)) == {Mode.GATHER}


def test_all_resident_and_unpinned() -> None:
    """Nothing missing: nothing moves. Not pinned, or no slot at all: the CPU."""
    assert set(modes(16, replace(LAYER, resident=256))) == {Mode.RESIDENT}
    assert set(modes(16, replace(LAYER, on_cpu=True))) == {Mode.CPU}
    assert set(modes(8192, ring=0)) == {Mode.CPU}


def test_cpu_share_against_brute_force() -> None:
    """The split by number over all splits, CPU taking the experts with the fewest rows."""
    entries = sorted([1.0, 1, 2, 2, 3, 9, 30])
    q, seconds = prefill.cpu_share(7, entries, LAYER)
    size = LAYER.expert_bytes
    copies = [COSTS.gather.seconds(g * size) for g in range(8)]
    every = {g: max(copies[g], COSTS.cpu.seconds((7 - g) * size, sum(entries[: 7 - g]))) for g in range(8)}
    assert seconds == pytest.approx(min(every.values()))
    assert every[q] == pytest.approx(seconds)


def test_union_is_learned() -> None:
    """Real routing touches fewer experts than uniform: the estimate follows what was counted, and sizes nearby."""
    unions = UnionEstimate()
    assert unions.union(128, 8, 32) == pytest.approx(prefill.expected_union(128, 8, 32))
    for _ in range(30):
        unions.observe(128, 8, 32, 50)
    assert unions.union(128, 8, 32) == pytest.approx(50, rel=0.01)
    share = 50 / prefill.expected_union(128, 8, 32)
    assert unions.union(128, 8, 64) == pytest.approx(share * prefill.expected_union(128, 8, 64))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 30))
def test_ring_never_overwrites(counts: list[int], ring: int) -> None:
    """Replay copies as early as `wait_for` allows: no slot is written before the piece in it was computed with, every
    expert is copied once and in order, and with two slots or more one piece can be copied while another computes."""
    missing = [(layer, list(range(100 * layer, 100 * layer + n))) for layer, n in enumerate(counts)]
    slots = [7 + 3 * i for i in range(ring)]
    plan = list(prefill.pieces(missing, slots))
    assert [(p.layer, e) for p in plan for e in p.experts] == [(layer, e) for layer, es in missing for e in es]
    assert [p.number for p in plan] == list(range(len(plan)))
    last_in_slot: dict[int, int] = {}
    for p in plan:
        assert len(set(p.slots)) == len(p.slots) == len(p.experts)
        assert set(p.slots) <= set(slots)
        # Pieces are computed with in order, so waiting for one waits for all before it.
        assert p.wait_for == max((last_in_slot.get(s, -1) for s in p.slots), default=-1)
        assert p.wait_for < p.number - 1 or ring == 1 or p.wait_for == -1
        last_in_slot.update(dict.fromkeys(p.slots, p.number))


def test_empty_ring() -> None:
    with pytest.raises(ValueError, match="no slots"):
        list(prefill.pieces([(0, [1])], []))


def test_ring_size_is_far_below_two_layers() -> None:
    """Two pieces of 32 MiB plus the link's bytes of the dense part: 34 slots + 2 of 1.87 MB here, not 512."""
    assert prefill.ring_size([LAYER] * 40, 25.1e9, 5000) == 2 * (prefill.PIECE_BYTES // LAYER.expert_bytes) + 2
    assert prefill.ring_size([LAYER] * 40, 25.1e9, 10) == 10
    assert prefill.ring_size([replace(LAYER, resident=256)], 25.1e9, 10) == 0


def test_borrowed_slots_come_back_and_the_best_experts_stay() -> None:
    """A warm cache lends a third: what it loses is worth no more than what it keeps, moves name real contents, decode
    steps leave the ring alone, and the maps hold throughout."""
    rng = np.random.default_rng(1)
    state = residency.create(4, 32, [60])
    weights = synthetic.zipf_weights(32, 1.0, rng)

    def decode() -> None:
        for layer in range(4):
            residency.step(state, layer, synthetic.route(1, 4, weights, rng), int(layer == 0))

    for _ in range(50):
        decode()
    value = dict(zip(state.owner_of.tolist(), prefill.scores(state).tolist(), strict=True))
    before = state.owner_of.copy()
    ring, moves = prefill.borrow(state, 0, 20)
    residency.check(state)
    kept = set(state.owner_of[state.owner_of >= 0].tolist())
    assert len(kept) == 40
    assert max(value[f] for f in value if f >= 0 and f not in kept) <= min(value[f] for f in kept)
    assert moves
    assert all(state.owner_of[b] == before[a] for a, b in moves)
    for _ in range(50):
        decode()
    assert (state.owner_of[ring] == residency.FREE).all()
    prefill.give_back(state, 0, ring)
    decode()
    residency.check(state)
    assert state.class_count[0] == 60
    with pytest.raises(ValueError, match="cannot borrow"):
        prefill.borrow(state, 0, 61)
    with pytest.raises(ValueError, match="do not follow"):
        prefill.give_back(state, 0, ring)
