"""The arithmetic of tables, against NumPy, closed forms and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.bench import stats

positive = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20)


@given(positive, positive)
def test_ratio_is_oriented_so_that_more_is_better(a: list[float], b: list[float]) -> None:
    """Swapping sides or direction inverts it: checked against plain means."""
    speed = stats.ratio(a, b, higher_is_better=True, draws=50)
    time = stats.ratio(a, b, higher_is_better=False, draws=50)
    assert speed.value == pytest.approx(np.mean(a) / np.mean(b))
    assert time.value == pytest.approx(np.mean(b) / np.mean(a))
    assert speed.low <= speed.high


def test_interval_covers_the_truth_about_95_times_of_100() -> None:
    """Two normal populations of ratio 1.25; 400 experiments of 30 samples each."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        a, b = rng.normal(125, 10, 30), rng.normal(100, 10, 30)
        found = stats.ratio(a.tolist(), b.tolist(), higher_is_better=True, draws=400)
        hits += found.low <= 1.25 <= found.high
    assert 0.91 <= hits / 400 <= 0.98


def test_pairs_take_the_machines_drift_out() -> None:
    """Both sides slow down together: rounds agree on the ratio although samples spread fourfold."""
    drift = np.linspace(1, 4, 12)
    a, b = (130 / drift).tolist(), (100 / drift).tolist()
    paired = stats.ratio(a, b, higher_is_better=True, paired=True)
    loose = stats.ratio(a, b, higher_is_better=True)
    assert paired.low == pytest.approx(1.3)
    assert paired.high == pytest.approx(1.3)
    assert loose.high - loose.low > 0.5


def test_one_sample_has_no_interval() -> None:
    found = stats.ratio([2.0], [1.0], higher_is_better=True)
    assert found == (2.0, 2.0, 2.0)


def test_zero_side_gives_no_number_instead_of_an_exception() -> None:
    assert not math.isfinite(stats.ratio([1.0, 2.0], [0.0, 0.0], higher_is_better=True).value)


def test_empty_sides_and_unequal_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="both sides"):
        stats.ratio([], [1.0], higher_is_better=True)
    with pytest.raises(ValueError, match="equally many"):
        stats.ratio([1.0], [1.0, 2.0], higher_is_better=True, paired=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.integers(0, 100))
def test_percentile_and_deviation_against_numpy(values: list[float], q: int) -> None:
    assert stats.percentile(values, q) == pytest.approx(np.percentile(values, q))
    assert stats.deviation(values) == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    assert stats.quantile_of(q)(np.array([values]))[0] == pytest.approx(np.percentile(values, q))
