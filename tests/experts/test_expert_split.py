"""The integer rule against a brute-force optimum and the paper's machines; the controller on simulated machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.experts.control import BLOCK, Arm, SplitController
from ftgguf.experts.samples import Bandwidths, PathSample, StepSample
from ftgguf.experts.split import PHI_ONE, balanced_fills, phi_from_bandwidths, to_q16

TABLE1 = {  # arXiv 2608.16157, table 1: B_P, B_H in GB/s
    "5090 server": (52.7, 77.3), "4090": (25.1, 63.2), "3090": (25.3, 56.7),
    "5090 desktop": (49.0, 53.8), "4060 laptop": (11.8, 47.5), "PRO 6000": (51.5, 178.0),
}  # fmt: skip


@given(st.integers(0, 512), st.integers(0, PHI_ONE))
def test_rule_is_the_integer_optimum(m: int, phi: int) -> None:
    """Without the clamp: the makespan of the two branches is the least over all integers (brute force)."""
    q = balanced_fills(m, phi, least=0)
    costs = [max(f * (PHI_ONE - phi), (m - f) * phi) for f in range(m + 1)]
    assert max(q * (PHI_ONE - phi), (m - q) * phi) == min(costs)
    assert abs(q - m * phi / PHI_ONE) <= 1


@pytest.mark.parametrize("name", TABLE1)
def test_published_machines(name: str) -> None:
    """q for 4 misses against the values printed in the review of the paper; at least one where m > 0."""
    bp, bh = TABLE1[name]
    phi = to_q16(phi_from_bandwidths(bp, bh))
    want = {"5090 server": 3, "4090": 1, "3090": 2, "5090 desktop": 4, "4060 laptop": 1, "PRO 6000": 1}
    assert balanced_fills(4, phi) == want[name]
    assert [balanced_fills(m, phi) for m in (0, 1)] == [0, 1]


def test_ends_of_the_rule() -> None:
    """The paper's degenerate cases, and its regression: 3 misses at 0.415 fill 1, 4 fill 2."""
    assert balanced_fills(9, to_q16(phi_from_bandwidths(80, 77.3))) == 9
    assert balanced_fills(9, 0, least=0) == 0
    assert balanced_fills(9, 0, least=1) == 1
    assert [balanced_fills(m, to_q16(0.415)) for m in (3, 4)] == [1, 2]
    assert phi_from_bandwidths(0, 50) == 0
    assert phi_from_bandwidths(50, 0) == 1
    assert phi_from_bandwidths(25, 63, 20, 40) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="positive"):
        phi_from_bandwidths(0, 0)


@dataclass
class Machine:
    """A step of `layers` layers with random misses. Rates in bytes/s: the link's and the host memory's alone; while
    both run, the link keeps `link_share` of its rate and the CPU gets `cpu_share` of what its own would be."""

    link: float
    cpu: float
    link_share: float = 1.0
    cpu_share: float = 1.0
    layers: int = 8
    size: int = 3_000_000
    dense: float = 0.7e-3
    most: int = 8
    stale: float = 0.0
    """Misses that an arm without fills suffers in the end, as a share of `most`, beyond the usual 0.4."""

    def step(self, misses: np.ndarray, share: int, least: int, rng: np.random.Generator) -> StepSample:
        fills = np.array([balanced_fills(int(m), share, least) for m in misses])
        f, c = fills * self.size, (misses - fills) * self.size
        link, cpu = self.link * self.link_share, self.cpu * self.cpu_share
        both = np.minimum(f / link, c / cpu)
        fill_time = both + (f - both * link) / self.link
        cpu_time = both + (c - both * cpu) / self.cpu
        exposed = float(np.maximum(fill_time, cpu_time).sum())
        seconds = (self.dense + exposed) * (1 + 0.01 * rng.standard_normal())
        sample = PathSample(int(f.sum()), float(fill_time.sum()), int(c.sum()), float(cpu_time.sum()))
        return StepSample(seconds, exposed, 1, {"Q4_K": sample})


@dataclass
class Outcome:
    ours: float
    fill: float
    cpu: float
    rails: float
    trial_steps: int
    control: SplitController


