"""Calls as a name, a separator and a JSON object: DeepSeek V3 and R1, Kimi K2, Mistral, Functionary, Llama's tags."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftgguf.chat.tools.json_call import JsonText
from ftgguf.chat.tools.machine import Machine, State


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """`open` starts a call's name, one of `separators` ends it, then JSON, then one of `close` (all optional text
    around them is skipped). `sections` are markers around all calls. `name` cleans the name and may find an id."""

    open: tuple[str, ...]
    separators: tuple[str, ...]
    close: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    name: Callable[[str], tuple[str, str]] = lambda text: (text.strip(), "")
    fence: bool = False
    """The JSON may stand in a ```json fence."""
    plain: str = ""
    """This name is no tool: what follows is content (Functionary's `all`)."""


def kimi_name(text: str) -> tuple[str, str]:
    """`functions.NAME:INDEX` is the call's id and holds its name."""
    found = re.fullmatch(r"\s*(?:functions\.)?(.+?)(?::(\d+))?\s*", text, re.DOTALL)
    return (found.group(1) if found else text.strip()), text.strip()


def solar_name(text: str) -> tuple[str, str]:
    """`ID<|tool_call:name|>NAME`."""
    id, _, name = text.rpartition("<|tool_call:name|>")
    return name.strip(), id.strip()


def mistral_name(text: str) -> tuple[str, str]:
    """`NAME` or `NAME[CALL_ID]ID`."""
    name, _, id = text.partition("[CALL_ID]")
    return name.strip(), id.strip()


class NamedJsonParser(Machine):
    """Reads `open NAME separator {arguments} close`."""

    def __init__(self, tools: list[dict[str, Any]], format: NamedFormat, start_open: bool = False) -> None:
        super().__init__(tools)
        self._format = format
        self._openers = (*format.sections, *format.open)
        self._name = ""
        self._tag = ""
        self._json: JsonText | None = None
        if start_open:
            self._state = self._in_name

    def _opened(self, tag: str) -> State:
        self._name, self._tag = "", tag
        return self._in_section if tag in self._format.sections else self._in_name

    def _in_section(self) -> bool:
        """After a section's marker: white space, then a call (or text again)."""
        if not self._skip_space():
            return False
        return self._back_to_content()

    def _in_name(self) -> bool:
        def emit(text: str) -> None:
            self._name += text

        separator = self._until(self._format.separators, emit)
        if separator is None:
            return False
        if self._format.plain and self._name.strip() == self._format.plain:
            self._called = False
            self._state = self._in_content
            return True
        if separator == "{":
            self._buffer = "{" + self._buffer
        name, id = self._format.name(self._name)
        if not name or (self._tools and name not in self._tools and not self._format.close):
            return self._not_a_call(self._tag + self._name + (separator if separator != "{" else ""))
        self._open_call(name, id)
        self._json = JsonText()
        self._state = self._before_json
        return True

    def _before_json(self) -> bool:
        if not self._skip_space():
            return False
        if self._format.fence:
            for fence in ("```json", "```"):
                found = self._starts(fence)
                if found is None:
                    return False
                if found:
                    self._buffer = self._buffer[len(fence) :]
                    return True
        self._state = self._in_json
        return True

    def _in_json(self) -> bool:
        json = self._json
        assert json is not None
        used = json.feed(self._buffer)
        part, self._buffer = self._buffer[:used], self._buffer[used:]
        self._arguments(part)
        if json.done:
            self._state = self._after_json
            return True
        return False

    def _after_json(self) -> bool:
        """Skip to the closing marker; without one, text begins again."""
        if not self._skip_space():
            return False
        markers = (*(("```",) if self._format.fence else ()), *self._format.close)
        for marker in markers:
            found = self._starts(marker)
            if found is None:
                return False
            if found:
                self._buffer = self._buffer[len(marker) :]
                return self._back_to_content() if marker in self._format.close else True
        return self._back_to_content()

    def _finish(self) -> None:
        if self._state == self._in_name:
            self._content(self._tag + self._name + self._buffer)
            self._buffer = ""
        super()._finish()
