"""Grammars of tool calls that are no JSON: a tool's schema in Gemma 4's brace notation and in LFM2's Python calls.

Required arguments come first, in the order of the schema, then the optional ones; names, types, `enum` and `const` hold
at every depth. What the notation cannot say by itself (lengths, patterns, ranges) is left to the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ftgguf.chat.tools.literals import QUOTE

MAX_DEPTH = 24
"""Deeper parts of a schema are any value."""

_NUMBER = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,3})?"
_SHARED = [
    f"NUMBER: /{_NUMBER}/",
    "INTEGER: /-?(0|[1-9][0-9]{0,18})/",
    "any_value: string | NUMBER | BOOL | NULL | any_array | any_object",
    'any_array: "[" SPACE (any_value (SPACE "," SPACE any_value)*)? SPACE "]"',
    'any_object: "{" SPACE (any_pair (SPACE "," SPACE any_pair)*)? SPACE "}"',
    "SPACE: /[ \\n]{0,2}/",
]


class Notation:
    """One notation's rules for values. `text(value)` is the Lark expression of exactly that string."""

    def __init__(
        self, rules: list[str], key: Callable[[str], str], text: Callable[[str], str], words: dict[Any, str]
    ) -> None:
        self.rules = [*rules, *_SHARED]
        self.key = key
        self.text = text
        self._words = words
        self._root: dict[str, Any] = {}
        self._refs: dict[str, str] = {}

    def add(self, expression: str) -> str:
        """A new rule of `expression`; its name."""
        name = f"v_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def arguments(self, schema: dict[str, Any], key: Callable[[str], str], any_pair: str) -> str:
        """The members of a tool's arguments, without the brackets around them; '""' where there are none."""
        self._root, self._refs = schema, {}
        return self._members(schema, key, any_pair, 0)

    # ------------------------------------------------------------------------------------------------- values

    def value(self, schema: Any, depth: int = 0) -> str:
        """The Lark expression of a value of `schema`."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return "any_value"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), depth)
        if "const" in schema:
            return self._exactly(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return "(" + " | ".join(map(self._exactly, schema["enum"])) + ")"
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return "(" + " | ".join(self.value(each, depth + 1) for each in schema[key]) + ")"
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return "(" + " | ".join(self._of_type(each, schema, depth) for each in kind) + ")"
        return self._of_type(kind, schema, depth)

    def _of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> str:
        simple = {"string": "string", "number": "NUMBER", "integer": "INTEGER", "boolean": "BOOL", "null": "NULL"}
        if kind in simple:
            return simple[kind]
        if kind == "array":
            item = self.add(self.value(schema.get("items"), depth + 1))
            return f'"[" SPACE ({item} (SPACE "," SPACE {item})*)? SPACE "]"'
        if kind == "object" or isinstance(schema.get("properties"), dict):
            return f'"{{" SPACE {self._members(schema, self.key, "any_pair", depth)} SPACE "}}"'
        return "any_value"

    def _reference(self, target: str, depth: int) -> str:
        if target not in self._refs:
            found: Any = self._root
            for part in target.removeprefix("#").split("/")[1:] if target.startswith("#") else [target]:
                found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
            name = self._refs[target] = f"ref_{len(self.rules)}"
            at = len(self.rules)
            self.rules.append("")
            self.rules[at] = f"{name}: {self.value(found, depth + 1)}"
        return self._refs[target]

    def _exactly(self, value: Any) -> str:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool) or value is None:
            return self._words[value]
        if isinstance(value, int | float):
            return json.dumps(json.dumps(value))
        return "any_array" if isinstance(value, list) else "any_object"

    def _members(self, schema: dict[str, Any], key: Callable[[str], str], any_pair: str, depth: int) -> str:
        """Required members in order, then any of the optional ones in order, then others where they are allowed."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        wanted = schema.get("required")
        wanted = wanted if isinstance(wanted, list) else []
        pairs = {
            name: self.add(f"{opening} {self.value(part, depth + 1)}")
            for name, part in properties.items()
            if (opening := key(name))
        }
        first = [pairs[name] for name in properties if name in wanted and name in pairs]
        rest = [pairs[name] for name in properties if name not in wanted and name in pairs]
        more = "" if properties and not schema.get("additionalProperties") else f'(SPACE "," SPACE {any_pair})*'
        comma = ' SPACE "," SPACE '
        tails = [f"({comma}{name})?" for name in rest]
        if first:
            return " ".join((comma.join(first), *tails, more))
        starts = [" ".join((name, *tails[i + 1 :], more)) for i, name in enumerate(rest)]
        starts += [f"{any_pair} {more}"] if more else []
        return "(" + " | ".join(starts) + ")?" if starts else '""'


