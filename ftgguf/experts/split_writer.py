"""What split of the misses do the device's layers have? Written between two passes, where it is to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftgguf.experts.split import rows_each

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore


class SplitWriter:
    """Puts what the store's controller decides, or what was forced, into Residency's `split`, `late` and `part`."""

    def __init__(self, store: CachedStore) -> None:
        """For a store whose layers, cache and controller are made."""
        self.store = store
        self.running = store.controller.running
        """The arm whose split the device has."""
        self.due = False
        """What the controller decides has changed."""
        self.short = 0
        """Rows of the short prompt whose split the device has, 0 for decode's."""
        self.forced: tuple[int, int] | None = None
        self._forced_part = (0, 0)
        self._written: dict[tuple[str, int, int], tuple[tuple[int, int], int, tuple[int, int]]] = {}
        """What the device's split was made from."""
        sizes = [spec.slot_bytes for spec in store.order]
        parts = [part.size for part in store.parts]
        self._sorts = list(dict.fromkeys(zip(store.kinds, sizes, parts, strict=True)))

    def follow(self, short: int) -> None:
        """A pass is about to be queued: of a short prompt of `short` rows, or (0) another."""
        if self.due or short != self.short:
            self.due, self.short = False, short
            self.write()

    def write(self) -> None:
        """The split of the next pass to the device, where it is another than the last one's."""
        store, c = self.store, self.store.controller
        self.running = c.running
        # A short prompt's experts have several rows each, which costs the CPU more and the link nothing.
        further = rows_each(self.short, store.top_k, store.state.experts) - 1 if self.short else 0.0
        chosen = {
            (kind, size, part): (
                c.split(kind, further * store.costs.cpu_row(kind, size) / size),
                c.late(kind, size),
                c.part(kind, size, part),
            )
            if self.forced is None
            else (self.forced, 0, self._forced_part)
            for kind, size, part in self._sorts
        }
        if chosen == self._written:
            return
        self._written = chosen
        s = store.state
        for i, spec in enumerate(store.order):
            found = chosen[store.kinds[i], spec.slot_bytes, store.parts[i].size]
            s.split[i], s.late[i], s.part[i] = found if store.reachable(i) else ((0, 0), 0, (0, 0))
        for name in ("split", "late", "part"):
            store.device_state.arrays[name].copy_(torch.from_numpy(getattr(s, name)))

    def force(self, share: int, least: int, part: tuple[int, int] = (0, 0)) -> None:
        """Keep one split (Q16 share, least fills, Residency's `part`) for all layers from now on."""
        self.forced, self._forced_part = (share, least), part
        self.write()

    def release(self) -> None:
        """Follow the controller again."""
        self.forced, self._forced_part = None, (0, 0)
        self.write()
