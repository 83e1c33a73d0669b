"""Calls as JSON objects between markers: Hermes, Qwen, Nemotron v2, Granite, Apertus, Cohere, generic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftgguf.chat.tools.json_call import JsonCall
from ftgguf.chat.tools.machine import Machine, State


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """`open` may be several alternatives. With `list` the calls are a JSON array (one object is accepted too)."""

    open: tuple[str, ...]
    close: str = ""
    list: bool = False
    key_is_name: bool = False
    keep_ids: bool = False
    """The model's own ids are passed on."""
    bare: bool = False
    """A message that is one JSON object naming a tool is a call too (Llama 3 writes no marker)."""


class TaggedJsonParser(Machine):
    """Reads `FORMAT.open {call} FORMAT.close`, or a list of calls between them."""

    def __init__(self, tools: list[dict[str, Any]], format: TaggedFormat) -> None:
        super().__init__(tools)
        self._format = format
        self._openers = format.open
        self._raw = ""
        self._in_list = False
        self._call: JsonCall | None = None
        self._accept: Callable[[str], bool] | None = None
        if format.bare:
            self._state = self._bare

    def _bare(self) -> bool:
        """The start of the message: an object may be a call, anything else is text."""
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        self._state = self._in_content
        if stripped[0] == "{":
            self._raw = self._buffer[: len(self._buffer) - len(stripped)]
            self._buffer = stripped
            self._accept = self._tools.__contains__
            self._state = self._before_call
        return True

    def _opened(self, tag: str) -> State:
        self._raw, self._accept = tag, None
        if tag[0] == "{":
            self._buffer = tag + self._buffer
            self._raw, self._accept = "", self._tools.__contains__
        self._in_list = False
        return self._before_call

    def _before_call(self) -> bool:
        space = len(self._buffer) - len(self._buffer.lstrip())
        self._raw += self._buffer[:space]
        if not self._skip_space():
            return False
        if self._format.list and not self._in_list and self._buffer[0] == "[":
            self._in_list = True
            self._raw += "["
            self._buffer = self._buffer[1:]
            return True
        if self._buffer[0] != "{":
            return self._not_a_call(self._raw)
        self._call = JsonCall(self._report, self._arguments, self._format.key_is_name, self._accept)
        self._state = self._in_call
        return True

    def _report(self, name: str, id: str) -> None:
        self._open_call(name, id if self._format.keep_ids else "")

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        used = call.feed(self._buffer)
        if not call.named:
            self._raw += self._buffer[:used]
        self._buffer = self._buffer[used:]
        if call.failed and not call.named:
            return self._not_a_call(self._raw)
        if call.failed or call.done:
            self._state = self._after_call
            return True
        return False

    def _after_call(self) -> bool:
        """After an object: a comma and the next one, the end of the list, or the closing marker."""
        if not self._skip_space():
            return False
        if self._in_list:
            if self._buffer[0] == ",":
                self._buffer = self._buffer[1:]
                self._raw, self._state = "", self._before_call
                return True
            self._in_list = False
            if self._buffer[0] == "]":
                self._buffer = self._buffer[1:]
            return True
        if not self._format.close:
            if self._buffer[0] == ";":
                self._buffer = self._buffer[1:]
                if self._format.bare:
                    self._called, self._state = True, self._bare
                    return True
            return self._back_to_content()
        closed = self._starts(self._format.close)
        if closed is None:
            return False
        if closed:
            self._buffer = self._buffer[len(self._format.close) :]
            return self._back_to_content()
        if self._buffer[0] == "{":  # two calls in one block
            self._raw, self._state = "", self._before_call
            return True
        if self._could_open():  # the next call, without a closing marker
            return self._back_to_content()
        if self._buffer[0] in "}],`":  # one bracket too many is dropped
            self._buffer = self._buffer[1:]
            return True
        return self._back_to_content()

    def _finish(self) -> None:
        if self._state == self._before_call or (
            self._state == self._in_call and self._call is not None and not self._call.named
        ):
            self._content(self._raw + self._buffer)
            self._buffer = ""
        super()._finish()
