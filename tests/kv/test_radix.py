"""The radix tree against a naive model: a pool of cells that remember which prefix was written to them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.kv.pages import PagePool, cells_of, pages_for
from ftgguf.kv.radix import Match, Node, RadixTree, common_prefix
from ftgguf.kv.snapshots import SnapshotBudget
from ftgguf.nouns import I32, PAGE, Snapshot


def ids(*tokens: int) -> I32:
    return np.array(tokens, dtype=np.int32)


class Cells:
    """Stands for K and V: each cell holds the whole prefix it was computed from, so any mix-up is visible."""

    def __init__(self, n_pages: int) -> None:
        self.pool = PagePool(n_pages * PAGE)
        self.tree = RadixTree(self.pool)
        self.content: list[tuple[int, ...] | None] = [None] * (n_pages * PAGE)

    def check(self, match: Match, tokens: I32) -> None:
        """The cells of a match hold exactly the prefixes of `tokens`."""
        cells = cells_of(match.pages)[: match.length]
        assert len(match.pages) == pages_for(match.length)
        for position, cell in enumerate(cells.tolist()):
            assert self.content[cell] == tuple(tokens[: position + 1].tolist())


class Run:
    """What the scheduler does for one sequence: match, share or copy, evaluate, insert."""

    def __init__(self, cells: Cells, tokens: I32) -> None:
        self.cells, self.tokens = cells, tokens
        tree, pool = cells.tree, cells.pool
        match = tree.match(tokens, limit=len(tokens) - 1)
        cells.check(match, tokens)
        self.cached = match.length
        keep = match.length // PAGE + (match.adoptable and match.length % PAGE > 0)
        self.pages = match.pages[:keep]
        pool.retain(self.pages)
        self.node: Node | None = tree.lock_prefix(match.node, match.length)
        need = pages_for(len(tokens)) - keep
        if need > pool.n_free:
            tree.evict(need - pool.n_free)
        fresh = pool.alloc(need, after=self.pages[-1] if self.pages else -1)
        self.started = fresh is not None
        if fresh is None:
            self.release()
            return
        self.pages += fresh
        if match.length % PAGE and not match.adoptable:
            src = cells_of(match.pages[-1:])[: match.length % PAGE]
            dst = cells_of(fresh[:1])
            for a, b in zip(src.tolist(), dst.tolist(), strict=False):
                cells.content[b] = cells.content[a]
        self.done = match.length

    def evaluate(self, n: int) -> None:
        table = cells_of(self.pages)
        for position in range(self.done, min(self.done + n, len(self.tokens))):
            # what attention would read, for every earlier position, must still be there
            for earlier in range(position):
                assert self.cells.content[table[earlier]] == tuple(self.tokens[: earlier + 1].tolist())
            self.cells.content[table[position]] = tuple(self.tokens[: position + 1].tolist())
        self.done = min(self.done + n, len(self.tokens))

    def insert(self) -> None:
        tree = self.cells.tree
        node = tree.insert(self.tokens[: self.done], self.pages)
        assert node.end == self.done
        tree.lock(node)
        assert self.node is not None
        tree.unlock(self.node)
        self.node = node

    def release(self) -> None:
        assert self.node is not None
        self.cells.tree.unlock(self.node)
        self.cells.pool.release(self.pages)


def tokens_before(node: Node) -> I32:
    above: list[I32] = []
    while node.parent is not None:
        node = node.parent
        above.insert(0, node.tokens)
    return np.concatenate(above)


def check_tree(cells: Cells) -> None:
    """Spans join, children differ in their first token, and every page holds its node's path up to the node's end."""
    tree = cells.tree
    count = 0
    for node in tree.nodes():
        count += 1
        assert node.parent is not None
        assert node.start == node.parent.end
        assert len(node.tokens) > 0
        assert node.parent.children[int(node.tokens[0])] is node
        assert len(node.pages) == pages_for(node.end) - node.start // PAGE
        assert node.locks <= node.parent.locks
        path = np.concatenate([tokens_before(node), node.tokens]).tolist()
        first = node.start // PAGE * PAGE
        for position, cell in zip(range(first, node.end), cells_of(node.pages).tolist(), strict=False):
            assert cells.content[cell] == tuple(path[: position + 1])
    assert count == tree.n_nodes


def test_common_prefix() -> None:
    """Checked by hand, with the lengths that differ and the empty one."""
    assert common_prefix(ids(), ids(1)) == 0
    assert common_prefix(ids(1, 2, 3), ids(1, 2)) == 2
    assert common_prefix(ids(1, 2, 3), ids(1, 9, 3)) == 1
    assert common_prefix(ids(5), ids(5, 6)) == 1


def test_same_prompt_twice_leaves_one_token() -> None:
    """llama-server evaluates exactly one token of a prompt it has just seen."""
    cells = Cells(16)
    prompt = np.arange(77, dtype=np.int32)
    for cached in (0, 76, 76):
        run = Run(cells, prompt)
        assert run.cached == cached
        run.evaluate(1000)
        run.insert()
        run.release()
        check_tree(cells)


def test_two_agents_share_the_pages_of_a_system_prompt() -> None:
    """A branch in the middle of a page costs one page of its own, not the shared ones."""
    cells = Cells(64)
    system = np.arange(10 * PAGE + 7, dtype=np.int32)
    first = Run(cells, np.concatenate([system, np.full(20, 1000, np.int32)]))
    first.evaluate(1000)
    first.insert()
    before = cells.pool.n_used
    second = Run(cells, np.concatenate([system, np.full(20, 2000, np.int32)]))
    second.evaluate(1000)
    assert second.cached == len(system)
    assert second.pages[:10] == first.pages[:10]
    assert cells.pool.n_used == before + 1
    second.insert()
    first.release()
    second.release()
    check_tree(cells)


def test_a_continued_conversation_goes_on_in_its_last_page() -> None:
    """The next turn adopts the partial last page; a second continuation at the same point copies it instead."""
    cells = Cells(16)
    turn = np.arange(40, dtype=np.int32)
    first = Run(cells, turn)
    first.evaluate(1000)
    first.insert()
    first.release()
    a = Run(cells, np.concatenate([turn, ids(100, 101)]))
    b = Run(cells, np.concatenate([turn, ids(200, 201)]))
    assert a.cached == b.cached == 40
    assert a.pages[1] == first.pages[1]
    assert b.pages[1] != first.pages[1]
    for run in (a, b):
        run.evaluate(1000)
        run.insert()
        run.release()
    check_tree(cells)
    for run in (a, b):
        cells.check(cells.tree.match(run.tokens), run.tokens)


def test_least_recently_used_goes_first_and_from_its_tail() -> None:
    """Of two conversations the older one loses its last pages; the newer one stays whole (worked by hand)."""
    cells = Cells(8)
    old, new = (np.arange(4 * PAGE, dtype=np.int32) + base for base in (0, 1000))
    for tokens in (old, new):
        run = Run(cells, tokens)
        run.evaluate(1000)
        run.insert()
        run.release()
    assert cells.pool.n_free == 0
    assert cells.tree.evict(1) == 1
    assert cells.tree.match(old).length == 3 * PAGE
    assert cells.tree.match(new).length == 4 * PAGE
    assert cells.tree.evict(5) == 5
    assert cells.tree.match(old).length == 0
    assert cells.tree.match(new).length == 2 * PAGE
    check_tree(cells)


def test_locked_nodes_stay() -> None:
    """Pages of a running sequence cannot be evicted, whatever the pressure."""
    cells = Cells(8)
    run = Run(cells, np.arange(4 * PAGE, dtype=np.int32))
    run.evaluate(1000)
    run.insert()
    assert cells.tree.evictable_pages() == 0
    assert cells.tree.evict(100) == 0
    run.release()
    assert cells.tree.evictable_pages() == 4
    assert cells.tree.evict(100) == 4


def test_forget_spares_shared_parts() -> None:
    """Erasing one slot's conversation leaves what another one shares with it."""
    cells = Cells(16)
    system = np.arange(50, dtype=np.int32)
    a, b = (np.concatenate([system, ids(base, base + 1)]) for base in (100, 200))
    for tokens in (a, b):
        run = Run(cells, tokens)
        run.evaluate(1000)
        run.insert()
        run.release()
    cells.tree.forget(a)
    assert cells.tree.match(a).length == 50
    assert cells.tree.match(b).length == 52
    cells.tree.forget(b)
    assert cells.pool.n_used == 0


