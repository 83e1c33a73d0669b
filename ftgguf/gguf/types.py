"""ggml's tensor types: ids, block geometry and the names that llama.cpp and the GGUF tools print.

Ids and sizes are ggml's (`ggml.h`, `ggml-common.h` at the version pinned in pyproject.toml); a test compares the
whole table with the installed libggml and with the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class TensorType(IntEnum):
    """The live values of `ggml_type` as they stand in a GGUF tensor record."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block(self) -> int:
        """Elements in one block; a row of a tensor is a whole number of blocks."""
        return TYPE_TABLE[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return TYPE_TABLE[self][1]

    @property
    def ggml_name(self) -> str:
        """The name `ggml_type_name` prints: `q4_K`, `iq2_xxs`, `f32`."""
        return _GGML_NAMES[self]

    @property
    def quantized(self) -> bool:
        """True for block formats (ggml's `ggml_is_quantized`)."""
        return self.block > 1


TYPE_TABLE: Mapping[TensorType, tuple[int, int]] = MappingProxyType(
    {
        TensorType.F32: (1, 4),
        TensorType.F16: (1, 2),
        TensorType.Q4_0: (32, 18),
        TensorType.Q4_1: (32, 20),
        TensorType.Q5_0: (32, 22),
        TensorType.Q5_1: (32, 24),
        TensorType.Q8_0: (32, 34),
        TensorType.Q8_1: (32, 36),
        TensorType.Q2_K: (256, 84),
        TensorType.Q3_K: (256, 110),
        TensorType.Q4_K: (256, 144),
        TensorType.Q5_K: (256, 176),
        TensorType.Q6_K: (256, 210),
        TensorType.Q8_K: (256, 292),
        TensorType.IQ2_XXS: (256, 66),
        TensorType.IQ2_XS: (256, 74),
        TensorType.IQ3_XXS: (256, 98),
        TensorType.IQ1_S: (256, 50),
        TensorType.IQ4_NL: (32, 18),
        TensorType.IQ3_S: (256, 110),
        TensorType.IQ2_S: (256, 82),
        TensorType.IQ4_XS: (256, 136),
        TensorType.I8: (1, 1),
        TensorType.I16: (1, 2),
        TensorType.I32: (1, 4),
        TensorType.I64: (1, 8),
        TensorType.F64: (1, 8),
        TensorType.IQ1_M: (256, 56),
        TensorType.BF16: (1, 2),
        TensorType.TQ1_0: (256, 54),
        TensorType.TQ2_0: (256, 66),
        TensorType.MXFP4: (32, 17),
        TensorType.NVFP4: (64, 36),
        TensorType.Q1_0: (128, 18),
        TensorType.Q2_0: (64, 18),
    }
)
"""(block elements, block bytes) of every live type."""

REMOVED_TYPES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)
"""Ids that ggml once wrote to files and no longer reads."""


def _ggml_name(kind: TensorType) -> str:
    """ggml prints names in lower case, but keeps the capital K of the k-quants."""
    name = kind.name.lower()
    return name[:-1] + "K" if name.endswith("_k") else name


_GGML_NAMES: dict[TensorType, str] = {kind: _ggml_name(kind) for kind in TensorType}
_BY_NAME: dict[str, TensorType] = {kind.name: kind for kind in TensorType}


def type_from_name(name: str) -> TensorType:
    """The type of a name in either spelling and any case (`q4_K`, `Q4_K`); ValueError lists what there is."""
    try:
        return _BY_NAME[name.upper()]
    except KeyError:
        known = ", ".join(kind.ggml_name for kind in TensorType)
        raise ValueError(f"unknown tensor type '{name}'; known types: {known}") from None


def row_bytes(kind: TensorType, n: int) -> int:
    """Bytes of a row of `n` elements (ggml's `ggml_row_size`). ValueError unless n is a whole number of blocks."""
    block, size = TYPE_TABLE[kind]
    if n < 0 or n % block:
        raise ValueError(f"a row of {n} elements is not a multiple of the {block}-element block of {kind.ggml_name}")
    return n // block * size


FILE_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        0: "all F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        7: "Q8_0",
        8: "Q5_0",
        9: "Q5_1",
        10: "Q2_K - Medium",
        11: "Q3_K - Small",
        12: "Q3_K - Medium",
        13: "Q3_K - Large",
        14: "Q4_K - Small",
        15: "Q4_K - Medium",
        16: "Q5_K - Small",
        17: "Q5_K - Medium",
        18: "Q6_K",
        19: "IQ2_XXS - 2.0625 bpw",
        20: "IQ2_XS - 2.3125 bpw",
        21: "Q2_K - Small",
        22: "IQ3_XS - 3.3 bpw",
        23: "IQ3_XXS - 3.0625 bpw",
        24: "IQ1_S - 1.5625 bpw",
        25: "IQ4_NL - 4.5 bpw",
        26: "IQ3_S - 3.4375 bpw",
        27: "IQ3_S mix - 3.66 bpw",
        28: "IQ2_S - 2.5 bpw",
        29: "IQ2_M - 2.7 bpw",
        30: "IQ4_XS - 4.25 bpw",
        31: "IQ1_M - 1.75 bpw",
        32: "BF16",
        36: "TQ1_0 - 1.69 bpw ternary",
        37: "TQ2_0 - 2.06 bpw ternary",
        38: "MXFP4 MoE",
        39: "NVFP4",
        40: "Q1_0",
        41: "Q2_0",
    }
)
"""`general.file_type` as llama.cpp prints it (`llama_ftype_name`)."""


def file_type_name(file_type: int | None, most_common: TensorType | None = None) -> str:
    """llama.cpp's name of `general.file_type`; without the key, `(guessed) ` and the type most tensors have."""
    if file_type is not None:
        return FILE_TYPE_NAMES.get(file_type, "unknown, may not work")
    return "(guessed) " + _GUESSED_NAMES.get(most_common, "all F32") if most_common is not None else "(guessed) all F32"


def base_type(file_type: int) -> TensorType | None:
    """The tensor type that `file_type` is named after (Q4_K for "Q4_K - Medium"); None where it names a mix."""
    words = FILE_TYPE_NAMES.get(file_type, "").removeprefix("all ").split()
    return _BY_NAME.get(words[0]) if words else None


_GUESSED_FILE_TYPE = {"Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17}
"""Where several file types share a base type llama.cpp guesses the medium mix."""


def _guessed_names() -> dict[TensorType | None, str]:
    names: dict[TensorType | None, str] = {}
    for number, name in FILE_TYPE_NAMES.items():
        kind = base_type(number)
        if kind is None or kind is TensorType.MXFP4:  # llama.cpp does not guess MXFP4 MoE
            continue
        if _GUESSED_FILE_TYPE.get(kind.name, number) == number and kind not in names:
            names[kind] = name
    return names


_GUESSED_NAMES = _guessed_names()
