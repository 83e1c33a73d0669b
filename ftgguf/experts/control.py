"""The split in service: phi follows what each step measured, and rails check it against fill-all and all-CPU.

Three *arms* can be in charge: `split` (phi and at least one fill), `fill` (every miss over PCIe), `cpu` (none). Start
is `split` with phi from the bandwidth profile. Then

- *correction*: while `split` runs, each type's phi follows the two paths' measured rates (they run at the same time,
  so these are the contended ones), as `fill / (fill + cpu)`. Where one path finishes early its rate shows the
  uncontended speed for the rest, which moves phi towards balance and settles there. Once the layers have shown enough
  sizes of jobs, each path's time is taken as `a + b * bytes`: phi then follows from the b alone, and the difference of
  the a (the CPU's signals and barriers against the products behind the link's copies) becomes the rule's `late`.
- *rails*: a block of 64 steps with another arm, the two others in turn, is compared with the 64 steps before and the
  64 after. Blocks never make up more than 1 % of all steps, and end early where they lose much. An arm that was
  faster beyond noise takes over; the others are tried in the same way ever after, so that `split` comes back when the
  machine changes.
- *giving way at once*: if the arm in charge takes over 10 % longer than another is predicted to take from the rates
  known, and the excess has added up to `PATIENCE` steps, that arm takes over without waiting for a block. It keeps
  the place only if its next 64 steps are faster (all-CPU: 512), and loses it sooner if it is much slower; each time it
  loses it, twice the excess is needed.

Deterministic: no clock and no random numbers in here, everything comes in by `record`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ftgguf.experts.samples import Bandwidths, Moments, PathSample, StepSample
from ftgguf.experts.split import LATE_MOST, PHI_ONE, phi_from_bandwidths, to_q16

BLOCK = 64
CPU_CONFIRM = 512
"""Steps over which the all-CPU arm must prove faster: it fills nothing, so its cache goes stale, which shows late."""
TRIAL_SHARE = 0.01
SETTLE = 4
"""Steps at the beginning of a block that are not counted: the arm before still shows in the cache."""
MARGIN = 0.02
"""An arm must be faster by this share, and by two standard errors, to take over."""
SUSPICION = 0.10
PATIENCE = 8
"""Steps' worth of lost time after which an arm gives way: many steps for a small loss, few for a large one."""
SMOOTHING = 1 / 32
PRIOR_STEPS = 2
"""What a rate from the profile counts against the first steps measured."""
NEARLY_ALL = 0.95
FIT_MEMORY = 1 / 256
"""What one step replaces of the sums behind the line."""
LATE_STEP = 1 / 32
"""`late` on the device changes when it has moved this far, in experts."""
HIDDEN_WAIT = 4e-6
"""Seconds until the GPU has a shared expert's hidden rows: a flag over the link, their reading, a kernel."""
HYSTERESIS = 0.01
"""phi on the device changes when the estimate has moved this far: each change is a small copy."""


class Arm(Enum):
    """Who serves the misses."""

    SPLIT = "split"
    FILL = "fill"
    CPU = "cpu"


