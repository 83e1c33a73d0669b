"""Output parsing in the cases of public bug reports, and where we decide otherwise than llama-server.

llama-server answers 500 for output that its grammar does not accept; we never do: what is no call is text, and a call
that was cut off keeps what there is of it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ftgguf.chat.dialects import HARMONY, KIMI_K2, Dialect
from ftgguf.chat.parser import ChatDelta, OutputParser
from ftgguf.chat.reasoning import ReasoningParser, thinking_is_open
from ftgguf.chat.request import ChatPlan
from ftgguf.chat.tools import tool_parser


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [tool("run", code={"type": "string"}, n={"type": "integer"}, any={}), tool("stop")]


def feed_by_character(parser: OutputParser, text: str) -> list[ChatDelta]:
    deltas = [delta for char in text for delta in parser.feed(char)]
    return deltas + parser.finish()


def calls(parser: OutputParser) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parser.message.tool_calls]


CODE = 'label=\'\\\'\'\nprint("\\\\n", {1: "naïve ☕"})\n'


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "run", "arguments": ' + json.dumps({"code": CODE}) + "}\n</tool_call>"),
        ("qwen3_coder", f"<tool_call>\n<function=run>\n<parameter=code>\n{CODE}\n</parameter>\n</function>\n"
         "</tool_call>"),
        ("glm", f"<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>{CODE}</arg_value>\n</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>" + json.dumps({"code": CODE})
         + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("harmony", "<|channel|>commentary to=functions.run <|constrain|>json<|message|>" + json.dumps({"code": CODE})),
        ("minimax_m2", f'<minimax:tool_call>\n<invoke name="run">\n<parameter name="code">{CODE}</parameter>\n'
         "</invoke>\n</minimax:tool_call>"),
    ],
)  # fmt: skip
def test_quotes_backslashes_and_accents_in_arguments(format: str, text: str) -> None:
    """Bug log R07 and R34: split at every character, arguments grow only and join to the exact value."""
    parser = tool_parser(format, TOOLS, True)
    deltas = feed_by_character(parser, text)
    assert calls(parser) == [("run", {"code": CODE})]
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"code": CODE}


def test_name_and_id_come_once_and_first() -> None:
    """Bug log R32 and R33: three calls, indexes 0 to 2, ids distinct."""
    one = '<tool_call>{"name": "run", "arguments": {"n": 1}}</tool_call>\n'
    parser = tool_parser("hermes", TOOLS, True)
    deltas = [delta for delta in feed_by_character(parser, one * 3) if delta.tool_index >= 0]
    opening = [delta for delta in deltas if delta.tool_name]
    assert [delta.tool_index for delta in opening] == [0, 1, 2]
    assert len({delta.tool_id for delta in opening}) == 3
    assert all(not delta.tool_id for delta in deltas if not delta.tool_name)
    for index in range(3):
        first = next(delta for delta in deltas if delta.tool_index == index)
        assert first.tool_name == "run"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        # Bug log R40, each with its outcome
        ('{"name": "run", "arguments": {}}</tool_call>', '{"name": "run", "arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "run", "arguments": {"n": 1},}</tool_call>', "", [("run", {"n": 1})]),
        ('<tool_call>{"name": "run", "arguments": {"n": 1}}}</tool_call>', "", [("run", {"n": 1})]),
        ('<tool_call>{"name": "run", "arguments": {"n": 1}}\n{"name": "stop", "arguments": {}}</tool_call>', "",
         [("run", {"n": 1}), ("stop", {})]),
        ('Sure.\n<tool_call>{"name": "stop"}</tool_call>', "Sure.\n", [("stop", {})]),
        ('<tool_call>{"arguments": {"n": 1}, "name": "run"}</tool_call>', "", [("run", {"n": 1})]),
        ('<tool_call>{"name": "run", "arguments": "{\\"n\\": 1}"}</tool_call>', "", [("run", {"n": 1})]),
        ('<tool_call>{"type": "function", "function": {"name": "run", "arguments": {"n": 1}}}</tool_call>', "",
         [("run", {"n": 1})]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        ("a < b <tool", "a < b <tool", []),
    ],
)  # fmt: skip
def test_calls_in_slightly_wrong_form(text: str, content: str, expected: list[Any]) -> None:
    for split in (False, True):
        parser = tool_parser("hermes", TOOLS, True)
        if split:
            feed_by_character(parser, text)
        else:
            parser.feed(text)
            parser.finish()
        assert (parser.message.content, calls(parser)) == (content, expected)


def test_arguments_cut_by_the_token_limit_are_kept() -> None:
    """Bug log R38."""
    parser = tool_parser("hermes", TOOLS, True)
    parser.feed('<tool_call>{"name": "run", "arguments": {"code": "pri')
    parser.finish()
    assert parser.message.tool_calls[0].arguments == '{"code": "pri'
    parser = tool_parser("hermes", TOOLS, True)
    parser.feed('Text <tool_call>{"na')
    parser.finish()
    assert parser.message.content == 'Text <tool_call>{"na'
    assert parser.message.tool_calls == []


def test_markup_values_have_the_schemas_type() -> None:
    text = (
        "<tool_call><function=run><parameter=code>5</parameter><parameter=n>5</parameter>"
        "<parameter=any>[1]</parameter></function></tool_call>"
    )
    parser = tool_parser("qwen3_coder", TOOLS, True)
    parser.feed(text)
    parser.finish()
    assert calls(parser) == [("run", {"code": "5", "n": 5, "any": [1]})]


def test_no_call_is_made_of_a_name_that_is_no_tool() -> None:
    text = "<tool_call>\n<function=nope>\n</function>\n</tool_call>"
    parser = tool_parser("qwen3_coder", TOOLS, True)
    parser.feed(text)
    parser.finish()
    assert (parser.message.content, parser.message.tool_calls) == (text, [])


THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("open", "text", "reasoning", "content"),
    [
        # Bug log R27
        (True, "plan</think>answer", "plan", "answer"),
        (False, "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        (False, "no thinking, `<think>` in code", "", "no thinking, `<think>` in code"),
        (False, "\n<think>a</think>b", "a", "b"),
        # Bug log R28: the limit inside the thinking
        (True, "unfinished <thi", "unfinished <thi", ""),
        (False, "<think>unfinished </", "unfinished </", ""),
        (False, "<thi", "", "<thi"),
        (True, "", "", ""),
    ],
)
def test_thinking_is_split_off_the_front(open: bool, text: str, reasoning: str, content: str) -> None:
    for split in (False, True):
        parser = ReasoningParser(THINK, open, tool_parser("hermes", [], True))
        if split:
            deltas = feed_by_character(parser, text)
            assert "".join(delta.reasoning for delta in deltas) == reasoning
            assert "".join(delta.content for delta in deltas) == content
        else:
            parser.feed(text)
            parser.finish()
        assert (parser.message.reasoning, parser.message.content) == (reasoning, content)


def test_reasoning_format_none_leaves_the_text_alone() -> None:
    dialect = Dialect("generic", "hermes", None, "<think>", "</think>", tags=THINK)
    plan = ChatPlan("", "<think>", dialect, extract_reasoning=False, thinking_open=True)
    parser = plan.parser()
    parser.feed("plan</think>answer")
    parser.finish()
    assert (parser.message.reasoning, parser.message.content) == ("", "plan</think>answer")


def test_whether_the_prompt_opened_the_thinking() -> None:
    assert thinking_is_open("<|im_start|>assistant\n<think>\n", THINK)
    assert not thinking_is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not thinking_is_open("<|im_start|>assistant\n", THINK)


def test_harmony_turns() -> None:
    """The format's published examples: analysis, preamble, call; then analysis and final."""
    parser = ChatPlan("", "<|start|>assistant", HARMONY, tools=TOOLS).parser()
    deltas = feed_by_character(
        parser,
        "<|channel|>analysis<|message|>Need code.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"n":1}<|call|>',
    )
    assert parser.message.reasoning == "Need code."
    assert parser.message.content == "One moment."
    assert calls(parser) == [("run", {"n": 1})]
    assert not any("<|" in delta.content + delta.reasoning + delta.arguments for delta in deltas)
    parser = ChatPlan("", "<|start|>assistant", HARMONY).parser()
    parser.feed("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>")
    parser.finish()
    assert (parser.message.reasoning, parser.message.content) == ("Hm.", "Hello")


def test_kimi_calls_without_closing_its_thinking() -> None:
    """llama.cpp's note on the model: it may begin a call inside its thinking; the marker ends that."""
    call = "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>" + '{"n": 1}<|tool_call_end|>'
    for opening in ("<|tool_calls_section_begin|>", ""):
        parser = ChatPlan("", "<think>", KIMI_K2, tools=TOOLS, thinking_open=True).parser()
        feed_by_character(parser, "Run it." + opening + call)
        assert parser.message.reasoning == "Run it."
        assert (parser.message.content, calls(parser)) == ("", [("run", {"n": 1})])
        assert parser.message.tool_calls[0].id == "functions.run:0"
