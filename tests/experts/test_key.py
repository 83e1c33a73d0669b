"""The eviction key against the floating-point definition of decayed frequency."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.experts import key

ints = st.integers(key.NONE, key.REBASE_LIMIT)


@given(ints, ints)
def test_log2_add(a: int, b: int) -> None:
    """Against numpy.logaddexp2 in float64, to 1 % of a unit; commutative; int32 in, int32 out."""
    x, y = np.array([a], np.int32), np.array([b], np.int32)
    got = key.log2_add(x, y)
    assert got.dtype == np.int32
    assert abs(got[0] / key.ONE - np.logaddexp2(a / key.ONE, b / key.ONE)) < 0.01
    assert got[0] == key.log2_add(y, x)[0]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40, unique=True))
def test_score_is_decayed_frequency(uses: list[int]) -> None:
    """A score against log2(8 * sum 2^-(age/2) + sum 2^-(age/32)) from the list of uses, in float64."""
    fast = slow = np.full(1, key.NONE, np.int32)
    for t in sorted(uses):
        fast, slow = key.touch(key.DECAY, fast, slow, t, 3, 8)
    now = max(uses) + 5
    age = now - np.array(uses)
    want = np.log2(8 * np.exp2(-age / 2).sum() + np.exp2(-age / 32).sum())
    got = key.score(key.DECAY, fast, slow, 3, now, 3, 8)[0] - key.DECAY.phase_step(8)  # own layer: farthest
    assert abs(got / key.ONE - want) < 0.03


def test_layers_ahead_are_worth_more() -> None:
    """Same keys: the layer that comes next beats the ones later in the round, which beat the layer just done; a layer
    not yet reached counts its age on its own clock. Checked against the definition in the module's docstring."""
    fast = slow = np.full(8, 100 * key.DECAY.fast_step, np.int32)
    slow = np.full(8, 100 * key.DECAY.slow_step, np.int32)
    got = key.score(key.DECAY, fast, slow, np.arange(8), 101, 3, 8)
    order = np.argsort(-got)
    assert order.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    behind = key.score(key.DECAY, fast, slow, np.arange(8), 100, 3, 8)
    assert got[4] - behind[4] < 0  # one step later it has aged by one step
    assert got[7] - got[0] > key.DECAY.slow_step // 2  # crossing the current layer costs a step of age


@pytest.mark.parametrize("p", list(key.POLICIES.values()), ids=lambda p: p.name)
def test_rebase_keeps_the_order(p: key.KeyPolicy) -> None:
    """Scores before and after a rebase, for keys of uses in the last 500 steps: equal (LRU: equal differences)."""
    rng = np.random.default_rng(1)
    layers, clock = 6, 200_000
    keys = np.full((2, layers, 32), key.NONE, np.int32)
    for t in range(clock - 500, clock):
        for layer in range(layers):
            lanes = rng.integers(0, 30, 4)
            lanes = np.unique(lanes)
            fast, slow = keys[:, layer, lanes]
            keys[0, layer, lanes], keys[1, layer, lanes] = key.touch(p, fast, slow, t, layer, layers)
    owner = np.repeat(np.arange(layers), 32).reshape(layers, 32)
    before = key.score(p, keys[0], keys[1], owner, clock, 2, layers)[:, :30]
    new = key.rebase(p, keys, clock, layers)
    after = key.score(p, keys[0], keys[1], owner, new, 2, layers)[:, :30]
    if p.lru:
        np.testing.assert_array_equal(before - before[0, 0], after - after[0, 0])
    else:
        np.testing.assert_array_equal(before, after)
    assert (keys[:, :, 30:] == key.NONE).all()


def test_no_overflow_at_the_limit() -> None:
    """At the last clock before a rebase is demanded, scores of never-used experts stay int32 and lowest."""
    clock = key.DECAY.clock_limit(48) - 1
    fast = np.array([key.NONE, clock * key.DECAY.fast_step], np.int32)
    slow = np.array([key.NONE, clock * key.DECAY.slow_step], np.int32)
    got = key.score(key.DECAY, fast, slow, np.array([47, 0]), clock, 10, 48)
    assert got.dtype == np.int32
    assert got[0] < got[1]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="decay"):
        key.policy("fifo")
