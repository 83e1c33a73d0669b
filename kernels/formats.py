"""Which GGUF tensor types the kernels read: block sizes, the activation type of ggml's dot product, and the kernel
family that serves them. Plain Python, no torch.

Ids and block layouts: GGUF specification and ggml's block definitions. `activation` is what ggml's CPU backend
quantises the other operand to (`vec_dot_type`), so that a product on the GPU is the same sum of integer products.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Type(IntEnum):
    """`ggml_type` ids of the weight types a GGUF file may hold."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class Activation(IntEnum):
    """What the activations are rounded to before a product with few rows."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    """Blocks of 32: scale rounded to f16, int8."""
    Q8_1 = 4
    """Q8_0 with the block's sum times the scale, rounded to f16."""
    Q8_K = 5
    """Blocks of 256: float32 scale, int8, sums of 16."""


@dataclass(frozen=True, slots=True)
class Format:
    """One tensor type: `block` elements take `size` bytes; `group` is the number of weights that one thread's packed
    load of the integer dot kernels covers (0: only the generic path reads this type)."""

    type: Type
    block: int
    size: int
    activation: Activation
    group: int = 0
    halves: int = 0
    """Elements between a byte's low and its high nibble (0: the tile is unpacked one element at a time)."""

    @property
    def integer(self) -> bool:
        return self.group != 0

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of `k` elements; ValueError unless `k` is a whole number of blocks."""
        if k % self.block:
            raise ValueError(f"{self.type.name}: a row of {k} elements is not a multiple of the block of {self.block}")
        return k // self.block * self.size


_A = Activation
_FORMATS = (
    Format(Type.F32, 1, 4, _A.F32),
    Format(Type.F16, 1, 2, _A.F16),
    Format(Type.BF16, 1, 2, _A.BF16),
    Format(Type.Q4_0, 32, 18, _A.Q8_0, group=32, halves=16),
    Format(Type.Q4_1, 32, 20, _A.Q8_1, group=32, halves=16),
    Format(Type.Q5_0, 32, 22, _A.Q8_0, group=32, halves=16),
    Format(Type.Q5_1, 32, 24, _A.Q8_1, group=32, halves=16),
    Format(Type.Q8_0, 32, 34, _A.Q8_0, group=16),
    Format(Type.Q2_K, 256, 84, _A.Q8_K),
    Format(Type.Q3_K, 256, 110, _A.Q8_K),
    Format(Type.Q4_K, 256, 144, _A.Q8_K, group=32, halves=32),
    Format(Type.Q5_K, 256, 176, _A.Q8_K, group=32, halves=32),
    Format(Type.Q6_K, 256, 210, _A.Q8_K, group=32, halves=64),
    Format(Type.IQ2_XXS, 256, 66, _A.Q8_K),
    Format(Type.IQ2_XS, 256, 74, _A.Q8_K),
    Format(Type.IQ2_S, 256, 82, _A.Q8_K),
    Format(Type.IQ3_XXS, 256, 98, _A.Q8_K),
    Format(Type.IQ3_S, 256, 110, _A.Q8_K),
    Format(Type.IQ1_S, 256, 50, _A.Q8_K),
    Format(Type.IQ1_M, 256, 56, _A.Q8_K),
    Format(Type.IQ4_NL, 32, 18, _A.Q8_0, group=32, halves=16),
    Format(Type.IQ4_XS, 256, 136, _A.Q8_K, group=32, halves=16),
    Format(Type.TQ1_0, 256, 54, _A.Q8_K),
    Format(Type.TQ2_0, 256, 66, _A.Q8_K),
    Format(Type.MXFP4, 32, 17, _A.Q8_0, group=32, halves=16),
    Format(Type.NVFP4, 64, 36, _A.Q8_0),
    Format(Type.Q1_0, 128, 18, _A.Q8_0),
    Format(Type.Q2_0, 64, 18, _A.Q8_0),
)
FORMATS: dict[Type, Format] = {f.type: f for f in _FORMATS}


def format_of(type_id: int) -> Format:
    """The format of a `ggml_type` id; ValueError names the ids that are supported."""
    try:
        return FORMATS[Type(type_id)]
    except ValueError:
        names = ", ".join(f"{t.name}={t.value}" for t in Type)
        raise ValueError(f"tensor type {type_id} has no GPU kernel; supported: {names}") from None
