"""Pages that left the tree come back with what they held: against a naive model whose cells know their tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.kv.host import HostTier
from ftgguf.kv.pages import PagePool, cells_of, pages_for
from ftgguf.kv.radix import RadixTree
from ftgguf.nouns import I32, PAGE

N_PAGES = 12


class Cells:
    """A cell holds a hash of the whole prefix up to its token, and of the space: what K and V depend on."""

    def __init__(self) -> None:
        self.values = np.zeros(N_PAGES * PAGE, np.int64)
        self.reads = 0

    def read_cells(self, cells: I32) -> bytes:
        self.reads += 1
        return self.values[cells].tobytes()

    def write_cells(self, cells: I32, data: bytes) -> None:
        self.values[cells] = np.frombuffer(data, np.int64)


def states(tokens: I32, space: tuple[float, ...]) -> list[int]:
    return [hash((space, tokens[: i + 1].tobytes())) for i in range(len(tokens))]


class Model:
    def __init__(self, budget: int) -> None:
        self.cells = Cells()
        self.pool = PagePool(N_PAGES * PAGE)
        self.tree = RadixTree(self.pool)
        self.host = HostTier(self.cells, self.pool, self.tree, budget)

    def run(self, tokens: I32, space: tuple[float, ...]) -> int:
        """A request as the engine does it: recall, match, evaluate the rest, keep. Returns the tokens reused."""
        self.host.recall(tokens[:-1], space)
        match = self.tree.match(tokens, limit=len(tokens) - 1, space=space)
        expected = states(tokens, space)
        held = cells_of(match.pages)[: match.length]
        assert self.cells.values[held].tolist() == expected[: match.length]
        node = self.tree.lock_prefix(match.node, match.length // PAGE * PAGE)
        keep = match.pages[: match.length // PAGE]
        need = pages_for(len(tokens)) - len(keep)
        self.pool.retain(keep)
        if need > self.pool.n_free:
            self.tree.evict(need - self.pool.n_free)
        fresh = self.pool.alloc(need)
        assert fresh is not None
        pages = keep + fresh
        start = len(keep) * PAGE
        self.cells.values[cells_of(pages)[start : len(tokens)]] = expected[start:]
        self.tree.insert(tokens, pages, space)
        self.tree.unlock(node)
        self.pool.release(pages)
        return match.length


def prompt(*parts: tuple[int, int]) -> I32:
    """Runs of (token, count)."""
    return np.concatenate([np.full(n, token, np.int32) for token, n in parts])


def test_a_prompt_that_was_pushed_out_is_found_again() -> None:
    model = Model(1 << 20)
    first, second = prompt((1, 8 * PAGE + 5)), prompt((2, 9 * PAGE))
    assert model.run(first, ()) == 0
    assert model.run(second, ()) == 0
    assert model.run(first, ()) == 8 * PAGE
    assert model.host.recalled_pages >= 4
    assert model.run(second, ()) >= 8 * PAGE


def test_adapters_are_kept_apart() -> None:
    model = Model(1 << 20)
    tokens, other = prompt((1, 6 * PAGE)), prompt((2, 11 * PAGE))
    model.run(tokens, ())
    model.run(other, ())
    assert model.run(tokens, (0.5,)) == 0


def test_the_budget_holds_and_nothing_is_kept_without_one() -> None:
    page = PAGE * 8
    model = Model(3 * page)
    for token in range(1, 9):
        model.run(prompt((token, 7 * PAGE)), ())
        assert model.host.used <= 3 * page
    assert model.host.used == 3 * page
    tiny = Model(page - 1)
    tiny.run(prompt((1, 8 * PAGE)), ())
    tiny.run(prompt((2, 8 * PAGE)), ())
    assert tiny.host.used == 0
    assert tiny.run(prompt((1, 8 * PAGE)), ()) < 8 * PAGE - 1


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3 * PAGE)), min_size=1, max_size=4)


@settings(max_examples=80)
@given(
    prompts=st.lists(st.tuples(RUNS, st.sampled_from([(), (1.0,)])), min_size=1, max_size=12),
    budget=st.sampled_from([0, PAGE * 8, 5 * PAGE * 8, 1 << 20]),
)
def test_what_comes_back_is_what_was_there(
    prompts: list[tuple[list[tuple[int, int]], tuple[float, ...]]], budget: int
) -> None:
    model = Model(budget)
    for runs, space in prompts:
        model.run(prompt(*runs)[: N_PAGES * PAGE], space)
        assert model.host.used <= budget
        assert model.pool.n_used <= N_PAGES
