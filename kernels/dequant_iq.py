# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The lattice formats (IQ1, IQ2, IQ3) to float32, one element at a time, and their grids as device tables.

The grids are data of the formats; they are taken from the gguf package. The sign table of IQ2_XXS, IQ2_XS and IQ3_XXS
is not needed: its eighth bit is the parity of the seven stored ones.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from .device import wide
from .formats import Type


@functools.cache
def grid_table(type_: Type, device: torch.device) -> torch.Tensor:
    """The grid of a lattice type as int8 [entries * width] on `device`; one element for types without a grid."""
    import gguf.quants as q

    owner = {
        Type.IQ1_S: q.IQ1_S, Type.IQ1_M: q.IQ1_M, Type.IQ2_XXS: q.IQ2_XXS, Type.IQ2_XS: q.IQ2_XS,
        Type.IQ2_S: q.IQ2_S, Type.IQ3_XXS: q.IQ3_XXS, Type.IQ3_S: q.IQ3_S,
    }.get(type_)  # fmt: skip
    if owner is None:
        return torch.zeros(1, dtype=torch.int8, device=device)
    owner.init_grid()
    return torch.from_numpy(owner.grid.astype(np.int8).ravel()).to(device)


@triton.jit
def _byte(p):
    return wide(tl.load(p))


@triton.jit
def _u16(p):
    return wide(tl.load(p.to(tl.pointer_type(tl.uint16), bitcast=True)))


@triton.jit
def _half(p):
    return tl.load(p.to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)


@triton.jit
def _sign7(index, j):
    """-1 or 1: bit j of the seven stored sign bits, their parity for j = 7."""
    p = index ^ (index >> 4)
    p = p ^ (p >> 2)
    p = p ^ (p >> 1)
    return (1 - 2 * (tl.where(j == 7, p, index >> j) & 1)).to(tl.float32)


@triton.jit
def iq2(T: tl.constexpr, b, e, tab):
    """IQ2_XXS (16), IQ2_XS (17), IQ2_S (22): element `e` of the super-block at byte pointer `b`."""
    s = e // 32
    v = e % 32 // 8
    j = e % 8
    if T == 16:  # d, per 32: four grid bytes, then 4 x 7 sign bits and a 4-bit scale
        low = _u16(b + 2 + s * 8 + 4)
        high = _u16(b + 2 + s * 8 + 6)
        word = low | (high << 16)
        scale = (0.5 + (high >> 12).to(tl.float32)) * 0.25
        index = _byte(b + 2 + s * 8 + v)
        sign = _sign7((word >> (7 * v)) & 127, j)
    elif T == 17:  # d, 32 words of 9 grid bits and 7 sign bits, 8 scale bytes
        q = _u16(b + 2 + (s * 4 + v) * 2)
        scale = (0.5 + ((_byte(b + 66 + s) >> (v // 2 * 4)) & 15).to(tl.float32)) * 0.25
        index = q & 511
        sign = _sign7(q >> 9, j)
    else:  # d, 32 grid bytes, 32 sign bytes, 8 bytes of high grid bits, 8 scale bytes
        index = _byte(b + 2 + s * 4 + v) | (((_byte(b + 66 + s) >> (2 * v)) & 3) << 8)
        scale = (0.5 + ((_byte(b + 74 + s) >> (v // 2 * 4)) & 15).to(tl.float32)) * 0.25
        sign = (1 - 2 * ((_byte(b + 34 + s * 4 + v) >> j) & 1)).to(tl.float32)
    return _half(b) * scale * tl.load(tab + index * 8 + j).to(tl.float32) * sign


@triton.jit
def iq3(T: tl.constexpr, b, e, tab):
    """IQ3_XXS (18), IQ3_S (21)."""
    s = e // 32
    v = e % 32 // 8
    j = e % 8
    index = _byte(b + 2 + s * 8 + v * 2 + j // 4)
    if T == 18:  # d, 64 grid bytes, per 32: 4 x 7 sign bits and a 4-bit scale
        low = _u16(b + 66 + s * 4)
        high = _u16(b + 66 + s * 4 + 2)
        scale = (0.5 + (high >> 12).to(tl.float32)) * 0.5
        sign = _sign7(((low | (high << 16)) >> (7 * v)) & 127, j)
    else:  # d, 64 grid bytes, 8 bytes of ninth grid bits, 32 sign bytes, 4 scale bytes
        index |= ((_byte(b + 66 + s) >> (2 * v + j // 4)) & 1) << 8
        scale = (1 + 2 * ((_byte(b + 106 + s // 2) >> (s % 2 * 4)) & 15)).to(tl.float32)
        sign = (1 - 2 * ((_byte(b + 74 + s * 4 + v) >> j) & 1)).to(tl.float32)
    return _half(b) * scale * tl.load(tab + index * 4 + j % 4).to(tl.float32) * sign


@triton.jit
def iq1(T: tl.constexpr, b, e, tab):
    """IQ1_S (19), IQ1_M (29)."""
    s = e // 32
    v = e % 32 // 8
    if T == 19:  # d, 32 grid bytes, 8 words: 4 x 3 high grid bits, 3-bit scale, sign of the shift
        h = _u16(b + 34 + s * 2)
        index = _byte(b + 2 + s * 4 + v) | (((h >> (3 * v)) & 7) << 8)
        d = _half(b) * (2 * ((h >> 12) & 7) + 1).to(tl.float32)
        negative = h >> 15
    else:  # 32 grid bytes, 16 bytes of high grid bits and shift signs, 4 words: 12 scale bits and 4 bits of d
        h = _byte(b + 32 + s * 2 + v // 2) >> (v % 2 * 4)
        index = _byte(b + s * 4 + v) | ((h & 7) << 8)
        bits = (_u16(b + 48) >> 12) | ((_u16(b + 50) >> 8) & 0x00F0)
        bits = bits | ((_u16(b + 52) >> 4) & 0x0F00) | (_u16(b + 54) & 0xF000)
        d = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = (_u16(b + 48 + s // 2 * 2) >> (s % 2 * 6 + v // 2 * 3)) & 7
        d = d * (2 * scale + 1).to(tl.float32)
        negative = (h >> 3) & 1
    delta = tl.where(negative != 0, -0.125, 0.125)
    return d * (tl.load(tab + index * 8 + e % 8).to(tl.float32) + delta)
