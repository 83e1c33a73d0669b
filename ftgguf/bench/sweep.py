"""llama.cpp's best placement for a VRAM budget: an unswept baseline is the first thing that a critic looks for.

Flags swept: `--n-cpu-moe N` (the experts of N layers stay on the CPU; fewer is faster and takes more memory) and `-ub`
(a larger physical batch prefills faster and takes more memory), always with all layers on the GPU and flash attention;
then `--load-mode none` at the best of them, as llama.cpp advises where experts stay on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UBATCHES = (512, 2048, 8192)
PROMPT, GEN = 8192, 256
"""The job whose duration decides: tokens read (fewer where the context holds fewer) and written."""
MARGIN = 64 << 20
"""Bytes by which sums from the file's sizes may be wrong: buffers of a pass change with the placement too."""
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
    mapped: bool = True
    """The file is mapped, llama.cpp's default; else read into memory, which CUDA can pin, so that experts on the CPU
    reach the GPU faster for prompts."""

    @property
    def flags(self) -> list[str]:
        batch = ["-b", str(max(USUAL_BATCH, self.ubatch)), "-ub", str(self.ubatch)]
        return ["-ngl", "99", "--n-cpu-moe", str(self.n_cpu_moe), *batch, "-fa", "on"] + (
            [] if self.mapped else ["--load-mode", "none"]
        )

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
        what = f"--n-cpu-moe {self.n_cpu_moe} -ub {self.ubatch}" + ("" if self.mapped else " --load-mode none")
        if self.error:
            return f"{what}: {self.error[:200]}"
        speeds = f", pp {self.pp:.1f}, tg {self.tg:.1f} tok/s" if self.pp else ""
        return f"{what}: {self.vram / 2**20:.0f} MiB{speeds}"


Measure = Callable[[int, int, bool], Trial]
"""(n_cpu_moe, ubatch, whether the file is mapped) -> Trial, with speeds where it fits the budget."""


class BudgetError(RuntimeError):
    """No setting fits, or (`failed`) none that would fit ran. `tried` is what was tried."""

    def __init__(self, text: str, tried: Sequence[Trial], *, failed: bool) -> None:
        super().__init__(text)
        self.tried = list(tried)
        self.failed = failed


@dataclass(frozen=True, slots=True)
class Found:
    """The quickest settings within the budget: for the whole job, for reading and for writing (often one and the same),
    and all that were tried, in order. `left_out`: physical batches that there was no time for."""

    best: Trial
    reading: Trial
    writing: Trial
    tried: list[Trial]
    left_out: tuple[int, ...] = ()


def _best(done: Sequence[Trial]) -> tuple[Trial, Trial, Trial]:
    """The quickest for the whole job, for reading and for writing."""
    return min(done, key=lambda t: t.seconds), max(done, key=lambda t: t.pp), max(done, key=lambda t: t.tg)


class Sweep:
    """One search. For each physical batch the fewest layers of experts on the CPU that fit (memory falls with them, and
    a larger batch needs at least as many as a smaller one), with the speeds there; then the best of them with the file
    read instead of mapped.

    `layer_bytes`: the experts of each layer, which is what a layer more on the CPU frees. Each trial is a start of the
    server, so the file's sizes tell where to look: a trial or two, and what lies within MARGIN of the budget is
    measured instead of reckoned. `besides`: about what everything else takes. `late` says that no further physical
    batch is to be begun.
    """

    def __init__(
        self,
        measure: Measure,
        layer_bytes: Sequence[int],
        budget: int,
        besides: int = 0,
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._measure = measure
        self._layers = len(layer_bytes)
        self._on_gpu = [sum(layer_bytes[n:]) for n in range(self._layers + 1)]
        """Bytes of experts on the GPU with N layers on the CPU."""
        self._budget = budget
        self._besides = besides
        self._late = late
        self.tried: list[Trial] = []

    def run(self, ubatches: Sequence[int] = UBATCHES) -> Found:
        """Raises BudgetError."""
        low = 0
        done: list[Trial] = []
        left_out: list[int] = []
        for ubatch in sorted(ubatches):
            if done and self._late():
                left_out.append(ubatch)
                continue
            trial = self._fewest(ubatch, low)
            if trial is None:
                break  # all experts are on the CPU already, and larger batches take more
            done.append(trial)
            low = trial.n_cpu_moe
        if not done:
            raise self._hopeless()
        for trial in dict.fromkeys(_best(done)):
            if trial.n_cpu_moe and not self._late():
                read = self._measure(trial.n_cpu_moe, trial.ubatch, False)
                self.tried.append(read)
                done += [read] if read.fits(self._budget) else []
        return Found(*_best(done), self.tried, tuple(left_out))

    def _fewest(self, ubatch: int, first: int) -> Trial | None:
        """The trial at the smallest N from `first` on that fits; None if none does."""
        found: Trial | None = None
        low, high = first - 1, self._layers + 1  # what is too much, and the least known to do
        failed = False  # whether what was too much did not run at all
        n = self._guess(first)
        while low < n < high:
            trial = self._measure(n, ubatch, True)
            self.tried.append(trial)
            if trial.fits(self._budget):
                found, high = trial, n
            else:
                low, failed = n, bool(trial.error)
            if failed and high - low > 1:  # it does not say how much it wanted
                n = (low + high) // 2
            else:
                n = self._next(trial, low, high)
        return found

    def _guess(self, first: int) -> int:
        """Where to begin: as in the trial before (a smaller batch's), or by the sizes of the experts alone."""
        if self.tried:
            return first
        room = self._budget - self._besides
        return next((n for n in range(first, self._layers) if self._on_gpu[n] <= room), self._layers)

    def _next(self, last: Trial, low: int, high: int) -> int:
        """The next N to measure, `high` where nothing is left to learn."""
        if high - low <= 1:
            return high
        room = self._budget - last.vram + self._on_gpu[last.n_cpu_moe]
        n = next((n for n in range(low + 1, min(high, self._layers + 1)) if self._on_gpu[n] <= room + MARGIN), high)
        if n < high or any(trial.fits(self._budget) for trial in self.tried):
            return n
        return self._layers  # nothing fits by these sums: the most that can be done tells how much is needed

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
