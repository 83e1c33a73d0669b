"""The cells of running sequences: taken from the tree where a prefix is known, from the pool otherwise.

This is the only place that pairs pages with sequences, so that references, locks and copies stay together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftgguf.engine.executor import Executor
from ftgguf.engine.request import Sequence
from ftgguf.kv.pages import PagePool, cells_of, pages_for
from ftgguf.kv.radix import Match, RadixTree
from ftgguf.kv.snapshots import SnapshotBudget
from ftgguf.nouns import I32, PAGE

if TYPE_CHECKING:
    from ftgguf.engine.elastic import Elastic


class KvCache:
    """Page pool and radix tree of one executor."""

    def __init__(self, executor: Executor, snapshots: SnapshotBudget | None = None) -> None:
        if executor.recurrent and snapshots is None:
            raise ValueError("a recurrent executor needs a snapshot budget (it may be 0)")
        self.executor = executor
        self.pool = PagePool(executor.n_cells)
        self.tree = RadixTree(self.pool, snapshots)
        self.copied_cells = 0
        self.refusals = 0
        """Times a sequence had to wait for pages."""
        self.elastic: Elastic | None = getattr(executor, "elastic", None)
        """What gives the pool more memory when it needs it, where something does."""
        if self.elastic is not None:
            self.elastic.attach(self)
        self._refused: tuple[int, ...] = ()

    @property
    def n_cells(self) -> int:
        """Cells in whole pages."""
        return self.pool.n_pages * PAGE

    def match(self, sequence: Sequence) -> Match:
        """What is held of the sequence's tokens; at least one token is always left to evaluate."""
        if self.elastic is not None:
            self.elastic.look()
        if sequence.reuses:
            return self.tree.match(sequence.known, limit=sequence.n_tokens - 1, space=sequence.adapters)
        return Match(0, self.tree.root, [], False)

    def begin(self, sequence: Sequence, match: Match, spare: int, pin: bool = True) -> bool:
        """Give the sequence the cells of `match` and room for all its known tokens.

        False (and nothing changes) when even eviction leaves fewer than `spare` pages besides. `match` must be fresh.
        Without `pin` the tree may evict the nodes of the match, where a page of the path is not the sequence's; only
        for a match of whole pages.
        """
        offset = match.length % PAGE
        keep = match.length // PAGE + (1 if match.adoptable else 0)
        need = pages_for(sequence.n_tokens) - keep
        refused = (self.pool.version, self.tree.version, sequence.id, spare, match.length, pin)
        if self._refused == refused:
            return False
        shared = match.pages[:keep]
        self.pool.retain(shared)
        node = self.tree.lock_prefix(match.node, match.length if pin else 0)
        if not self._make_room(need, spare):
            self.tree.unlock(node)
            self.pool.release(shared)
            self._refused = (self.pool.version, self.tree.version, sequence.id, spare, match.length, pin)
            self.refusals += 1
            return False
        fresh = self.pool.alloc(need, after=shared[-1] if shared else -1)
        assert fresh is not None
        sequence.pages, sequence.node = [], node
        sequence.add_pages(shared + fresh)
        sequence.n_past = match.length
        if offset and not match.adoptable:
            self._copy(cells_of(match.pages[-1:])[:offset], cells_of(fresh[:1])[:offset])
        return True

    def _make_room(self, need: int, spare: int) -> bool:
        """Evict until `need` pages are free, but only if that leaves `spare` more within reach."""
        pool, tree = self.pool, self.tree
        if need + spare > pool.n_free and self.elastic is not None:
            self.elastic.more(need + spare)
        if need + spare <= pool.n_free:
            return True
        if need + spare > pool.n_free + tree.evictable_pages():
            return False
        tree.evict(need - pool.n_free)
        return need <= pool.n_free

    def grow(self, sequence: Sequence) -> bool:
        """Room for one more page of the sequence; False when none can be had."""
        if self.pool.n_free == 0 and self.elastic is not None:
            self.elastic.more(1)
        if self.pool.n_free == 0:
            self.tree.evict(1)
        pages = self.pool.alloc(1, after=sequence.pages[-1] if sequence.pages else -1)
        if pages is None:
            return False
        sequence.add_pages(pages)
        return True

    def keep(self, sequence: Sequence) -> None:
        """Put what the sequence has evaluated into the tree, for others and for later.

        Where the tree has whole pages for the same tokens already, the sequence uses those and gives its own back.
        """
        length = min(sequence.n_past, sequence.exact)
        tokens = sequence.tokens[:length]
        node = self.tree.insert(tokens, sequence.pages, sequence.adapters)
        self.tree.lock(node)
        self.unpin(sequence)
        sequence.node = node
        n = length // PAGE
        held, own = self.tree.held_pages(tokens, sequence.adapters)[:n], sequence.pages[:n]
        if held != own:
            first = next(i for i in range(n) if held[i] != own[i])
            self.pool.retain(held[first:])
            self.pool.release(own[first:])
            sequence.pages[first:n] = held[first:]
            sequence.table[first * PAGE : n * PAGE] = cells_of(held[first:])

    def unpin(self, sequence: Sequence) -> bool:
        """Let the tree evict what the sequence uses of it (its own references keep its pages). False: nothing was."""
        node, sequence.node = sequence.node, None
        if node is not None:
            self.tree.unlock(node)
        return node is not None and node.parent is not None

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's cells away; what `keep` has put into the tree stays there."""
        self.unpin(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.n_past = 0

    def shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> bool:
        """Drop the evaluated positions [n_keep, n_keep + n_discard) and move what follows down (context shift).

        False when shared cells would have to be copied and there is no room. Raises NotSupported from the executor.
        """
        n_past = sequence.n_past
        self.unpin(sequence)
        if not self._own_from(sequence, n_keep // PAGE):
            return False
        table = sequence.table
        # Chunks no longer than the hole: each reads above what it writes, and writes only what was read or discarded.
        for start in range(n_keep + n_discard, n_past, n_discard):
            stop = min(start + n_discard, n_past)
            self._copy(table[start:stop], table[start - n_discard : stop - n_discard])
        self.executor.shift_cells(table[n_keep : n_past - n_discard].copy(), -n_discard)
        moved = sequence.tokens[n_keep + n_discard : sequence.n_tokens].copy()
        sequence.tokens[n_keep : n_keep + len(moved)] = moved
        sequence.n_tokens -= n_discard
        sequence.n_past -= n_discard
        sequence.exact = min(sequence.exact, n_keep)
        spare = pages_for(sequence.n_past + 1)
        self.pool.release(sequence.pages[spare:])
        del sequence.pages[spare:]
        return True

    def _own_from(self, sequence: Sequence, first: int) -> bool:
        """Make the pages from page index `first` on the sequence's alone, by eviction or by copying."""
        pool = self.pool
        for index in range(first, len(sequence.pages)):
            page = sequence.pages[index]
            if pool.refs(page) == 1:
                continue
            if pool.n_free == 0:
                self.tree.evict(1)
            if pool.refs(page) == 1:
                continue
            fresh = pool.alloc(1)
            if fresh is None:
                return False
            cells = cells_of(fresh)
            self._copy(cells_of([page]), cells)
            pool.release([page])
            sequence.pages[index] = fresh[0]
            sequence.table[index * PAGE : (index + 1) * PAGE] = cells
        return True

    def _copy(self, src: I32, dst: I32) -> None:
        self.executor.copy_cells(np.ascontiguousarray(src), np.ascontiguousarray(dst))
        self.copied_cells += len(src)
