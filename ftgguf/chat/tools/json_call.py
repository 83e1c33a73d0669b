"""One tool call as a JSON object, read character by character: the name, then the arguments as they come.

The arguments are passed on in the model's own text. Accepts `{"name": ..., "arguments": {...}}` with other key names,
the OpenAI wrapper `{"type": "function", "function": {...}}`, arguments that are a JSON text inside a string, and
`{"tool": {...}}` where the key is the name.
"""

from __future__ import annotations

import json
from collections.abc import Callable

NAME_KEYS = frozenset(("name", "tool_name"))
ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
ID_KEYS = frozenset(("id", "tool_call_id", "call_id"))
_CALL_KEYS = NAME_KEYS | ARGUMENT_KEYS | ID_KEYS | {"type", "function"}
_SPACE = " \t\r\n"


class JsonText:
    """Finds the end of one JSON value of any kind. `feed` returns how many characters belong to it."""

    __slots__ = ("_depth", "_escaped", "_scalar", "_string", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._string = False
        self._escaped = False
        self._scalar = False
        self.done = False

    def feed(self, text: str) -> int:
        """Characters of `text` that are part of the value; `done` is set when it has ended."""
        for index, char in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
                    if not self._depth:
                        self.done = True
                        return index + 1
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return index + 1
            elif not self._depth:
                if char in ",}]" or char in _SPACE:
                    self.done = True
                    return index
                self._scalar = True
        return len(text)


class JsonCall:
    """`feed` consumes the object's text; `open(name, id)` is called once the name is known, `arguments(text)` after it.

    `failed` is set when the text is no such object; then nothing was reported if `named` is False.
    """

    def __init__(
        self,
        open: Callable[[str, str], None],
        arguments: Callable[[str], None],
        key_is_name: bool = False,
        accept: Callable[[str], bool] | None = None,
    ) -> None:
        """`accept(name)`: only these names make a call, and an object that begins with an unknown key is none."""
        self._accept = accept
        self._open = open
        self._arguments = arguments
        self._key_is_name = key_is_name
        self._step = "start"
        self._levels = 0
        self._key = ""
        self._held = ""
        self._value: JsonText | None = None
        self._pending = ""
        self._pending_string = ""
        self._id = ""
        self._name = ""
        self._seen_arguments = False
        self.named = False
        self.done = False
        self.failed = False

    def feed(self, text: str) -> int:
        """Consume what belongs to the call; returns the number of characters."""
        position = 0
        while position < len(text) and not self.done and not self.failed:
            if self._value is not None:
                position += self._in_value(text[position:])
                continue
            char = text[position]
            if char in _SPACE and self._step != "key_text":
                position += 1
                continue
            position += self._structure(char)
        return position

    def _structure(self, char: str) -> int:
        step = self._step
        if step == "start":
            if char != "{":
                self.failed = True
                return 0
            self._levels, self._step = 1, "key"
        elif step == "key":
            if char == '"':
                self._held, self._step = '"', "key_text"
                self._escaped = False
            elif char == "}":
                self._close()
            elif char != ",":
                self.failed = True
        elif step == "key_text":
            self._held += char
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._key, self._step = _decode(self._held), "colon"
                if self._accept is not None and not self.named and self._key not in _CALL_KEYS:
                    self.failed = True
        elif step == "colon":
            if char != ":":
                self.failed = True
            self._step = "value"
        elif step == "value":
            if self._key == "function" and char == "{":
                self._levels, self._step = self._levels + 1, "key"
            else:
                self._begin_value()
                return 0
        return 1

    def _close(self) -> None:
        self._levels -= 1
        if self._levels:
            return
        self.done = True
        if not self.named and self._name:
            self._report()
        if not self.named:
            self.failed = True
        elif not self._seen_arguments:
            self._arguments("{}")

    # --------------------------------------------------------------------------------------------- values

    def _begin_value(self) -> None:
        self._value = JsonText()
        self._held = ""
        if self._key_is_name and not self.named and self._levels == 1:
            self._name = self._key
            self._report()
            self._key = "arguments"
        self._kind = (
            "arguments" if self._key in ARGUMENT_KEYS
            else "name" if self._key in NAME_KEYS or self._key == "function"
            else "id" if self._key in ID_KEYS
            else ""
        )  # fmt: skip
        self._text_inside: bool | None = None
        if self._kind == "arguments":
            self._seen_arguments = True

    def _in_value(self, text: str) -> int:
        value = self._value
        assert value is not None
        used = value.feed(text)
        part = text[:used]
        if self._kind == "arguments":
            self._argument_text(part, value.done)
        elif self._kind:
            self._held += part
        if value.done:
            self._end_value()
        return used

    def _argument_text(self, part: str, done: bool) -> None:
        """Pass on, or hold: a JSON text inside a string is decoded as a whole, and the name may come later."""
        if self._text_inside is None:
            self._text_inside = part.startswith('"')
        if self._text_inside:
            self._held += part
            if not done:
                return
            part, self._held = _decode(self._held), ""
        if self.named:
            if part:
                self._arguments(part)
        else:
            self._pending += part

    def _end_value(self) -> None:
        held, self._value, self._step = self._held, None, "key"
        self._held = ""
        if self._kind == "id":
            self._id = _decode(held) if held.startswith('"') else held
        elif self._kind == "name" and held.startswith('"') and not self.named:
            self._name = _decode(held)
            self._report()

    def _report(self) -> None:
        if self._accept is not None and not self._accept(self._name):
            self.failed = True
            return
        self.named = True
        self._open(self._name, self._id)
        if self._pending:
            self._arguments(self._pending)
            self._pending = ""


def _decode(text: str) -> str:
    """The string that the JSON text `text` stands for; the raw text where it is malformed."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else text