def simulate(machines: list[tuple[int, Machine]], prior: Bandwidths, steps: int, seed: int = 0) -> Outcome:
    """Run the controller and both fixed arms over the same misses; `machines` are (from step, machine)."""
    rng = np.random.default_rng(seed)
    control = SplitController({"Q4_K": prior})
    ours = fill = cpu = rails = 0.0
    trial_steps = 0
    stale = {"ours": 0.0, "fill": 0.0, "cpu": 0.0}
    for t in range(steps):
        machine = [m for start, m in machines if start <= t][-1]
        draws = rng.random((machine.layers, machine.most))

        def step(who: str, share: int, least: int, machine: Machine = machine, draws: np.ndarray = draws) -> StepSample:
            misses = (draws < 0.4 + machine.stale * stale[who]).sum(1)
            # A cache that is never filled goes stale over about 100 steps, and warms again over about 30.
            stale[who] += (1 - stale[who]) / 100 if share == least == 0 else -stale[who] / 30
            return machine.step(misses, share, least, rng)

        fixed = [step("fill", PHI_ONE, 1).seconds, step("cpu", 0, 0).seconds]
        fill, cpu = fill + fixed[0], cpu + fixed[1]
        on_trial = control.running is not control.arm
        sample = step("ours", *control.split("Q4_K"))
        ours += sample.seconds
        if on_trial:
            trial_steps += 1
            rails += max(0.0, sample.seconds - min(fixed))
        control.record(sample)
    return Outcome(ours, fill, cpu, rails, trial_steps, control)