@dataclass(slots=True)
class _Estimate:
    """Rates of one type, in bytes/s, by exponential smoothing of bytes and seconds; phi as the device has it."""

    alone: dict[str, float]
    contended: dict[str, float]
    phi: float
    late: float = 0.0
    """Bytes that both paths, one after the other, move in the time by which the CPU's begins later."""
    sums: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    jobs: dict[str, Moments] = field(default_factory=lambda: {"fill": Moments(), "cpu": Moments()})
    lines: dict[str, tuple[float, float]] = field(default_factory=dict)

    def blend(self, group: str, path: str, amount: float, seconds: float) -> None:
        """Take `amount` bytes in `seconds` into the rate of `path`; the rate so far counts as PRIOR_STEPS steps."""
        rates = self.contended if group == "contended" else self.alone
        if amount <= 0 or seconds <= 0:
            return
        # The prior counts by bytes: one that promised far too much is then forgotten within a few steps.
        prior_seconds = PRIOR_STEPS * amount / rates[path] if rates[path] > 0 else 0.0
        total = self.sums.get((group, path), (PRIOR_STEPS * amount if prior_seconds else 0.0, prior_seconds))
        keep = 1 - SMOOTHING
        total = (keep * total[0] + amount, keep * total[1] + seconds)
        self.sums[group, path] = total
        rates[path] = total[0] / total[1]

    def fit(self, sample: PathSample) -> None:
        """Take in the step's jobs; `lines` has both paths' or none."""
        keep = 1 - FIT_MEMORY
        for path, more in (("fill", sample.fill_jobs), ("cpu", sample.cpu_jobs)):
            self.jobs[path] = self.jobs[path].faded(keep, more)
        found = {path: moments.line() for path, moments in self.jobs.items()}
        self.lines = {path: line for path, line in found.items() if line is not None}

    def seconds_per_byte(self) -> float:
        """Of both paths one after the other, at the rates they have together: the unit of phi and `late`."""
        if len(self.lines) == 2:
            return sum(slope for _, slope in self.lines.values())
        fill, cpu = self.contended["fill"], self.contended["cpu"]
        return 1 / fill + 1 / cpu if fill > 0 and cpu > 0 else float("inf")

    def derive(self) -> None:
        """Forget the contended rates; take what the paths do alone, the CPU getting what the link leaves."""
        self.sums.pop(("contended", "fill"), None)
        self.sums.pop(("contended", "cpu"), None)
        self.contended = {"fill": self.alone["fill"], "cpu": max(self.alone["cpu"] - self.alone["fill"], 0.0)}
        self.update()

    def update(self) -> None:
        """phi and `late` from the lines or else the rates, if they moved far enough."""
        late = 0.0
        if len(self.lines) == 2:
            (a_fill, b_fill), (a_cpu, b_cpu) = self.lines["fill"], self.lines["cpu"]
            phi = b_cpu / (b_fill + b_cpu)
            late = (a_cpu - a_fill) / (b_fill + b_cpu)
        else:
            phi = phi_from_bandwidths(
                self.alone["fill"], self.alone["cpu"], self.contended["fill"], self.contended["cpu"]
            )
        if abs(phi - self.phi) > HYSTERESIS:
            self.phi = phi
        self.late = late


