"""When requests tend to come together, should an idle engine wait a moment for the others?

A pass over a prompt costs nearly the same for one prompt as for four where experts come over a link (37 ms for 32 rows,
50 for 64: 12 layers of the Qwen3-30B-A3B shape in 4 GB), and a request that comes a millisecond late waits for the
whole pass and then pays for one of its own. So an idle engine waits, but only where requests have come together of
late, and only a small part of what a prompt's pass takes: whose requests never overlap is never kept waiting. No clock
in here.
"""

from __future__ import annotations

MEMORY_S = 60.0
"""Requests that came together so long ago say nothing about the next ones."""
TOGETHER_S = 0.02
"""Requests closer than this to one another came together: the front needs 1 to 3 ms for each."""
GAP_S = 0.003
"""Nobody comes any more when none came for so long."""
SHARE = 0.1
"""Part of a prompt's pass that may be spent on waiting in all."""
MOST_S = 0.008
"""No wait is longer in all: four requests are there by then."""


class Gather:
    """`arrived` at each request; then `pause` says how long to wait for the next one, again and again, until 0."""

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._last = self._together = float("-inf")
        self._first = 0.0
        """When the first of those came that are waiting now."""
        self._waiting = 0

    def arrived(self, now: float, busy: bool) -> None:
        """A request is here, at `now` seconds of any steady clock; `busy`: another is not finished yet."""
        if busy and now - self._last < TOGETHER_S:
            self._together = now
        if self._waiting == 0:
            self._first = now
        self._last = now
        self._waiting += 1

    def pause(self, now: float, pass_seconds: float) -> float:
        """Seconds to wait for one more request before a pass that takes about `pass_seconds`; 0: begin."""
        if not 0 < self._waiting < self._n_slots or now - self._together > MEMORY_S:
            return 0.0
        until = min(self._last + GAP_S, self._first + min(SHARE * pass_seconds, MOST_S))
        return max(0.0, until - now)

    def began(self) -> None:
        """The pass begins: those who come now are the next ones."""
        self._waiting = 0
