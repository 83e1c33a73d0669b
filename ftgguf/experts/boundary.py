"""The boundary between KV and the expert cache: how many bytes each has, and when that changes.

Weights and workspace are fixed; KV and experts share the rest. KV has what the asked context needs at start. When
requests need more pages than it has, it takes memory from the experts; when much of it lies idle for long, it gives
some back; when the budget for all changes (`POST /v1/cache/rebuild`, another program needs the card), both follow, KV
in use last. Moves happen at a safe point and are whole granules, so that few and large ones are made. No clock in
here: the caller passes the time in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GRANULE = 32 << 20
"""Bytes moved at least: a slab, and a multiple of cuMemMap's granule (2 MiB)."""
KV_SPARE = 0.25
"""KV grows by this share more than needed, and keeps as much when it shrinks."""
IDLE_SECONDS = 60.0
"""KV must have needed less for so long before it gives back."""
SHRINK_BELOW = 0.5
"""It gives back only when it needs less than this share of what it has."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: `total` that may be used by both; `kv` and `experts` what each has now; `kv_floor` what KV keeps (the
    context a single request may ask for) and `kv_most` what it may ever have, `experts_floor` what the cache keeps (a
    ring for prefill)."""

    total: int
    kv: int
    experts: int
    kv_floor: int
    experts_floor: int
    kv_most: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Move:
    """The new sizes, and why."""

    kv: int
    experts: int
    reason: str


class BudgetError(ValueError):
    """A budget that cannot hold what must stay; the message has the numbers."""


def up(size: float) -> int:
    """To whole granules, upwards."""
    return int(-(-size // GRANULE)) * GRANULE


class Boundary:
    """Watches KV's need and says when to move. Give it `need` (bytes of pages in use or about to be) at each safe
    point; apply the returned `Move` and report it by `moved`."""

    def __init__(self, budget: Budget) -> None:
        """Raises BudgetError if the floors do not fit."""
        if budget.kv_floor + budget.experts_floor > budget.total or budget.kv + budget.experts > budget.total:
            raise BudgetError(f"{budget} does not hold its own parts")
        self.budget = budget
        self._idle_since: float | None = None
        self._idle_peak = 0

    def poll(self, need: int, now: float) -> Move | None:
        """A move that `need` calls for, or None. KV above the experts' floor is never refused to requests."""
        b = self.budget
        most = min(b.total - b.experts_floor, b.kv_most)
        if need > b.kv:
            self._idle_since = None
            wanted = min(up(need * (1 + KV_SPARE)), most)
            if wanted <= b.kv:
                return None  # all that can be had: the request waits for pages
            return Move(wanted, b.total - wanted, f"KV needs {need} bytes, has {b.kv}")
        target = max(up(need * (1 + KV_SPARE)), b.kv_floor)
        if need >= SHRINK_BELOW * b.kv or target + GRANULE > b.kv:
            self._idle_since = None
            return None
        if self._idle_since is None:
            self._idle_since, self._idle_peak = now, need
        self._idle_peak = max(self._idle_peak, need)
        if now - self._idle_since < IDLE_SECONDS:
            return None
        target = max(up(self._idle_peak * (1 + KV_SPARE)), b.kv_floor)
        if target + GRANULE > b.kv:
            return None
        return Move(
            target, b.total - target, f"KV needed at most {self._idle_peak} of {b.kv} bytes for {IDLE_SECONDS:.0f} s"
        )

    def retarget(self, total: int, need: int) -> Move:
        """New sizes for a new `total`: the cache shrinks first, to its floor, then KV down to what is in use.

        More memory goes to the experts. Raises BudgetError if the pages in use and the floor do not fit.
        """
        b = self.budget
        if need + b.experts_floor > total:
            raise BudgetError(
                f"{total} bytes cannot hold {need} bytes of KV in use and {b.experts_floor} for experts: "
                "end or shorten requests first"
            )
        kv = min(b.kv, max(total - b.experts_floor, need))
        self.budget = replace(b, total=total, kv_floor=min(b.kv_floor, kv))
        return Move(kv, total - kv, f"budget changed from {b.total} to {total} bytes")

    def moved(self, move: Move) -> None:
        """The move was made."""
        self.budget = replace(self.budget, kv=move.kv, experts=move.experts)
        self._idle_since = None
