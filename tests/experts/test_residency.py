"""The NumPy residency step against a slow, literal model of the cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.experts import key, residency, synthetic
from ftgguf.experts.residency import Stat
from ftgguf.experts.split import PHI_ONE, balanced_fills


class Literal:
    """The same cache with a dict and lists: exact least score over all slots of the class, no window."""

    def __init__(self, layers: int, slots: int, policy: key.KeyPolicy) -> None:
        self.layers, self.policy, self.clock = layers, policy, 1
        self.slots: list[tuple[int, int] | None] = [None] * slots
        self.keys: dict[tuple[int, int], tuple[int, int]] = {}

    def score(self, expert: tuple[int, int], layer: int) -> int:
        fast, slow = self.keys.get(expert, (key.NONE, key.NONE))
        if self.policy.lru:
            return fast
        seen = self.clock - (1 if expert[0] > layer else 0)
        distance = (expert[0] - layer - 1) % self.layers
        a = fast - seen * self.policy.fast_step + self.policy.fast_weight
        b = slow - seen * self.policy.slow_step
        mixed = max(a, b) + int(key.TABLE[min(abs(a - b) >> 6, 1023)])
        return mixed + (self.layers - distance) * self.policy.phase_step(self.layers)

    def touch(self, expert: tuple[int, int]) -> None:
        old = self.keys.get(expert, (key.NONE, key.NONE))
        if self.policy.lru:
            stamp = self.clock * self.layers + expert[0]
            self.keys[expert] = (stamp, stamp)
            return
        now = (self.clock * self.policy.fast_step, self.clock * self.policy.slow_step)
        fast, slow = (max(a, b) + int(key.TABLE[min(abs(a - b) >> 6, 1023)]) for a, b in zip(old, now, strict=True))
        self.keys[expert] = (fast, slow)

    def step(self, layer: int, ids: list[int], share: int, least: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns ([(expert, slot)], CPU experts)."""
        used = sorted({e for e in ids if e >= 0})
        for e in used:
            self.touch((layer, e))
        missing = [e for e in used if (layer, e) not in self.slots]
        missing.sort(key=lambda e: (-self.score((layer, e), layer), e))
        in_use = {(layer, e) for e in used}
        free_first = sorted(
            (i for i, x in enumerate(self.slots) if x not in in_use),
            key=lambda i: (-(1 << 40) if self.slots[i] is None else self.score(self.slots[i], layer), i),  # type: ignore[arg-type]
        )
        q = min(balanced_fills(len(missing), share, least), len(free_first))
        fills = list(zip(missing[:q], free_first[:q], strict=True))
        for e, slot in fills:
            self.slots[slot] = (layer, e)
        return fills, sorted(missing[q:])


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(0, 40), rows=st.integers(1, 5), seed=st.integers(0, 999),
    lru=st.booleans(), share=st.sampled_from([0, 16000, 32768, 50000, PHI_ONE]), least=st.integers(0, 1),
)  # fmt: skip
def test_against_the_literal_model(slots: int, rows: int, seed: int, lru: bool, share: int, least: int) -> None:
    """Fills, slots, CPU list and rows of 20 steps, against `Literal`."""
    policy = key.LRU if lru else key.DECAY
    layers, experts, k = 3, 12, 3
    state = residency.create(layers, experts, [slots], policy=policy)
    state.split[:] = (share, least)
    model = Literal(layers, slots, policy)
    rng = np.random.default_rng(seed)
    weights = synthetic.zipf_weights(experts, 1.0, rng)
    for _ in range(20):
        model.clock += 1
        for layer in range(layers):
            ids = synthetic.route(rows, k, weights, rng)
            ids[rng.random(rows) < 0.1] = -1
            got = residency.step(state, layer, ids, advance=int(layer == 0))
            fills, cpu = model.step(layer, ids.reshape(-1).tolist(), share, least)
            assert list(zip(got.fill_expert.tolist(), got.fill_slot.tolist(), strict=True)) == fills
            assert got.cpu_expert.tolist() == cpu
            flat = ids.reshape(-1)
            for i, e in enumerate(cpu):
                rows_of = got.cpu_rows[got.cpu_start[i] : got.cpu_start[i + 1]]
                assert rows_of.tolist() == np.flatnonzero(flat == e).tolist()
            for entry, slot in zip(flat, got.place.reshape(-1), strict=True):
                want = (layer, int(entry)) if entry >= 0 and entry not in cpu else None
                assert (model.slots[slot] if slot >= 0 else None) == want
        residency.check(state)


