"""What a step measured, against sums formed by hand; the lines fitted to jobs, against the line that made them; the
split that follows, against brute force on a machine with fixed costs."""

# mypy: disable-error-code="comparison-overlap"
# (of a float and what `pytest.approx` gives)
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_worker_doorbell import Gpu, job

from ftgguf.experts.control import SplitController
from ftgguf.experts.meter import SIGNAL, StepMeter
from ftgguf.experts.samples import FIT_JOBS, Bandwidths, Moments, PathSample, StepSample
from ftgguf.experts.split import LATE_MOST, PHI_ONE, balanced_fills, split_misses


def test_sums_by_kind() -> None:
    """Two layers of two kinds: bytes from the trace and the CPU's own count, a second call sees only what is new."""
    gpu = Gpu()
    trace = np.zeros((2, 16), np.int64)
    meter = StepMeter(trace, gpu.bell, ["A", "B"], [100, 300], [10, 20])
    assert meter.sample(1.0, 1) is None  # no clock: nothing was measured
    for i in range(4):
        assert gpu.wait(gpu.ask(i % 2, *job(i))) == "done"
    trace[0, :8] = (4, 3, 2, 1, 7000, 5000, 200, 99)  # hits, misses, fills, CPU, busy, fill, wait, end
    trace[1, :10] = (1, 2, 1, 1, 3000, 2000, 100, 100, 1, 50)  # ... and a shared expert, whose rows came 50 ns late
    got = meter.sample(0.5, 2)
    assert got is not None
    assert (got.seconds, got.rows, got.exposed) == (0.5, 2, pytest.approx(7350e-9))
    served = gpu.bell.statistics()
    for i, (kind, fills, bytes, busy, fill) in enumerate((("A", 2, 100, 7e-6, 5e-6), ("B", 1, 300, 3e-6, 2e-6))):
        part = 20 if kind == "B" else 0
        p = got.paths[kind]
        assert (p.fill_bytes, p.cpu_bytes) == (fills * bytes + part, served[i][3])
        assert (p.fill_seconds, p.cpu_seconds) == (pytest.approx(fill), pytest.approx(served[i][4] * 1e-9))
        assert (p.fill_jobs.jobs, p.fill_jobs.b, p.fill_jobs.t) == (1, fills * bytes + part, pytest.approx(busy))
        assert p.cpu_jobs.jobs == 1  # what the layer's CPU did since the last call is one job
        assert p.cpu_jobs.t == pytest.approx(served[i][4] * 1e-9 + SIGNAL)
    trace[:, [2, 8]] = 0
    again = meter.sample(0.5, 1)
    assert again is not None
    assert again.paths["A"].fill_jobs == again.paths["A"].cpu_jobs == Moments()
    gpu.bell.close()


@given(st.floats(0, 1e-4), st.floats(1e-11, 1e-9))
def test_a_line_is_found(fixed: float, slope: float) -> None:
    """Jobs on a line give the line; too few, or all of one size, give none."""
    sizes = np.tile([1e6, 2e6, 5e6], FIT_JOBS)
    t = fixed + slope * sizes
    m = Moments(len(sizes), float(sizes.sum()), float((sizes**2).sum()), float(t.sum()), float((t * sizes).sum()))
    line = m.line()
    assert line is not None
    assert line[1] * 1e6 + line[0] == pytest.approx(slope * 1e6 + fixed, rel=1e-5)
    assert line[1] == pytest.approx(slope, rel=1e-4)
    assert Moments(3, 8e6, 3e13, 1e-3, 3e3).line() is None
    assert Moments(500, 5e8, 5e14, 1e-2, 1e4).line() is None


@given(st.integers(0, 300), st.integers(0, PHI_ONE), st.integers(-LATE_MOST, LATE_MOST))
def test_the_rule_with_a_late_path_is_the_optimum(m: int, phi: int, late: int) -> None:
    """The makespan is the least over all integers (brute force), where an idle CPU has no fixed cost."""

    def cost(f: int) -> int:
        return max(f * (PHI_ONE - phi), (m - f) * phi + late if f < m else 0)

    q = balanced_fills(m, phi, 0, late)
    assert 0 <= q <= m
    assert cost(q) == min(cost(f) for f in range(m + 1))


