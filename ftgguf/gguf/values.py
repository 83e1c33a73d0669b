"""GGUF metadata values: their types, the fast bounds-checked walk over strings, and lazy decoding.

Formulas: the GGUF specification (a string is a u64 length and that many bytes; an array is a u32 type, a u64 count
and the elements back to back; everything little-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from mmap import mmap
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

U32 = struct.Struct("<I").unpack_from
U64 = struct.Struct("<Q").unpack_from


class ValueType(IntEnum):
    """`gguf_metadata_value_type` of the specification."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STR = 8
    ARR = 9
    U64 = 10
    I64 = 11
    F64 = 12


FORMATS: dict[int, struct.Struct] = {
    ValueType.U8: struct.Struct("<B"),
    ValueType.I8: struct.Struct("<b"),
    ValueType.U16: struct.Struct("<H"),
    ValueType.I16: struct.Struct("<h"),
    ValueType.U32: struct.Struct("<I"),
    ValueType.I32: struct.Struct("<i"),
    ValueType.F32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.U64: struct.Struct("<Q"),
    ValueType.I64: struct.Struct("<q"),
    ValueType.F64: struct.Struct("<d"),
}
"""Fixed-size types; a bool is a byte, and any value but 0 is true, as in llama.cpp."""

_DTYPES = {
    ValueType.U8: "<u1",
    ValueType.I8: "<i1",
    ValueType.U16: "<u2",
    ValueType.I16: "<i2",
    ValueType.U32: "<u4",
    ValueType.I32: "<i4",
    ValueType.F32: "<f4",
    ValueType.BOOL: "<u1",
    ValueType.U64: "<u8",
    ValueType.I64: "<i8",
    ValueType.F64: "<f8",
}
_CHUNK = 1 << 12
"""Strings walked between two checks against the limit; so few that a hostile file cannot map much before one."""


class TooLong(Exception):
    """An array of strings goes beyond the limit of what a header may hold."""


class Overrun(Exception):
    """String `index` of an array, whose length prefix is at `offset`, does not end within the buffer."""

    def __init__(self, index: int, offset: int, length: int | None) -> None:
        super().__init__(index, offset, length)
        self.index, self.offset, self.length = index, offset, length


def walk_strings(buffer: mmap | bytes, start: int, count: int, limit: int | None = None) -> NDArray[np.int64]:
    """Offsets of `count` strings that begin at `start`: int64 [count + 1], string i is `[o[i] + 8, o[i + 1])`.

    Reads only the length prefixes: 0.1 us a string. Python integers cannot wrap and `unpack_from` refuses to read
    outside the buffer, so an over-long length is caught by the next read or by the last comparison.
    The caller has bounded `count` (8 bytes each) by the file; `limit` is the offset where the last string must end.
    Raises Overrun, TooLong.
    """
    offsets = np.empty(count + 1, np.int64)
    read, at = U64, start
    for first in range(0, count, _CHUNK):
        here: list[int] = []
        push = here.append
        try:
            for _ in range(min(_CHUNK, count - first)):
                push(at)
                at += 8 + read(buffer, at)[0]
        except (struct.error, OverflowError, IndexError):
            _overrun(buffer, first, here[:-1], at, offsets)
        if at > len(buffer):
            _overrun(buffer, first, here, at, offsets)
        if limit is not None and at > limit:
            raise TooLong
        offsets[first : first + len(here)] = here
    offsets[count] = at
    return offsets


def _overrun(buffer: mmap | bytes, first: int, good: list[int], at: int, offsets: NDArray[np.int64]) -> None:
    """Name the string whose length was wrong: the last one read if it ran past the end, else the one at `at`."""
    index = first + len(good)
    if at > len(buffer):
        offset = good[-1] if good else int(offsets[first - 1])
        raise Overrun(index - 1, offset, U64(buffer, offset)[0])
    raise Overrun(index, at, None)


class StringArray(Sequence[str]):
    """An array of strings that stays in the file: indexing decodes one, `to_bytes` and `to_str` decode all.

    Text that is not UTF-8 (byte-level vocabularies have it) decodes with surrogateescape; `raw` keeps the bytes.
    """

    def __init__(self, buffer: mmap | bytes, offsets: NDArray[np.int64]) -> None:
        self._buffer = buffer
        self.offsets = offsets
        """int64 [len + 1], absolute: string i's length prefix is at offsets[i], its end at offsets[i + 1]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of string `index` (0 <= index < len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._buffer[int(self.offsets[index]) + 8 : int(self.offsets[index + 1])]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self.raw(i).decode("utf-8", "surrogateescape") for i in range(*index.indices(len(self)))]
        return self.raw(index + len(self) if index < 0 else index).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_str())

    def to_bytes(self) -> list[bytes]:
        """All strings as bytes."""
        base = int(self.offsets[0])
        blob = self._buffer[base : int(self.offsets[-1])]
        return [blob[a + 8 : b] for a, b in pairwise((self.offsets - base).tolist())]

    def to_str(self) -> list[str]:
        """All strings, surrogateescape where they are not UTF-8."""
        return [text.decode("utf-8", "surrogateescape") for text in self.to_bytes()]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


def decode_numbers(buffer: mmap | bytes, kind: int, at: int, count: int) -> NDArray[Any]:
    """An aligned, read-only copy of `count` numbers (bool: np.bool_) at `at`."""
    values = np.frombuffer(buffer, _DTYPES[ValueType(kind)], count, at)
    values = values != 0 if kind == ValueType.BOOL else values.copy()
    values.flags.writeable = False
    return values


def decode_array(buffer: mmap | bytes, kind: int, at: int, count: int) -> tuple[Any, int]:
    """The elements of a nested array and where it ends; its bounds were checked when the header was read."""
    if kind in FORMATS:
        return decode_numbers(buffer, kind, at, count), at + count * FORMATS[kind].size
    if kind == ValueType.STR:
        offsets = walk_strings(buffer, at, count)
        return StringArray(buffer, offsets), int(offsets[-1])
    values = []
    for _ in range(count):
        value, at = decode_array(buffer, U32(buffer, at)[0], at + 12, U64(buffer, at + 4)[0])
        values.append(value)
    return values, at
