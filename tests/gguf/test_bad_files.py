"""Bad files: one line that names the offset and the fault, before any large allocation.

Expectations are computed by hand from the layout: a model that holds ARCH first has its second record at byte 69.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf_craft as craft
import pytest
from gguf_craft import ARCH, ARR, BOOL, F32, STR, U8, U32, array, kv, kv_array, model, tensor

from ftgguf.gguf import GGUFError, open_gguf
from ftgguf.gguf.header import INNER_COST, MAX_KEYS, MAX_STRINGS, MAX_TENSORS

SECOND = 24 + len(ARCH)
"""Where the record or tensor behind ARCH begins."""
HUGE = 1 << 62


def refused(path: Path) -> GGUFError:
    """The error of opening `path`: one printable line that begins with the path, under 50 MB of allocations."""
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert line.startswith(f"{caught.value.path}: ")
    assert line.isprintable()
    assert len(line) < 600 + len(str(path))
    assert caught.value.__cause__ is None
    assert peak < 50 << 20
    return caught.value


def nested(depth: int) -> bytes:
    inner = array(U8, [1])
    for _ in range(depth - 1):
        inner = array(ARR, [inner])
    return kv_array("deep", ARR, [inner])


BAD: dict[str, tuple[bytes, int | None, str]] = {
    # ------------------------------------------------------------------------------------------ not GGUF at all
    "empty": (b"", 0, "the file is empty"),
    "magic": (b"\x00\x01\x02\x03" + bytes(range(40)), 0, "bad magic '\\x00\\x01\\x02\\x03'"),
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4661211808\n",
        0,
        "this is a Git LFS pointer of a 4661211808-byte file, not the model: run 'git lfs pull'",
    ),
    "three bytes": (b"GGU", 0, "the file ends after 3 bytes of 'GGUF': the download has just begun"),
    "web page": (b"\n<!DOCTYPE html><html><head>", 0, "this is a web page saved under the model's name"),
    "error text": (b'{"error":"Repository not found"}', 0, 'this is a text file that begins \'{"error":'),
    "zeros": (b"\0" * 4096, 0, "the file begins with zeros: the download never finished"),
    "ggjt": (b"tjgg" + b"\3\0\0\0" * 8, 0, "this is a GGJT file from before GGUF"),
    "safetensors": (struct.pack("<Q", 100) + b'{"a":{"dtype":"F32"' + b" " * 80, 0, "this is a safetensors file"),
    "zip": (b"PK\x03\x04" + b"\x80" * 60, 0, "this is a zip"),
    "cut in the header": (b"GGUF\3\0\0\0\1", 8, "the tensor count needs 8 bytes but 1 are left"),
    "only magic": (b"GGUF", 4, "the version needs 4 bytes but 0 are left"),
    # -------------------------------------------------------------------------------------------------- preamble
    "version 1": (model([ARCH], version=1), 4, "GGUF version 1 is not supported (versions 2 and 3 are)"),
    "version 0": (model([ARCH], version=0), 4, "unknown GGUF version 0"),
    "version 4": (model([ARCH], version=4), 4, "unknown GGUF version 4 (2 and 3 are supported)"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 9, 4, "big-endian GGUF files are not supported"),
    "tensor count": (model([ARCH], n_tensors=1 << 40), 8, f"tensor count {1 << 40} is more than a model can have"),
    "key count": (model([ARCH], n_kvs=(1 << 64) - 1), 16, f"key-value count {(1 << 64) - 1} is more than a model"),
    "counts beyond the file": (model([ARCH], n_kvs=MAX_KEYS, n_tensors=MAX_TENSORS), 8, "do not fit in the 45 bytes"),
    # ----------------------------------------------------------------------------------------------- key-values
    "key length": (
        model([craft.string("k" * 60, 0xFFFFFFFFFFFF)]),
        24,
        "key 0: length 281474976710655 exceeds the 60 bytes left",
    ),
    "empty key": (model([ARCH, kv("", U32, 1)]), SECOND, "key 1 is empty"),
    "long key": (model([kv("k" * 65536, U32, 1)]), 24, "key 0 is 65536 bytes long, at most 65535 are allowed"),
    "key not utf-8": (model([kv(b"\xff\xfe", U32, 1)]), 24, "key 0 '\\xff\\xfe' is not UTF-8"),
    "key with zero": (model([kv(b"a\0b", U32, 1)]), 24, "key 0 'a\\x00b' contains a zero byte"),
    "duplicate key": (model([ARCH, ARCH]), SECOND, "duplicate key 'general.architecture', first at byte 24"),
    "value type": (model([craft.string("k") + struct.pack("<IQ", 13, 0)]), 33, "key 'k' has unknown value type 13"),
    "value cut": (model([craft.string("k") + struct.pack("<IB", U32, 1)]), 37, "the value of key 'k' needs 4 bytes"),
    "string length": (
        model([craft.string("k") + struct.pack("<I", STR) + craft.string("abc", HUGE)]),
        37,
        f"the value of key 'k': string length {HUGE} exceeds the 3 bytes left",
    ),
    "element type": (model([kv_array("k", 77, [])]), 37, "the array of key 'k' has unknown element type 77"),
    "array count": (model([kv_array("k", F32, [1.0], 1 << 61)]), 37, f"({1 << 61} elements) needs {1 << 63} bytes"),
    "array count wraps": (model([kv_array("k", F32, [1.0], (1 << 62) + 1)]), 37, f"needs {(1 << 64) + 4} bytes"),
    "string count": (model([kv_array("k", STR, ["a"], HUGE)]), 37, f"({HUGE} elements) needs {8 * HUGE} bytes or more"),
    "string in array": (
        model([kv_array("k", STR, [b"ab"]) + kv("pad", STR, "x" * 99)]).replace(
            struct.pack("<Q", 2) + b"ab", struct.pack("<Q", 1 << 63) + b"ab"
        ),
        49,
        f"string 0 is {1 << 63} bytes long but 124 are left",
    ),
    "strings run out": (
        model([kv_array("k", STR, ["a", "bcdefgh"], 3)]),
        73,
        "the file ends before string 2 of 3",
    ),
    "second string": (
        model([kv_array("k", STR, ["a", b"b", "cccccccccccc"])]).replace(b"\1" + b"\0" * 7 + b"b", b"\xff" * 8 + b"b"),
        58,
        f"string 1 is {(1 << 64) - 1} bytes long but 21 are left",
    ),
    "nested too deep": (model([nested(5)]), None, "the array of key 'deep' is nested more than 4 deep"),
    "nested count": (model([kv_array("k", ARR, [array(U8, [1])], HUGE)]), 37, f"({HUGE} elements) needs"),
    "nested inner count": (model([kv_array("k", ARR, [array(U8, [1], 99)])]), 49, "(99 elements) needs 99 bytes but 1"),
    "many inner arrays": (
        model([kv_array("k", ARR, [array(U8, [])] * (MAX_STRINGS // INNER_COST + 1))]),
        37,
        "more strings and arrays than a model can have",
    ),
    "alignment type": (model([kv("general.alignment", STR, "32")]), 24, "general.alignment must be a u32"),
    "alignment zero": (model([kv("general.alignment", U32, 0)]), 53, "general.alignment 0 is not a power of two"),
    "alignment 48": (model([ARCH, kv("general.alignment", U32, 48)]), SECOND + 29, "48 is not a power of two"),
    # -------------------------------------------------------------------------------------------------- tensors
    "zero dimension": (model([], [tensor("t", [4, 0])]), 45, "tensor 't': dimension 1 is zero"),
    "one zero dimension": (model([], [tensor("t", [0])]), 37, "tensor 't': dimension 0 is zero"),
    "five dimensions": (model([], [tensor("t", [1] * 5)]), 33, "has 5 dimensions, at most 4 are allowed"),
    "four billion dimensions": (model([], [tensor("t", [1], n_dims=(1 << 32) - 1)]), 33, "has 4294967295 dimensions"),
    "dimensions cut": (model([], [tensor("t", [1], n_dims=4)]), 37, "tensor 't' needs 44 bytes but 20 are left"),
    "product wraps": (
        model([], [tensor("t", [1 << 32, 1 << 32])]),
        37,
        "tensor 't': [4294967296, 4294967296] has more than 2^63 elements",
    ),
    "product wraps to little": (model([], [tensor("t", [32, (1 << 59) + 1])]), 37, "more than 2^63 elements"),
    "dimension negative": (model([], [tensor("t", [(1 << 64) - 1])]), 37, "more than 2^63 elements"),
    "part of a block": (
        model([], [tensor("t", [100, 3], 12)]),
        37,
        "tensor 't': rows of 100 are not a multiple of the block of 256 of q4_K",
    ),
    "removed type": (
        model([], [tensor("t", [32], 31)]),
        45,
        "tensor 't' has type Q4_0_4_4 (31), which ggml removed: get a newer quantisation",
    ),
    "unknown type": (model([], [tensor("t", [32], 43)]), 45, "tensor 't' has unknown type 43"),
    "negative type": (model([], [tensor("t", [32], (1 << 32) - 1)]), 45, "has unknown type 4294967295"),
    "empty name": (model([], [tensor("", [1])]), 24, "the name of tensor 0 is empty"),
    "long name": (model([], [tensor("n" * 64, [1])]), 24, "tensor 0 is 64 bytes long, at most 63 are allowed"),
    "name length": (model([], [craft.string("n" * 40, HUGE)]), 24, "the name of tensor 0: length"),
    "duplicate tensor": (
        model([], [tensor("t", [1]), tensor("t", [1], 0, 32)], b"\0" * 64),
        57,
        "duplicate tensor 't', first at byte 24",
    ),
    # ----------------------------------------------------------------------------------------------------- data
    "unaligned": (
        model([ARCH], [tensor("a", [1]), tensor("b", [1], 0, 4)], b"\0" * 64),
        SECOND + 33,
        "tensor 'b': data offset 4 is not a multiple of the alignment 32",
    ),
    "unaligned to its own": (
        model([kv("general.alignment", U32, 64)], [tensor("b", [1], 0, 32)], b"\0" * 64, alignment=64),
        57,
        "tensor 'b': data offset 32 is not a multiple of the alignment 64",
    ),
    "overlap": (
        model([], [tensor("a", [16]), tensor("b", [16], 0, 32)], b"\0" * 96),
        57,
        "tensor 'b' at data offset 32 overlaps 'a', which ends at 64",
    ),
    "overlap, listed backwards": (
        model([], [tensor("b", [16], 0, 32), tensor("a", [16])], b"\0" * 96),
        24,
        "tensor 'b' at data offset 32 overlaps 'a'",
    ),
    "offset beyond the end": (
        model([], [tensor("a", [16], 0, 1 << 40)], b"\0" * 64),
        24,
        f"tensor 'a': its 64 bytes at data offset {1 << 40} lie beyond the end of the file (128 bytes)",
    ),
    "offset wraps": (
        model([], [tensor("a", [16], 0, (1 << 64) - 32)], b"\0" * 64),
        24,
        "lie beyond the end of the file",
    ),
    "huge dimension": (
        model([], [tensor("a", [1 << 42])], b"\0" * 64),
        128,
        f"the file ends here but its tensors need {(1 << 44) + 64} bytes, {(1 << 44) - 64} are missing: get it again",
    ),
    "data cut": (model([], [tensor("a", [16])], b"\0" * 63), 127, "its tensors need 128 bytes, 1 are missing"),
    "no data at all": (model([ARCH], [tensor("a", [16])]), 102, "need 192 bytes, 90 are missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_at_the_fault(tmp_path: Path, case: str) -> None:
    """Expectation: offsets computed by hand from the specification's layout."""
    data, offset, fault = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    error = refused(path)
    assert fault in error.message
    if offset is not None:
        assert error.offset == offset
    assert error.offset is not None
    assert f"bad.gguf: at byte {error.offset}: " in str(error)


