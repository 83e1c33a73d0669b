"""A Jinja environment for chat templates: they come out of files from the internet, so they are hostile input.

On top of Jinja's sandbox (no attribute that leads to Python's internals), a render is bounded in steps, in time and
in the size of every string it builds. Steps are counted in loops and calls: the parsed template is rewritten so that
every `for` goes through `_tick` and every `~` through `_concat`. Filters and globals follow llama.cpp's Jinja where
it differs from Jinja2 (`default` also replaces none, filters accept undefined).
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import ChainableUndefined, Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ftgguf.chat.caps import RenderStopped, WatchedList, WatchedStr, mark_all

MAX_STEPS = 3_000_000
MAX_CHARACTERS = 64 * 1024 * 1024
MAX_SECONDS = 10.0
CHECK_EVERY = 1024
"""Steps between two looks at the clock."""


class RenderLimit(TemplateError, RenderStopped):
    """A template ran too long or built too much."""


class Raised(TemplateError):
    """The template itself raised (`raise_exception`)."""


class Budget:
    """What one render may still use."""

    __slots__ = ("_deadline", "_steps")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps % CHECK_EVERY == 0:
            if self._steps > MAX_STEPS:
                raise RenderLimit(f"the chat template took more than {MAX_STEPS} steps")
            if time.monotonic() > self._deadline:
                raise RenderLimit(f"the chat template ran longer than {MAX_SECONDS:.0f} s")

    @staticmethod
    def size(length: int) -> None:
        if length > MAX_CHARACTERS:
            raise RenderLimit(f"the chat template built a string of more than {MAX_CHARACTERS} characters")


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` (Hugging Face's marker of assistant text): renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class Missing(ChainableUndefined):
    """llama.cpp's undefined: an attribute of it is undefined too, it is empty text, and nothing beside text."""

    def __add__(self, other: Any) -> Any:
        return other

    def __radd__(self, other: Any) -> Any:
        return other


class ChatEnvironment(SandboxedEnvironment):
    """The environment of one template; not re-entrant, because its budget is that of the running render."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            cache_size=0,
            undefined=Missing,
        )
        self.budget = Budget()
        self.filters = {name: self._bounded(function) for name, function in self.filters.items()}
        self.filters |= {
            "tojson": tojson,
            "default": default,
            "d": default,
            "items": items,
            "safe": str,
            "string": string,
            "_tick": self._tick,
            "_concat": self._concat,
        }
        self.tests["string"] = is_string
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(value: Any, *arguments: Any, **named: Any) -> Any:
            if any(isinstance(a, int) and a > MAX_CHARACTERS for a in (*arguments, *named.values())):
                raise RenderLimit("a filter of the chat template was asked for too much")
            if function is do_format:
                _check_widths(str(value))
            result = function(value, *arguments, **named)
            if isinstance(result, Iterator):
                result = list(self._tick(result))  # llama.cpp's filters give lists, which templates print as JSON
            elif isinstance(result, str):
                self.budget.size(len(result))
            return result

        return call

    def _tick(self, iterable: Any) -> Iterator[Any]:
        step = self.budget.step
        for item in iterable:
            step()
            yield item

    def _concat(self, parts: list[Any]) -> str:
        texts = [str(part) for part in parts]
        self.budget.step()
        self.budget.size(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def _range(*bounds: int) -> range:
        result = range(*bounds)
        if len(result) > MAX_STEPS:
            raise RenderLimit(f"range() of more than {MAX_STEPS} in the chat template")
        return result

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        """Every call of a template passes here; sizes asked of string methods are bounded before they run."""
        self.budget.step()
        if isinstance(getattr(function, "__self__", None), str):
            if any(isinstance(a, int) and a > MAX_CHARACTERS for a in (*arguments, *named.values())):
                raise RenderLimit("a string method of the chat template was asked for too much")
            if getattr(function, "__name__", "") == "replace" and len(arguments) >= 2:
                text, old, new = function.__self__, str(arguments[0]), str(arguments[1])
                self.budget.size((text.count(old) if old else len(text) + 1) * len(new))
            if getattr(function, "__name__", "") == "join" and arguments and isinstance(arguments[0], list):
                self.budget.size(sum(len(str(a)) + len(function.__self__) for a in arguments[0]))
        result = super().call(context, function, *arguments, **named)
        if isinstance(result, str):
            self.budget.size(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` and `format_map`, wherever the template reaches for them."""
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _check_widths(text)
        return super().wrap_str_format(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            self.budget.size(len(left) + len(right))
        elif operator == "*":
            text, count = (left, right) if isinstance(left, str | list) else (right, left)
            if isinstance(text, str | list) and isinstance(count, int):
                self.budget.size(len(text) * max(count, 0))
            elif isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 256:
                raise RenderLimit("a number of the chat template grew too large")
        elif operator == "**" and (abs(right) > 64 or abs(left) > 1 << 32):
            raise RenderLimit("a power in the chat template is too large")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("string formatting by % is not available in chat templates")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then route loops and concatenations through the budget."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_tick", [], [], None, None, lineno=loop.lineno)
        _replace_concat(tree)
        return tree


def _check_widths(text: str) -> None:
    """Refuse a format string that asks for a field of a million characters or more."""
    if re.search(r"\d{7}", text):
        raise RenderLimit("a format string of the chat template asks for too wide a field")


def _replace_concat(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    value[index] = _concat_filter(item)
        elif isinstance(value, nodes.Node):
            setattr(node, field, _concat_filter(value))


def _concat_filter(node: nodes.Node) -> nodes.Node:
    _replace_concat(node)
    if isinstance(node, nodes.Concat):
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)
    return node


# -------------------------------------------------------------------------------------- filters and globals


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's and llama.cpp's `tojson` write it: no HTML escapes, `", "` and `": "` between items."""
    mark_all(value)
    separators = tuple(separators) if separators else None
    looked_into = getattr(value, "as_array", False)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_undefined_as_null,
    )
    if isinstance(value, WatchedList):
        value.as_array = looked_into  # printing a list as JSON is no sign that its parts are understood
    return text


def _undefined_as_null(value: Any) -> Any:
    if isinstance(value, Undefined):
        return None
    raise TypeError(f"{type(value).__name__} is not JSON")


def default(value: Any, fallback: Any = "", boolean: bool = False) -> Any:
    """llama.cpp: none counts as missing too."""
    missing = not value if boolean else isinstance(value, Undefined) or value is None
    return fallback if missing else value


def string(value: Any) -> str:
    mark_all(value)
    return str(value)


def is_string(value: Any) -> bool:
    if isinstance(value, WatchedStr | WatchedList):
        value.asked_string = True
    return isinstance(value, str)


def items(value: Any) -> list[tuple[Any, Any]]:
    if value is None or isinstance(value, Undefined):
        return []
    return list(value.items())


def raise_exception(message: str) -> None:
    raise Raised(str(message))


def strftime_now(format: str) -> str:
    """The local time in `format` (a template that prints it is different every day, or every second)."""
    if len(format) > 100:
        raise RenderLimit("strftime_now: the format is too long")
    return time.strftime(format)
