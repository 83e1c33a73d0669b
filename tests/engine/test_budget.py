"""The reasoning budget alone; its counts on whole answers equal llama-server's in tests/compat/test_known.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.engine.budget import ReasoningBudget, cut_character
from ftgguf.engine.messages import Reasoning

TEXTS = ["<think>", "</think>", "a", "é"[:1], "<th", "ink>", "</", "think>", "b"]
BYTES = [text.encode() for text in TEXTS] + ["é".encode()[:1], "é".encode()[1:]]
START, END, A, HALF, OTHER_HALF = 0, 1, 2, len(BYTES) - 2, len(BYTES) - 1


def budget(n: int, *, open: bool = False, forced: tuple[int, ...] = (8, END)) -> ReasoningBudget:
    return ReasoningBudget(
        Reasoning(start="<think>", ends=("</think>",), forced=forced, budget=n, open=open), lambda t: BYTES[t]
    )


def feed(b: ReasoningBudget, *tokens: int) -> list[int | None]:
    """What is due after each token."""
    due = []
    for token in tokens:
        b.accept(token)
        due.append(b.next())
    return due


def test_forced_after_the_budget() -> None:
    assert feed(budget(2), START, A, A, 8, END, A) == [None, None, 8, END, None, None]


def test_zero_ends_at_once_and_an_open_prompt_counts() -> None:
    assert feed(budget(0), A, START, 8, END) == [None, 8, END, None]
    assert budget(0, open=True).next() == 8
    assert feed(budget(1, open=True), A) == [8]


def test_a_natural_end_disarms_and_a_second_block_has_its_own_budget() -> None:
    assert feed(budget(2), START, A, END, A, A, START, A, A) == [None] * 7 + [8]


def test_tags_in_several_tokens() -> None:
    """Whatever way a tag is tokenised; here `<th` `ink>` and `</` `think>`."""
    assert feed(budget(3), 4, 5, A, 6, 7, A, A) == [None] * 7
    assert feed(budget(1), 4, 5, A) == [None, None, 8]


def test_a_character_is_not_cut() -> None:
    """The end waits for the character that the budget's last token began."""
    assert feed(budget(1), START, HALF, OTHER_HALF) == [None, None, 8]


def test_end_on_demand() -> None:
    b = budget(-1)
    assert not b.end()
    assert feed(b, START, A, HALF) == [None] * 3
    assert b.end()
    assert feed(b, OTHER_HALF, 8, END) == [8, END, None]
    assert not b.end()


def test_no_end_tag_is_an_error() -> None:
    with pytest.raises(ValueError, match="tag that ends"):
        ReasoningBudget(Reasoning(start="<think>", ends=(), forced=(1,)), lambda t: b"")


@given(st.text(max_size=6), st.integers(0, 30))
def test_cut_character(text: str, at: int) -> None:
    """Against Python's decoder."""
    data = text.encode()[:at]
    try:
        data.decode()
        whole = True
    except UnicodeDecodeError:
        whole = False
    assert cut_character(data) is not whole
