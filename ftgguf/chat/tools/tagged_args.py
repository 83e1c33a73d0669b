"""Calls as XML-like markup with one element per argument: Qwen3-Coder, GLM, MiniMax, Seed-OSS, DeepSeek's DSML ...

The arguments become one JSON object, fragment by fragment: a string is escaped as it comes, anything else is passed on
when it is complete. What a value's type is, the tool's schema says; without one a value that is JSON is taken as such.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

from ftgguf.chat.tools.machine import Machine, State


@dataclass(frozen=True, slots=True)
class MarkupFormat:
    """Markers of a family. A call is `open NAME name_end (argument ...) close`; an argument is
    `key_open KEY key_end VALUE value_close`. `sections` surround all calls."""

    open: str
    name_end: tuple[str, ...]
    close: tuple[str, ...]
    key_open: str
    key_end: str
    value_close: str
    value_open: str = ""
    """Between the key and the value (GLM's `<arg_value>`)."""
    sections: tuple[str, ...] = ()
    section_close: tuple[str, ...] = ()
    trim: bool = False
    """One newline on both sides of a value is layout, not part of it."""
    attributes: bool = False
    """The key is followed by attributes: `name="k" string="true">` (DSML)."""
    trim_content: bool = False
    """White space between the text and the calls is layout."""
    cdata: bool = False
    """A value may stand in `<![CDATA[...]]>`."""


CDATA = "<![CDATA["
_WORDS = frozenset(("true", "false", "none"))


def value_kinds(schema: Any, root: Any = None, depth: int = 0) -> set[str]:
    """The JSON types a schema allows; empty: any."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    if "$ref" in schema and isinstance(root, dict):
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return value_kinds(target, root, depth + 1)
    kinds: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key, []) if isinstance(schema.get(key), list) else []:
            kinds |= value_kinds(option, root, depth + 1)
    listed = schema.get("type")
    if isinstance(listed, str):
        kinds.add(listed)
    elif isinstance(listed, list):
        kinds |= {item for item in listed if isinstance(item, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not kinds and isinstance(values, list):
        kinds |= {_json_kind(value) for value in values}
    return kinds


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class MarkupParser(Machine):
    """Reads calls of one `MarkupFormat`."""

    def __init__(self, tools: list[dict[str, Any]], format: MarkupFormat) -> None:
        super().__init__(tools)
        self._format = format
        self._openers = (*format.sections, format.open)
        self._trim_content = format.trim_content
        self._text = ""
        self._key = ""
        self._first = True
        self._streaming = False
        self._value = ""
        self._forced_string: bool | None = None
        self._tag = ""
        self._name = ""
        self._value_close = format.value_close

    def _opened(self, tag: str) -> State:
        self._text, self._tag = "", tag
        return self._in_name if tag == self._format.open else self._in_section

    def _in_section(self) -> bool:
        """After a section's marker: the first call, or it was no section."""
        space = len(self._buffer) - len(self._buffer.lstrip())
        self._tag += self._buffer[:space]
        if not self._skip_space():
            return False
        for marker in self._format.section_close:
            if self._starts(marker):
                self._buffer = self._buffer[len(marker) :]
                return self._back_to_content()
            if self._starts(marker) is None:
                return False
        found = self._starts(self._format.open)
        if found is None:
            return False
        if not found:
            return self._not_a_call(self._tag)
        self._buffer = self._buffer[len(self._format.open) :]
        self._tag += self._format.open
        self._state = self._in_name
        return True

    def _hold(self, text: str) -> None:
        self._text += text

    def _in_name(self) -> bool:
        end = self._until(self._format.name_end, self._hold)
        if end is None:
            return False
        if end in (self._format.key_open, *self._format.close):
            self._buffer = end + self._buffer
        self._name, self._first = self._text.strip().strip('"'), True
        if not self._name or (self._tools and self._name not in self._tools):
            return self._not_a_call(self._tag + self._text + ("" if self._buffer.startswith(end) else end))
        self._open_call(self._name)
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        """Between arguments: the next one, or the end of the call."""
        if not self._skip_space():
            return False
        for marker in self._format.close:
            found = self._starts(marker)
            if found is None:
                return False
            if found:
                self._buffer = self._buffer[len(marker) :]
                self._end_call()
                return True
        found = self._starts(self._format.key_open)
        if found is None:
            return False
        if not found:
            self._buffer = self._buffer[1:]  # stray text between arguments is dropped
            return True
        self._buffer = self._buffer[len(self._format.key_open) :]
        self._text, self._state = "", self._in_key
        return True

    def _end_call(self) -> None:
        self._arguments("{}" if self._first else "}")
        self._state = self._after_call

    def _after_call(self) -> bool:
        """After a call: another one, or the end of the section."""
        if not self._skip_space():
            return False
        for marker in self._format.section_close:
            found = self._starts(marker)
            if found is None:
                return False
            if found:
                self._buffer = self._buffer[len(marker) :]
                return self._back_to_content()
        return self._back_to_content()

    # ------------------------------------------------------------------------------------------ arguments

    def _in_key(self) -> bool:
        if self._until((self._format.key_end,), self._hold) is None:
            return False
        key = self._text
        self._forced_string = None
        if self._format.attributes:
            key, _, rest = key.partition('"')
            self._forced_string = {"true": True, "false": False}.get(rest.partition('string="')[2].rstrip('" '))
        self._key = key.strip().strip('"')
        self._value = ""
        self._arguments(("{" if self._first else ",") + json.dumps(self._key, ensure_ascii=False) + ":")
        self._first = False
        self._streaming = self._is_string() is True
        self._state = self._before_value
        return True

    def _is_string(self) -> bool | None:
        """True: only a string fits; False: never; None: it depends on the text."""
        if self._forced_string is not None:
            return self._forced_string
        parameters = self._tools.get(self._name, {}).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        kinds = value_kinds(schema, parameters)
        if kinds == {"string"}:
            return True
        return None if not kinds or "string" in kinds else False

    def _before_value(self) -> bool:
        if self._format.value_open:
            if not self._skip_space():
                return False
            found = self._starts(self._format.value_open)
            if found is None:
                return False
            if found:
                self._buffer = self._buffer[len(self._format.value_open) :]
        elif self._format.trim:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
        self._value_close = self._format.value_close
        if self._format.cdata:
            found = self._starts(CDATA)
            if found is None:
                return False
            if found:
                self._buffer = self._buffer[len(CDATA) :]
                self._value_close = "]]>" + self._value_close
        if self._streaming:
            self._arguments('"')
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        close = self._value_close
        markers = ("\n" + close, close) if self._format.trim else (close,)
        if self._until(markers, self._emit_string if self._streaming else self._hold_value) is None:
            return False
        if self._streaming:
            self._arguments('"')
        else:
            self._arguments(self._value_json())
        self._state = self._in_body
        return True

    def _emit_string(self, text: str) -> None:
        if text:
            self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _hold_value(self, text: str) -> None:
        self._value += text

    def _value_json(self) -> str:
        text = self._value.strip()
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            if self._is_string() is False:
                try:  # models that print Python where JSON is wanted: True, None, {'a': 1}
                    return json.dumps(ast.literal_eval(text.title() if text.lower() in _WORDS else text))
                except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                    pass
            return json.dumps(self._value, ensure_ascii=False)
        return text

    def _finish(self) -> None:
        if self._state == self._in_name or (self._state == self._in_section):
            self._content(self._tag + self._text + self._buffer)
        elif self._state == self._in_value and self._streaming:
            self._emit_string(self._buffer)
        self._buffer = ""
        super()._finish()
