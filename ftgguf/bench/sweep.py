"""llama.cpp's best placement for a VRAM budget: an unswept baseline is the first thing that a critic looks for.

Flags swept: `--n-cpu-moe N` (the experts of N layers stay on the CPU; fewer is faster and takes more memory) and `-ub`
(a larger physical batch prefills faster and takes more memory), always with all layers on the GPU and flash attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UBATCHES = (512, 2048, 8192)
PROMPT, GEN = 8192, 256
"""The job whose duration decides: tokens read (fewer where the context holds fewer) and written."""
USUAL_BATCH = 2048
"""llama.cpp's default for -b; it cuts a larger -ub down to it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting tried: peak VRAM in bytes; speeds in tokens per second, 0 where only the memory was asked for;
    `error` where it did not run."""

    n_cpu_moe: int
    ubatch: int
    vram: int = 0
    pp: float = 0.0
    tg: float = 0.0
    error: str = ""

    @property
    def flags(self) -> list[str]:
        batch = ["-b", str(max(USUAL_BATCH, self.ubatch)), "-ub", str(self.ubatch)]
        return ["-ngl", "99", "--n-cpu-moe", str(self.n_cpu_moe), *batch, "-fa", "on"]

    @property
    def seconds(self) -> float:
        """How long the reference job takes; infinite where it did not run."""
        if self.error or self.pp <= 0 or self.tg <= 0:
            return float("inf")
        return PROMPT / self.pp + GEN / self.tg

    def fits(self, budget: int) -> bool:
        return not self.error and self.vram <= budget

    def describe(self) -> str:
        """One line for the report."""
        what = f"--n-cpu-moe {self.n_cpu_moe} -ub {self.ubatch}"
        if self.error:
            return f"{what}: {self.error[:200]}"
        speeds = f", pp {self.pp:.1f}, tg {self.tg:.1f} tok/s" if self.pp else ""
        return f"{what}: {self.vram / 2**20:.0f} MiB{speeds}"


Measure = Callable[[int, int, bool], Trial]
"""(n_cpu_moe, ubatch, whether speeds are wanted) -> Trial."""


class BudgetError(RuntimeError):
    """No setting fits, or (`failed`) none that would fit ran. `tried` is what was tried."""

    def __init__(self, text: str, tried: Sequence[Trial], *, failed: bool) -> None:
        super().__init__(text)
        self.tried = list(tried)
        self.failed = failed


@dataclass(frozen=True, slots=True)
class Found:
    """The quickest settings within the budget: for the whole job, for reading and for writing (often one and the same),
    and all that were tried, in order."""

    best: Trial
    reading: Trial
    writing: Trial
    tried: list[Trial]


class Sweep:
    """One search. For each physical batch the fewest layers of experts on the CPU that fit (memory falls with them, and
    a larger batch needs at least as many as a smaller one); then the speeds there."""

    def __init__(self, measure: Measure, n_layers: int, budget: int) -> None:
        self._measure = measure
        self._layers = n_layers
        self._budget = budget
        self._known: dict[tuple[int, int], Trial] = {}
        self.tried: list[Trial] = []

    def run(self, ubatches: Sequence[int] = UBATCHES) -> Found:
        """Raises BudgetError."""
        low, done = 0, []
        for ubatch in sorted(ubatches):
            n = self._fewest(ubatch, low)
            if n is None:
                break  # all experts are on the CPU already, and larger batches take more
            trial = self._timed(n, ubatch)
            if trial is not None:
                done.append(trial)
            low = n
        if not done:
            raise self._hopeless()
        return Found(
            min(done, key=lambda t: t.seconds),
            max(done, key=lambda t: t.pp),
            max(done, key=lambda t: t.tg),
            self.tried,
        )

    def _at(self, n: int, ubatch: int, *, speeds: bool = False) -> Trial:
        key = (n, ubatch)
        if key not in self._known or speeds:
            self._known[key] = self._measure(n, ubatch, speeds)
            self.tried.append(self._known[key])
        return self._known[key]

    def _fewest(self, ubatch: int, low: int) -> int | None:
        """The smallest N from `low` on that fits, None if none does."""
        if self._at(low, ubatch).fits(self._budget):
            return low
        if low == self._layers or not self._at(self._layers, ubatch).fits(self._budget):
            return None
        high = self._layers
        while high - low > 1:  # low does not fit, high does
            middle = self._between(low, high, ubatch)
            if self._at(middle, ubatch).fits(self._budget):
                high = middle
            else:
                low = middle
        return high

    def _between(self, low: int, high: int, ubatch: int) -> int:
        """Where memory meets the budget if it falls evenly with N, strictly between; the middle where it is not known
        (a setting that ran out of memory does not say how much it wanted)."""
        a, b = self._known[low, ubatch], self._known[high, ubatch]
        if a.error or a.vram <= b.vram:
            return (low + high) // 2
        share = (a.vram - self._budget) / (a.vram - b.vram)
        return min(max(low + int(share * (high - low)), low + 1), high - 1)

    def _timed(self, n: int, ubatch: int) -> Trial | None:
        """Speeds at N, or one more where the work itself took more memory than loading did."""
        for k in range(n, min(n + 3, self._layers + 1)):
            trial = self._at(k, ubatch, speeds=True)
            if trial.fits(self._budget):
                return trial
        return None

    def _hopeless(self) -> BudgetError:
        least = min((t.vram for t in self.tried if not t.error), default=None)
        error = next((t.error for t in reversed(self.tried) if t.error), "")
        if least is None or least <= self._budget:
            return BudgetError(
                f"llama.cpp runs with none of the settings that would fit: {error}", self.tried, failed=True
            )
        text = (
            f"llama.cpp does not fit {self._budget / 2**20:.0f} MiB of VRAM: it takes {least / 2**20:.0f} MiB at least"
        )
        return BudgetError(text, self.tried, failed=False)
