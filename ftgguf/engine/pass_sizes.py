"""How many rows do the passes have that a GPU captures? Batches in between are padded."""

from __future__ import annotations

EACH_UP_TO = 8
"""Row counts up to this have a graph each; above, multiples of it, with rows that write nothing as padding."""


def graph_rows(max_decode_rows: int) -> list[int]:
    """The row counts that get a graph for batches of 1..`max_decode_rows` rows, ascending."""
    small = list(range(1, min(max_decode_rows, EACH_UP_TO) + 1))
    if max_decode_rows <= EACH_UP_TO:
        return small
    top = -(-max_decode_rows // EACH_UP_TO) * EACH_UP_TO
    return small + list(range(2 * EACH_UP_TO, top + 1, EACH_UP_TO))


def prompt_rows(rows: int, max_rows: int) -> int:
    """The row count that a prompt's pass of `rows` rows is padded to: up to 8 none, then two sizes for each power of
    two, so that beyond 16 rows at most a third is padding and a handful of captured passes serves every prompt."""
    if rows <= EACH_UP_TO:
        return rows
    size = 2 * EACH_UP_TO
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return max(rows, min(size, max_rows))
