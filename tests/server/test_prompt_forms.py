"""The quick ways through a prompt of many ids give what the slow ways give: results, errors and their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_front import FakeVocab, Front
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftgguf.engine.messages import Generate, decode_to_engine, encode
from ftgguf.server import prompts
from ftgguf.server.errors import ApiError
from ftgguf.server.generation import MAX_ANCHORS, turn_ends
from ftgguf.server.prompts import check_prompt, plain_ids, tokenize_mixed, tokenize_prompts

VOCAB = FakeVocab()
NUMBERS: st.SearchStrategy[Any] = st.integers(-5, 300) | st.integers(-(2**31) - 3, 2**31 + 3) | st.integers()
ODD: st.SearchStrategy[Any] = (
    st.booleans() | st.floats() | st.text(max_size=3) | st.none() | st.just({}) | st.just({"prompt_string": "a"})
)
PROMPTS: st.SearchStrategy[Any] = (
    st.lists(NUMBERS, max_size=30)
    | st.lists(NUMBERS | ODD, max_size=8)
    | st.lists(st.lists(NUMBERS | ODD, max_size=4) | NUMBERS | ODD, max_size=4)
    | ODD
)


def outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    """What came of it: the value, or the error's class and text."""
    try:
        return "value", work()
    except (ApiError, ValueError) as error:
        return type(error).__name__, str(error)


@settings(max_examples=400, deadline=None)
@given(PROMPTS)
@example([1, True])
@example([True, 1])
@example([1, 2.0])
@example([2**31 - 1, -(2**31)])
@example([2**31])
@example([2**80, 1])
@example([[1, 2], [3]])
@example([1, "a"])
@example([])
def test_the_quick_way_through_ids_equals_the_slow_one(prompt: Any) -> None:
    """Oracle: the same functions where no list counts as plain, so that every element is looked at in Python."""

    def both() -> list[Any]:
        return [
            outcome(lambda: tokenize_prompts(VOCAB, prompt)),
            outcome(lambda: tokenize_prompts(VOCAB, prompt, add_special=False)),
            outcome(lambda: tokenize_mixed(VOCAB, prompt, True, True)),
        ]

    quick = both()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "plain_ids", lambda value: None)
        slow = both()
    assert quick == slow
    assert repr(quick) == repr(slow)  # True == 1, but it is no id


def test_plain_ids_are_a_copy() -> None:
    """What is done with the ids is not done to the request's body."""
    body = [5, 6, 7]
    found = plain_ids(body)
    assert found == body
    assert found is not body
    assert plain_ids([]) is None
    assert plain_ids((5,)) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 262), max_size=40), st.integers(0, 50))
def test_a_prompt_is_checked_as_one_by_one(ids: list[int], n_ctx: int) -> None:
    """Oracle: every id against the vocabulary's bounds; a list and an array are checked alike."""
    wrong = any(not 0 <= id < VOCAB.n_vocab for id in ids)
    for form in (ids, np.array(ids, np.int32)):
        kind, text = outcome(lambda form=form: check_prompt(VOCAB, form, n_ctx))  # type: ignore[misc]
        if wrong:
            assert (kind, text) == ("InvalidRequest", "Prompt contains invalid tokens")
        else:
            assert (kind == "value") == (len(ids) < n_ctx)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=150), st.frozensets(st.integers(0, 6), max_size=4))
def test_turn_ends_are_those_of_a_plain_loop(prompt: list[int], eog: frozenset[int]) -> None:
    """Oracle: the definition, written out."""
    ends = [i + 1 for i, token in enumerate(prompt) if token in eog and i + 1 < len(prompt)]
    expected = ends if len(ends) <= MAX_ANCHORS else [ends[0], *ends[-MAX_ANCHORS:]]
    assert turn_ends(prompt, eog) == tuple(expected)
    assert turn_ends(np.array(prompt, np.int32), eog) == tuple(expected)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_a_packed_prompt_is_the_same_prompt(ids: list[int]) -> None:
    """Over the socket and back, in either form."""
    packed = Generate(id=1, packed=np.array(ids, "<i4").tobytes())
    plain = Generate(id=1, prompt=tuple(ids))
    for request in (packed, plain):
        again = decode_to_engine(encode(request))
        assert isinstance(again, Generate)
        assert again.tokens.tolist() == ids
        assert again.tokens.dtype == np.int32


def test_ids_reach_the_engine_as_they_were_sent(server: Front) -> None:
    """Text, ids and a mixture of both that mean the same get the same answer about the same prompt."""
    ids = VOCAB.tokenize("hi there", add_special=True)
    forms: list[Any] = ["hi there", ids, [1, "hi there"], [*ids[:3], " there"]]
    for form in forms:
        out = server.post("/completion", {"prompt": form}).json()
        assert out["prompt"] == "<s>hi there"
        assert out["tokens_evaluated"] == len(ids)
        assert out["content"] == "Hello world!"
    assert server.post("/detokenize", {"tokens": ids}).json() == {"content": "<s>hi there"}
