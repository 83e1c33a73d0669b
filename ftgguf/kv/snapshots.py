"""How many bytes of recurrent state the radix tree may keep, and which snapshot goes first.

A snapshot hangs on the tree node that covers its last token. Here is only the budget: least recently used first,
across all nodes of one tier. Making, loading and moving states is the executor's work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ftgguf.nouns import Snapshot


class SnapshotBudget:
    """Keeps the sum of `Snapshot.size` within `limit` bytes; `free` is called for each snapshot that goes."""

    def __init__(self, limit: int, free: Callable[[Snapshot], None]) -> None:
        self.limit = limit
        self.used = 0
        self.evictions = 0
        self._free = free
        self._held: OrderedDict[int, tuple[Snapshot, dict[int, Snapshot]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, snapshot: Snapshot, home: dict[int, Snapshot]) -> bool:
        """Keep `snapshot` in `home` (a node's snapshots by length); older ones go until it fits.

        False, and the snapshot is freed, when it alone is over the budget.
        """
        if snapshot.size > self.limit:
            self._free(snapshot)
            return False
        previous = home.get(snapshot.length)
        if previous is not None:
            self.drop(previous)
        while self.used + snapshot.size > self.limit:
            oldest, _ = next(iter(self._held.values()))
            self.drop(oldest)
            self.evictions += 1
        home[snapshot.length] = snapshot
        self._held[snapshot.handle] = (snapshot, home)
        self.used += snapshot.size
        return True

    def touch(self, snapshot: Snapshot) -> None:
        """`snapshot` was used: it goes last."""
        self._held.move_to_end(snapshot.handle)

    def rehome(self, snapshot: Snapshot, home: dict[int, Snapshot]) -> None:
        """Its node was split: `snapshot` now belongs to `home`."""
        _, old = self._held[snapshot.handle]
        del old[snapshot.length]
        home[snapshot.length] = snapshot
        self._held[snapshot.handle] = (snapshot, home)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget and free `snapshot`."""
        _, home = self._held.pop(snapshot.handle)
        del home[snapshot.length]
        self.used -= snapshot.size
        self._free(snapshot)
