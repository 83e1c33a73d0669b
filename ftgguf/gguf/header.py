"""One file's GGUF header: parsed with every count, length, offset and product checked before it is used.

The layout is the GGUF specification's: magic, version, tensor count, key-value count, the key-value records, the
tensor records, padding to `general.alignment`, data. Limits that the specification leaves open are llama.cpp's
(64-byte names, 4 dimensions) or far above any real file, so that a hostile header costs little time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from .errors import GGUFError, shown
from .sniff import describe
from .types import REMOVED_TYPES, TYPE_TABLE, TensorType
from .values import FORMATS, U32, U64, Overrun, TooLong, ValueType, walk_strings

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
"""Kimi-K2 with one tensor per expert would have 70,000."""
MAX_STRINGS = 1 << 22
"""All strings in a header's arrays together; the largest vocabularies have 0.8 million with their merges."""
INNER_COST = 64
"""An array inside an array takes as long to check as about 64 strings, and counts as so many."""
MAX_METADATA = 96 << 20
"""Where the key-value records must end; Gemma's take 16 MB, tokenizer.huggingface.json would add 30."""
MAX_KEY = 65535
MAX_NAME = 63
"""GGML_MAX_NAME less the closing zero."""
MAX_DIMS = 4
MAX_DEPTH = 4
DEFAULT_ALIGNMENT = 32
INT64_MAX = (1 << 63) - 1
TOO_LONG = f"makes the metadata longer than the {MAX_METADATA} bytes a model can have: the file is damaged"
AGAIN = "the file is truncated or damaged, get it again"


_TENSORS = tuple(Struct(f"<{n}QIQ") for n in range(MAX_DIMS + 1))
"""A tensor record behind its number of dimensions: the dimensions, the type, the offset."""