@dataclass(slots=True)
class _Window:
    """The last 64 step times of the arm in charge with the row counts, and what was lost against each other arm's
    prediction (seconds, never below zero)."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=BLOCK))
    rows: deque[int] = field(default_factory=lambda: deque(maxlen=BLOCK))
    lost: dict[Arm, float] = field(default_factory=dict)

    def clear(self) -> None:
        self.seconds.clear()
        self.rows.clear()
        self.lost.clear()

    def full(self) -> bool:
        return len(self.seconds) == BLOCK

    def counted(self) -> list[float]:
        """The step times without the settling ones."""
        return list(self.seconds)[SETTLE:]


def _faster(trial: list[float], control: list[float]) -> bool:
    """Whether `trial`'s mean is below `control`'s by MARGIN and by two standard errors of the difference."""
    a, b = np.asarray(trial), np.asarray(control)
    error = 2 * float(np.sqrt(a.var() / len(a) + b.var() / len(b)))
    return float(b.mean() - a.mean()) > max(MARGIN * float(b.mean()), error)


class SplitController:
    """Decides the arm and phi of each step. Call `split(kind)` before a step, `record(sample)` after it."""

    def __init__(self, priors: Mapping[str, Bandwidths], arm: Arm = Arm.SPLIT, rails: bool = True) -> None:
        """`priors`: bandwidths per type name. `rails=False` keeps `arm` for ever (a mode the user forced); phi is
        still corrected. Raises ValueError for impossible bandwidths."""
        self.estimates: dict[str, _Estimate] = {}
        for kind, b in priors.items():
            phi = phi_from_bandwidths(b.fill, b.cpu, b.fill_contended, b.cpu_contended)
            contended = {"fill": b.fill_contended or b.fill, "cpu": b.cpu_contended or max(b.cpu - b.fill, 0.0)}
            self.estimates[kind] = _Estimate({"fill": b.fill, "cpu": b.cpu}, contended, phi)
        self.arm = arm
        self.rails = rails
        self.reason = f"{arm.value}: " + ("from the bandwidth profile" if rails else "asked for")
        self.steps = 0
        self.trial_steps = 0
        self.switches = 0
        self._trial: Arm | None = None
        self._turn = 0
        self._window = _Window()
        self._before: list[float] = []
        self._block: list[float] = []
        self._block_rows: set[int] = set()
        self._awaiting: tuple[Arm, list[float], list[float]] | None = None
        self._gave_way: tuple[Arm, list[float]] | None = None
        self._proof: list[float] = []
        self._suspicion = dict.fromkeys(Arm, SUSPICION)

    @property
    def running(self) -> Arm:
        """The arm of the next step: the one in charge, or the one on trial."""
        return self._trial or self.arm

    def split(self, kind: str, more: float = 0.0) -> tuple[int, int]:
        """(phi in Q16, least number of fills) for layers of type `kind` in the next step; `more` seconds a byte are
        what further rows at an expert cost the CPU."""
        if self.running is Arm.FILL:
            return PHI_ONE, 1
        if self.running is Arm.CPU:
            return 0, 0
        e = self.estimates[kind]
        both = e.seconds_per_byte()
        return to_q16((e.phi * both + more) / (both + more) if more and both < float("inf") else e.phi), 1

    def late(self, kind: str, expert_bytes: int) -> int:
        """The rule's `late` in Q16 for layers of type `kind` in the next step, in steps of `LATE_STEP`."""
        if self.running is not Arm.SPLIT:
            return 0
        steps = round(self.estimates[kind].late / expert_bytes / LATE_STEP)
        return max(-LATE_MOST, min(LATE_MOST, round(steps * LATE_STEP * PHI_ONE)))

    def part(self, kind: str, expert_bytes: int, part_bytes: int) -> tuple[int, int]:
        """(`link_q16`, `cpu_q16`) of `split.split_misses` for layers of type `kind` whose down has `part_bytes`; (0, 0)
        where no expert is to be shared."""
        if self.running is not Arm.SPLIT:
            return 0, 0
        e = self.estimates[kind]
        whole = expert_bytes * e.seconds_per_byte()
        if not 0 < whole < float("inf"):
            return 0, 0
        share = part_bytes / expert_bytes
        # in the steps of `late`, so that the estimate's noise is not copied to the device
        steps = max(1, round((share * (1 - e.phi) + HIDDEN_WAIT / whole) / LATE_STEP))
        if steps * LATE_STEP * PHI_ONE > LATE_MOST:
            return 0, 0  # the wait alone takes longer than experts do, and int32 ends somewhere
        return round(steps * LATE_STEP * PHI_ONE), round(share * to_q16(e.phi))

    def write(self, split: NDArray[np.int32], kinds: Sequence[str]) -> bool:
        """Set `Residency.split` (int32 [layers, 2]) for the next step, `kinds[l]` being layer l's type; returns
        whether anything changed, and so must be copied to the device."""
        rows = np.array([self.split(kind) for kind in kinds], np.int32)
        if np.array_equal(rows, split):
            return False
        split[:] = rows
        return True

    def record(self, sample: StepSample, arm: Arm | None = None) -> None:
        """Take in what a step measured; may change arm and phi.

        `arm`: the one that the step ran with, where it was begun before the last sample was taken in (None:
        `running`). What another arm did counts for that arm's rates, and for no comparison.
        """
        arm = arm or self.running
        self.steps += 1
        self._correct(sample, arm)
        if not self.rails:
            return
        if arm is not self.running:
            self.trial_steps += arm is not self.arm
            return
        if self._trial is not None:
            self._record_trial(sample)
            return
        self._window.seconds.append(sample.seconds)
        self._window.rows.append(sample.rows)
        if self._gave_way is not None:
            self._proof.append(sample.seconds)
            self._confirm()
        elif (self._awaiting is None and self._give_way(sample)) or not self._window.full():
            return
        elif self._awaiting is not None:
            self._compare()
        elif self.trial_steps + BLOCK <= TRIAL_SHARE * (self.steps + BLOCK):
            self._begin_trial()

    def status(self) -> dict[str, object]:
        """Fields for /metrics and /v1/cache/status. Rates in bytes/s."""
        return {
            "mode": self.arm.value,
            "reason": self.reason,
            "steps": self.steps,
            "trial_steps": self.trial_steps,
            "switches": self.switches,
            "phi": {k: e.phi for k, e in self.estimates.items()},
            "late_bytes": {k: e.late for k, e in self.estimates.items()},
            "lines": {k: {path: list(line) for path, line in e.lines.items()} for k, e in self.estimates.items()},
            "rates": {k: {"alone": dict(e.alone), "contended": dict(e.contended)} for k, e in self.estimates.items()},
        }

    # ------------------------------------------------------------------------------------------ correction

    def _correct(self, sample: StepSample, arm: Arm) -> None:
        for kind, p in sample.paths.items():
            e = self.estimates[kind]
            group = "contended" if arm is Arm.SPLIT else "alone"
            e.blend(group, "fill", p.fill_bytes, p.fill_seconds)
            e.blend(group, "cpu", p.cpu_bytes, p.cpu_seconds)
            if group == "contended":
                e.fit(p)
                e.update()

    def _predict(self, sample: StepSample, arm: Arm) -> float:
        """Seconds the step would have taken with `arm`: its misses at that path's rate, or at both rates together."""
        misses = 0.0
        for kind, p in sample.paths.items():
            e = self.estimates[kind]
            rate = sum(e.contended.values()) if arm is Arm.SPLIT else e.alone[arm.value]
            misses += (p.fill_bytes + p.cpu_bytes) / rate if rate > 0 else float("inf")
        return sample.seconds - sample.exposed + misses

    # ------------------------------------------------------------------------------------------ rails

    def _begin_trial(self) -> None:
        others = [a for a in Arm if a is not self.arm]
        self._trial = others[self._turn % 2]
        self._turn += 1
        self._before = list(self._window.seconds)
        self._block, self._block_rows = [], set(self._window.rows)

    def _record_trial(self, sample: StepSample) -> None:
        assert self._trial is not None
        self.trial_steps += 1
        self._block.append(sample.seconds)
        self._block_rows.add(sample.rows)
        limit = float(np.mean(self._before))
        hopeless = sum(t - limit for t in self._block[SETTLE:]) > PATIENCE * limit
        if len(self._block) < BLOCK and not hopeless:
            return
        if self._trial is Arm.CPU:
            # A split that leaves the CPU nothing never learns that the CPU has become faster: here it can.
            for e in self.estimates.values():
                if e.phi > NEARLY_ALL:
                    e.derive()
        # Batches of different sizes cannot be compared: such a block is spent, but decides nothing.
        if len(self._block_rows) == 1 and not hopeless:
            self._awaiting = (self._trial, self._before[SETTLE:], self._block[SETTLE:])
        self._trial = None
        self._window.clear()

    def _compare(self) -> None:
        assert self._awaiting is not None
        arm, before, block = self._awaiting
        self._awaiting = None
        after = self._window.counted()
        if len(set(self._window.rows) | self._block_rows) > 1:
            return
        if _faster(block, before + after):
            self._take_over(arm, block, before + after)

    def _give_way(self, sample: StepSample) -> bool:
        if len(self._window.seconds) <= SETTLE or len(set(self._window.rows)) > 1:
            return False
        for arm in Arm:
            if arm is self.arm:
                continue
            predicted = self._predict(sample, arm)
            lost = self._window.lost.get(arm, 0.0) + sample.seconds - (1 + self._suspicion[arm]) * predicted
            self._window.lost[arm] = max(0.0, lost)
            if lost > PATIENCE * predicted:
                self._take_over(arm, [predicted], self._window.counted())
                return True
        return False

    def _take_over(self, arm: Arm, faster: list[float], before: list[float]) -> None:
        self._gave_way = (self.arm, before)
        self._proof = []
        self._switch(arm, faster, before)

    def _confirm(self) -> None:
        """After giving way: go back where the new arm proves slower, at once if by much."""
        assert self._gave_way is not None
        old, before = self._gave_way
        now = self._proof[SETTLE:]
        limit = float(np.mean(before))
        much_slower = sum(t - limit for t in now) > PATIENCE / 2 * limit
        if len(self._proof) < (CPU_CONFIRM if self.arm is Arm.CPU else BLOCK) and not much_slower:
            return
        self._gave_way = None
        if not _faster(now[-BLOCK:], before):
            self._suspicion[self.arm] *= 2
            self._switch(old, before, now[-BLOCK:])

    def _switch(self, arm: Arm, faster: list[float], slower: list[float]) -> None:
        a, b = 1000 * float(np.mean(faster)), 1000 * float(np.mean(slower))
        self.reason = f"{arm.value}: {a:.3f} ms a step against {b:.3f} ms of {self.arm.value} at step {self.steps}"
        self.arm = arm
        self.switches += 1
        self._window.clear()
