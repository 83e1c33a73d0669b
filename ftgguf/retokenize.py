"""Which part of a text was tokenized before?

A conversation comes back with every turn, one turn longer, and libllama needs some 0.3 us for each byte of it (100 ms
for 400 KB). Its tokenizers cut a text at control tokens first and then look at each stretch between two of them by
itself; so behind a control token that both texts have at the same place, nothing depends on what came before it. What
was tokenized of the common part up to there is taken as it is, and only the rest is tokenized.

That holds for a control token that certainly is read as one there: no other special token of its length or longer
overlaps it (libllama looks for special tokens from the longest to the shortest), and it cannot overlap itself.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ftgguf.nouns import I32

MIN_BYTES = 2048
"""A shorter text is tokenized in half a millisecond."""
MAX_BYTES = 32 << 20
"""Of all texts that are remembered; their ids take about as much again."""
MAX_TEXTS = 32
TAIL_BYTES = 256
"""A text that a later one continues is forgotten: it went on for less than this behind what they share."""
MAX_TRIES = 16
"""Borders that are looked at before a text is tokenized as if it were new."""

_NO_IDS: I32 = np.zeros(0, np.int32)
Tokenize = Callable[[bytes, bool], list[int]]
"""(text, add_special) -> ids, where control tokens in the text are read as such and nothing is added at its end."""


@dataclass(frozen=True, slots=True)
class _Text:
    data: bytes
    add_special: bool
    ids: I32
    ends: list[int]
    """Bytes before the end of each control token that may be a border, rising."""
    counts: list[int]
    """Ids up to and with each of them."""
    borders: list[bytes]
    """The control tokens' texts."""


class Retokenizer:
    """Remembers the last texts and their ids. Thread-safe.

    `borders`: control token's text -> id, without those that swallow white space behind them. `specials`: the texts of
    all special tokens (control, unknown and user-defined).
    """

    def __init__(
        self, tokenize: Tokenize, borders: Mapping[bytes, int], specials: Iterable[bytes], n_vocab: int
    ) -> None:
        self._tokenize = tokenize
        self._specials = sorted({text for text in specials if text}, key=len, reverse=True)
        self._reach = max(map(len, self._specials), default=0)
        self._borders = {id: text for text, id in borders.items() if _stands_alone(text)}
        self._is_border = np.zeros(n_vocab, np.bool_)
        self._is_border[list(self._borders)] = True
        self._clashes: dict[bytes, re.Pattern[bytes] | None] = {}
        self._lock = threading.Lock()
        self._texts: list[_Text] = []
        """The last used at the end."""
        self.reused_bytes = 0
        """Bytes of all texts so far that were not tokenized again."""

    def tokenize(self, data: bytes, add_special: bool) -> list[int]:
        """The ids of `data`, as the tokenizer alone gives them."""
        if not self._borders or not MIN_BYTES <= len(data) <= MAX_BYTES:
            return self._tokenize(data, add_special)
        with self._lock:
            texts = [text for text in self._texts if text.add_special == add_special]
        best, at = None, -1
        for text in reversed(texts):
            index = self._last_border(text, data)
            if index >= 0 and (best is None or text.ends[index] > best.ends[at]):
                best, at = text, index
        if best is None:
            ids = self._tokenize(data, add_special)
            self._remember(self._continued(_Text(b"", add_special, _NO_IDS, [], [], []), data, ids), None)
            return ids
        end, count, n = best.ends[at], best.counts[at], at + 1
        known = _Text(data[:end], add_special, best.ids[:count], best.ends[:n], best.counts[:n], best.borders[:n])
        rest = self._tokenize(data[end:], False)
        self.reused_bytes += end
        self._remember(self._continued(known, data, rest), best if len(best.data) - end < TAIL_BYTES else None)
        reused: list[int] = known.ids.tolist()
        return reused + rest

    def _last_border(self, text: _Text, data: bytes) -> int:
        """The last control token of `text` that `data` surely has too; -1: none."""
        old, ends = memoryview(text.data), text.ends

        def parted(end: int) -> bool:
            stop = end + self._reach  # what decides about a control token reaches a little behind it
            return stop > len(old) or not data.startswith(old[:stop])

        index = bisect_left(ends, True, key=parted)
        for i in range(index - 1, max(-1, index - 1 - MAX_TRIES), -1):
            if self._is_sure(text.borders[i], ends[i], data):
                return i
        return -1

    def _is_sure(self, border: bytes, end: int, data: bytes) -> bool:
        """Whether nothing overlaps the control token `border` that ends at `end` and would be found before it."""
        if border not in self._clashes:
            longer = [text for text in self._specials if len(text) >= len(border) and text != border]
            pattern = b"(?=(" + b"|".join(map(re.escape, longer)) + b"))"
            self._clashes[border] = re.compile(pattern) if longer else None
        clash = self._clashes[border]
        if clash is None:
            return True
        begin = end - len(border)
        first = max(0, begin - self._reach)
        window = data[first : end + self._reach]
        found = ((first + match.start(1), first + match.end(1)) for match in clash.finditer(window))
        return not any(a < end and b > begin for a, b in found)

    def _continued(self, known: _Text, data: bytes, rest: list[int]) -> _Text:
        """`data`, which begins with the text `known` and goes on for the ids `rest`, with the places of its control
        tokens: of those kinds whose number in the text is that in the ids."""
        new = np.array(rest, np.int32)
        at = np.flatnonzero(self._is_border[new])
        found: list[tuple[int, int, bytes]] = []
        for id in np.unique(new[at]).tolist():
            border = self._borders[id]
            counts = (at[new[at] == id] + 1 + len(known.ids)).tolist()
            ends = [match.end() for match in re.compile(re.escape(border)).finditer(data, len(known.data))]
            if len(ends) == len(counts):
                found += zip(ends, counts, [border] * len(ends), strict=True)
        found.sort()
        return _Text(
            data,
            known.add_special,
            np.concatenate([known.ids, new]),
            known.ends + [end for end, _, _ in found],
            known.counts + [count for _, count, _ in found],
            known.borders + [border for _, _, border in found],
        )

    def _remember(self, text: _Text, instead: _Text | None) -> None:
        """Keep `text`, in place of one that it holds all of."""
        with self._lock:
            self._texts = [other for other in self._texts if other is not instead]
            self._texts.append(text)
            total = 0
            for index in range(len(self._texts) - 1, -1, -1):
                total += len(self._texts[index].data)
                if total > MAX_BYTES or len(self._texts) - index > MAX_TEXTS:
                    del self._texts[: index + 1]
                    break


def _stands_alone(text: bytes) -> bool:
    """Two of it cannot overlap, and no white space at its ends can be taken for a neighbour's."""
    return len(text) >= 3 and text.strip() == text and text.find(text[:1], 1) < 0
