"""The one interface of output parsing: text in, differences of an assistant message out.

A parser is a small state machine fed with pieces of generated text. Whatever way the text is cut into pieces, the
joined differences are the same (property-tested): text is held back only while it could be the start of a marker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ftgguf.server.wire import random_id


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """New text of one kind, or a fragment of the tool call `tool_index`. `tool_id` and `tool_name` are set in a
    call's first fragment only; `arguments` fragments join to one JSON text."""

    reasoning: str = ""
    content: str = ""
    tool_index: int = -1
    tool_id: str = ""
    tool_name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """What has been parsed so far."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class OutputParser:
    """Base: collects the message and merges neighbouring differences. Subclasses implement `_feed` and `_finish`
    and report through `_content`, `_reasoning`, `_open_call` and `_arguments`."""

    def __init__(self) -> None:
        self.message = Message()
        self._out: list[ChatDelta] = []

    def feed(self, text: str) -> list[ChatDelta]:
        """The differences that `text` brings; an empty list while a marker is incomplete."""
        if text:
            self._feed(text)
        return self._take()

    def finish(self) -> list[ChatDelta]:
        """The generation has ended: what was held back comes out."""
        self._finish()
        return self._take()

    def _feed(self, text: str) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _take(self) -> list[ChatDelta]:
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------------------------------ reporting

    def _content(self, text: str) -> None:
        if text:
            self.message.content += text
            last = self._out[-1] if self._out else None
            if last is not None and last.content:
                self._out[-1] = ChatDelta(content=last.content + text)
            else:
                self._out.append(ChatDelta(content=text))

    def _reasoning(self, text: str) -> None:
        if text:
            self.message.reasoning += text
            last = self._out[-1] if self._out else None
            if last is not None and last.reasoning:
                self._out[-1] = ChatDelta(reasoning=last.reasoning + text)
            else:
                self._out.append(ChatDelta(reasoning=text))

    def _open_call(self, name: str, id: str = "") -> None:
        call = ToolCall(id or random_id(), name)
        self.message.tool_calls.append(call)
        self._out.append(ChatDelta(tool_index=len(self.message.tool_calls) - 1, tool_id=call.id, tool_name=call.name))

    def _arguments(self, text: str) -> None:
        if text:
            self.message.tool_calls[-1].arguments += text
            self._out.append(ChatDelta(tool_index=len(self.message.tool_calls) - 1, arguments=text))


class PlainParser(OutputParser):
    """Everything is content (`--skip-chat-parsing`, templates without any structure)."""

    def _feed(self, text: str) -> None:
        self._content(text)

    def _finish(self) -> None:
        pass


def held_back(text: str, markers: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `markers`."""
    best = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), best, -1):
            if text.endswith(marker[:length]):
                best = length
                break
    return best


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """Where the first of `markers` begins in `text`, and which (the longest at the same place); (-1, "") if none."""
    found, which = -1, ""
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (found < 0 or at < found or (at == found and len(marker) > len(which))):
            found, which = at, marker
    return found, which
