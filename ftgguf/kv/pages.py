"""Which pages of the cell pool are free, and which to hand out next.

The pool is `n_cells` cells cut into pages of `nouns.PAGE`. A page is free while its reference count is 0; sequences
and radix-tree nodes each hold one reference to every page they use. Placement keeps a sequence in few contiguous
runs, because the executors read cells as views over [lowest, highest).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ftgguf.nouns import I32, PAGE

_IN_PAGE = np.arange(PAGE, dtype=np.int32)


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` cells."""
    return -(-tokens // PAGE)


def cells_of(pages: Sequence[int] | I32) -> I32:
    """The cells of `pages` in order: int32 [len(pages) * PAGE]."""
    first = np.asarray(pages, dtype=np.int32) * np.int32(PAGE)
    return (first[:, None] + _IN_PAGE).reshape(-1)


class PagePool:
    """Reference-counted pages 0..n_pages-1 over `n_cells` cells (a rest smaller than a page is unused)."""

    def __init__(self, n_cells: int) -> None:
        self.n_pages = n_cells // PAGE
        if self.n_pages < 1:
            raise ValueError(f"a cell pool needs at least {PAGE} cells, got {n_cells}")
        self._refs: NDArray[np.int32] = np.zeros(self.n_pages, dtype=np.int32)
        self.n_free = self.n_pages
        self.usable = self.n_pages
        """Pages below this have memory (`limit`); the others are never handed out."""
        self.version = 0
        """Changes whenever a page becomes free; lets a caller that was refused wait for news."""

    @property
    def n_used(self) -> int:
        return self.usable - self.n_free

    def limit(self, n_pages: int) -> None:
        """Hand out pages below `n_pages` only. Raises ValueError where a page from there on is in use."""
        if not 0 < n_pages <= self.n_pages:
            raise ValueError(f"{n_pages} pages of a pool of {self.n_pages}")
        if n_pages < self.usable:
            if np.any(self._refs[n_pages : self.usable]):
                raise ValueError(f"pages from {n_pages} on are in use")
            self._refs[n_pages : self.usable] = 1
        else:
            self._refs[self.usable : n_pages] = 0
            self.version += 1
        self.n_free += n_pages - self.usable
        self.usable = n_pages

    def rename(self, old: int, new: int) -> None:
        """Page `new`, free, takes the place of `old` with all its references; the caller moves cells and holders."""
        if self._refs[new] or not self._refs[old]:
            raise ValueError(f"page {old} cannot become {new}")
        self._refs[new], self._refs[old] = self._refs[old], 0

    def refs(self, page: int) -> int:
        """Holders of `page`."""
        return int(self._refs[page])

    def ref_counts(self) -> NDArray[np.int32]:
        """A copy of all reference counts, int32 [n_pages]."""
        return self._refs.copy()

    def alloc(self, n: int, after: int = -1) -> list[int] | None:
        """Take `n` free pages with one reference each, or None (nothing taken) when fewer are free.

        Prefers the pages right behind `after`, then the start of the longest free run (the lowest of equals), then
        the next longest.
        """
        if n > self.n_free:
            return None
        taken: list[int] = []
        refs = self._refs
        page = after + 1
        while after >= 0 and len(taken) < n and page < self.n_pages and refs[page] == 0:
            taken.append(page)
            refs[page] = 1
            page += 1
        while len(taken) < n:
            start, length = self._longest_run()
            run = range(start, start + min(length, n - len(taken)))
            refs[run.start : run.stop] = 1
            taken.extend(run)
        self.n_free -= n
        return taken

    def retain(self, pages: Sequence[int]) -> None:
        """Add one reference to each of `pages`: different pages, all in use."""
        at = np.asarray(pages, dtype=np.int64)
        if np.any(self._refs[at] <= 0):
            raise ValueError(f"a page of {list(pages)[:8]} is free: it cannot be shared")
        self._refs[at] += 1

    def release(self, pages: Sequence[int]) -> int:
        """Drop one reference from each of `pages` (different pages); returns how many became free."""
        at = np.asarray(pages, dtype=np.int64)
        left = self._refs[at] - 1
        if np.any(left < 0):
            raise ValueError(f"a page of {list(pages)[:8]} was released more often than it was taken")
        self._refs[at] = left
        freed = int(np.count_nonzero(left == 0))
        if freed:
            self.n_free += freed
            self.version += 1
        return freed

    def _longest_run(self) -> tuple[int, int]:
        """(start, length) of the longest run of free pages, the lowest of equals; length 0 when none is free."""
        free = np.zeros(self.n_pages + 2, dtype=np.int8)
        free[1:-1] = self._refs == 0
        edges = np.flatnonzero(np.diff(free))
        if not len(edges):
            return 0, 0
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        best = int(np.argmax(lengths))
        return int(starts[best]), int(lengths[best])
