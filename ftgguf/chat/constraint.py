"""Grammars over a model's own call format: what makes tool calls well-formed, and `tool_choice: required` true.

With `auto` the grammar sleeps until a call's opening marker appears; with `required` it begins at once (after the
thinking). JSON arguments follow the tool's schema; a schema that does not compile is replaced by "any object", so that
one tool's exotic keyword never fails a request that only offers it. Markup arguments (XML-like) are left free: forcing
them into a JSON string's form makes models cut values short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ftgguf.chat.notation import gemma_rules, python_rules
from ftgguf.chat.tools import MARKUP, NAMED, TAGGED
from ftgguf.chat.tools.literals import QUOTE
from ftgguf.chat.tools.named_json import NamedFormat
from ftgguf.chat.tools.tagged_args import MarkupFormat
from ftgguf.chat.tools.tagged_json import TaggedFormat
from ftgguf.engine.messages import Grammar

ANY_OBJECT = {"type": "object"}
_SPACE = "SPACE: /[ \\n]{0,2}/"
_JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"


class Literals:
    """Texts as Lark: control tokens of the vocabulary, which plain strings never match, become token references."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        longest = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest))) if longest else None

    def __call__(self, text: str) -> str:
        """A Lark expression that matches exactly `text`."""
        out, position = [], 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            if found.start() > position:
                out.append(json.dumps(text[position : found.start()]))
            out.append(f"<[{self._control[found.group()]}]>")
            position = found.end()
        if position < len(text):
            out.append(json.dumps(text[position:]))
        return " ".join(out) or '""'

    def is_token(self, text: str) -> bool:
        return text in self._control


@lru_cache(maxsize=256)
def _compiles(kind: str, text: str) -> str:
    """Empty if the grammar compiles, else why not."""
    from ftgguf.engine.grammar_source import GrammarError, compile_grammar

    try:
        compile_grammar(Grammar(kind=kind, text=text))
    except GrammarError as error:
        return str(error)
    return ""


