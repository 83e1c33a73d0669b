"""What the tool-call parsers share: a buffer, states that consume it, and content up to a marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftgguf.chat.parser import OutputParser, find_first, held_back

State = Callable[[], bool]
"""Consumes from the buffer; False: it needs more text."""


class Machine(OutputParser):
    """A parser whose current state is a method. `_openers` end the content and start a call (or a section of calls).

    Text between calls and after the last one that is only white space is dropped, as llama-server does.
    """

    _openers: Sequence[str] = ()
    _trim_content = False
    """White space at the end of the content is layout."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__()
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._buffer = ""
        self._state: State = self._in_content
        self._called = False
        self._space = ""

    def _feed(self, text: str) -> None:
        self._buffer += text
        while self._state():
            pass

    def _finish(self) -> None:
        """What is still in the buffer was no marker after all."""
        rest, self._buffer = self._buffer, ""
        if self._trim_content:
            rest = rest.rstrip()
        if self._state == self._in_content and not (self._called and not rest.strip()):
            self._content(rest)

    # --------------------------------------------------------------------------------------------- states

    def _in_content(self) -> bool:
        if self._called:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            if not self._could_open():
                self._called = False
        tag = self._until(self._openers, self._text_before)
        if tag is None:
            return False
        self._space = ""
        self._called = False
        self._state = self._opened(tag)
        return True

    def _text_before(self, text: str) -> None:
        """Content; with `_trim_content` its trailing white space waits for what follows."""
        if self._trim_content:
            text = self._space + text
            self._space = text[len(text.rstrip()) :]
            text = text.rstrip()
        self._content(text)

    def _could_open(self) -> bool:
        """The buffer starts with an opener, or with a part of one."""
        return any(self._buffer.startswith(o) or o.startswith(self._buffer) for o in self._openers)

    def _opened(self, tag: str) -> State:
        """The state after opener `tag`."""
        raise NotImplementedError

    def _back_to_content(self) -> bool:
        """A call has ended."""
        self._called = True
        self._state = self._in_content
        return True

    def _not_a_call(self, text: str) -> bool:
        """What looked like a call is text."""
        self._content(text)
        self._called = False
        self._state = self._in_content
        return True

    # --------------------------------------------------------------------------------------------- helpers

    def _until(self, markers: Sequence[str], emit: Callable[[str], None]) -> str | None:
        """Consume up to the first of `markers` and the marker itself; what comes before goes to `emit`.

        None: no marker is complete yet; what cannot belong to one was emitted.
        """
        at, tag = find_first(self._buffer, markers)
        if at >= 0:
            before, self._buffer = self._buffer[:at], self._buffer[at + len(tag) :]
            emit(before)
            return tag
        keep = held_back(self._buffer, markers)
        before = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(before) :]
        emit(before)
        return None

    def _skip_space(self) -> bool:
        """Drop white space at the front; False while there is nothing else."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _starts(self, marker: str) -> bool | None:
        """Whether the buffer starts with `marker`; None while that is open."""
        if self._buffer.startswith(marker):
            return True
        return None if marker.startswith(self._buffer) else False
