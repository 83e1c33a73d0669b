"""llama.cpp's best placement for a VRAM budget: an unswept baseline is the first thing that a critic looks for.

Flags swept: `--n-cpu-moe N` (the experts of N layers stay on the CPU; fewer is faster and takes more memory), `-ub`
(a larger physical batch reads the experts less often for a prompt and takes more memory) and how the file is loaded
(mapped, or read, as llama.cpp advises where experts stay on the CPU), always with all layers on the GPU and flash
attention. Every pair of a physical batch and a way of loading gets the smallest N of its own that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UBATCHES = (512, 2048, 4096, 8192)
PROMPT, GEN = 8192, 256
"""The job whose duration decides: tokens read (fewer where the context holds fewer) and written."""
MARGIN = 64 << 20
"""Bytes by which sums from the file's sizes may be wrong: buffers of a pass change with the placement too."""
JITTER = 8 << 20
"""Bytes by which two starts with the same setting may differ."""
USUAL_BATCH = 2048
"""llama.cpp's default for -b; it cuts a larger -ub down to it."""
SLOWER = 0.95
"""Once prompts are read at less than this share of the best with a smaller physical batch, larger ones are not tried
(of the same way of loading): what a pass costs has been spread wide enough, and each takes experts off the GPU."""


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
    read_flags: tuple[str, ...] = ("--load-mode", "none")
    """What makes this llama-server read the file: older ones say --no-mmap."""

    @property
    def flags(self) -> list[str]:
        batch = ["-b", str(max(USUAL_BATCH, self.ubatch)), "-ub", str(self.ubatch)]
        return ["-ngl", "99", "--n-cpu-moe", str(self.n_cpu_moe), *batch, "-fa", "on"] + (
            [] if self.mapped else [*self.read_flags]
        )

    @property
    def seconds(self) -> float:
        """How long the reference job takes; infinite where it did not run."""
        if self.error or self.pp <= 0 or self.tg <= 0:
            return float("inf")
        return PROMPT / self.pp + GEN / self.tg

    def fits(self, budget: int) -> bool:
        return not self.error and self.vram <= budget

    @property
    def short(self) -> str:
        """The flags that were swept."""
        return f"--n-cpu-moe {self.n_cpu_moe} -ub {self.ubatch}" + (
            "" if self.mapped else " " + " ".join(self.read_flags)
        )

    def describe(self) -> str:
        """One line for the report."""
        if self.error:
            return f"{self.short}: {self.error[:200]}"
        speeds = f", pp {self.pp:.1f}, tg {self.tg:.1f} tok/s" if self.pp else ""
        return f"{self.short}: {self.vram / 2**20:.0f} MiB{speeds}"


Measure = Callable[[int, int, bool], Trial]
"""(n_cpu_moe, ubatch, whether the file is mapped) -> Trial, with speeds where it fits the budget."""


class BudgetError(RuntimeError):
    """No setting fits, or (`failed`) none that would fit ran. `tried` is what was tried."""

    def __init__(self, text: str, tried: Sequence[Trial], *, failed: bool) -> None:
        super().__init__(text)
        self.tried = list(tried)
        self.failed = failed


