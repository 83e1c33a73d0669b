"""Splitting the thinking off the front of an answer.

Only thinking at the very start counts, as in llama-server: an optional opening tag (the prompt may have written it
already), the thinking up to a closing tag, white space, then the rest for the next parser. Tags that come later are
text of the answer.
"""

from __future__ import annotations

from ftgguf.chat.parser import OutputParser, find_first, held_back


def thinking_is_open(generation_prompt: str, tags: tuple[str, ...]) -> bool:
    """Whether the prompt's opening of the turn ends inside a thinking block."""
    opened = generation_prompt.rfind(tags[0])
    closed = max((generation_prompt.rfind(tag) for tag in tags[1:]), default=-1)
    return opened >= 0 and closed < opened


class ReasoningParser(OutputParser):
    """`tags`: the opening tag, then those that end the thinking. A closing tag other than the first (a tool call's
    opening, which models write without closing their thinking) is passed on to `inner`.

    White space is kept as it comes, as llama-server keeps it, but for the exact text `lead` after the opening tag and
    `tail` after the closing one (what the template writes there). `loose` drops all white space before the thinking
    (`lead`), after its end (`tail`) or on both sides (`both`).
    """

    def __init__(
        self,
        tags: tuple[str, ...],
        open: bool,
        inner: OutputParser,
        lead: str = "",
        tail: str = "",
        loose: str = "",
    ) -> None:
        super().__init__()
        self._tags = tags
        self._inner = inner
        self._lead = lead
        self._tail = tail
        self._loose = loose
        self.message = inner.message
        self._state = "thinking" if open else "start"
        self._skip = open and loose in ("lead", "both")
        self._held = ""

    def _feed(self, text: str) -> None:
        if self._state == "after":
            self._pass(text)
            return
        self._held += text
        if self._state == "start":
            self._open()
        if self._state == "thinking":
            self._think()
        if self._state == "tail" and self._eat(self._tail, self._loose in ("tail", "both")):
            held, self._held, self._state = self._held, "", "after"
            self._pass(held)

    def _open(self) -> None:
        """Before the opening tag: white space and a part of the tag are held back."""
        stripped = self._held.lstrip()
        tag = self._tags[0]
        if stripped.startswith(tag):
            self._held = stripped[len(tag) :]
            self._state, self._skip = "thinking", True
        elif not tag.startswith(stripped):
            held, self._held, self._state = self._held, "", "after"
            self._pass(held)

    def _eat(self, space: str, all: bool) -> bool:
        """Drop the layout at the front (`all`: any white space); False while it may still come."""
        if all:
            self._held = self._held.lstrip()
            return bool(self._held)
        if self._held.startswith(space):
            self._held = self._held[len(space) :]
            return True
        return not space.startswith(self._held)

    def _think(self) -> None:
        if self._skip:
            if not self._eat(self._lead, self._loose in ("lead", "both")):
                return
            self._skip = False
        at, tag = find_first(self._held, self._tags[1:])
        if at >= 0:
            self._reasoning(self._held[:at])
            rest = self._held[at:]
            own = tag == self._tags[1]
            self._held = rest[len(tag) :] if own else rest
            self._state = "tail"
            return
        keep = held_back(self._held, self._tags[1:])
        body = self._held[: len(self._held) - keep]
        self._reasoning(body)
        self._held = self._held[len(body) :]

    def _pass(self, text: str) -> None:
        self._out += self._inner.feed(text)

    def _finish(self) -> None:
        held, self._held = self._held, ""
        if self._state == "thinking":
            self._reasoning(held)
        elif self._state == "start" or (self._state == "tail" and self._loose not in ("tail", "both")):
            self._pass(held)
        self._out += self._inner.finish()