class Record(NamedTuple):
    """Where a key-value record lies: absolute byte offsets, and its type. `strings` only for arrays of strings."""

    start: int
    kind: int
    value: int
    """Offset of the scalar, the string's length prefix or the array's first element."""
    end: int
    element: int = -1
    length: int = 1
    strings: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` is ggml's `ne` as the file has it, fastest first, 1 to 4 numbers; `offset` is absolute in
    the file of shard `shard`; `nbytes` without padding."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    nbytes: int
    shard: int
    offset: int

    @property
    def ne(self) -> tuple[int, int, int, int]:
        """`shape` padded with ones to four numbers."""
        a, b, c, d = (*self.shape, 1, 1, 1)[:4]
        return a, b, c, d

    @property
    def n_elements(self) -> int:
        a, b, c, d = self.ne
        return a * b * c * d

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of shape[0] elements."""
        block, size = TYPE_TABLE[self.type]
        return self.shape[0] // block * size


class RawTensor(NamedTuple):
    """A tensor record as read; `start` is the record's own offset, `relative` the data's within the data section."""

    start: int
    name: str
    type: TensorType
    shape: tuple[int, ...]
    nbytes: int
    relative: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `end` is where the tensor records end, `data` where the (aligned) data section begins."""

    version: int
    alignment: int
    records: dict[str, Record]
    tensors: list[RawTensor]
    end: int
    data: int


class Parser:
    """A cursor over the file. Every method checks before it reads and raises GGUFError at the place of the fault."""

    def __init__(self, path: Path, buffer: mmap | bytes) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0
        self.strings_left = MAX_STRINGS

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise GGUFError(self.path, self.at if at is None else at, message)

    def need(self, n: int, what: str) -> None:
        left = self.size - self.at
        if n > left:
            self.fail(f"{what} needs {n} bytes but {left} are left: {AGAIN}")

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.at += 4
        return int(U32(self.buffer, self.at - 4)[0])

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.at += 8
        return int(U64(self.buffer, self.at - 8)[0])

    def name(self, what: str, limit: int) -> str:
        """A key or tensor name: not empty, at most `limit` bytes, UTF-8."""
        start = self.at
        length = self.u64(f"the length of {what}")
        if length == 0:
            self.fail(f"{what} is empty", start)
        if length > self.size - self.at:
            self.fail(f"{what}: length {length} exceeds the {self.size - self.at} bytes left: {AGAIN}", start)
        if length > limit:
            self.fail(f"{what} is {length} bytes long, at most {limit} are allowed", start)
        raw = self.buffer[self.at : self.at + length]
        self.at += length
        if b"\0" in raw:
            self.fail(f"{what} {shown(raw)} contains a zero byte", start)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} {shown(raw)} is not UTF-8", start)

    # ------------------------------------------------------------------------------------------- parts of a header

    def preamble(self) -> tuple[int, int, int]:
        """Magic, version and counts: (version, tensor count, key-value count)."""
        head = self.buffer[:512]
        if head[:4] != b"GGUF":
            self.fail(describe(head, self.size, self.path.name), 0)
        self.at = 4
        version = self.u32("the version")
        if version & 0xFFFF == 0 and 1 <= int.from_bytes(version.to_bytes(4, "little"), "big") <= 0xFFFF:
            self.fail("big-endian GGUF files are not supported: get the little-endian file", 4)
        if version == 1:
            self.fail("GGUF version 1 is not supported (versions 2 and 3 are): get a newer conversion of the model", 4)
        if version not in (2, 3):
            self.fail(f"unknown GGUF version {version} (2 and 3 are supported)", 4)
        n_tensors = self._count("tensor", MAX_TENSORS)
        n_keys = self._count("key-value", MAX_KEYS)
        # The smallest records: a u8 under a one-letter key (14 bytes), a one-letter tensor without dimensions (25).
        if n_keys * 14 + n_tensors * 25 > self.size - self.at:
            self.fail(f"{n_keys} keys and {n_tensors} tensors do not fit in the {self.size - self.at} bytes left", 8)
        return version, n_tensors, n_keys

    def _count(self, what: str, limit: int) -> int:
        count = self.u64(f"the {what} count")
        if count > limit:
            self.fail(f"{what} count {count} is more than a model can have ({limit}): the file is damaged", self.at - 8)
        return count

    def record(self, key: str, start: int) -> Record:
        """One key-value record from its type on; the cursor ends behind it."""
        kind = self.u32(f"the type of key {shown(key)}")
        value = self.at
        if kind in FORMATS:
            self.skip(FORMATS[kind].size, f"the value of key {shown(key)}")
        elif kind == ValueType.STR:
            self.skip_string(f"the value of key {shown(key)}")
        elif kind == ValueType.ARR:
            return self._array_record(key, start)
        else:
            self.fail(f"key {shown(key)} has unknown value type {kind}", value - 4)
        return Record(start, kind, value, self.at)

    def _array_record(self, key: str, start: int) -> Record:
        what = f"the array of key {shown(key)}"
        element = self.u32(what)
        count = self.u64(what)
        value = self.at
        strings = self.elements(element, count, what, 1)
        return Record(start, ValueType.ARR, value, self.at, element, count, strings)

    def elements(self, element: int, count: int, what: str, depth: int) -> NDArray[np.int64] | None:
        """Check and pass `count` array elements; the strings' offsets where the elements are strings."""
        header = self.at - 12
        if element in FORMATS:
            size = count * FORMATS[element].size
            self.skip(size, f"{what} ({count} elements)", header)
            return None
        if element not in (ValueType.STR, ValueType.ARR):
            self.fail(f"{what} has unknown element type {element}", header)
        least = 8 if element == ValueType.STR else 12
        if count * least > self.size - self.at:
            left = self.size - self.at
            self.fail(f"{what} ({count} elements) needs {count * least} bytes or more but {left} are left", header)
        self.strings_left -= count if element == ValueType.STR else count * INNER_COST
        if self.strings_left < 0:
            self.fail(
                f"{what} ({count} elements): the header has more strings and arrays than a model can have", header
            )
        if element == ValueType.STR:
            return self._strings(count, what)
        if depth >= MAX_DEPTH:
            self.fail(f"{what} is nested more than {MAX_DEPTH} deep", header)
        for _ in range(count):
            inner = self.u32(what)
            self.elements(inner, self.u64(what), what, depth + 1)
        return None

    def _strings(self, count: int, what: str) -> NDArray[np.int64]:
        try:
            offsets = walk_strings(self.buffer, self.at, count, MAX_METADATA)
        except TooLong:
            self.fail(f"{what} ({count} elements) {TOO_LONG}")
        except Overrun as error:
            left = self.size - error.offset - 8
            if error.length is None:
                self.fail(f"{what}: the file ends before string {error.index} of {count}: {AGAIN}", error.offset)
            self.fail(
                f"{what}: string {error.index} is {error.length} bytes long but {left} are left: {AGAIN}", error.offset
            )
        self.at = int(offsets[-1])
        return offsets

    def skip(self, n: int, what: str, at: int | None = None) -> None:
        left = self.size - self.at
        if n > left:
            self.fail(f"{what} needs {n} bytes but {left} are left: {AGAIN}", at)
        if self.at + n > MAX_METADATA:
            self.fail(f"{what} ({n} bytes) {TOO_LONG}", at)
        self.at += n

    def skip_string(self, what: str) -> None:
        start = self.at
        length = self.u64(what)
        left = self.size - self.at
        if length > left:
            self.fail(f"{what}: string length {length} exceeds the {left} bytes left: {AGAIN}", start)
        if self.at + length > MAX_METADATA:
            self.fail(f"{what} ({length} bytes) {TOO_LONG}", start)
        self.at += length

    def tensor(self, index: int) -> RawTensor:
        """One tensor record: name, dimensions, type, offset."""
        start = self.at
        name = self.name(f"the name of tensor {index}", MAX_NAME)
        self.need(4, "the number of dimensions")
        n_dims = U32(self.buffer, self.at)[0]
        if n_dims > MAX_DIMS:
            self.fail(f"tensor {shown(name)} has {n_dims} dimensions, at most {MAX_DIMS} are allowed")
        self.at += 4
        dims, record = self.at, _TENSORS[n_dims]
        if record.size > self.size - self.at:
            self.need(record.size, f"tensor {shown(name)}")
        *stored, number, relative = record.unpack_from(self.buffer, dims)
        self.at += record.size
        shape = tuple(stored) or (1,)
        elements = 1
        for place, n in enumerate(shape):
            if n == 0:
                self.fail(f"tensor {shown(name)}: dimension {place} is zero", dims + 8 * place)
            elements *= n
        if elements > INT64_MAX:
            self.fail(f"tensor {shown(name)}: {list(shape)} has more than 2^63 elements, the product wraps", dims)
        if number not in TYPE_TABLE:
            self._bad_type(name, number, dims + 8 * n_dims)
        kind = TensorType(number)
        block, size = TYPE_TABLE[kind]
        if shape[0] % block:
            self.fail(
                f"tensor {shown(name)}: rows of {shape[0]} are not a multiple of the block of {block} "
                f"of {kind.ggml_name}",
                dims,
            )
        return RawTensor(start, name, kind, shape, elements // block * size, relative)

    def _bad_type(self, name: str, number: int, at: int) -> NoReturn:
        if number in REMOVED_TYPES:
            self.fail(
                f"tensor {shown(name)} has type {REMOVED_TYPES[number]} ({number}), which ggml removed: "
                "get a newer quantisation of the model",
                at,
            )
        self.fail(f"tensor {shown(name)} has unknown type {number}: a newer format, or damage", at)


def parse_header(path: Path, buffer: mmap | bytes) -> Header:
    """Parse the header of one file, given whole as a read-only buffer. Raises GGUFError; reads no tensor data."""
    parser = Parser(path, buffer)
    version, n_tensors, n_keys = parser.preamble()
    records: dict[str, Record] = {}
    for index in range(n_keys):
        start = parser.at
        key = parser.name(f"key {index}", MAX_KEY)
        if key in records:
            parser.fail(f"duplicate key {shown(key)}, first at byte {records[key].start}", start)
        records[key] = parser.record(key, start)
    alignment = _alignment(parser, records)
    tensors: dict[str, RawTensor] = {}
    for index in range(n_tensors):
        tensor = parser.tensor(index)
        if tensor.name in tensors:
            first = tensors[tensor.name].start
            parser.fail(f"duplicate tensor {shown(tensor.name)}, first at byte {first}", tensor.start)
        tensors[tensor.name] = tensor
    end = parser.at
    return Header(version, alignment, records, list(tensors.values()), end, -(-end // alignment) * alignment)


def _alignment(parser: Parser, records: dict[str, Record]) -> int:
    record = records.get("general.alignment")
    if record is None:
        return DEFAULT_ALIGNMENT
    if record.kind != ValueType.U32:
        parser.fail("general.alignment must be a u32", record.start)
    alignment = int(U32(parser.buffer, record.value)[0])
    if alignment == 0 or alignment & (alignment - 1):
        parser.fail(f"general.alignment {alignment} is not a power of two", record.value)
    return alignment
