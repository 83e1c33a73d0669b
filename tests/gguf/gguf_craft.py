"""GGUF bytes by hand, right or wrong on purpose: each part is packed as the specification says, with no checks."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string; `length` lies about it."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, item: object) -> bytes:
    if kind == STR:
        assert isinstance(item, (str, bytes))
        return string(item)
    return struct.pack("<" + _PACK[kind], item)


def kv(key: str | bytes, kind: int, item: object) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, item)


def array(kind: int, items: Sequence[object], count: int | None = None) -> bytes:
    """An array's type, count and elements; for kind ARR the items are bytes made by `array`."""
    body = b"".join(item if kind == ARR else value(kind, item) for item in items)  # type: ignore[misc]
    return struct.pack("<IQ", kind, len(items) if count is None else count) + body


def kv_array(key: str, kind: int, items: Sequence[object], count: int | None = None) -> bytes:
    return string(key) + struct.pack("<I", ARR) + array(kind, items, count)


def tensor(name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def model(
    kvs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_kvs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; the counts lie where they are given."""
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(kvs) if n_kvs is None else n_kvs
    )
    head += b"".join(kvs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment if data else 0) + data


ARCH = kv("general.architecture", STR, "llama")
"""The record that every model has: 48 bytes, so the next record of `model([ARCH, ...])` begins at byte 72 - 3."""
