"""The page allocator against a plain set-and-counter model (written here), and its placement rules (docs/design.md)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.kv.pages import PagePool, cells_of, pages_for
from ftgguf.nouns import PAGE


def test_arithmetic() -> None:
    """Checked against the definition of a page: PAGE consecutive cells."""
    assert [pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
    assert cells_of([2, 0]).tolist() == [*range(2 * PAGE, 3 * PAGE), *range(PAGE)]
    assert cells_of([2, 0]).dtype == np.int32
    with pytest.raises(ValueError, match="at least"):
        PagePool(PAGE - 1)


def test_placement() -> None:
    """Behind the last page first, else the start of the longest free run, the lowest of equals (worked by hand)."""
    pool = PagePool(16 * PAGE)
    assert pool.alloc(4) == [0, 1, 2, 3]
    assert pool.alloc(2, after=3) == [4, 5]
    assert pool.alloc(2) == [6, 7]
    pool.release([4, 5])
    # page 3 is followed by 2 free pages, then the longest run starts at 8
    assert pool.alloc(4, after=3) == [4, 5, 8, 9]
    pool.release([0, 1, 2])
    assert pool.alloc(1, after=9) == [10]
    # the longest run is 11..15 (5 pages), then 0..2
    assert pool.alloc(8) == [11, 12, 13, 14, 15, 0, 1, 2]
    assert pool.n_free == 0
    assert pool.alloc(1) is None


def test_misuse_is_refused() -> None:
    """A double free or sharing a free page is an error here, not a mixed-up context later."""
    pool = PagePool(4 * PAGE)
    pages = pool.alloc(1)
    assert pages == [0]
    pool.release(pages)
    with pytest.raises(ValueError, match="more often"):
        pool.release(pages)
    with pytest.raises(ValueError, match="free"):
        pool.retain([3])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 1 << 16)), max_size=60))
def test_against_counters(actions: list[tuple[int, int, int]]) -> None:
    """Any sequence of alloc, retain, release agrees with a list of counters; nothing is handed out twice."""
    pool = PagePool(12 * PAGE + 5)
    counts = [0] * 12
    held: list[list[int]] = []
    for kind, n, pick in actions:
        if kind == 0:
            pages = pool.alloc(n, after=pick % 13 - 1)
            if n > counts.count(0):
                assert pages is None
                continue
            assert pages is not None
            assert len(set(pages)) == len(pages) == n
            for page in pages:
                assert counts[page] == 0
                counts[page] = 1
            held.append(pages)
        elif held and kind == 1:
            pages = held[pick % len(held)]
            pool.retain(pages)
            held.append(list(pages))
            for page in pages:
                counts[page] += 1
        elif held:
            pages = held.pop(pick % len(held))
            freed = pool.release(pages)
            for page in pages:
                counts[page] -= 1
            assert freed == sum(counts[page] == 0 for page in pages)
        assert pool.ref_counts().tolist() == counts
        assert pool.n_free == counts.count(0)
        assert pool.n_used == 12 - pool.n_free