def test_step_never_evicts_what_it_uses() -> None:
    """Two slots, three missing experts, fill all: two are filled, one stays on the CPU, none is thrown out again."""
    state = residency.create(1, 16, [2])
    got = residency.step(state, 0, np.array([[3, 5, 7]]), 1)
    assert len(got.fill_slot) == len(set(got.fill_slot.tolist())) == 2
    assert len(got.cpu_expert) == 1
    again = residency.step(state, 0, np.array([[int(got.fill_expert[0]), int(got.fill_expert[1]), 9]]), 1)
    assert again.hits == 2
    assert again.cpu_expert.tolist() == [9]


def test_a_shared_expert_has_a_place_for_its_down() -> None:
    """Three misses at an even split, one fill at least: the first expert that is not filled is shared, by hand."""
    state = residency.create(1, 16, [2])
    state.host_base[0, 0], state.host_stride[0, 0] = 1000, 10
    state.split[0], state.part[0] = (PHI_ONE // 2, 1), (PHI_ONE // 6, PHI_ONE // 6)
    ids = np.array([[9, 4, 7], [4, 9, 7]])
    got = residency.step(state, 0, ids, 1)
    assert got.shared
    assert len(got.fill_expert) == 1
    first = int(got.cpu_expert[0])
    assert got.part_src == 1000 + 10 * first
    np.testing.assert_array_equal(got.place_down, np.where(ids == first, 2, got.place))
    assert state.stats[0, residency.Stat.SHARED] == 1
    assert not residency.step(state, 0, np.array([[1, 2, 3]]), 1, may_share=False).shared


def test_addresses_of_fills() -> None:
    """Sources are base + expert * stride of each part, destinations the slots' addresses; checked by hand."""
    state = residency.create(2, 16, [3])
    state.slot_addr[:3] = [1 << 40, 7 << 40, 5 << 40]
    state.host_base[1] = [1000, 2000, 3000]
    state.host_stride[1] = [10, 10, 14]
    got = residency.step(state, 1, np.array([[4]]), 1)
    assert got.fill_src.tolist() == [[1040, 2040, 3056]]
    assert got.fill_dst.tolist() == [1 << 40]


def test_statistics_add_up() -> None:
    """Identities between the counters of a skewed run with duplicates and padding."""
    rng = np.random.default_rng(3)
    state = residency.create(4, 32, [40], window=16)
    state.split[:] = (30000, 1)
    weights = synthetic.zipf_weights(32, 1.2, rng)
    for _ in range(50):
        for layer in range(4):
            ids = synthetic.route(3, 4, weights, rng)
            ids[2] = -1
            residency.step(state, layer, ids, int(layer == 0))
    s = state.stats.sum(0)
    assert s[Stat.STEPS] == 200
    assert s[Stat.ENTRIES] == 200 * 8
    assert s[Stat.EXPERTS] == s[Stat.HITS] + s[Stat.MISSES]
    assert s[Stat.MISSES] == s[Stat.FILLS] + s[Stat.CPU]
    assert s[Stat.CPU_ENTRIES] >= s[Stat.CPU] > 0
    assert s[Stat.FILLS] >= 0.3 * s[Stat.MISSES]


def test_window_spreads_over_the_whole_class() -> None:
    """With a window of 8 and 50 slots every slot is used: the hand comes round."""
    state = residency.create(1, 256, [50], window=8)
    for t in range(200):
        residency.step(state, 0, np.array([[(7 * t) % 256, (11 * t + 3) % 256]]), 1)
    assert (state.owner_of >= 0).all()


def test_refusals() -> None:
    """Bad sizes, ids and clocks get the documented ValueError."""
    with pytest.raises(ValueError, match="power of two"):
        residency.create(1, 4, [3], window=100)
    with pytest.raises(ValueError, match="layer_class"):
        residency.create(2, 4, [3], [0, 1])
    with pytest.raises(ValueError, match="capacity"):
        residency.create(1, 4, [3], capacity=[2])
    state = residency.create(1, 10, [3])
    with pytest.raises(ValueError, match="10 experts"):
        residency.step(state, 0, np.array([[10]]), 1)
    state.clock[:] = state.policy.clock_limit(1)
    with pytest.raises(ValueError, match="rebase"):
        residency.step(state, 0, np.array([[1]]), 1)


def test_rebase_changes_nothing() -> None:
    """Two equal caches, one rebased half way: the same decisions afterwards."""
    rng = np.random.default_rng(9)
    weights = synthetic.zipf_weights(32, 0.9, rng)
    routes = [synthetic.route(1, 4, weights, rng) for _ in range(400)]
    states = [residency.create(2, 32, [20]) for _ in range(2)]
    for t, ids in enumerate(routes):
        if t == 200:
            residency.rebase(states[1])
        a, b = (residency.step(s, t % 2, ids, int(t % 2 == 0)) for s in states)
        np.testing.assert_array_equal(a.place, b.place)
