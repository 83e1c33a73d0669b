"""llama.cpp's best placement for a VRAM budget: an unswept baseline is the first thing that a critic looks for.

Flags swept: `--n-cpu-moe N` (the experts of N layers stay on the CPU; fewer is faster and takes more memory) and `-ub`
(a larger physical batch prefills faster and takes more memory), always with all layers on the GPU and flash attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

UBATCHES = (512, 2048, 4096)
PROMPT, GEN = 2048, 256
"""The job whose duration decides: tokens read and written."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting measured: peak VRAM in bytes, speeds in tokens per second; `error` where it did not run."""

    n_cpu_moe: int
    ubatch: int
    vram: int = 0
    pp: float = 0.0
    tg: float = 0.0
    error: str = ""

    @property
    def flags(self) -> list[str]:
        return ["-ngl", "99", "--n-cpu-moe", str(self.n_cpu_moe), "-ub", str(self.ubatch), "-fa", "on"]

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
            return f"{what}: {self.error[:120]}"
        return f"{what}: {self.vram / 2**20:.0f} MiB, pp {self.pp:.1f}, tg {self.tg:.1f} tok/s"


Measure = Callable[[int, int], Trial]
"""(n_cpu_moe, ubatch) -> Trial."""


class BudgetError(RuntimeError):
    """No setting fits."""


def sweep(
    measure: Measure, n_layers: int, budget: int, ubatches: Sequence[int] = UBATCHES
) -> tuple[Trial, list[Trial]]:
    """The quickest setting within `budget` bytes, and all that were tried. Raises BudgetError.

    For each physical batch the fewest layers of experts on the CPU that fit, by bisection (memory falls with them); a
    larger batch needs at least as many as a smaller one.
    """
    tried: dict[tuple[int, int], Trial] = {}

    def at(n: int, ubatch: int) -> Trial:
        if (n, ubatch) not in tried:
            tried[n, ubatch] = measure(n, ubatch)
        return tried[n, ubatch]

    low = 0
    for ubatch in sorted(ubatches):
        if not at(n_layers, ubatch).fits(budget):
            break  # all experts are on the CPU already, and larger batches take more
        high = n_layers
        while low < high:
            middle = (low + high) // 2
            if at(middle, ubatch).fits(budget):
                high = middle
            else:
                low = middle + 1
    fitting = [t for t in tried.values() if t.fits(budget)]
    if not fitting:
        least = min((t for t in tried.values() if not t.error), key=lambda t: t.vram, default=None)
        why = f"it takes {least.vram / 2**20:.0f} MiB at least" if least else next(iter(tried.values())).error
        raise BudgetError(f"llama.cpp does not fit {budget / 2**20:.0f} MiB of VRAM: {why}")
    return min(fitting, key=lambda t: t.seconds), list(tried.values())
