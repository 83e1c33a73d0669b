"""The grammars of tool calls and schemas, tried on a byte vocabulary with llguidance."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from ftgguf.chat.constraint import closed_schema, schema_grammar, tool_grammar
from ftgguf.chat.tools import MARKUP, NAMED, TAGGED, tool_parser
from ftgguf.engine.grammar_source import compile_grammar
from ftgguf.engine.messages import Grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}},
]


class Bytes:
    """A tokenizer of bytes for llguidance."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    special_token_ids = (256,)
    is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(Bytes(), n_vocab=257, eos_token=256)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a complete sentence of `grammar`."""
    matcher = llguidance.LLMatcher(TOKENIZER, compile_grammar(grammar).text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_required_calls_have_a_known_name_and_fitting_arguments() -> None:
    grammar = tool_grammar("hermes", TOOLS, "required", "", True)
    assert grammar is not None
    assert not grammar.lazy
    assert accepts(grammar, HERMES)
    assert accepts(grammar, HERMES + "\n" + HERMES)
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, HERMES.replace("get_weather", "other"))
    assert not accepts(grammar, HERMES.replace('"city"', '"town"'))
    single = tool_grammar("hermes", TOOLS, "required", "", False)
    assert single is not None
    assert not accepts(single, HERMES + "\n" + HERMES)


def test_auto_sleeps_until_the_marker() -> None:
    grammar = tool_grammar("hermes", TOOLS, "auto", "", True)
    assert grammar is not None
    assert (grammar.lazy, grammar.triggers) == (True, ("<tool_call>",))
    assert accepts(grammar, HERMES)


def test_a_named_function_is_the_only_one() -> None:
    grammar = tool_grammar("hermes", TOOLS, "required", "stop", True)
    assert grammar is not None
    assert not accepts(grammar, HERMES)
    assert accepts(grammar, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
    with pytest.raises(ValueError, match="nope"):
        tool_grammar("hermes", TOOLS, "required", "nope", True)


def test_thinking_may_come_first() -> None:
    grammar = tool_grammar("hermes", TOOLS, "required", "", True, thought=("<think>", "</think>"))
    assert grammar is not None
    assert accepts(grammar, "<think>hm</think>\n" + HERMES)
    assert accepts(grammar, HERMES)
    schema = schema_grammar(CITY, "", ("<think>", "</think>"), {})
    assert accepts(schema, '<think>hm</think>{"city": "x"}')
    assert not accepts(schema, "<think>hm</think>text")
    assert schema_grammar(CITY, "</think>", (), {}).after == "</think>"


def test_one_bad_schema_does_not_fail_the_others() -> None:
    """Clients offer dozens of tools; a keyword that cannot be compiled frees that tool's arguments only."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "description": "", "parameters": odd}}]
    grammar = tool_grammar("hermes", tools, "auto", "", True)
    assert grammar is not None
    assert accepts(grammar, HERMES)
    assert accepts(grammar, '<tool_call>\n{"name": "odd", "arguments": {"z": [1]}}\n</tool_call>')


@pytest.mark.parametrize("format", sorted({*TAGGED, *NAMED, *MARKUP, "harmony", "gemma4", "lfm2"}))
def test_every_formats_grammar_compiles(format: str) -> None:
    assert tool_grammar(format, TOOLS, "required", "", True) is not None
    tool_grammar(format, TOOLS, "auto", "", True)


def test_control_tokens_are_token_references() -> None:
    grammar = tool_grammar("hermes", TOOLS, "required", "", True, control={"<tool_call>": 7, "</tool_call>": 8})
    assert grammar is not None
    assert "<[7]>" in grammar.text
    assert '"<tool_call>"' not in grammar.text


SAMPLES: dict[str, str] = {
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "P"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
    '{"city": "P"}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "P"}',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "P"}}]</TOOLCALL>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "P"}}',
    "harmony": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "P"}',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>P<|"|>}<tool_call|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="P")]<|tool_call_end|>',
    "functionary": 'get_weather\n{"city": "P"}',
    "glm": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>P</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nP\n</parameter>\n</function>\n</tool_call>",
}  # fmt: skip


@pytest.mark.parametrize("format", sorted(SAMPLES))
def test_what_the_grammar_allows_the_parser_reads(format: str) -> None:
    grammar = tool_grammar(format, TOOLS, "required", "", True)
    assert grammar is not None
    assert accepts(grammar, SAMPLES[format])
    parser = tool_parser(format, TOOLS, True)
    parser.feed(SAMPLES[format])
    parser.finish()
    assert [(call.name, json.loads(call.arguments)) for call in parser.message.tool_calls] == [
        ("get_weather", {"city": "P"})
    ]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, CITY | {"additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        (CITY | {"additionalProperties": True}, CITY | {"additionalProperties": True}),
        ({"allOf": [CITY]}, {"allOf": [CITY]}),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CITY | {"additionalProperties": False}}),
    ],
)
def test_listed_properties_are_all_there_are(schema: Any, expected: Any) -> None:
    """llama.cpp's schema-to-grammar conversion: no additional properties where some are listed."""
    assert closed_schema(schema) == expected


def test_xml_values_are_the_models_own_text() -> None:
    """Bug log R36: a value keeps its line breaks, quotes and tags; it is not forced into a quoted JSON string."""
    grammar = tool_grammar("qwen3_coder", TOOLS, "required", "", True)
    assert grammar is not None
    value = "line one\nline \"two\" <b>bold</b>\n  label='\\''\n"
    call = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + value + "\n</parameter>\n</function>\n</tool_call>"
    )
    assert accepts(grammar, call)
    parser = tool_parser("qwen3_coder", TOOLS, True)
    parser.feed(call)
    parser.finish()
    assert json.loads(parser.message.tool_calls[0].arguments)["city"] == value