def _arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; any object where there is none, or none that compiles."""
    parameters = tool["function"].get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        return ANY_OBJECT
    closed = closed_schema(parameters)
    return ANY_OBJECT if _compiles("json_schema", json.dumps(closed)) else closed


def closed_schema(schema: Any, depth: int = 0) -> Any:
    """`schema` with llama.cpp's reading of silence: an object that lists properties has no others unless it says so.

    Parts of `allOf` are left open, because each of them must accept the properties of the others.
    """
    if depth > 64:
        return schema
    if isinstance(schema, list):
        return [closed_schema(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: value if key in ("allOf", "const", "enum", "default", "examples") else closed_schema(value, depth + 1)
        for key, value in schema.items()
    }
    listed = isinstance(out.get("properties"), dict) and out.get("type", "object") == "object"
    if listed and not {"additionalProperties", "allOf", "patternProperties", "unevaluatedProperties"} & set(out):
        out["additionalProperties"] = False
    return out


def _json_rule(schema: Any) -> str:
    options = {"whitespace_pattern": _JSON_SPACE, "lenient": True}
    clean = {k: v for k, v in schema.items() if k not in ("$schema", "x-guidance")}
    return "%json " + json.dumps({**clean, "x-guidance": options})


def _tagged(format: TaggedFormat, tools: list[dict[str, Any]], lit: Literals, parallel: bool) -> list[str]:
    rules, names = [], []
    before = '(ID SPACE "," SPACE)? ' if format.keep_ids else ""
    after = '(SPACE "," SPACE ID)? ' if format.keep_ids else ""
    for index, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        names.append(f"call_{index}")
        if format.key_is_name:
            rules.append(f'call_{index}: "{{" SPACE {json.dumps(name)} SPACE ":" SPACE args_{index} SPACE "}}"')
        else:
            key, value = ("tool_name", "parameters") if format.keep_ids and "START_ACTION" in format.open[0] else (
                "name", "parameters" if "python_tag" in format.open[0] else "arguments"
            )  # fmt: skip
            rules.append(
                f'call_{index}: "{{" SPACE {before}"\\"{key}\\"" SPACE ":" SPACE {json.dumps(name)} '
                f'SPACE "," SPACE "\\"{value}\\"" SPACE ":" SPACE args_{index} {after}SPACE "}}"'
            )
        rules.append(f"args_{index}: {_json_rule(_arguments_schema(tool))}")
    one = "one: " + " | ".join(names)
    id_rule = 'ID: /"(id|tool_call_id)"[ ]?:[ ]?"[A-Za-z0-9_-]{1,40}"/'
    more = ' (SPACE "," SPACE one)*' if parallel else ""
    closing = f" SPACE {lit(format.close)}" if format.close else ""
    opening = lit(format.open[0])
    if format.list:
        calls = f'calls: {opening} SPACE "[" SPACE one{more} SPACE "]"{closing}'
    elif format.bare and not format.close:
        calls = f"calls: ({opening})? one"
    else:
        block = f"{opening} SPACE one{closing}"
        calls = f"calls: {block}" + (f" (SPACE {block})*" if parallel else "")
    return [calls, one, *rules, _SPACE, id_rule]


def _named(format: NamedFormat, tools: list[dict[str, Any]], lit: Literals, parallel: bool) -> list[str] | None:
    if format.plain or (len(format.separators) > 1 and "{" not in format.separators):
        return None
    separator = format.separators[0]
    rules, names = [], []
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if "argument_begin" in separator:  # Kimi K2's ids
            header = json.dumps(f"functions.{name}:") + " /[0-9]{1,3}/"
        else:
            header = json.dumps(name)
        fence = '"```json\\n"' if format.fence else '""'
        after = '"\\n```"' if format.fence else '""'
        close = lit(format.close[0]) if format.close else '""'
        names.append(f"call_{index}")
        rules.append(
            f"call_{index}: {lit(format.open[0])} {header} {lit(separator)} {fence} args_{index} {after} {close}"
        )
        rules.append(f"args_{index}: {_json_rule(_arguments_schema(tool))}")
    section = f"({lit(format.sections[0])} SPACE)? " if format.sections else ""
    end = f" (SPACE {lit(format.sections[1])})?" if len(format.sections) > 1 else ""
    more = " (SPACE one)*" if parallel else ""
    return [f"calls: {section}one{more}{end}", "one: " + " | ".join(names), *rules, _SPACE]


def _markup(format: MarkupFormat, tools: list[dict[str, Any]], lit: Literals) -> list[str]:
    """The opening of a call to one of the tools; what follows is free."""
    section = f"{lit(format.sections[0])} SPACE " if format.sections else ""
    end = "" if format.name_end[0] == format.key_open else " " + lit(format.name_end[0])
    names = " | ".join(json.dumps(tool["function"]["name"]) for tool in tools)
    return [f"calls: {section}{lit(format.open)} name{end} REST", f"name: {names}", _SPACE, "REST: /(?s:.*)/"]


def _functionary(tools: list[dict[str, Any]], parallel: bool) -> list[str]:
    """`NAME`, a line break and JSON; the prompt ends in the first call's `>>>`."""
    names, rules = [], []
    for index, tool in enumerate(tools):
        names.append(f"call_{index}")
        rules.append(f"call_{index}: {json.dumps(tool['function']['name'] + chr(10))} args_{index}")
        rules.append(f"args_{index}: {_json_rule(_arguments_schema(tool))}")
    more = ' (SPACE ">>>" one)*' if parallel else ""
    return [f"calls: one{more}", "one: " + " | ".join(names), *rules, _SPACE]


def _harmony(tools: list[dict[str, Any]], lit: Literals) -> list[str]:
    calls, rules = [], []
    for index, tool in enumerate(tools):
        header = lit("<|channel|>") + f' "commentary to=functions.{tool["function"]["name"]} "'
        calls.append(f"call_{index}")
        rules.append(f'call_{index}: {header} ({lit("<|constrain|>")})? "json" {lit("<|message|>")} args_{index}')
        rules.append(f"args_{index}: {_json_rule(_arguments_schema(tool))}")
    thought = f'({lit("<|channel|>")} "analysis" {lit("<|message|>")} TEXT {lit("<|end|><|start|>")} "assistant")?'
    return [f"calls: {thought} one", "one: " + " | ".join(calls), *rules, "TEXT: /(?s:.*)/"]


