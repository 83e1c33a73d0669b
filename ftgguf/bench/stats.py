"""Means, percentiles and the bootstrap interval of a ratio: the arithmetic of every table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Statistic = Callable[[F64], F64]
"""float64 [draws, n] -> [draws]."""

DRAWS = 4000
"""Bootstrap resamples: the ends of a 95 % interval then have a relative Monte Carlo error of a few per cent."""


class Ratio(NamedTuple):
    """A ratio oriented so that more than 1 means the first side is better, and its 95 % bootstrap interval.

    `low` and `high` equal `value` where a side has a single sample: there is no interval to speak of.
    """

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean. ValueError for none."""
    return fmean(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1), 0 for fewer than two values, as llama-bench has it."""
    return stdev(values) if len(values) > 1 else 0.0


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linearly interpolated between order statistics (NumPy's default)."""
    return float(np.percentile(np.asarray(values, np.float64), q))


def quantile_of(q: float) -> Statistic:
    """The statistic `percentile(q)` over rows."""
    return lambda x: np.asarray(np.percentile(x, q, axis=-1), np.float64)


def mean_of(x: F64) -> F64:
    """The statistic `mean` over rows."""
    return np.asarray(x.mean(axis=-1), np.float64)


def ratio(
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    higher_is_better: bool,
    statistic: Statistic = mean_of,
    paired: bool = False,
    draws: int = DRAWS,
) -> Ratio:
    """`statistic(ours) / statistic(peer)`, inverted where lower is better, with Efron's percentile bootstrap interval.

    `paired`: sample i of both sides was measured in the same round, so rounds are resampled and a machine that
    slows down for both does not widen the interval. Needs equal lengths. ValueError for an empty side.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(peer, np.float64)
    if not a.size or not b.size:
        raise ValueError("a ratio needs samples of both sides")
    if paired and a.size != b.size:
        raise ValueError(f"paired samples must be equally many, got {a.size} and {b.size}")
    if not higher_is_better:
        a, b = b, a
    with np.errstate(divide="ignore", invalid="ignore"):  # a side of zeros gives inf or nan, the caller's to judge
        return _interval(a, b, statistic, paired, draws)


def _interval(a: F64, b: F64, statistic: Statistic, paired: bool, draws: int) -> Ratio:
    value = float(statistic(a[None])[0] / statistic(b[None])[0])
    if min(a.size, b.size) < 2:
        return Ratio(value, value, value)
    rng = np.random.default_rng(0)  # the same data give the same interval
    i = rng.integers(0, a.size, (draws, a.size))
    j = i if paired else rng.integers(0, b.size, (draws, b.size))
    low, high = np.percentile(statistic(a[i]) / statistic(b[j]), (2.5, 97.5))
    return Ratio(value, float(low), float(high))
