"""Calls written as literals: LFM2's Python calls and Gemma 4's brace notation. Short texts, so they are parsed whole.

A call is held until its end marker; what does not parse is passed on as text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from ftgguf.chat.tools.machine import Machine, State

Calls = list[tuple[str, str]]
"""(name, arguments as JSON)."""


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def python_calls(text: str) -> Calls | None:
    """`[name(arg="x", n=1), other()]` as calls, or None. JSON's true, false and null are names Python lacks.

    Models write line breaks into their strings, which Python does not allow; those are escaped and tried again.
    """
    found = _python_calls(text)
    return found if found is not None or "\n" not in text.strip() else _python_calls(text.strip().replace("\n", "\\n"))


def _python_calls(text: str) -> Calls | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls: Calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args:
                return None
            arguments = {keyword.arg or "": _literal(keyword.value) for keyword in node.keywords}
            calls.append((ast.unparse(node.func), _compact(arguments)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.Dict):
        return {str(_literal(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    return ast.literal_eval(node)


QUOTE = '<|"|>'
_TOKEN = re.compile(
    r"\s*(?:(?P<punct>[{}\[\]:,])|(?P<word>[^{}\[\]:,\s<][^{}\[\]:,<]*)|(?P<quote><\|\"\|>))", re.DOTALL
)


def gemma_calls(text: str) -> Calls | None:
    """`call:NAME{key:<|"|>text<|"|>,n:1}` as one call, or None."""
    found = re.match(r"\s*call:([^{\s]+)\s*", text)
    if not found:
        return None
    try:
        value, _ = _gemma_value(text, found.end())
    except (ValueError, RecursionError):
        return None
    return [(found.group(1), _compact(value))]


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    token = _TOKEN.match(text, at)
    if token is None:
        raise ValueError("no value")
    if token["quote"]:
        end = text.index(QUOTE, token.end())
        return text[token.end() : end], end + len(QUOTE)
    if token["word"]:
        return _scalar(token["word"].strip()), token.end()
    if token["punct"] == "[":
        items: list[Any] = []
        at = token.end()
        while not (after := re.compile(r"\s*\]").match(text, at)):
            item, at = _gemma_value(text, at)
            items.append(item)
            at = _skip_comma(text, at)
        return items, after.end()
    if token["punct"] != "{":
        raise ValueError("unexpected mark")
    out: dict[str, Any] = {}
    at = token.end()
    while not (after := re.compile(r"\s*\}").match(text, at)):
        key, at = _gemma_value(text, at)
        colon = re.compile(r"\s*:").match(text, at)
        if colon is None:
            raise ValueError("no colon")
        out[str(key)], at = _gemma_value(text, colon.end())
        at = _skip_comma(text, at)
    return out, after.end()


def _skip_comma(text: str, at: int) -> int:
    comma = re.compile(r"\s*,").match(text, at)
    return comma.end() if comma else at


def _scalar(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


class LiteralParser(Machine):
    """Calls between `open` and `close`, read by `parse` as a whole."""

    def __init__(
        self, tools: list[dict[str, Any]], open: str, close: str, parse: Callable[[str], Calls | None]
    ) -> None:
        super().__init__(tools)
        self._openers = (open,)
        self._close = close
        self._parse = parse
        self._text = ""

    def _opened(self, tag: str) -> State:
        self._text = ""
        return self._in_call

    def _hold(self, text: str) -> None:
        self._text += text

    def _in_call(self) -> bool:
        if self._until((self._close,), self._hold) is None:
            return False
        if self._report():
            return self._back_to_content()
        return self._not_a_call(self._openers[0] + self._text + self._close)

    def _report(self) -> bool:
        calls = self._parse(self._text)
        for name, arguments in calls or ():
            self._open_call(name)
            self._arguments(arguments)
        return bool(calls)

    def _finish(self) -> None:
        if self._state == self._in_call:
            self._text += self._buffer
            self._buffer = ""
            if not self._report():
                self._content(self._openers[0] + self._text)
        super()._finish()