class Hung(BudgetError):
    """A setting that never answers; another one would take as long. What was found before stands."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(f"llama.cpp hangs with {trial.describe()}", [trial], failed=True)


@dataclass(frozen=True, slots=True)
class Found:
    """The quickest settings within the budget: for the whole job, for reading and for writing (often one and the same),
    and all that were tried, in order. `left_out`: the settings that were not tried, each with its reason."""

    best: Trial
    reading: Trial
    writing: Trial
    tried: list[Trial]
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class _Way:
    """How far the search has come for one way of loading. `low`: the fewest layers on the CPU that a larger batch may
    need; `best`: tokens read a second at most so far; `over`: why no larger batch is tried."""

    mapped: bool
    low: int = 0
    best: float = 0.0
    over: str = ""


class Sweep:
    """One search. For each physical batch, from the smallest on, and each way of loading: the fewest layers of experts
    on the CPU that fit (memory falls with them, and a larger batch needs at least as many), with the speeds there.
    A way of loading ends with a batch that reads slower than a smaller one did (SLOWER). Where all experts are on the
    GPU the way of loading changes nothing, and the file is mapped.

    `layer_bytes`: the experts of each layer, which is what a layer more on the CPU frees. Each trial is a start of the
    server, so what is known tells where to look: the same batch loaded the other way, smaller batches, the file's
    sizes. A trial or two, then; what lies within MARGIN of the budget is measured instead of reckoned. `besides`: about
    what everything else takes. `late` says that nothing further is to be begun.
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
        done: list[Trial] = []
        left_out: list[str] = []
        ways = (_Way(mapped=True), _Way(mapped=False))
        try:
            for ubatch in sorted(ubatches):
                for way in ways:
                    if not way.over and done and self._late():
                        way.over = "no time was left (--limit)"
                    if way.over:
                        left_out.append(f"-ub {ubatch}{'' if way.mapped else ', file read'}: {way.over}")
                        continue
                    self._step(ubatch, way, done)
        except Hung as error:
            if not done:
                raise
            left_out.append(f"nothing after {error.tried[0].short}, which hung, was tried")
        if not done:
            raise self._hopeless()
        reading = max(done, key=lambda t: t.pp)
        return Found(min(done, key=lambda t: t.seconds), reading, self._writing(done), self.tried, tuple(left_out))

    def _writing(self, done: Sequence[Trial]) -> Trial:
        """What writes fastest. How the file is loaded changes writing little and reading much (1700 or 9200 tok/s), and
        one sample of writing is off by a tenth: where the same setting loaded the other way reads faster, both are
        measured once more, and it is taken unless it writes slower by SLOWER on average."""
        best = max(done, key=lambda t: (t.tg, t.pp))
        same = (t for t in done if (t.n_cpu_moe, t.ubatch) == (best.n_cpu_moe, best.ubatch) and t is not best)
        twin = next(same, None)
        if twin is None or twin.pp <= best.pp or self._late():
            return best
        again = [self._measure(t.n_cpu_moe, t.ubatch, t.mapped) for t in (best, twin)]
        self.tried += again
        if any(t.error for t in again):
            return best
        mean = [(a.tg + b.tg) / 2 for a, b in zip((best, twin), again, strict=True)]
        return twin if mean[1] >= SLOWER * mean[0] else best

    def _step(self, ubatch: int, way: _Way, done: list[Trial]) -> None:
        """The best of one physical batch loaded one way, into `done`; and whether `way` goes on."""
        twin = next((t for t in reversed(done) if t.mapped and not way.mapped), None)
        if (
            twin is not None and twin.n_cpu_moe == 0
        ):  # mapped, nothing stays on the CPU with this batch or the last tried
            return
        if not way.mapped and not done and self._too_much():
            way.over = "it takes more than the budget however it is loaded"
            return
        trial = self._fewest(ubatch, way)
        if trial is None:
            way.over = "it does not fit or run with a smaller one, with all experts on the CPU"
            return
        done.append(trial)
        way.low = trial.n_cpu_moe
        if trial.pp < SLOWER * way.best:
            way.over = f"-ub {ubatch} reads prompts slower than a smaller one already"
        way.best = max(way.best, trial.pp)

    def _too_much(self) -> bool:
        """Whether the least that could be asked for is clearly above the budget."""
        return any(t.n_cpu_moe == self._layers and not t.error and t.vram > self._budget + MARGIN for t in self.tried)

    def _fewest(self, ubatch: int, way: _Way) -> Trial | None:
        """The trial at the smallest N from `way.low` on that fits; None if none does."""
        found: Trial | None = None
        low, high = way.low - 1, self._layers + 1  # what is too much, and the least known to do
        failed = False  # whether what was too much did not run at all
        n = self._guess(ubatch, way)
        while low < n < high:
            trial = self._measure(n, ubatch, way.mapped)
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

    def _guess(self, ubatch: int, way: _Way) -> int:
        """Where to begin: where the other way of loading ended, where two smaller batches point to, where one ended, or
        what the sizes of the experts say."""
        fitting = [t for t in self.tried if t.fits(self._budget)]
        other = [t.n_cpu_moe for t in fitting if t.ubatch == ubatch and t.mapped != way.mapped]
        if other:
            return max(way.low, min(other))
        if self.tried and not fitting:
            return self._layers  # loaded the other way nothing ran: the surest first
        besides = self._besides_with(ubatch, fitting)
        if fitting and besides is None:
            return way.low
        room = self._budget - (self._besides if besides is None else besides)
        return next((n for n in range(way.low, self._layers) if self._on_gpu[n] <= room), self._layers)

    def _besides_with(self, ubatch: int, fitting: Sequence[Trial]) -> int | None:
        """Bytes beside the experts, which grow evenly with the physical batch; None before two sizes were measured."""
        known = {t.ubatch: t.vram - self._on_gpu[t.n_cpu_moe] for t in fitting}
        if len(known) < 2:
            return None
        (a, at_a), (b, at_b) = sorted(known.items())[-2:]
        return at_b + max(0, at_b - at_a) * (ubatch - b) // (b - a)

    def _next(self, last: Trial, low: int, high: int) -> int:
        """The next N to measure, `high` where nothing is left to learn."""
        if high - low <= 1:
            return high
        room = self._budget - last.vram + self._on_gpu[last.n_cpu_moe]
        n = next(
            (n for n in range(low + 1, min(high, self._layers + 1)) if self._on_gpu[n] <= room + self._doubt(last, n)),
            high,
        )
        if n < high or any(trial.fits(self._budget) for trial in self.tried):
            return n
        return self._layers  # nothing fits by these sums: the most that can be done tells how much is needed

    def _doubt(self, last: Trial, n: int) -> int:
        """Bytes by which the sum for N may be wrong: MARGIN, or, where the same batch loaded the other way was measured
        at N and at the last one's N, what that says with JITTER."""
        other = {t.n_cpu_moe: t for t in self.tried if t.ubatch == last.ubatch and t.mapped != last.mapped and t.vram}
        if n not in other or last.n_cpu_moe not in other:
            return MARGIN
        step = other[n].vram - other[last.n_cpu_moe].vram
        return self._on_gpu[n] - self._on_gpu[last.n_cpu_moe] - step + JITTER

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
