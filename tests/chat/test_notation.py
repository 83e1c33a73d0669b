"""Calls in Gemma 4's and LFM2's notations: what a tool's schema allows is accepted and read back, all else is refused.

The notations are those of the families' templates (recorded calls of both are in `test_recorded.py`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.chat.constraint import tool_grammar
from ftgguf.chat.tools import tool_parser
from ftgguf.engine.messages import Grammar
from tests.chat.test_constraint import accepts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "colour": {"enum": ["red", "light blue", 7, None]},
        "count": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {}}, "required": ["x"]},
    },
    "required": ["count", "colour"],
    "$defs": {"tag": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/tag"}}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}},
]


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def write(format: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as the family's template writes it."""
    if format == "gemma4":
        return f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>"
    inner = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({inner})]<|tool_call_end|>"


def grammar(format: str, **options: Any) -> Grammar:
    found = tool_grammar(format, TOOLS, "required", "", True, **options)
    assert found is not None
    return found


GRAMMARS = {format: grammar(format) for format in ("gemma4", "lfm2")}


@pytest.mark.parametrize("format", ["gemma4", "lfm2"])
def test_types_names_and_required_arguments_hold(format: str) -> None:
    right = {"colour": "light blue", "count": 3}
    for arguments in (right, right | {"on": True}, right | {"tags": [], "place": {"x": 1.5, "y": {"a": [1, None]}}}):
        assert accepts(GRAMMARS[format], write(format, "paint", arguments)), arguments
    for wrong in (
        {"count": 3},
        {"colour": 7, "count": "3"},
        {"colour": "pink", "count": 3},
        right | {"size": 3},
        right | {"on": "yes"},
        right | {"tags": [3]},
        right | {"place": {"y": 1}},
    ):
        assert not accepts(GRAMMARS[format], write(format, "paint", wrong)), wrong
    assert not accepts(GRAMMARS[format], write(format, "erase", right))
    assert accepts(GRAMMARS[format], write(format, "stop", {}))
    assert accepts(GRAMMARS[format], write(format, "stop", {"why": ["free", {"form": False}]}))


text = st.text(st.characters(codec="utf-8", exclude_characters="<>\\|", exclude_categories=("C", "Z")), max_size=12)
tags: Any = st.recursive(text, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
ARGUMENTS = st.fixed_dictionaries(
    {"count": st.integers(-(10**6), 10**6), "colour": st.sampled_from(["red", "light blue", 7, None])},
    optional={
        "note": text,
        "share": st.none() | st.integers(-99, 99) | st.sampled_from([0.5, -12.25, 1000.125]),
        "on": st.booleans(),
        "tags": st.lists(tags, max_size=3),
        "place": st.fixed_dictionaries({"x": st.integers(-9, 9)}, optional={"y": text | st.none()}),
    },
)


@pytest.mark.parametrize("format", ["gemma4", "lfm2"])
@settings(max_examples=60)
@given(arguments=ARGUMENTS, cut=st.integers(1, 9))
def test_what_is_allowed_is_read_back(format: str, arguments: dict[str, Any], cut: int) -> None:
    order = [name for name in SCHEMA["properties"] if name in SCHEMA["required"]]
    order += [name for name in SCHEMA["properties"] if name not in order]
    sorted_arguments = {name: arguments[name] for name in order if name in arguments}
    if "place" in arguments:
        sorted_arguments["place"] = dict(sorted(arguments["place"].items()))
    call = write(format, "paint", sorted_arguments)
    assert accepts(GRAMMARS[format], call)
    parser = tool_parser(format, TOOLS, True)
    for at in range(0, len(call), cut):
        parser.feed(call[at : at + cut])
    parser.finish()
    assert [(c.name, json.loads(c.arguments)) for c in parser.message.tool_calls] == [("paint", sorted_arguments)]


def test_control_tokens_of_the_notation() -> None:
    """Gemma 4's quotes are one control token each: they are asked for as such, within texts of an `enum` too."""
    control = {"<|tool_call>": 48, "<tool_call|>": 49, '<|"|>': 52}
    found = grammar("gemma4", control=control)
    for token in control.values():
        assert f"<[{token}]>" in found.text
    assert '<[52]> "light blue" <[52]>' in found.text
