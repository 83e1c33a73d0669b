"""The bound on an answer's thinking: after so many tokens, or on demand, its end is forced.

This is llama-server's budget sampler. States as there: idle until the opening tag, counting, waiting for a whole
character, forcing, idle again. A further block of thinking has a budget of its own. Tags are found in the text, so it
does not matter how they are tokenised.
"""

from __future__ import annotations

from collections.abc import Callable

from ftgguf.engine.messages import Reasoning


class ReasoningBudget:
    """Watches the tokens of one sequence. `piece` gives a token's bytes, control tokens rendered."""

    def __init__(self, reasoning: Reasoning, piece: Callable[[int], bytes]) -> None:
        if not reasoning.ends or not reasoning.forced:
            raise ValueError("a reasoning budget needs the tag that ends reasoning")
        self._piece = piece
        self._start = reasoning.start.encode()
        self._ends = [end.encode() for end in reasoning.ends]
        self._forced = reasoning.forced
        self._budget = reasoning.budget
        self._keep = max(len(tag) for tag in (self._start, *self._ends))
        self._tail = b""
        self._counting = False
        self._left = 0
        self._at = -1
        """Position in `forced`; -1 while nothing is forced."""
        self._due = False
        if reasoning.open:
            self._begin()

    def next(self) -> int | None:
        """The token that must come next, if there is one."""
        return self._forced[self._at] if self._at >= 0 else None

    def end(self) -> bool:
        """End the thinking that is going on; False if there is none."""
        if not self._counting:
            return False
        self._due = True
        self._force_when_whole()
        return True

    def accept(self, token: int) -> None:
        """`token` was generated."""
        if self._at >= 0:
            self._at += 1
            if self._at == len(self._forced):
                self._at, self._tail = -1, b""
            return
        piece = self._piece(token)
        new = self._tail + piece
        old = len(self._tail)
        self._tail = new[-self._keep :]
        if not self._counting:
            if self._start and self._found(new, old, self._start):
                self._begin()
        elif any(self._found(new, old, end) for end in self._ends):
            self._counting = False
        else:
            if self._left > 0:
                self._left -= 1
                self._due = self._due or self._left == 0
            self._force_when_whole()

    @staticmethod
    def _found(text: bytes, old: int, tag: bytes) -> bool:
        """Whether `tag` ends in the new part of `text`."""
        return text.find(tag, max(0, old - len(tag) + 1)) >= 0

    def _begin(self) -> None:
        self._counting, self._tail = True, b""
        self._left = self._budget
        self._due = self._budget == 0
        self._force_when_whole()

    def _force_when_whole(self) -> None:
        if self._due and not cut_character(self._tail):
            self._counting = self._due = False
            self._at = 0


def cut_character(text: bytes) -> bool:
    """Whether `text` ends inside a UTF-8 character."""
    for back in range(1, min(3, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
