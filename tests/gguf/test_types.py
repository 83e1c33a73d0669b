"""The tensor-type table against the installed libggml, libllama and the gguf package."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import pytest

from ftgguf.gguf.types import (
    FILE_TYPE_NAMES,
    REMOVED_TYPES,
    TYPE_TABLE,
    TensorType,
    base_type,
    file_type_name,
    row_bytes,
    type_from_name,
)


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    """libggml-base as llama-cpp-python installed it."""
    lib = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_type_size.restype = ctypes.c_size_t
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_row_size.restype = ctypes.c_size_t
    lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.ggml_is_quantized.restype = ctypes.c_bool
    return lib


def test_every_type_of_libggml_is_in_the_table(ggml: ctypes.CDLL) -> None:
    """Oracle: ggml_type_name, ggml_blck_size, ggml_type_size, ggml_row_size, ggml_is_quantized of libggml."""
    live = {n for n in range(43) if ggml.ggml_blck_size(n) > 0}
    assert live == {int(kind) for kind in TensorType} == {int(kind) for kind in TYPE_TABLE}
    assert len(live) == 35
    assert live.isdisjoint(REMOVED_TYPES)
    assert live | REMOVED_TYPES.keys() == set(range(43))
    for kind in TensorType:
        assert kind.ggml_name.encode() == ggml.ggml_type_name(int(kind))
        assert (kind.block, kind.block_bytes) == (ggml.ggml_blck_size(int(kind)), ggml.ggml_type_size(int(kind)))
        assert row_bytes(kind, 7 * kind.block) == ggml.ggml_row_size(int(kind), 7 * kind.block)
        assert kind.quantized == ggml.ggml_is_quantized(int(kind))


def test_sizes_and_names_agree_with_the_gguf_package() -> None:
    """Oracle: gguf.GGML_QUANT_SIZES and GGMLQuantizationType, for the types that the package knows."""
    known = {int(kind): kind for kind in TensorType}
    shared = [kind for kind in gguf.GGMLQuantizationType if int(kind) in known]
    assert len(shared) >= 32
    for kind in shared:
        assert known[int(kind)].name == kind.name
        if kind is gguf.GGMLQuantizationType.Q8_1:
            continue  # the package still has the size from when its scales were float32
        assert TYPE_TABLE[known[int(kind)]] == gguf.GGML_QUANT_SIZES[kind]


def test_file_type_names_are_llama_cpps() -> None:
    """Oracle: llama_ftype_name of libllama."""
    for number in range(64):
        assert llama_cpp.llama_ftype_name(number) == file_type_name(number).encode()
    assert set(FILE_TYPE_NAMES) < set(range(64))


def test_names_in_both_spellings() -> None:
    """The names of llama.cpp's flags (`-ctk q8_0`) and of file names (`Q4_K`)."""
    assert type_from_name("q4_K") is type_from_name("Q4_K") is type_from_name("q4_k") is TensorType.Q4_K
    with pytest.raises(ValueError, match="unknown tensor type 'q4_9'; known types: f32, f16, q4_0"):
        type_from_name("q4_9")


def test_row_bytes_refuses_part_of_a_block() -> None:
    """ggml asserts the same."""
    with pytest.raises(ValueError, match="a row of 255 elements is not a multiple of the 256-element block of q4_K"):
        row_bytes(TensorType.Q4_K, 255)


def test_base_type_and_guesses() -> None:
    """By the names themselves; the guess is llama_model_loader's table from a tensor type to a file type."""
    assert base_type(15) is TensorType.Q4_K
    assert base_type(0) is TensorType.F32
    assert base_type(29) is None
    assert base_type(999) is None
    assert file_type_name(None, TensorType.Q4_K) == "(guessed) Q4_K - Medium"
    assert file_type_name(None, TensorType.IQ3_S) == "(guessed) IQ3_S - 3.4375 bpw"
    assert file_type_name(None, TensorType.MXFP4) == "(guessed) all F32"
    assert file_type_name(99) == "unknown, may not work"