def good(kvs: Sequence[bytes] = ()) -> bytes:
    tokens = kv_array("tokenizer.ggml.tokens", STR, [f"t{i}" for i in range(20)])
    more = [kv("a.bool", BOOL, 1), kv_array("nest", ARR, [array(STR, ["x", "y"]), array(U8, [1, 2])])]
    tensors = [tensor("a.weight", [32, 2], 8), tensor("b.weight", [5], 0, 96)]
    return model([ARCH, tokens, *more, *kvs], tensors, bytes(68) + bytes(28) + bytes(20))


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    """Every proper prefix of a good file fails with a GGUFError, the whole file opens."""
    whole = good()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    open_gguf(path).close()
    for length in range(len(whole) - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(GGUFError) as caught:
            open_gguf(path)
        assert caught.value.offset is not None
        assert caught.value.offset <= length


def test_missing_bytes_are_counted(tmp_path: Path) -> None:
    """Expectation: whole size less what is there."""
    whole = good()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-50])
    error = refused(path)
    assert f"its tensors need {len(whole)} bytes, 50 are missing: get it again" in error.message
    part = tmp_path / "model.gguf.part1of2"
    part.write_bytes(whole[:-50])
    assert "join all parts in order with cat" in refused(part).message
    rest = tmp_path / "model.gguf.part2of2"
    rest.write_bytes(whole[-50:] + b"\1")
    assert "join all parts in order with cat" in refused(rest).message