@given(
    st.integers(0, 300), st.integers(0, PHI_ONE), st.integers(0, 2), st.integers(-LATE_MOST, LATE_MOST),
    st.integers(0, PHI_ONE), st.integers(0, PHI_ONE),
)  # fmt: skip
def test_sharing_is_the_optimum(m: int, phi: int, least: int, late: int, link: int, cpu: int) -> None:
    """The slower branch is the least over all integers of both kinds (brute force), among those with `least` fills; a
    shared expert is one that is not filled, and is chosen only where it is better."""

    def whole(f: int) -> int:
        return max(f * (PHI_ONE - phi), (m - f) * phi + late if f < m else 0)

    def half(f: int) -> int:
        return max(f * (PHI_ONE - phi) + link, (m - f) * phi + late - cpu)

    q, shared = split_misses(m, phi, least, late, link, cpu)
    assert min(least, m) <= q <= m - shared
    others = [whole(f) for f in range(min(least, m), m + 1)]
    halves = [half(f) for f in range(least, m)] if link else []
    assert (half(q) if shared else whole(q)) == min(others + halves)
    assert shared == (min(halves, default=min(others)) < min(others))
    assert split_misses(m, phi, least, late) == (balanced_fills(m, phi, least, late), False)


def run(control: SplitController, steps: int, late: bool, seed: int = 0) -> float:
    """Seconds lost to misses on a machine with fixed costs: the link 50 GB/s and 5 us, the CPU 40 GB/s and 60 us."""
    rng, size, total = np.random.default_rng(seed), 2_800_000, 0.0
    for _ in range(steps):
        misses = (rng.random((48, 8)) < 0.5).sum(1)
        share, least = control.split("Q4_K")
        q = np.array([balanced_fills(int(m), share, least, control.late("Q4_K", size) if late else 0) for m in misses])
        f, c = q * size, (misses - q) * size
        fill = np.where(q > 0, 5e-6 + f / 50e9, 0.0)
        cpu = np.where(c > 0, 60e-6 + c / 40e9, 0.0)
        exposed = float(np.maximum(fill, cpu).sum())

        def moments(b: np.ndarray, t: np.ndarray) -> Moments:
            return Moments(*(float(v.sum()) for v in (b > 0, b, b.astype(float) ** 2, t, b * t)))

        path = PathSample(f.sum(), fill.sum(), c.sum(), cpu.sum(), moments(f, fill), moments(c, cpu))
        control.record(StepSample(1e-3 + exposed, exposed, 1, {"Q4_K": path}))
        total += exposed
    return total


def test_fixed_costs_are_part_of_the_split() -> None:
    """Against the same machine split by rates alone (what the controller did without lines): at least 5 % less time in
    misses, and the line is the machine's."""
    prior = {"Q4_K": Bandwidths(50e9, 40e9, 50e9, 40e9)}
    ours = SplitController(prior)
    plain = SplitController(prior, rails=False)
    plain._correct = lambda sample, arm: None  # type: ignore[method-assign]
    assert run(ours, 400, True) < 0.95 * run(plain, 400, False)
    a, b = ours.estimates["Q4_K"].lines["cpu"]
    assert (a, b) == (pytest.approx(60e-6, rel=0.05), pytest.approx(1 / 40e9, rel=0.05))


@pytest.mark.parametrize("slope", [1e-10, 1e-14, 1e-17])
def test_a_shared_expert_never_leaves_int32(slope: float) -> None:
    """Lines fitted to noise may say that bytes cost nothing: the wait for a hidden row is then many experts' time, and
    none is shared. The device's arrays are int32."""
    control = SplitController({"Q4_K": Bandwidths(50e9, 40e9, 50e9, 40e9)})
    control.estimates["Q4_K"].lines = {"fill": (1e-5, slope), "cpu": (1e-5, slope)}
    part = control.part("Q4_K", 2_800_000, 900_000)
    np.array([part], np.int32)
    assert (part == (0, 0)) == (slope < 1e-11)
    assert max(part) <= LATE_MOST
