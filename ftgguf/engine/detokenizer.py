"""Generated tokens to text, piece by piece: whole characters only, and no part of a stop string.

The joined deltas are the answer: a request that does not stream gets the same text from the same code. Where
llama-server's streamed and whole answers differ (text held back for a stop string when the token limit comes, an
indentation stop, a cut character at the end), this gives its whole answer, without the bytes of a cut character.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftgguf.engine.messages import TokenProbs
from ftgguf.vocab import Vocab


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step may send.

    `tokens` are the ids since the last piece, as llama-server sends them: each as it comes, its text held back or not.
    `probs` belong to tokens whose text is out and was not dropped. `stop` is the stop string that ended the text,
    `limit` whether an indentation or time limit did. `held` says that text waits for a later token.
    """

    text: str
    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...]
    stop: str | None = None
    limit: bool = False
    held: bool = False


@dataclass(frozen=True, slots=True)
class _Token:
    start: int
    """Characters of the text before it; a token that continues a character starts where that character does."""
    end: int
    probs: TokenProbs


class Detokenizer:
    """The text of one sequence. Not thread-safe.

    `special` renders control tokens, `preserved` those it lists. `n_indent` ends the text at a line after the first
    that is indented by fewer spaces and tabs; `t_max_predict_ms` ends it at a newline after that time.
    """

    def __init__(
        self,
        vocab: Vocab,
        stop: Sequence[str] = (),
        *,
        special: bool = False,
        preserved: Collection[int] = (),
        n_indent: int = 0,
        t_max_predict_ms: int = -1,
    ) -> None:
        self._vocab, self._special, self._preserved = vocab, special, frozenset(preserved)
        self._stop = tuple(word for word in stop if word)
        self._n_indent, self._t_max_ms = n_indent, t_max_predict_ms
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._sent = 0
        self._ids: list[int] = []
        """Tokens not reported yet."""
        self._waiting: deque[_Token] = deque()
        """Tokens with probabilities whose text is not out yet."""
        self._indent = -1
        """Spaces and tabs so far at the start of a line after the first; -1 elsewhere in a line."""
        self.has_new_line = False

    def push(self, token: int, probs: TokenProbs | None = None, elapsed_ms: float = 0.0) -> Piece:
        """One generated token; `elapsed_ms` is the time since generation began. After a stop or limit, call no more."""
        piece = self._piece(token)
        start = self._sent + len(self._held)
        new = self._decoder.decode(piece)
        cut = bool(self._decoder.getstate()[0])
        self._ids.append(token)
        if probs is not None:
            self._waiting.append(_Token(start, start + len(new) + cut, probs))
        text = self._held + new
        at, word = self._find_stop(text, len(self._held))
        if word is not None:
            return self._end(text[:at], word, limit=False)
        if (at := self._find_indent(new)) >= 0:
            return self._end(text[: len(self._held) + at], None, limit=True)
        keep = 0 if self._vocab.is_eog(token) else self._partial_stop(text)
        self._held = text[len(text) - keep :]
        sent = text[: len(text) - keep]
        over = 0 < self._t_max_ms < elapsed_ms and "\n" in sent
        if over:
            return self._end(text, None, limit=True)
        return self._released(sent, held=bool(keep) or cut)

    def finish(self) -> Piece:
        """The end without a stop string: what was held back, but for the bytes of a character that never came whole."""
        return self._end(self._held, None, limit=False)

    def _piece(self, token: int) -> bytes:
        if self._special or token in self._preserved:
            return self._vocab.piece(token, special=True)
        # A token that ends generation is no text, even where the file does not mark it as a control token.
        return b"" if self._vocab.is_eog(token) else self._vocab.piece(token, special=False)

    def _find_stop(self, text: str, old: int) -> tuple[int, str | None]:
        """The stop string that begins first (of several there, the one listed first); nothing wholly in text[:old]."""
        at, found = len(text), None
        for word in self._stop:
            position = text.find(word, max(0, old - len(word) + 1))
            if 0 <= position < at:
                at, found = position, word
        return at, found

    def _partial_stop(self, text: str) -> int:
        """Characters at the end of `text` that could begin a stop string: the longest such suffix."""
        longest = 0
        for word in self._stop:
            for size in range(min(len(word) - 1, len(text)), longest, -1):
                if text.endswith(word[:size]):
                    longest = size
                    break
        return longest

    def _find_indent(self, new: str) -> int:
        """Where in `new` a line turns out to be indented too little, -1 if nowhere."""
        if self._n_indent <= 0:
            return -1
        for at, character in enumerate(new):
            if self._indent >= 0:
                if character in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._n_indent:
                    return at
                self._indent = -1
            if character == "\n":
                self._indent = 0
        return -1

    def _released(self, text: str, *, held: bool) -> Piece:
        """Send `text`, the tokens up to here, and the probabilities of those whose text is out."""
        self._sent += len(text)
        self.has_new_line = self.has_new_line or "\n" in text
        probs = []
        while self._waiting and self._waiting[0].end <= self._sent:
            probs.append(self._waiting.popleft().probs)
        return Piece(text, self._take_ids(), tuple(probs), held=held)

    def _take_ids(self) -> tuple[int, ...]:
        ids, self._ids = tuple(self._ids), []
        return ids

    def _end(self, text: str, stop: str | None, *, limit: bool) -> Piece:
        """Send `text` as the last; tokens that begin behind it lose their probabilities."""
        ended = self._sent + len(text)
        probs = tuple(token.probs for token in self._waiting if token.start < ended or (stop is None and not limit))
        self._sent = ended
        self.has_new_line = self.has_new_line or "\n" in text
        self._waiting.clear()
        self._held = ""
        return Piece(text, self._take_ids(), probs, stop, limit)
