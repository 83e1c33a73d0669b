"""KV cells that grow and shrink at the expert cache's expense, at safe points between steps.

`experts/boundary.py` says when and how far; this moves the memory: slots are given up or taken (`CachedStore.resize`),
the cells are copied to tensors of the new size (`CudaExecutor.resize_cells`), and the page pool learns its new limit.
What requests and the prefix tree hold stays where it is, except that before KV shrinks the tree's pages beyond the new
end move below it. Nothing is loaded again; decode's graphs are captured again, because they hold the cells' addresses.

A pass that finds no memory borrows from the experts (`lend`). They have it back when no pass has asked for more for a
while, the longer the oftener it was asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ftgguf.experts.boundary import IDLE_SECONDS, Boundary, Budget, Move
from ftgguf.kv.pages import cells_of
from ftgguf.nouns import PAGE

if TYPE_CHECKING:
    from ftgguf.engine.cache import KvCache
    from ftgguf.engine.cuda_executor import CudaExecutor
    from ftgguf.experts.store import CachedStore

log = logging.getLogger(__name__)

MOST_PATIENCE = 3600.0
"""Seconds that what was lent stays lent at most."""


class Elastic:
    """The boundary of one executor and its store; `attach`ed to the cells' pool. `clock` gives seconds."""

    def __init__(self, executor: CudaExecutor, store: CachedStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.executor, self.store, self.clock = executor, store, clock
        self.cell_bytes = executor.cells.cell_bytes
        kv = executor.cells.n_cells * self.cell_bytes
        self.boundary = Boundary(
            Budget(
                total=kv + store.budget,
                kv=kv,
                experts=store.budget,
                kv_floor=kv,
                experts_floor=min(2 * store.ring.half, store.budget),
                kv_most=executor.n_cells * self.cell_bytes,
            )
        )
        self.cache: KvCache | None = None
        self.moves = 0
        self.seconds = 0.0
        self.refused = ""
        """Why the last move that was wanted did not happen."""
        self.lent = 0
        """Bytes of the experts that passes have for their workspace, or that another program took."""
        self.returns = 0
        self._lent_at = 0.0
        self._patience = IDLE_SECONDS

    def attach(self, cache: KvCache) -> None:
        """Use `cache`'s pool, which has the numbers of all cells, as far as there is memory."""
        self.cache = cache
        cache.pool.limit(self.executor.cells.n_cells // PAGE)

    def _bytes(self, pages: int) -> int:
        return pages * PAGE * self.cell_bytes

    def more(self, free: int) -> bool:
        """Make `free` pages free if the boundary can move that far; whether it moved."""
        assert self.cache is not None
        move = self.boundary.poll(self._bytes(self.cache.pool.n_used + free), self.clock())
        return move is not None and self._apply(move)

    def look(self) -> None:
        """A request is about to begin: give back what KV has not needed for long, and what passes have not."""
        assert self.cache is not None
        if self.lent and self.clock() - self._lent_at >= self._patience:
            self._take_back()
        move = self.boundary.poll(self._bytes(self.cache.pool.n_used), self.clock())
        if move is not None:
            self._apply(move)

    def resize(self, experts: int) -> dict[str, int]:
        """Another size of the expert cache, from outside; KV stays as it is, and nothing is lent any more. Raises what
        CachedStore.resize raises."""
        done = self.store.resize(experts)
        self._bound(experts)
        self.lent, self._patience = 0, IDLE_SECONDS
        return done

    def lend(self, nbytes: int) -> None:
        """A pass found no memory: it may have `nbytes` of the experts'. They come back to them when no pass has asked
        for IDLE_SECONDS, at the next request's beginning; twice as long after each time that they were wanted again.
        Raises what CachedStore.resize raises."""
        self.store.resize(self.store.budget - nbytes)
        self._bound(self.store.budget)
        if not self.lent and self.returns:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.lent += nbytes
        self._lent_at = self.clock()

    def _take_back(self) -> None:
        """The experts have again what was lent, if it is free."""
        self._lent_at = self.clock()  # the next try, if this one fails
        try:
            self.store.resize(self.store.budget + self.lent)
        except MemoryError as error:  # nothing has changed
            self._refuse(f"{self.lent >> 20} MiB that were the experts' are still in use: {error}")
            return
        self._bound(self.store.budget)
        log.info("the expert cache has %d MiB back", self.lent >> 20)
        self.lent, self.refused = 0, ""
        self.returns += 1

    def _bound(self, experts: int) -> None:
        """A boundary for another size of the expert cache."""
        b, least = self.boundary.budget, min(2 * self.store.ring.half, experts)
        self.boundary = Boundary(Budget(b.kv + experts, b.kv, experts, min(b.kv_floor, b.kv), least, b.kv_most))

    @property
    def absent_bytes(self) -> int:
        """What the cells would take that have no memory now."""
        return self.boundary.budget.kv_most - self.boundary.budget.kv

    def status(self) -> dict[str, Any]:
        b = self.boundary.budget
        return {
            "kv_bytes": b.kv,
            "kv_most_bytes": b.kv_most,
            "expert_bytes": b.experts,
            "cells": self.executor.cells.n_cells,
            "moves": self.moves,
            "seconds": self.seconds,
            "refused": self.refused,
            "lent_bytes": self.lent,
            "returns": self.returns,
        }

    # ------------------------------------------------------------------------------------------------- a move

    def _apply(self, move: Move) -> bool:
        assert self.cache is not None
        pages = min(move.kv // (PAGE * self.cell_bytes), self.cache.pool.n_pages)
        started = self.clock()
        try:
            done = self._grow(pages, move) if pages > self.cache.pool.usable else self._shrink(pages, move)
        except MemoryError as error:
            self._refuse(str(error))
            return False
        if done:
            self.moves += 1
            self.seconds += self.clock() - started
            self.refused = ""
            log.info("KV of %d cells, experts %d MiB: %s", pages * PAGE, self.store.budget >> 20, move.reason)
        return done

    def _refuse(self, reason: str) -> None:
        if reason != self.refused:
            log.warning("the boundary between KV and experts stays: %s", reason)
        self.refused = reason

    def _grow(self, pages: int, move: Move) -> bool:
        assert self.cache is not None
        before, store = self.store.budget, self.store
        store.resize(move.experts)
        left = store.memory.left
        short = 0 if left is None else self._bytes(pages - self.cache.pool.usable) - left
        if short > 0:  # memory goes back in chunks: one more
            least = self.boundary.budget.experts_floor
            store.resize(max(least, min(move.experts, store.arena.bytes + least - store.arena.chunk)))
        try:
            self.executor.resize_cells(pages * PAGE)
        except MemoryError:
            store.resize(before)
            raise
        self.cache.pool.limit(pages)
        self.boundary.moved(Move(move.kv, store.budget, move.reason))
        return True

    def _shrink(self, pages: int, move: Move) -> bool:
        assert self.cache is not None
        pool = self.cache.pool
        if pages >= pool.usable:
            return False
        if not self._clear_from(pages):
            self.refused = f"running requests hold pages beyond {pages}"  # until they end
            return False
        pool.limit(pages)
        self.executor.resize_cells(pages * PAGE)
        before = self.store.budget
        try:
            self.store.resize(move.experts)
        except MemoryError:  # another program has what the cells gave up: the experts have it when it is free
            self.boundary.moved(Move(move.kv, before, move.reason))
            self._bound(before)
            self.lent += move.experts - before
            self._lent_at = self.clock()
            raise
        self.boundary.moved(move)
        return True

    def _clear_from(self, first: int) -> bool:
        """Move the tree's pages from `first` on below it; False (nothing moved) where others hold one or no room is."""
        assert self.cache is not None
        pool, tree = self.cache.pool, self.cache.tree
        refs = pool.ref_counts()
        nodes = list(tree.nodes())
        held = np.bincount(np.asarray([p for node in nodes for p in node.pages], np.int64), minlength=pool.n_pages)
        high = [p for p in range(first, pool.usable) if refs[p]]
        low = [p for p in range(first) if not refs[p]][: len(high)]
        if len(low) < len(high) or any(refs[p] != held[p] for p in high):
            return False
        if not high:
            return True
        self.executor.copy_cells(cells_of(high), cells_of(low))
        renamed = dict(zip(high, low, strict=True))
        for old, new in renamed.items():
            pool.rename(old, new)
        for node in nodes:
            node.pages[:] = [renamed.get(p, p) for p in node.pages]
        return True
