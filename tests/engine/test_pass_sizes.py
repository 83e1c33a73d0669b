"""Row counts of captured passes, by their definitions; no torch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftgguf.engine.pass_sizes import EACH_UP_TO, graph_rows, prompt_rows


@given(st.integers(1, 200))
def test_every_batch_has_a_graph_with_less_than_eight_rows_of_padding(most: int) -> None:
    sizes = graph_rows(most)
    assert sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        assert size - rows < EACH_UP_TO
        assert rows > EACH_UP_TO or size == rows


@given(st.integers(1, 8192), st.integers(1, 8192))
def test_a_prompt_is_padded_by_a_third_at_most(rows: int, most: int) -> None:
    """Up to 8 rows not at all, up to 16 to those; sizes are 2^i and 3 * 2^(i - 1), or the widest pass."""
    size = prompt_rows(rows, most)
    if rows <= EACH_UP_TO:
        assert size == rows
        return
    assert rows <= size <= max(rows, most)
    if rows > 16:
        assert 3 * (size - rows) <= size
    odd = size
    while odd % 2 == 0:
        odd //= 2
    assert odd in (1, 3) or size in (rows, most)