def test_recurrent_prefix_ends_at_a_snapshot() -> None:
    """With snapshots only the longest prefix that has one is usable; splitting keeps them, the budget is LRU."""
    freed: list[int] = []
    pool = PagePool(16 * PAGE)
    tree = RadixTree(pool, SnapshotBudget(100, lambda snapshot: freed.append(snapshot.handle)))
    tokens = np.arange(100, dtype=np.int32)
    pages = pool.alloc(4)
    assert pages is not None
    tree.insert(tokens, pages)
    assert tree.match(tokens).length == 0
    for handle, length in enumerate((20, 70)):
        assert tree.add_snapshot(tokens[:length], Snapshot(length, 40, "ram", handle))
    assert tree.match(tokens).length == 70
    fork = np.concatenate([tokens[:60], ids(900)])
    match = tree.match(fork)
    assert (match.length, match.snapshot) == (20, Snapshot(20, 40, "ram", 0))
    more = pool.alloc(1)
    assert more is not None
    tree.insert(fork, pages[:1] + more)
    assert tree.match(tokens).length == 70
    assert tree.match(fork).length == 20
    assert tree.add_snapshot(tokens, Snapshot(100, 40, "ram", 2))
    assert freed == [0]
    assert tree.match(fork).length == 0
    assert not tree.add_snapshot(tokens, Snapshot(100, 101, "ram", 3))
    assert not tree.add_snapshot(tokens + 1, Snapshot(100, 1, "ram", 4))


