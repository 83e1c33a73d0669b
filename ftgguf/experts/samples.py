"""What is known of the two paths of a miss: their bandwidths, and what a decode step shows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIT_JOBS = 64
"""Jobs (a layer's misses on one path) that must have been seen before a line is fitted to them."""
FIT_SPREAD = 0.04
"""Their sizes must vary by this much: variance over squared mean."""


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes/s of expert data for one tensor type: each path alone, and both at once (0: not measured)."""

    fill: float
    cpu: float
    fill_contended: float = 0.0
    cpu_contended: float = 0.0


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over jobs of one path: their number, bytes, bytes^2, seconds, bytes * seconds."""

    jobs: float = 0.0
    b: float = 0.0
    bb: float = 0.0
    t: float = 0.0
    bt: float = 0.0

    def faded(self, keep: float, more: Moments) -> Moments:
        """`keep` of these sums and all of `more`."""
        return Moments(
            keep * self.jobs + more.jobs, keep * self.b + more.b, keep * self.bb + more.bb,
            keep * self.t + more.t, keep * self.bt + more.bt,
        )  # fmt: skip

    def line(self) -> tuple[float, float] | None:
        """(a, b) of seconds = a + b * bytes by least squares, both not negative; None while the jobs say too little."""
        spread = self.jobs * self.bb - self.b * self.b
        if self.jobs < FIT_JOBS or spread <= FIT_SPREAD * self.b * self.b:
            return None
        slope = (self.jobs * self.bt - self.b * self.t) / spread
        fixed = (self.t - slope * self.b) / self.jobs
        if slope <= 0:
            return None
        return (fixed, slope) if fixed >= 0 else (0.0, self.t / self.b)


@dataclass(frozen=True, slots=True)
class PathSample:
    """One step's traffic of one type: bytes, and seconds each path was busy, summed over the layers of that type.

    `fill_jobs`, `cpu_jobs`: the same by layer, each path's whole time until the layer could go on: the link's with the
    products after it, the CPU's with the signals.
    """

    fill_bytes: float
    fill_seconds: float
    cpu_bytes: float
    cpu_seconds: float
    fill_jobs: Moments = Moments()
    cpu_jobs: Moments = Moments()


@dataclass(frozen=True, slots=True)
class StepSample:
    """One decode step. `exposed` is the time the layers waited for misses, `rows` the batch's size."""

    seconds: float
    exposed: float
    rows: int
    paths: Mapping[str, PathSample]
