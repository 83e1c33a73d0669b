"""How much of a file is there? The spans of a partial download, in memory and in a small file beside it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

MAX_JOURNAL = 64 << 20
"""Bytes; more cannot be one of ours."""


class _Record(msgspec.Struct, frozen=True):
    total: int
    segment: int
    done: list[int]
    validator: str = ""


class Spans:
    """A file of `total` bytes in segments of `segment`; `done[i]` bytes of segment i are on disk, from its start.

    A segment is filled by one thread, so `done` needs no lock; which segment is next does.
    """

    def __init__(self, total: int, segment: int, done: list[int] | None = None, validator: str = "") -> None:
        self.total = total
        self.segment = segment
        self.done = done if done is not None else [0] * -(-total // segment)
        self.validator = validator
        """ETag of content that no digest names."""
        self._next = 0
        self._lock = threading.Lock()
        self._full = 0

    def bounds(self, index: int) -> tuple[int, int]:
        start = index * self.segment
        return start, min(start + self.segment, self.total)

    def take(self) -> int | None:
        """The next segment that is not complete, in ascending order; None when all are given out."""
        with self._lock:
            while self._next < len(self.done):
                index = self._next
                self._next += 1
                if not self._complete(index):
                    return index
            return None

    @property
    def completed(self) -> int:
        return sum(self.done)

    @property
    def missing(self) -> int:
        """Segments that are not complete."""
        return sum(not self._complete(index) for index in range(len(self.done)))

    def _complete(self, index: int) -> bool:
        start, end = self.bounds(index)
        return self.done[index] == end - start

    @property
    def frontier(self) -> int:
        """Bytes from the start of the file without a gap; never shrinks."""
        while self._full < len(self.done):
            start, end = self.bounds(self._full)
            n = self.done[self._full]
            if n < end - start:
                return start + n
            self._full += 1
        return self.total

    # -------------------------------------------------------------------------------------------------------- disk

    def save(self, path: Path) -> None:
        """Write the journal whole or not at all. Data is written before it is counted, so a killed process leaves a
        journal that claims too little; a power cut may leave one that claims too much, which the digest finds."""
        record = _Record(self.total, self.segment, list(self.done), self.validator)
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(msgspec.json.encode(record))
        os.replace(fresh, path)

    @classmethod
    def load(cls, path: Path, partial: Path) -> Spans | None:
        """The journal at `path` if it is whole and fits the file `partial`; None otherwise."""
        try:
            if path.stat().st_size > MAX_JOURNAL:
                return None
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
            size = partial.stat().st_size
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        if record.total <= 0 or record.segment <= 0 or size != record.total:
            return None
        spans = cls(record.total, record.segment, record.done, record.validator)
        count = -(-record.total // record.segment)
        if len(record.done) != count:
            return None
        bounds = [spans.bounds(index) for index in range(count)]
        fits = all(0 <= n <= end - start for n, (start, end) in zip(record.done, bounds, strict=True))
        return spans if fits else None


def remove(*paths: Path) -> None:
    """Delete what exists."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
