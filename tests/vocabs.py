"""The committed vocabularies, unpacked, and a Vocab from a path: shared by the tests of vocabulary and sampling."""

from __future__ import annotations

import functools
import gzip
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ftgguf.gguf import open_gguf
from ftgguf.vocab import Vocab

DATA = Path(__file__).parent / "data"
_unpacked = tempfile.TemporaryDirectory(prefix="ftgguf-vocab-")


@functools.cache
def vocab_path(name: str) -> Path:
    """The GGUF of `gpt-2` (BPE, 50257 ids), `phi-3` (SPM, 32064) or `stories` (SPM, 512)."""
    if name == "stories":
        return DATA / "stories260K.gguf"
    path = Path(_unpacked.name) / f"{name}.gguf"
    path.write_bytes(gzip.decompress((DATA / "vocab" / f"{name}.gguf.gz").read_bytes()))
    return path


def load(path: Path, overrides: Mapping[str, str | int | float | bool] | None = None) -> Vocab:
    with open_gguf(path, dict(overrides or {})) as gguf:
        return Vocab.load(gguf)


@functools.cache
def vocab(name: str) -> Vocab:
    return load(vocab_path(name))
