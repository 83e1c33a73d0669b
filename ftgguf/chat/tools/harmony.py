"""gpt-oss's channels: thinking, commentary with tool calls, and the final answer are messages of one turn.

    <|channel|>analysis<|message|>THINKING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{ARGUMENTS}

The prompt ends in `<|start|>assistant`, so a turn may begin with ` to=functions.NAME` as well.
"""

from __future__ import annotations

import re
from typing import Any

from ftgguf.chat.tools.machine import Machine, State

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyParser(Machine):
    """Reads harmony messages. With `reasoning` off the thinking stays in the content, markers included."""

    def __init__(self, tools: list[dict[str, Any]], reasoning: bool = True) -> None:
        super().__init__(tools)
        self._reasoning_on = reasoning
        self._has_tools = bool(tools)
        self._header = ""
        self._sink = "content"
        self._state: State = self._in_header

    def begin(self, generation_prompt: str) -> None:
        """Take in what the prompt wrote of this turn (a continued message), without reporting it."""
        opened = generation_prompt.partition(START + "assistant")[2]
        if opened:
            self.feed(opened)
            self.message.content = self.message.reasoning = ""

    def _hold(self, text: str) -> None:
        self._header += text

    def _in_header(self) -> bool:
        """Up to `<|message|>`: the channel and the recipient. Text without any marker is the answer itself."""
        if not self._may_be_header():
            self._buffer, self._header = self._header + self._buffer, ""
            self._sink, self._state = "content", self._in_message
            return True
        if self._until((MESSAGE,), self._hold) is None:
            return False
        header, self._header = self._header, ""
        channel = header.rpartition(CHANNEL)[2] if CHANNEL in header else ""
        recipient = _RECIPIENT.search(header)
        name = recipient.group(1) if recipient else ""
        self._sink = "content"
        if name and self._has_tools and name in self._tools:
            self._open_call(name)
            self._sink = "call"
        elif name and name != "assistant":
            self._sink = "drop"
        elif channel.startswith("analysis"):
            self._sink = "reasoning" if self._reasoning_on else "content"
            if not self._reasoning_on:
                self._content(header + MESSAGE)
        self._state = self._in_message
        return True

    def _may_be_header(self) -> bool:
        text = self._header + self._buffer
        stripped = text.lstrip()
        return not stripped or any(
            marker.startswith(stripped) or stripped.startswith(marker) for marker in (CHANNEL, START, "to=")
        )

    def _in_message(self) -> bool:
        emit = {"content": self._content, "reasoning": self._reasoning, "call": self._arguments, "drop": _drop}
        tag = self._until((END, CALL, START, "<|return|>"), emit[self._sink])
        if tag is None:
            return False
        if self._sink == "content" and not self._reasoning_on and tag == END:
            self._content(END)
        self._state = self._between
        if tag == START:
            self._buffer = START + self._buffer
        return True

    def _between(self) -> bool:
        """After a message: `<|start|>assistant` and the next header."""
        if not self._skip_space():
            return False
        found = self._starts(START)
        if found is None:
            return False
        if found:
            self._buffer = self._buffer[len(START) :]
            self._state = self._role
            return True
        self._state = self._in_header
        return True

    def _role(self) -> bool:
        found = self._starts("assistant")
        if found is None:
            return False
        if found:
            self._buffer = self._buffer[len("assistant") :]
        self._state = self._in_header
        return True

    def _finish(self) -> None:
        if self._state == self._in_header and (self._header or self._buffer).strip() and CHANNEL not in self._header:
            self._content(self._header + self._buffer)
        elif self._state == self._in_message:
            {"content": self._content, "reasoning": self._reasoning, "call": self._arguments, "drop": _drop}[
                self._sink
            ](self._buffer)
        self._buffer = ""


def _drop(text: str) -> None:
    """A call to something that is no function of the request (gpt-oss's built-in tools)."""