GB = 1e9
LEVEL = Bandwidths(25 * GB, 30 * GB, 25 * GB, 30 * GB)
DESKTOP = Machine(25 * GB, 60 * GB, 1, 0.6)
CASES = {
    "fast link, slow CPU": ([(0, Machine(50 * GB, 15 * GB, cpu_share=0.9))], Bandwidths(50 * GB, 15 * GB)),
    "slow link, fast CPU": ([(0, Machine(12 * GB, 48 * GB, cpu_share=0.75))], Bandwidths(12 * GB, 48 * GB)),
    "equal paths": ([(0, Machine(50 * GB, 54 * GB, 0.95, 0.9))], Bandwidths(50 * GB, 54 * GB, 47 * GB, 48 * GB)),
    "each ruins the other": ([(0, Machine(25 * GB, 30 * GB, 0.2, 0.2))], LEVEL),
    "CPU starved in service": ([(0, Machine(25 * GB, 1 * GB))], Bandwidths(25 * GB, 60 * GB, 23 * GB, 40 * GB)),
    "link worse than measured": ([(0, Machine(2 * GB, 40 * GB))], Bandwidths(25 * GB, 40 * GB, 24 * GB, 20 * GB)),
    "slow link, fast CPU, cache that must stay warm": (
        [(0, Machine(12 * GB, 48 * GB, cpu_share=0.75, stale=0.5))], Bandwidths(12 * GB, 48 * GB),
    ),
    "the CPU is taken and comes back": (
        [(0, DESKTOP), (2000, Machine(25 * GB, 2 * GB)), (4500, DESKTOP)],
        Bandwidths(25 * GB, 60 * GB),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_never_slower_than_the_better_fixed_arm(name: str) -> None:
    """Over 7,000 steps the total is at most the better fixed arm's, plus what the rails' blocks cost, plus the
    time of 200 steps for noticing and 0.5 %; trial blocks are at most 1 % of the steps. The fixed arms run over
    the same misses."""
    machines, prior = CASES[name]
    got = simulate(machines, prior, 7_000)
    assert got.ours <= min(got.fill, got.cpu) * (1.005 + 200 / 7_000) + got.rails, (name, got)
    assert 0 < got.trial_steps <= 70
    assert got.trial_steps == got.control.trial_steps


def test_split_pays_where_paths_are_equal() -> None:
    """Both paths together are worth nearly twice either (the arithmetic of the paper): at least 1.3 here, with the
    time outside the experts and whole experts counted."""
    got = simulate(*CASES["equal paths"], 3000)
    assert min(got.fill, got.cpu) / got.ours > 1.3
    assert got.control.arm is Arm.SPLIT


def test_phi_is_corrected() -> None:
    """A profile that is three times wrong: phi settles where the machine's contended rates put it (12 / (12 + 36))."""
    got = simulate([(0, Machine(12 * GB, 48 * GB, cpu_share=0.75, most=40))], Bandwidths(36 * GB, 48 * GB), 600)
    assert got.control.estimates["Q4_K"].phi == pytest.approx(0.25, abs=0.05)


def test_gives_way_within_a_few_blocks() -> None:
    """Where the paths ruin each other the controller leaves the split long before the first rails block."""
    got = simulate(*CASES["each ruins the other"], 600)
    assert got.control.arm is not Arm.SPLIT
    assert got.control.trial_steps == 0
    assert "against" in got.control.reason


def test_forced_arm_stays() -> None:
    """`rails=False` (a mode the user asked for): no trials, no switches, whatever is measured."""
    control = SplitController({"Q4_K": Bandwidths(25 * GB, 30 * GB)}, Arm.CPU, rails=False)
    machine, rng = Machine(50 * GB, 1 * GB), np.random.default_rng(0)
    for _ in range(8000):
        assert control.split("Q4_K") == (0, 0)
        control.record(machine.step(np.full(8, 3), 0, 0, rng))
    assert control.status()["switches"] == 0
    assert control.trial_steps == 0


def test_a_step_counts_for_the_arm_it_ran_with() -> None:
    """A step is taken in while the next one runs, so the first sample after a switch is of the arm before: it moves
    that arm's rates (by hand: the other group keeps the profile's), and neither block nor window has it."""
    control = SplitController({"Q4_K": LEVEL})
    both = StepSample(5e-3, 4e-3, 1, {"Q4_K": PathSample(10**8, 10e-3, 10**8, 10e-3)})
    while control.running is Arm.SPLIT:
        control.record(both)
    trial, alone = control.running, dict(control.estimates["Q4_K"].alone)
    assert alone == {"fill": 25 * GB, "cpu": 30 * GB}
    control.record(both, Arm.SPLIT)
    assert control.estimates["Q4_K"].alone == alone
    assert (control.trial_steps, control._block) == (0, [])
    filled = StepSample(5e-3, 4e-3, 1, {"Q4_K": PathSample(2 * 10**8, 8e-3, 0, 0.0)})
    while control.running is trial:
        control.record(filled)
    contended = dict(control.estimates["Q4_K"].contended)
    control.record(filled, trial)
    assert control.estimates["Q4_K"].contended == contended
    assert control.trial_steps == BLOCK + 1
    assert not control._window.seconds


def test_mixed_batches_decide_nothing() -> None:
    """A trial during which the batch size changes is spent without a decision."""
    control = SplitController({"Q4_K": Bandwidths(25 * GB, 30 * GB, 25 * GB, 30 * GB)})
    path = {"Q4_K": PathSample(10**8, 4e-3, 10**8, 3.3e-3)}
    t = 0
    while control.trial_steps < 2 * BLOCK:
        on_trial = control.running is not control.arm
        control.record(StepSample(1e-3 if on_trial else 9e-3, 4e-3, 1 + t % 2, path))
        t += 1
    for _ in range(2 * BLOCK):
        control.record(StepSample(9e-3, 4e-3, 1, path))
    assert control.arm is Arm.SPLIT


def test_write_by_layer() -> None:
    """Each layer gets its type's share; a second call without news changes nothing."""
    control = SplitController({"Q4_K": Bandwidths(25 * GB, 50 * GB), "Q6_K": Bandwidths(25 * GB, 100 * GB)})
    split = np.zeros((3, 2), np.int32)
    assert control.write(split, ["Q4_K", "Q6_K", "Q4_K"])
    assert split.tolist() == [[PHI_ONE // 2, 1], [PHI_ONE // 4, 1], [PHI_ONE // 2, 1]]
    assert not control.write(split, ["Q4_K", "Q6_K", "Q4_K"])


def test_deterministic() -> None:
    """The same inputs give the same decisions."""
    a, b = (simulate(*CASES["the CPU is taken and comes back"], 3000) for _ in range(2))
    assert (a.ours, a.control.reason) == (b.ours, b.control.reason)
