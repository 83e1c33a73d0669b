"""The placement sweep on a model of a GPU whose answers are known in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.bench.placement import _without, check_budget
from ftgguf.bench.report import NOT_COMPARABLE, OK, Contestant, Report
from ftgguf.bench.sweep import UBATCHES, BudgetError, Trial, sweep

MIB = 1 << 20


def gpu(n: int, ubatch: int) -> Trial:
    """48 layers of 300 MiB of experts, 1500 MiB besides, 0.5 MiB a row of the batch; fewer on the CPU is faster."""
    vram = 1500 + 300 * (48 - n) + ubatch // 2
    return Trial(n, ubatch, vram * MIB, pp=400.0 * ubatch**0.5 / (1 + n / 12), tg=100.0 / (1 + n / 12))


def all_settings(budget: int) -> list[Trial]:
    return [t for n in range(49) for u in UBATCHES if (t := gpu(n, u)).fits(budget)]


@given(st.integers(1757, 20000))
def test_it_finds_the_best_of_all_settings(mib: int) -> None:
    """Against trying every one of the 147; with a fraction of the trials."""
    best, tried = sweep(gpu, 48, mib * MIB)
    assert best.seconds == min(t.seconds for t in all_settings(mib * MIB))
    assert best.fits(mib * MIB)
    assert len(tried) <= 3 * 8


def test_a_budget_that_cannot_be_met_says_what_is_needed() -> None:
    with pytest.raises(BudgetError, match="does not fit 1000 MiB of VRAM: it takes 1756 MiB at least"):
        sweep(gpu, 48, 1000 * MIB)
    with pytest.raises(BudgetError, match="no CUDA"):
        sweep(lambda n, u: Trial(n, u, error="no CUDA"), 48, 1000 * MIB)


def test_settings_that_crash_are_passed_over() -> None:
    """Out of memory at load is an error and not a number."""

    def crashing(n: int, ubatch: int) -> Trial:
        trial = gpu(n, ubatch)
        return trial if trial.vram <= 8000 * MIB else Trial(n, ubatch, error="out of memory")

    best, tried = sweep(crashing, 48, 10**12)
    assert best.seconds == min(t.seconds for t in all_settings(8000 * MIB))
    assert any(t.error for t in tried)


def test_placement_flags_of_ours_do_not_reach_the_sweep() -> None:
    assert _without(["-m", "f", "-ngl", "20", "-t", "2", "-ub", "512"], ("-ngl", "-ub")) == ["-m", "f", "-t", "2"]


def test_more_vram_than_the_budget_is_unfair() -> None:
    report = Report("t", "t", contestants=[Contestant("A", ours=True, vram_peak=8100 * MIB)])
    check_budget(report, 8000)
    assert report.status == OK
    check_budget(report, 7000)
    assert report.status == NOT_COMPARABLE
    check_budget(report, None)