# Few distinct tokens and page-sized repeats make prefixes collide often.
_pieces = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 3, PAGE - 1, PAGE, PAGE + 5])), min_size=1, max_size=5
)
_action = st.tuples(
    st.sampled_from(["start", "start", "start", "step", "insert", "end", "end", "drop", "evict", "forget"]),
    _pieces,
    st.integers(0, 99),
)


@settings(deadline=None, max_examples=250)
@given(st.lists(_action, min_size=10, max_size=40))
def test_random_workloads(actions: list[tuple[str, list[tuple[int, int]], int]]) -> None:
    """Parallel sequences on a tiny pool: every cell read is the cell written for that prefix, and references add up."""
    cells = Cells(12)
    runs: list[Run] = []
    for kind, pieces, pick in actions:
        tokens = np.concatenate([np.full(n, t, np.int32) for t, n in pieces])
        run = runs[pick % len(runs)] if runs else None
        if kind == "start":
            started = Run(cells, tokens)
            if started.started:
                started.evaluate(2 * pick)
                runs.append(started)
        elif kind == "evict":
            before = cells.pool.n_free
            possible = cells.tree.evictable_pages()
            freed = cells.tree.evict(pick % 8)
            assert freed >= min(pick % 8, possible)
            assert cells.pool.n_free == before + freed
        elif kind == "forget":
            cells.tree.forget(tokens)
        elif run is not None:
            if kind == "step":
                run.evaluate(pick)
            elif kind == "insert":
                run.insert()
            else:
                runs.remove(run)
                if kind == "end":
                    run.insert()
                run.release()
        check_tree(cells)
        held = np.zeros(cells.pool.n_pages, dtype=np.int32)
        for pages in [node.pages for node in cells.tree.nodes()] + [run.pages for run in runs]:
            np.add.at(held, pages, 1)
        assert held.tolist() == cells.pool.ref_counts().tolist()
        match = cells.tree.match(tokens)
        cells.check(match, tokens)
    for run in runs:
        run.release()
    cells.tree.evict(10_000)
    assert cells.pool.n_used == 0
    assert cells.tree.n_nodes == 0
