"""The parsers against a real llama-server: `data/recorded.json` holds texts and what it made of each of them.

The texts are calls and answers as the templates themselves write them. Where the two differ on purpose it is said in
`test_parsers.py`, and the case is not in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.chat.dialects import Dialect
from ftgguf.chat.parser import ChatDelta, OutputParser
from ftgguf.chat.request import ChatPlan

RECORDED = json.loads((Path(__file__).parent / "data/recorded.json").read_text())
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (item["dialect"], case) for item in RECORDED["templates"] for case in item["cases"]
]
IDS = [f"{item['template']}-{i}" for item in RECORDED["templates"] for i in range(len(item["cases"]))]


def parser_of(dialect: dict[str, Any], case: dict[str, Any]) -> OutputParser:
    known = Dialect(**{**dialect, "tags": tuple(dialect["tags"])})
    tools = RECORDED["tools"] if case["tools"] else []
    return ChatPlan("", case["prompt"], known, tools=tools, thinking_open=case["open"]).parser()


def result(parser: OutputParser) -> dict[str, Any]:
    message = parser.message
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    return {"content": message.content, "reasoning": message.reasoning, "calls": calls}


def joined(deltas: list[ChatDelta]) -> dict[str, Any]:
    """What a client makes of the stream."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.tool_index >= 0:
            if delta.tool_name:
                assert delta.tool_index not in calls, "a call's name comes once"
                assert delta.tool_id
                calls[delta.tool_index] = [delta.tool_name, ""]
            calls[delta.tool_index][1] += delta.arguments
    assert list(calls) == list(range(len(calls)))
    return {
        "content": "".join(delta.content for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": list(calls.values()),
    }


@pytest.mark.parametrize(("dialect", "case"), CASES, ids=IDS)
def test_whole_text_gives_what_llama_server_gave(dialect: dict[str, Any], case: dict[str, Any]) -> None:
    parser = parser_of(dialect, case)
    parser.feed(case["text"])
    parser.finish()
    assert result(parser) == {key: case[key] for key in ("content", "reasoning", "calls")}


@pytest.mark.parametrize(("dialect", "case"), CASES, ids=IDS)
def test_one_character_at_a_time_gives_the_same(dialect: dict[str, Any], case: dict[str, Any]) -> None:
    parser = parser_of(dialect, case)
    deltas = [delta for char in case["text"] for delta in parser.feed(char)] + parser.finish()
    assert joined(deltas) == {key: case[key] for key in ("content", "reasoning", "calls")}
    assert result(parser) == joined(deltas)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split_gives_the_same(data: st.DataObject) -> None:
    dialect, case = data.draw(st.sampled_from(CASES))
    text = case["text"]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser = parser_of(dialect, case)
    deltas: list[ChatDelta] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        deltas += parser.feed(text[start:end])
    deltas += parser.finish()
    assert joined(deltas) == {key: case[key] for key in ("content", "reasoning", "calls")}


MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=get_weather>", "<parameter=city>", "</parameter>",
    "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "get_weather", "arguments": ',
    '{"city": "a\\"b"}', "}", "{", "[", "]", ",", "\n", " ", "get_weather", "é", '"', "\\", "<", "<|channel|>",
    "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.get_weather", "analysis", "final", "commentary",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "[TOOL_CALLS]", "[ARGS]",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", "call:get_weather{city:1}", ">>>",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_split_of_malformed_text_gives_the_same(data: st.DataObject) -> None:
    """Whatever a model writes: no exception, no text twice, and the same message however it is cut."""
    dialect, case = data.draw(st.sampled_from(CASES))
    pieces = data.draw(st.lists(st.sampled_from(MARKERS), max_size=14))
    whole = parser_of(dialect, case)
    whole.feed("".join(pieces))
    whole.finish()
    single = parser_of(dialect, case)
    deltas = [delta for char in "".join(pieces) for delta in single.feed(char)] + single.finish()
    assert joined(deltas) == result(whole)