def gemma(lit: Callable[[str], str], quote_is_token: bool) -> Notation:
    """Gemma 4: `{key:<|"|>text<|"|>,n:1}`; `lit` writes a text as Lark, control tokens as such."""
    quote = lit(QUOTE)
    if quote_is_token:
        string = [f"string: {quote} TEXT {quote}", "TEXT: /(?s:.*)/"]
    else:
        string = [f"string: {quote} text_and_quote", f"text_and_quote[suffix={json.dumps(QUOTE)}]: /(?s:.*)/"]
    rules = [*string, 'BOOL: "true" | "false"', 'NULL: "null"', 'any_pair: KEY ":" SPACE any_value',
             "KEY: /[^:{}\\[\\],<\\s]([^:{}\\[\\],<\\n]{0,60}[^:{}\\[\\],<\\s])?/"]  # fmt: skip
    words = {True: '"true"', False: '"false"', None: '"null"'}

    def key(name: str) -> str:
        plain = name and not set(name) & set(':{}[],<\n"') and name == name.strip()
        return f'{json.dumps(name)} ":" SPACE' if plain else ""

    return Notation(rules, key, lambda text: f"{quote} {lit(text)} {quote}", words)


def python() -> Notation:
    """LFM2: Python literals, with JSON's words as well."""
    escape = r"\\[\"'\\nrt]"
    rules = [
        f"string: DOUBLE | SINGLE\nDOUBLE: /\"([^\"\\\\\\n]|{escape})*\"/\nSINGLE: /'([^'\\\\\\n]|{escape})*'/",
        'BOOL: "True" | "False" | "true" | "false"',
        'NULL: "None" | "null"',
        'any_pair: string SPACE ":" SPACE any_value',
        'any_argument: /[A-Za-z_][A-Za-z0-9_]{0,60}/ "=" any_value',
    ]
    words = {True: '("True" | "true")', False: '("False" | "false")', None: '("None" | "null")'}

    def text(value: str) -> str:
        forms = sorted({json.dumps(value, ensure_ascii=False), repr(value)})
        return "(" + " | ".join(json.dumps(form, ensure_ascii=False) for form in forms) + ")"

    return Notation(rules, lambda name: f'{text(name)} ":" SPACE', text, words)


def gemma_rules(
    tools: list[dict[str, Any]], lit: Callable[[str], str], quote_is_token: bool, parallel: bool
) -> list[str]:
    """Rule `calls` of Gemma 4: `<|tool_call>call:NAME{...}<tool_call|>`."""
    notation, names = gemma(lit, quote_is_token), []
    for tool in tools:
        members = notation.arguments(_parameters(tool), notation.key, "any_pair")
        names.append(notation.add(f'{json.dumps(tool["function"]["name"])} "{{" SPACE {members} SPACE "}}"'))
    block = f'{lit("<|tool_call>")} "call:" one {lit("<tool_call|>")}'
    more = f" ({block})*" if parallel else ""
    return [f"calls: {block}{more}", "one: " + " | ".join(names), *notation.rules]


def python_rules(tools: list[dict[str, Any]], lit: Callable[[str], str], parallel: bool) -> list[str]:
    """Rule `calls` of LFM2: `<|tool_call_start|>[NAME(key=value)]<|tool_call_end|>`."""
    notation, names = python(), []

    def key(name: str) -> str:
        return f'"{name}="' if name.isidentifier() else ""

    for tool in tools:
        members = notation.arguments(_parameters(tool), key, "any_argument")
        names.append(notation.add(f'{json.dumps(tool["function"]["name"])} "(" {members} ")"'))
    more = ' ("," SPACE one)*' if parallel else ""
    calls = f'calls: {lit("<|tool_call_start|>")} "[" one{more} "]" {lit("<|tool_call_end|>")}'
    return [calls, "one: " + " | ".join(names), *notation.rules]


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool["function"].get("parameters")
    return parameters if isinstance(parameters, dict) else {}
