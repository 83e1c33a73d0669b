"""Splitting the thinking off the front of an answer.

Only thinking at the very start counts, as in llama-server: an optional opening tag (the prompt may have written it
already), the thinking up to a closing tag, white space, then the rest for the next parser. Tags that come later are
text of the answer.
"""

from __future__ import annotations

from ftgguf.chat.parser import ChatDelta, OutputParser, find_first, held_back


def thinking_is_open(generation_prompt: str, tags: tuple[str, ...]) -> bool:
    """Whether the prompt's opening of the turn ends inside a thinking block."""
    opened = generation_prompt.rfind(tags[0])
    closed = max((generation_prompt.rfind(tag) for tag in tags[1:]), default=-1)
    return opened >= 0 and closed < opened


class ReasoningParser(OutputParser):
    """`tags`: the opening tag, then those that end the thinking. A closing tag that belongs to what follows (a tool
    call's opening, which models write without closing their thinking) is passed on to `inner`."""

    def __init__(self, tags: tuple[str, ...], open: bool, inner: OutputParser) -> None:
        super().__init__()
        self._tags = tags
        self._inner = inner
        self.message = inner.message
        self._state = "thinking" if open else "start"
        self._held = ""
        self._thought = False

    def _feed(self, text: str) -> None:
        if self._state == "after":
            self._pass(text)
            return
        self._held += text
        if self._state == "start":
            self._open()
        if self._state == "thinking":
            self._think()
        if self._state == "space":
            self._skip_space()

    def _open(self) -> None:
        """Before the opening tag: white space and a part of the tag are held back."""
        stripped = self._held.lstrip()
        tag = self._tags[0]
        if stripped.startswith(tag):
            self._held = stripped[len(tag) :]
            self._state = "thinking"
        elif not tag.startswith(stripped):
            held, self._held, self._state = self._held, "", "after"
            self._pass(held)

    def _think(self) -> None:
        if not self._thought:
            self._held = self._held.lstrip()
            if not self._held:
                return
        at, tag = find_first(self._held, self._tags[1:])
        if at >= 0:
            self._emit(self._held[:at].rstrip())
            rest = self._held[at:]
            self._held = rest if tag != self._tags[1] else rest[len(tag) :]
            self._state = "space"
            return
        # white space before a closing tag is not part of the thinking, so it waits for what comes after it
        keep = held_back(self._held, self._tags[1:])
        body = self._held[: len(self._held) - keep]
        body = body.rstrip()
        self._emit(body)
        self._held = self._held[len(body) :]

    def _emit(self, text: str) -> None:
        if text:
            self._thought = True
            self._reasoning(text)

    def _skip_space(self) -> None:
        stripped = self._held.lstrip()
        if stripped:
            self._held, self._state = "", "after"
            self._pass(stripped)

    def _pass(self, text: str) -> None:
        self._out += self._inner.feed(text)

    def _finish(self) -> None:
        held, self._held = self._held, ""
        if self._state == "thinking":
            self._emit(held.rstrip() if self._thought else held.strip())
        elif self._state == "start":
            self._pass(held)
        self._out += self._inner.finish()


__all__ = ["ChatDelta", "ReasoningParser", "thinking_is_open"]