def thought_rules(tags: tuple[str, ...], lit: Literals) -> list[str]:
    """Rule `thought`: a thinking block that the model may open by itself before what is constrained."""
    opening, closing = tags[0], tags[1]
    if lit.is_token(closing):
        return [f"thought: {lit(opening)} THOUGHT {lit(closing)} WHITE", "THOUGHT: /(?s:.*)/", "WHITE: /[ \\n\\t]*/"]
    return [
        f"thought: {lit(opening)} inner WHITE",
        f"inner[suffix={json.dumps(closing)}]: /(?s:.*)/",
        "WHITE: /[ \\n\\t]*/",
    ]


def _lark(rules: list[str]) -> str:
    from ftgguf.engine.gbnf import OPTIONS

    return "\n".join((OPTIONS, *rules)) + "\n"


def schema_grammar(schema: Any, after: str, thought: tuple[str, ...], control: Mapping[str, int]) -> Grammar:
    """The answer is a document of `schema`. `after`: the tag that ends a thinking block the prompt has opened;
    `thought`: tags of one that the model may open itself. A schema that does not compile fails its request, in the
    engine."""
    schema = closed_schema(schema)
    text = json.dumps(schema)
    if not thought or not isinstance(schema, dict) or _compiles("json_schema", text):
        return Grammar(kind="json_schema", text=text, after=after)
    lit = Literals(control)
    lark = _lark(["start: thought? document", *thought_rules(thought, lit), f"document: {_json_rule(schema)}"])
    if _compiles("lark", lark):
        return Grammar(kind="json_schema", text=text, after=after)
    return Grammar(kind="lark", text=lark)


def tool_grammar(
    format: str,
    tools: list[dict[str, Any]],
    choice: str,
    forced: str,
    parallel: bool,
    *,
    after: str = "",
    thought: tuple[str, ...] = (),
    control: Mapping[str, int] | None = None,
) -> Grammar | None:
    """The constraint of a request with `tools`, or None where the format's calls are left free.

    `forced`: the one tool that may be called. Raises ValueError when `required` cannot be kept.
    """
    lit = Literals(control or {})
    chosen = [tool for tool in tools if not forced or tool["function"]["name"] == forced]
    if not chosen:
        raise ValueError(f"tool_choice names a function that is not in tools: {forced}")
    required = choice == "required"
    rules, triggers = _calls(format, chosen, lit, parallel, required)
    if rules is None:
        if required:
            raise ValueError(f'tool_choice "required" is not supported for the tool format "{format}" of this model')
        return None
    if required:
        head = "start: thought? calls" if thought else "start: calls"
        rules = [head, *rules, *(thought_rules(thought, lit) if thought else ())]
    else:
        rules = ["start: calls SPACE", *rules]
    lark = _lark(rules)
    fault = _compiles("lark", lark)
    if fault:
        if required:
            raise ValueError(f"the tools cannot be made a grammar: {fault}")
        return None
    if required:
        return Grammar(kind="lark", text=lark, after=after)
    return Grammar(kind="lark", text=lark, lazy=True, triggers=triggers, after=after)


def _calls(
    format: str, tools: list[dict[str, Any]], lit: Literals, parallel: bool, required: bool
) -> tuple[list[str] | None, tuple[str, ...]]:
    """(rules that define `calls`, the texts that start one)."""
    if format in TAGGED:
        tagged = TAGGED[format]
        return _tagged(tagged, tools, lit, parallel), tagged.open[:1]
    if format == "gemma4":
        return gemma_rules(tools, lit, lit.is_token(QUOTE), parallel), ("<|tool_call>",)
    if format == "lfm2":
        return python_rules(tools, lit, parallel), ("<|tool_call_start|>",)
    if format == "functionary" and required:
        return _functionary(tools, parallel), ()
    if format in NAMED:
        named = NAMED[format]
        return _named(named, tools, lit, parallel), (named.sections or named.open)[:1]
    if format in MARKUP and required:
        return _markup(MARKUP[format], tools, lit), ()
    if format == "harmony" and required:
        return _harmony(tools, lit), ()
    return None, ()
