"""Slots on disk: the tokens of a slot and the contents of their cells, for one model only.

Layout, little-endian: magic `FTGGSLOT`, uint32 version, uint32 header length, the header (JSON: fingerprint, n_tokens,
cell_bytes, and where adapters were in use their scales and what names their files), int32 tokens [n_tokens], the cells'
bytes (in chunks of CHUNK cells), and a CRC-32 of all before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ftgguf.engine.cache import KvCache
from ftgguf.engine.slots import Slot
from ftgguf.kv.pages import cells_of, pages_for
from ftgguf.nouns import I32

MAGIC = b"FTGGSLOT"
VERSION = 1
CHUNK = 1024
"""Cells moved at a time: some hundred MiB at most, whatever the context."""
_HEAD = struct.Struct("<8sII")
_IDENTITY = (
    "architecture", "name", "file_type", "n_params", "size", "n_vocab", "n_embd", "n_layer", "kv_types", "kv_layout",
)  # fmt: skip
_SAMPLE = 1 << 20


class SlotFileError(ValueError):
    """The file is not a slot of this model; the text says why."""


def fingerprint(info: dict[str, Any]) -> str:
    """Names a model and its KV: a hash of its description and of the first and last MiB of its file.

    `kv_layout` is there because cells lie in other orders on the CPU, on a GPU and in segments of both: bytes of one
    would be taken for those of another.
    """
    digest = hashlib.sha256(json.dumps([info.get(key) for key in _IDENTITY]).encode())
    path = info.get("path")
    if path and Path(path).is_file():
        _sample(digest, path)
    return digest.hexdigest()


def _sample(digest: Any, path: str) -> None:
    with open(path, "rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SAMPLE))
        digest.update(file.read(_SAMPLE))


class _Checked:
    """A file that counts and checksums what passes through."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.crc = 0
        self.count = 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self._note(data)

    def read(self, n: int) -> bytes:
        data = self.file.read(n)
        if len(data) != n:
            raise SlotFileError(f"the slot file ends after {self.count + len(data)} bytes: it is cut off")
        self._note(data)
        return data

    def _note(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.count += len(data)


def adapters_fingerprint(info: dict[str, Any]) -> str:
    """Names the loaded LoRA adapters, in order: a hash of the first and last MiB of their files."""
    digest = hashlib.sha256()
    for adapter in info.get("lora", ()):
        _sample(digest, adapter["path"])
    return digest.hexdigest()


def save(path: Path, slot: Slot, cache: KvCache, model: str, lora: str = "") -> tuple[int, int]:
    """Write what is held of the slot's tokens; returns (tokens, bytes). The file appears whole or not at all.

    `model` and `lora` name the model and the loaded adapters (`fingerprint`, `adapters_fingerprint`).
    """
    match = cache.tree.match(slot.tokens, space=slot.adapters)
    tokens = slot.tokens[: match.length]
    cells = cells_of(match.pages)[: match.length]
    cell_bytes = len(cache.executor.read_cells(cells[:1])) if len(cells) else 0
    fields: dict[str, Any] = {"fingerprint": model, "n_tokens": len(tokens), "cell_bytes": cell_bytes}
    if slot.adapters:
        fields |= {"adapters": slot.adapters, "lora": lora}
    header = json.dumps(fields).encode()
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            out = _Checked(file)
            out.write(_HEAD.pack(MAGIC, VERSION, len(header)))
            out.write(header)
            out.write(tokens.astype("<i4").tobytes())
            for start in range(0, len(cells), CHUNK):
                out.write(cache.executor.read_cells(np.ascontiguousarray(cells[start : start + CHUNK])))
            file.write(struct.pack("<I", out.crc))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return len(tokens), out.count + 4


def restore(
    path: Path, slot: Slot, cache: KvCache, model: str, n_ctx: int, n_vocab: int, lora: str = ""
) -> tuple[int, int]:
    """Read a slot file into the cache and the slot; returns (tokens, bytes).

    Raises SlotFileError for another model, a damaged file or one that does not fit; the slot then holds nothing.
    """
    slot.tokens = slot.tokens[:0]
    try:
        with open(path, "rb") as file:
            source = _Checked(file)
            tokens, cell_bytes, adapters = _read_head(source, model, lora, n_ctx, n_vocab)
            pages = _take_pages(cache, pages_for(len(tokens)))
            try:
                _read_cells(source, cache, cells_of(pages)[: len(tokens)], cell_bytes)
                if struct.pack("<I", source.crc) != file.read(4):
                    raise SlotFileError("its checksum is wrong: the file is damaged")
                cache.tree.insert(tokens, pages, adapters)
            finally:
                cache.pool.release(pages)
    except OSError as error:
        raise SlotFileError(f"Unable to restore slot: {path.name}: {error.strerror}") from None
    except SlotFileError as error:
        raise SlotFileError(f"Unable to restore slot: {path.name}: {error}") from None
    slot.tokens, slot.adapters = tokens, adapters
    return len(tokens), source.count + 4


def _read_head(source: _Checked, model: str, lora: str, n_ctx: int, n_vocab: int) -> tuple[I32, int, tuple[float, ...]]:
    magic, version, length = _HEAD.unpack(source.read(_HEAD.size))
    if magic != MAGIC:
        raise SlotFileError("not a slot file of this program")
    if version != VERSION or length > 1 << 16:
        raise SlotFileError(f"version {version} of the format is not known here (this is {VERSION})")
    text = source.read(length)
    try:
        header = json.loads(text)
        n, cell_bytes, found = int(header["n_tokens"]), int(header["cell_bytes"]), str(header["fingerprint"])
        adapters = tuple(float(scale) for scale in header.get("adapters", ()))
    except (ValueError, KeyError, TypeError):
        raise SlotFileError("its header is damaged") from None
    if found != model:
        raise SlotFileError("it was saved with another model or other KV types")
    if adapters and header.get("lora") != lora:
        raise SlotFileError("it was saved with other LoRA adapters")
    if not 0 <= n <= n_ctx:
        raise SlotFileError(f"its {n} tokens do not fit in the slot's context of {n_ctx}")
    tokens = np.frombuffer(source.read(4 * n), dtype="<i4").astype(np.int32)
    if n and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab:
        raise SlotFileError("it holds invalid tokens")
    return tokens, cell_bytes, adapters


def _take_pages(cache: KvCache, n: int) -> list[int]:
    if n > cache.pool.n_free:
        cache.tree.evict(n - cache.pool.n_free)
    pages = cache.pool.alloc(n)
    if pages is None:
        raise SlotFileError("running requests leave no room for it in the KV cache: try again later")
    return pages


def _read_cells(source: _Checked, cache: KvCache, cells: I32, cell_bytes: int) -> None:
    for start in range(0, len(cells), CHUNK):
        part = np.ascontiguousarray(cells[start : start + CHUNK])
        try:
            cache.executor.write_cells(part, source.read(cell_bytes * len(part)))
        except SlotFileError:
            raise
        except ValueError as error:
            raise SlotFileError(f"its cells do not fit this model: {error}") from None
