"""Pages that left the tree, kept in host memory (`--cache-ram`) until their tokens come again.

A page is known by all tokens up to its end, so it fits behind exactly the prefix it was evaluated behind; a partial
page at the end of a prompt is not kept. The least recently used pages go when the budget is full. Only for models whose
past is all in the cells: recurrent state cannot be cut at a page.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from ftgguf.kv.pages import PagePool, cells_of
from ftgguf.kv.radix import RadixTree
from ftgguf.nouns import I32, PAGE


class Cells(Protocol):
    """The executor's part: the contents of cells as bytes and back."""

    def read_cells(self, cells: I32) -> bytes: ...
    def write_cells(self, cells: I32, data: bytes) -> None: ...


class HostTier:
    """The pages of one executor's tree. `budget` in bytes."""

    def __init__(self, executor: Cells, pool: PagePool, tree: RadixTree, budget: int) -> None:
        self._executor, self._pool, self._tree = executor, pool, tree
        self.budget = budget
        self.used = 0
        self.spilled_pages = 0
        self.recalled_pages = 0
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()
        self._last: tuple[Hashable, I32, list[bytes]] | None = None
        tree.on_evict = self.spill

    def spill(self, space: Hashable, tokens: I32, first: int, pages: Sequence[int]) -> None:
        """Keep `pages`, which hold the page indexes from `first` on of the path `tokens`; the tree is about to free
        them."""
        keys = self._keys(space, tokens[: (first + len(pages)) * PAGE])[first:]
        for key, page in zip(keys, pages, strict=True):
            if key in self._pages:
                self._pages.move_to_end(key)
                continue
            data = self._executor.read_cells(cells_of([page]))
            if len(data) > self.budget:
                return
            self._pages[key] = data
            self.used += len(data)
            self.spilled_pages += 1
            while self.used > self.budget:
                _, oldest = self._pages.popitem(last=False)
                self.used -= len(oldest)

    def recall(self, tokens: I32, space: Hashable = ()) -> int:
        """Bring back into the tree what continues its longest prefix of `tokens`; returns the pages brought.

        Takes free pages, and those that the tree can evict for them; fewer pages are brought where there are none.
        """
        if not self._pages:
            return 0
        match = self._tree.match(tokens, space=space)
        first = match.length // PAGE
        found: list[bytes] = []
        for key in self._keys(space, tokens)[first:]:
            data = self._pages.get(key)
            if data is None:
                break
            self._pages.move_to_end(key)
            found.append(data)
        if not found:
            return 0
        node = self._tree.lock_prefix(match.node, match.length)
        try:
            if len(found) > self._pool.n_free:
                self._tree.evict(len(found) - self._pool.n_free)
            pages = self._pool.alloc(min(len(found), self._pool.n_free), after=match.pages[-1] if match.pages else -1)
            if not pages:
                return 0
            for page, data in zip(pages, found, strict=False):
                self._executor.write_cells(cells_of([page]), data)
            self._tree.insert(tokens[: (first + len(pages)) * PAGE], match.pages[:first] + pages, space)
            self._pool.release(pages)
        finally:
            self._tree.unlock(node)
        self.recalled_pages += len(pages)
        return len(pages)

    def _keys(self, space: Hashable, tokens: I32) -> list[bytes]:
        """One key for each whole page of `tokens`: a hash of everything up to its end. The last answer is kept."""
        n = len(tokens) // PAGE
        if self._last is not None:
            last_space, last, keys = self._last
            same = last_space == space and len(last) >= n * PAGE
            if same and np.array_equal(last[: n * PAGE], tokens[: n * PAGE]):
                return keys[:n]
        digest = hashlib.blake2b(repr(space).encode(), digest_size=16)
        keys = []
        for i in range(n):
            digest.update(tokens[i * PAGE : (i + 1) * PAGE].tobytes())
            keys.append(digest.digest())
        self._last = (space, tokens[: n * PAGE].copy(), keys)
        return keys
