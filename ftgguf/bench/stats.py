"""Means, percentiles and the bootstrap interval of a ratio: the arithmetic of every table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Statistic = Callable[[F64], F64]
"""float64 [draws, n] -> [draws]."""

DRAWS = 4000
"""Bootstrap resamples: the ends of a 95 % interval then have a relative Monte Carlo error of a few per cent."""


MIN_SAMPLES = 3
"""Of each side, for a verdict: what two samples differ by says next to nothing about a third."""
Verdict = Literal["better", "worse", "even", "too few"]


class Ratio(NamedTuple):
    """A ratio oriented so that more than 1 means the first side is better, and its 95 % bootstrap interval.

    `n` are the independent samples of the side that has fewer: rounds where several samples came of one round (`unit`
    says which). Where they are fewer than MIN_SAMPLES `low` and `high` equal `value`: no interval is spoken of. `sure`:
    Student's t test of the rounds tells the sides apart at 5 %.
    """

    value: float
    low: float
    high: float
    n: int = MIN_SAMPLES
    unit: str = "samples"
    sure: bool = True

    @property
    def verdict(self) -> Verdict:
        """Better or worse where the whole interval is on one side of 1 and `sure` agrees: few samples have resamples
        that lie too close together (of equal sides in three paired rounds, 28 in 100 intervals leave 1 out)."""
        if self.n < MIN_SAMPLES:
            return "too few"
        if not self.sure:
            return "even"
        return "better" if self.low > 1 else "worse" if self.high < 1 else "even"


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
    blocks: tuple[Sequence[int], Sequence[int]] | None = None,
    draws: int = DRAWS,
) -> Ratio:
    """`statistic(ours) / statistic(peer)`, inverted where lower is better, with Efron's percentile bootstrap interval,
    its ends moved outwards for few samples (`_tail`).

    `blocks`: how many samples each round of either side gave, in order. Samples of one round (the gaps of one
    generation) are no independent witnesses, so whole rounds are resampled. `paired`: sample, or block, i of both
    sides was measured in the same round, so that a machine that slows down for both does not widen the interval; needs
    equal numbers. ValueError for an empty side, or for blocks that are not its samples.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(peer, np.float64)
    if not a.size or not b.size:
        raise ValueError("a ratio needs samples of both sides")
    sizes = ([1] * a.size, [1] * b.size) if blocks is None else ([n for n in x if n] for x in blocks)
    units = list(sizes)
    if (sum(units[0]), sum(units[1])) != (a.size, b.size):
        raise ValueError(f"blocks of {sum(units[0])} and {sum(units[1])} samples, got {a.size} and {b.size}")
    if paired and len(units[0]) != len(units[1]):
        raise ValueError(f"paired samples must be equally many, got {len(units[0])} and {len(units[1])}")
    sides = [_Side(a, units[0]), _Side(b, units[1])]
    upper, lower = sides if higher_is_better else sides[::-1]
    with np.errstate(divide="ignore", invalid="ignore"):  # a side of zeros gives inf or nan, the caller's to judge
        found = _interval(upper, lower, statistic, paired, draws)
    return found if blocks is None else found._replace(unit="rounds")


class _Side(NamedTuple):
    """Samples, float64 [n], and how many of them each independent unit gave."""

    x: F64
    units: list[int]

    def drawn(self, picks: NDArray[np.int64], statistic: Statistic) -> F64:
        """The statistic of each resample; `picks` int64 [draws, units]."""
        if len(self.units) == self.x.size:
            return statistic(self.x[picks])
        parts = np.split(self.x, np.cumsum(self.units)[:-1])
        # few rounds can be drawn in few ways
        ways, which = np.unique(np.sort(picks, axis=1), axis=0, return_inverse=True)
        values = [statistic(np.concatenate([parts[k] for k in way])[None])[0] for way in ways]
        return np.asarray(values, np.float64)[which.reshape(-1)]


def _interval(a: _Side, b: _Side, statistic: Statistic, paired: bool, draws: int) -> Ratio:
    value = float(statistic(a.x[None])[0] / statistic(b.x[None])[0])
    n = min(len(a.units), len(b.units))
    if n < MIN_SAMPLES:
        return Ratio(value, value, value, n)
    rng = np.random.default_rng(0)  # the same data give the same interval
    i = rng.integers(0, len(a.units), (draws, len(a.units)))
    j = i if paired else rng.integers(0, len(b.units), (draws, len(b.units)))
    tail = 100 * _tail(n)
    low, high = np.percentile(a.drawn(i, statistic) / b.drawn(j, statistic), (tail, 100 - tail))
    return Ratio(value, float(low), float(high), n, sure=_told_apart(a, b, statistic, paired))


def _told_apart(a: _Side, b: _Side, statistic: Statistic, paired: bool) -> bool:
    """Whether the logarithms of the units' statistics differ by Student's t at 5 %: of the pairs' differences, or of
    two means (Welch) with the degrees of freedom of the smaller side, which errs to the side of no verdict. True where
    some statistic has no logarithm: then the interval alone speaks."""
    values = [[float(statistic(part[None])[0]) for part in np.split(s.x, np.cumsum(s.units)[:-1])] for s in (a, b)]
    if not all(0 < v < math.inf for side in values for v in side):
        return True
    x, y = (np.log(np.asarray(side, np.float64)) for side in values)
    if paired:
        error = float(np.std(x - y, ddof=1)) / math.sqrt(len(x))
    else:
        error = math.sqrt(float(x.var(ddof=1)) / len(x) + float(y.var(ddof=1)) / len(y))
    return abs(float(x.mean() - y.mean())) > _student(min(len(x), len(y)) - 1) * error


def _student(f: int) -> float:
    """Student's t that 2.5 % lie above, for `f` >= 1 degrees of freedom: by its expansion in 1/f (Abramowitz and Stegun
    26.7.5), which is 1 % low at 3; exact below, where it is worse."""
    if f <= 2:
        return (12.7062, 4.3027)[f - 1]
    z = NormalDist().inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)


def _tail(n: int) -> float:
    """The share of resamples beyond either end of a 95 % interval. 2.5 % is right for many samples; few have resamples
    that spread too little, so the percentile is moved out to Phi(-sqrt(n / (n - 1)) t) with Student's t of n - 1
    degrees of freedom (T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, expanded percentiles)."""
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * _student(n - 1))
