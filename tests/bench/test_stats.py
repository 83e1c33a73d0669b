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


@pytest.mark.parametrize(
    ("n", "paired", "least"), [(30, False, 0.91), (5, False, 0.9), (5, True, 0.86), (8, True, 0.9)]
)
def test_interval_covers_the_truth_about_95_times_of_100(n: int, paired: bool, least: float) -> None:
    """Two normal populations of ratio 1.25; 400 experiments of n samples each. Five pairs have no interval that does
    it: all lie on one side of the truth once in 16 times."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        a, b = rng.normal(125, 10, n), rng.normal(100, 10, n)
        found = stats.ratio(a.tolist(), b.tolist(), higher_is_better=True, draws=400, paired=paired)
        hits += found.low <= 1.25 <= found.high
    assert least <= hits / 400 <= 0.98


def test_samples_of_one_round_are_one_witness() -> None:
    """Each side's rounds differ by far more than the gaps within them: 300 gaps of three rounds are three samples, so
    the interval reaches from round to round, where pooled gaps would claim to know the ratio to a few per cent."""
    rng = np.random.default_rng(3)
    a = np.concatenate([rng.normal(m, 0.1, 100) for m in (8.0, 10.0, 12.0)]).tolist()
    b = np.concatenate([rng.normal(m, 0.1, 100) for m in (9.0, 10.0, 11.0)]).tolist()
    blocks = ([100] * 3, [100] * 3)
    by_round = stats.ratio(a, b, higher_is_better=True, blocks=blocks)
    pooled = stats.ratio(a, b, higher_is_better=True)
    assert (by_round.n, by_round.unit, by_round.verdict) == (3, "rounds", "even")
    assert by_round.high - by_round.low > 4 * (pooled.high - pooled.low)
    paired = stats.ratio(a, b, higher_is_better=True, blocks=blocks, paired=True)
    assert by_round.low < paired.low < 1 < paired.high < by_round.high
    # the ends are what numpy makes of the rounds that agree least
    assert paired.high == pytest.approx(np.mean(a[200:]) / np.mean(b[200:]))


@given(st.lists(st.lists(st.floats(1.0, 1e3), min_size=1, max_size=4), min_size=3, max_size=5))
def test_blocks_of_any_size_are_resampled_whole(rounds: list[list[float]]) -> None:
    """Against itself, paired, a side is as fast as itself in every resample; blocks of one are plain samples."""
    flat, sizes = [x for r in rounds for x in r], [len(r) for r in rounds]
    same = stats.ratio(flat, flat, higher_is_better=True, blocks=(sizes, sizes), paired=True, draws=50)
    assert (same.low, same.high) == pytest.approx((1.0, 1.0))
    ones = [1] * len(flat)
    single = stats.ratio(flat, flat[::-1], higher_is_better=True, blocks=(ones, ones), draws=50)
    assert single[:4] == stats.ratio(flat, flat[::-1], higher_is_better=True, draws=50)[:4]
    with pytest.raises(ValueError, match="blocks of"):
        stats.ratio(flat, [*flat, 1.0], higher_is_better=True, blocks=(sizes, sizes))


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
    assert found[:4] == (2.0, 2.0, 2.0, 1)
    assert found.verdict == stats.ratio([2.0, 2.1], [1.0, 1.0], higher_is_better=True).verdict == "too few"
    assert stats.ratio([2.0, 2.1, 2.0], [1.0, 1.0, 1.1], higher_is_better=True).verdict == "better"


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("rounds", [3, 4, 5, 10])
def test_one_verdict_in_twenty_between_equal_sides(rounds: int, paired: bool) -> None:
    """Also of three rounds, as the reports say: of 400 comparisons drawn alike at most 32 (20 expected, 3 deviations of
    the binomial). Their intervals alone left 1 out 110 times. Sides 30 % apart are told apart all the same."""
    rng = np.random.default_rng(rounds)

    def verdicts(gain: float, count: int) -> list[str]:
        drawn = np.exp(rng.normal(0, 0.03, (count, 2, rounds)))
        return [stats.ratio(gain * a, b, higher_is_better=True, paired=paired, draws=500).verdict for a, b in drawn]

    assert sum(v != "even" for v in verdicts(1.0, 400)) <= 33
    assert verdicts(1.3, 50).count("better") >= 45


def test_one_value_of_students_t() -> None:
    """Against the table: 12.706, 4.303, 3.182, 2.776, 2.262 and 1.984 for 1, 2, 3, 4, 9 and 100 degrees of freedom."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 100: 1.984}
    for freedom, value in table.items():
        assert stats._student(freedom) == pytest.approx(value, rel=0.012)


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
