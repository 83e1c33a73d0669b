"""Tool-call parsers, one per wire format; `tool_parser` picks by the dialect's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftgguf.chat.parser import OutputParser, PlainParser
from ftgguf.chat.tools.harmony import HarmonyParser
from ftgguf.chat.tools.literals import LiteralParser, gemma_calls, python_calls
from ftgguf.chat.tools.named_json import NamedFormat, NamedJsonParser, kimi_name, mistral_name, solar_name
from ftgguf.chat.tools.tagged_args import MarkupFormat, MarkupParser
from ftgguf.chat.tools.tagged_json import TaggedFormat, TaggedJsonParser

Tools = list[dict[str, Any]]
DSML = "｜DSML｜"

TAGGED: dict[str, TaggedFormat] = {
    "hermes": TaggedFormat(("<tool_call>",), "</tool_call>"),
    "generic": TaggedFormat(("<tool_call>",), "</tool_call>", bare=True),
    "mistral_list": TaggedFormat(("[TOOL_CALLS]",), "", list=True, keep_ids=True),
    "gigachat_31": TaggedFormat(("<|function_call|>",), ""),
    "nemotron": TaggedFormat(("<TOOLCALL>",), "</TOOLCALL>", list=True),
    "granite": TaggedFormat(("<|tool_call|>",), "", list=True),
    "apertus": TaggedFormat(("<|tools_prefix|>",), "<|tools_suffix|>", list=True, key_is_name=True),
    "tool_calls_list": TaggedFormat(("<tool_calls>",), "</tool_calls>", list=True),
    "cohere": TaggedFormat(("<|START_ACTION|>",), "<|END_ACTION|>", list=True, keep_ids=True),
    "functools": TaggedFormat(("functools",), "", list=True),
    "llama3": TaggedFormat(("<|python_tag|>", '{"name"'), "", bare=True),
    "gigachat": TaggedFormat(("<|message_sep|>\n\nfunction call<|role_sep|>\n",), ""),
}

NAMED: dict[str, NamedFormat] = {
    "deepseek": NamedFormat(
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁sep｜>",),
        ("<｜tool▁call▁end｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": NamedFormat(
        ("<|tool_call_begin|>",),
        ("<|tool_call_argument_begin|>",),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        kimi_name,
    ),
    "deepseek_r1": NamedFormat(
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
        ("\n",),
        ("<｜tool▁call▁end｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        fence=True,
    ),
    "solar": NamedFormat(
        ("<|tool_call:begin|>",), ("<|tool_call:args|>",), ("<|tool_call:end|>",), ("<|tool_calls|>",), solar_name
    ),
    "function_tag": NamedFormat(("<function=",), (">",), ("</function>",)),
    "mistral": NamedFormat(("[TOOL_CALLS]",), ("[ARGS]", "{"), name=mistral_name),
    "functionary": NamedFormat((">>>",), ("\n",), plain="all"),
}

_INVOKE = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")
MARKUP: dict[str, MarkupFormat] = {
    "qwen3_coder": MarkupFormat(
        "<function=", (">",), ("</function>",), "<parameter=", ">", "</parameter>",
        sections=("<tool_call>",), section_close=("</tool_call>",), trim=True,
    ),
    "seed": MarkupFormat(
        "<function=", (">",), ("</function>",), "<parameter=", ">", "</parameter>",
        sections=("<seed:tool_call>",), section_close=("</seed:tool_call>",),
    ),
    "glm": MarkupFormat(
        "<tool_call>", ("<arg_key>", "</tool_call>", "\n"), ("</tool_call>",), "<arg_key>", "</arg_key>",
        "</arg_value>", "<arg_value>",
    ),
    "minimax_m2": MarkupFormat(
        "<invoke name=", (">",), ("</invoke>",), "<parameter name=", ">", "</parameter>",
        sections=("<minimax:tool_call>",), section_close=("</minimax:tool_call>",),
    ),
    "deepseek_dsml": MarkupFormat(
        f'<{DSML}invoke name="', ('">',), (f"</{DSML}invoke>",), f'<{DSML}parameter name="', ">",
        f"</{DSML}parameter>", sections=_INVOKE, section_close=tuple("</" + tag[1:] for tag in _INVOKE),
        attributes=True, trim_content=True,
    ),
    "minicpm5": MarkupFormat(
        '<function name="', ('">',), ("</function>",), '<param name="', '">', "</param>", cdata=True,
    ),
    "hy3": MarkupFormat(
        "<tool_call:opensource>", ("<tool_sep:opensource>",), ("</tool_call:opensource>",), "<arg_key:opensource>",
        "</arg_key:opensource>", "</arg_value:opensource>", "<arg_value:opensource>",
        sections=("<tool_calls:opensource>",), section_close=("</tool_calls:opensource>",),
    ),
    "muse": MarkupFormat(
        '<atem:invoke name="', ('">',), ("</atem:invoke>",), '<atem:parameter name="', ">", "</atem:parameter>",
        sections=("<atem:function_calls>",), section_close=("</atem:function_calls>",), attributes=True,
    ),
}  # fmt: skip

OTHER: dict[str, Callable[[Tools], OutputParser]] = {
    "lfm2": lambda tools: LiteralParser(tools, "<|tool_call_start|>", "<|tool_call_end|>", python_calls),
    "gemma4": lambda tools: LiteralParser(tools, "<|tool_call>", "<tool_call|>", gemma_calls),
}


def tool_parser(name: str, tools: Tools, extract_reasoning: bool) -> OutputParser:
    """A parser of format `name` for the request's `tools` (empty: nothing is a call)."""
    if name == "harmony":
        return HarmonyParser(tools, extract_reasoning)
    if name == "functionary":  # the prompt ends in `>>>`, so the answer begins with a recipient
        return NamedJsonParser(tools, NAMED[name], start_open=True)
    if not tools:
        return PlainParser()
    if name in TAGGED:
        return TaggedJsonParser(tools, TAGGED[name])
    if name in NAMED:
        return NamedJsonParser(tools, NAMED[name])
    if name in MARKUP:
        return MarkupParser(tools, MARKUP[name])
    if name in OTHER:
        return OTHER[name](tools)
    return TaggedJsonParser(tools, TAGGED["generic"])