def test_joined_shards_are_detected(tmp_path: Path) -> None:
    """Two headers in one file, whatever padding lies between (shards end with or without it)."""
    for gap in (0, 12, 4096):
        path = tmp_path / f"joined{gap}.gguf"
        path.write_bytes(good() + b"\0" * gap + good())
        error = refused(path)
        assert error.offset == len(good()) + gap
        assert "shards were joined with cat, which does not work" in error.message


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """Expectation: a clear word each, and a FIFO does not block."""
    assert "No such file or directory" in refused(tmp_path / "none.gguf").message
    assert "is a directory" in refused(tmp_path).message
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe").message
    assert "not a regular file" in refused(Path("/dev/null")).message
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refused(tmp_path / "loop").message
    with pytest.raises(GGUFError, match="cannot be opened: embedded null"):
        open_gguf(str(tmp_path) + "\0")


def test_an_error_stays_one_line_for_a_hostile_name(tmp_path: Path) -> None:
    """File names and keys may hold line ends, escapes and bytes that are not UTF-8."""
    path = Path(os.fsdecode(bytes(tmp_path) + b"/a\n\x1b[31m\xff.gguf"))
    path.write_bytes(model([kv("k\n\x1b", STR, "x"), kv("k\n\x1b", STR, "x")]))
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    line = str(caught.value)
    assert line.isprintable()
    assert "duplicate key 'k\\n\\x1b'" in line


def test_a_sparse_giant_costs_nothing(tmp_path: Path) -> None:
    """A terabyte of zeros behind counts that it could satisfy: refused by the limits, not by trying."""
    head = model([ARCH, craft.string("k") + struct.pack("<IIQ", ARR, STR, 1 << 36)])
    path = tmp_path / "sparse.gguf"
    path.write_bytes(head)
    os.truncate(path, 1 << 40)
    assert "more strings and arrays than a model can have" in refused(path).message
    path.write_bytes(model([craft.string("k") + struct.pack("<IIQ", ARR, F32, 1 << 36)]))
    os.truncate(path, 1 << 40)
    assert "makes the metadata longer than the 100663296 bytes" in refused(path).message
    path.write_bytes(model([craft.string("k") + struct.pack("<IQ", STR, 1 << 36)]))
    os.truncate(path, 1 << 40)
    assert "makes the metadata longer than the 100663296 bytes" in refused(path).message
    path.write_bytes(model([craft.string("k") + struct.pack("<IIQQ", ARR, STR, 1, 1 << 36)]))
    os.truncate(path, 1 << 40)
    assert "makes the metadata longer than the 100663296 bytes" in refused(path).message
