"""The metadata of a model as a mapping: decoded on access, with `--override-kv` on top."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import isfinite
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from .errors import GGUFError, shown
from .header import Record
from .values import FORMATS, StringArray, ValueType, decode_array, decode_numbers

Override = int | float | bool | str
_F32_MAX = float(np.finfo(np.float32).max)
_STRUCTURAL = ("general.alignment", "split.")
"""Keys that say how the file is laid out; an override could only break the reading of it."""


def kind_name(value: object) -> str:
    """What a metadata value is, in words for messages."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name}"
    if isinstance(value, StringArray):
        return "an array of strings"
    return {bool: "a bool", int: "an integer", float: "a float", str: "a string", list: "an array"}[type(value)]


_WANTED = {
    bool: "a bool",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array of arrays",
    np.ndarray: "an array of numbers",
    StringArray: "an array of strings",
}


class Metadata(Mapping[str, Any]):
    """Key -> int, float, bool, str, NumPy array, StringArray or list of arrays."""

    def __init__(
        self, path: Path, buffer: mmap | bytes, records: Mapping[str, Record], overrides: Mapping[str, Override]
    ) -> None:
        self.path = path
        self.overrides = dict(overrides)
        self._buffer = buffer
        self._records = records
        self._arrays: dict[str, Any] = {}
        for key, value in self.overrides.items():
            self._check_override(key, value)

    def _check_override(self, key: str, value: Override) -> None:
        if not key or key.startswith(_STRUCTURAL):
            raise GGUFError(self.path, self.offset(key), f"metadata key {shown(key)} cannot be overridden")
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise GGUFError(self.path, self.offset(key), f"override of {shown(key)}: {value} does not fit in 64 bits")
        if isinstance(value, float) and isfinite(value) and abs(value) > _F32_MAX:
            raise GGUFError(
                self.path, self.offset(key), f"override of {shown(key)}: {value} does not fit in a 32-bit float"
            )
        if key not in self._records:
            return
        found = self.decoded(key)
        if kind_name(found) != kind_name(value):
            raise GGUFError(
                self.path,
                self.offset(key),
                f"metadata key {shown(key)} is {kind_name(found)}, it cannot be overridden with {kind_name(value)}",
            )

    def offset(self, key: str) -> int | None:
        """Where the record of `key` begins in the file; None if the file has none."""
        record = self._records.get(key)
        return None if record is None else record.start

    def decoded(self, key: str) -> Any:
        """The file's own value of `key`, overrides aside. KeyError if there is none."""
        record = self._records[key]
        if record.kind == ValueType.BOOL:
            return self._buffer[record.value] != 0
        if record.kind in FORMATS:
            return FORMATS[record.kind].unpack_from(self._buffer, record.value)[0]
        if record.kind == ValueType.STR:
            return self._buffer[record.value + 8 : record.end].decode("utf-8", "surrogateescape")
        if key not in self._arrays:
            self._arrays[key] = self._array(record)
        return self._arrays[key]

    def _array(self, record: Record) -> Any:
        if record.strings is not None:
            return StringArray(self._buffer, record.strings)
        if record.element in FORMATS:
            return decode_numbers(self._buffer, record.element, record.value, record.length)
        return decode_array(self._buffer, record.element, record.value, record.length)[0]

    def typed(self, key: str, kind: type | None) -> Any:
        """The value of `key`, checked to be a `kind` (a float may be written as an integer). KeyError, GGUFError."""
        value = self[key]
        if kind is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        wanted = _WANTED.get(kind, kind.__name__)
        raise GGUFError(
            self.path, self.offset(key), f"metadata key {shown(key)} is {kind_name(value)}, expected {wanted}"
        )

    def raw(self, prefix: str) -> list[tuple[str, bytes]]:
        """The record bytes of all keys that begin with `prefix`; see GGUFFile.raw_kv."""
        return [
            (key, encode(key, self.overrides[key]) if key in self.overrides else self._bytes(key))
            for key in self
            if key.startswith(prefix)
        ]

    def _bytes(self, key: str) -> bytes:
        record = self._records[key]
        return self._buffer[record.start : record.end]

    def __getitem__(self, key: str) -> Any:
        return self.overrides[key] if key in self.overrides else self.decoded(key)

    def __contains__(self, key: object) -> bool:
        return key in self.overrides or key in self._records

    def __iter__(self) -> Iterator[str]:
        yield from self._records
        yield from (key for key in self.overrides if key not in self._records)

    def __len__(self) -> int:
        return len(self._records.keys() | self.overrides.keys())


def encode_string(text: str) -> bytes:
    """A GGUF string: u64 length and the bytes."""
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def encode(key: str, value: Override) -> bytes:
    """A key-value record. Integers become u32, the type llama.cpp reads, where they fit, else i64; floats f32."""
    if isinstance(value, bool):
        return encode_string(key) + struct.pack("<IB", ValueType.BOOL, value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return encode_string(key) + struct.pack("<II", ValueType.U32, value)
        return encode_string(key) + struct.pack("<Iq", ValueType.I64, value)
    if isinstance(value, float):
        return encode_string(key) + struct.pack("<If", ValueType.F32, value)
    return encode_string(key) + struct.pack("<I", ValueType.STR) + encode_string(value)
