"""Mutated files: nothing but a GGUFError may come out, and libggml must agree with the verdict.

Deterministic: the seeds are fixed. What was found is kept in test_bad_files and at the end of this file.
"""

from __future__ import annotations

import ctypes
import random
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest
from gguf_craft import ARCH, ARR, BOOL, F32, I32, STR, U8, U32, array, kv, kv_array, model, tensor

from ftgguf.gguf import GGUFError, GGUFFile, open_gguf
from ftgguf.gguf.writer import vocab_only_bytes

SPECIAL = (0, 1, 2, 4, 5, 8, 9, 31, 32, 33, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
SPECIAL_64 = (*SPECIAL, 1 << 32, 1 << 40, (1 << 60) + 1, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def seed_file(nested: bool) -> bytes:
    """A small file with every kind of record, a vocabulary and tensors of several types."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(8)), "a", "b", "ab", " a"]
    kvs = [
        ARCH,
        kv("general.alignment", U32, 32),
        kv("tokenizer.ggml.model", STR, "gpt2"),
        kv_array("tokenizer.ggml.tokens", STR, tokens),
        kv_array("tokenizer.ggml.scores", F32, [0.0] * len(tokens)),
        kv_array("tokenizer.ggml.token_type", I32, [1] * len(tokens)),
        kv_array("tokenizer.ggml.merges", STR, ["a b"]),
        kv("tokenizer.ggml.bos_token_id", U32, 1),
        kv("tokenizer.ggml.add_bos_token", BOOL, 1),
    ]
    if nested:
        kvs.append(kv_array("n", ARR, [array(STR, ["x", ""]), array(U8, [1, 2]), array(ARR, [array(F32, [1.0])])]))
    tensors = [tensor("a.weight", [256, 2], 12), tensor("b.bias", [5], 0, 288), tensor("c", [32, 1, 3], 8, 320)]
    return model(kvs, tensors, bytes(288 + 32 + 102))


def mutate(data: bytes, source: random.Random) -> bytes:
    """One to three mutations: flipped bytes, integers of note, cuts, copies of pieces."""
    out = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(out)) if out else 0
        action = source.randrange(7)
        if action == 0 and out:
            out[at] ^= 1 << source.randrange(8)
        elif action == 1:
            out[at : at + 4] = struct.pack("<I", source.choice(SPECIAL))
        elif action in (2, 3):
            out[at : at + 8] = struct.pack("<Q", source.choice(SPECIAL_64))
        elif action == 4 and source.random() < 0.3:
            del out[at:]
        elif action == 5:
            del out[at : at + source.randint(1, 16)]
        elif action == 6:
            piece = source.randrange(len(out) + 1)
            out[at:at] = out[piece : piece + source.randint(1, 40)]
    return bytes(out)


def exercise(found: GGUFFile) -> None:
    """Decode everything of a file that opened; each may only fail with a GGUFError."""
    lines: list[str] = []
    for key, value in found.metadata.items():
        assert repr(value) is not None
        if not isinstance(value, (bool, int, float)):
            list(value)
        assert found.metadata.raw(key)
    for name, info in found.tensors.items():
        assert len(found.data(name)) == info.nbytes > 0
    for read in (lambda: found.architecture, lambda: found.file_type, lambda: vocab_only_bytes(found)):
        try:
            read()
        except GGUFError as error:
            lines.append(str(error))
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("seed", range(8))
def test_mutations_never_raise_anything_else(tmp_path: Path, seed: int) -> None:
    """400 mutants a seed; all of memory's allocations together stay under 20 MB for these 3 KB files."""
    source = random.Random(seed)
    data = seed_file(nested=seed % 2 == 0)
    path = tmp_path / "mutant.gguf"
    opened = 0
    tracemalloc.start()
    for _ in range(400):
        path.write_bytes(mutate(data, source))
        try:
            with open_gguf(path) as found:
                exercise(found)
            opened += 1
        except GGUFError as error:
            line = str(error)
            assert line.isprintable()
            assert line.startswith(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert 20 < opened < 380


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@pytest.fixture(scope="module")
def ggml_reads() -> Iterator[Callable[[Path], bool]]:
    """`ggml_reads(path) -> bool`: whether libggml's gguf_init_from_file accepts a file."""
    lib = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    lib.gguf_free.argtypes = [ctypes.c_void_p]
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    silence = callback(lambda level, text, data: None)
    lib.ggml_log_set(silence, None)

    def reads(path: Path) -> bool:
        handle = lib.gguf_init_from_file(bytes(path), _InitParams(True, None))
        if handle:
            lib.gguf_free(handle)
        return bool(handle)

    yield reads
    lib.ggml_log_set(None, None)


STRICTER = re.compile(
    r"are missing: |lie beyond the end|dimension \d is zero|is not UTF-8|contains a zero byte"
    r"|name of tensor \d+ is empty|joined with cat|split\.|more than a model can have|this is shard"
)
"""What we refuse and gguf_init_from_file does not: data it would read later, and names that nobody writes."""


def packed(found: GGUFFile) -> bool:
    """ggml wants the data in the records' order without gaps."""
    end = 0
    for info in found.tensors.values():
        if info.offset - found.shards[0].header.data != end:
            return False
        end += -(-info.nbytes // found.alignment) * found.alignment
    return True


@pytest.mark.parametrize("seed", range(100, 104))
def test_libggml_agrees(tmp_path: Path, seed: int, ggml_reads: Callable[[Path], bool]) -> None:
    """Oracle: gguf_init_from_file of libggml on 500 mutants a seed, where our contracts are the same."""
    source = random.Random(seed)
    data = seed_file(nested=False)
    path = tmp_path / "mutant.gguf"
    both = 0
    for _ in range(500):
        path.write_bytes(mutate(data, source))
        theirs = ggml_reads(path)
        fault = ""
        try:
            with open_gguf(path) as found:
                nested = any(isinstance(value, list) for value in found.metadata.values())
                assert theirs or nested or not packed(found), path.read_bytes()
                both += theirs
        except GGUFError as error:
            fault = error.message
        assert not fault or not theirs or STRICTER.search(fault), (fault, path.read_bytes())
    assert both > 20
