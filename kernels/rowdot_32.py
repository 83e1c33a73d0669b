# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Integer dot products of the 32-element formats (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4) with Q8_0 or Q8_1.

Same tile and arguments as rowdot_k, except `xd` float32 [M, K/32, 2]: the f16-rounded scale, and the block's sum (Q8_0)
or the f16-rounded scale times sum (Q8_1). Scale and sum are interleaved so that neither is a contiguous load, which
would be given four elements a thread and a trip through shared memory. `xs` is not used. A group is a block (Q8_0:
half a block).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import (
    E2M1_0,
    E2M1_1,
    E2M1_2,
    E2M1_3,
    IQ4_0,
    IQ4_1,
    IQ4_2,
    IQ4_3,
    dot4,
    e8m0_half,
    half_bits,
    lut16,
)  # fmt: skip
from .rowdot_k import inside


@triton.jit
def _pair(p, mask):
    """An int32 from two consecutive 16-bit loads: the blocks are only 2-byte aligned."""
    return tl.load(p, mask, 0).to(tl.int32) | (tl.load(p + 1, mask, 0).to(tl.int32) << 16)


@triton.jit
def _spread(bits):
    """The low four bits of an int32, bit b to bit 4 of byte b."""
    return (((bits & 15) * 0x00204081) & 0x01010101) << 4


@triton.jit
def step_4bit(
    acc, base, n, g0, M, xq, xd, xs,
    K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Q4_0 (2), Q5_0 (6), IQ4_NL (20), Q4_1 (3), Q5_1 (7): f16 d, (f16 m), (32 fifth bits), 16 bytes of nibbles."""
    FIFTH: tl.constexpr = (T == 6) or (T == 7)
    MIN: tl.constexpr = (T == 3) or (T == 7)
    QS: tl.constexpr = (2 if MIN else 1) + (2 if FIFTH else 0)
    U16: tl.constexpr = QS + 8
    g = g0 + tl.arange(0, G)
    i = tl.arange(0, 4)
    in3, in2 = inside(g, K // 32, BN, G)
    row = base.to(tl.pointer_type(tl.uint16), bitcast=True) + n * (K // 32 * U16)
    head = row[:, None] + (g * U16)[None, :]
    if MIN:  # 20 and 24 bytes: whole words
        words = base.to(tl.pointer_type(tl.int32), bitcast=True) + n * (K // 32 * (U16 // 2))
        w = tl.load(words[:, None, None] + (g * (U16 // 2) + QS // 2)[None, :, None] + i[None, None, :], in3, 0)
    else:
        w = _pair(row[:, None, None] + (g * U16 + QS)[None, :, None] + 2 * i[None, None, :], in3)
    if T == 20:
        lo, hi = lut16(w, IQ4_0, IQ4_1, IQ4_2, IQ4_3)
    else:
        lo = w & 0x0F0F0F0F
        hi = (w >> 4) & 0x0F0F0F0F
    if FIFTH:
        bits = _pair(head + (QS - 2), in2)[:, :, None] >> (4 * i)[None, None, :]
        lo |= _spread(bits)
        hi |= _spread(bits >> 16)
    d = half_bits(tl.load(head, in2, 0))
    low = d
    if MIN:
        low = half_bits(tl.load(head + 1, in2, 0))
    ZERO: tl.constexpr = 16 if T == 6 else 8
    kx = tl.broadcast_to((g * 8)[None, :, None] + i[None, None, :], (BN, G, 4))
    ks = tl.broadcast_to(g[None, :], (BN, G))
    out = ()
    for m in tl.static_range(MB):
        r = tl.minimum(m, M - 1)
        px = xq + r * (K // 4) + kx
        v = tl.sum(dot4(lo, tl.load(px, in3, 0), T == 20) + dot4(hi, tl.load(px + 4, in3, 0), T == 20), 2)
        px2 = xd + 2 * (r * (K // 32) + ks)
        dx = tl.load(px2, in2, 0.0)
        if MIN:
            f = (d * dx) * v.to(tl.float32) + low * tl.load(px2 + 1, in2, 0.0)
        elif T == 20:
            f = (d * dx) * v.to(tl.float32)
        else:
            f = (d * dx) * (v.to(tl.float32) - ZERO * tl.load(px2 + 1, in2, 0.0))
        out = out + (acc[m] + f,)
    return out


@triton.jit
def step_mxfp4(
    acc, base, n, g0, M, xq, xd, xs, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr
):  # fmt: skip
    """MXFP4: an E8M0 exponent and 16 bytes of E2M1 nibbles; 17 bytes, so byte loads."""
    g = g0 + tl.arange(0, G)
    i = tl.arange(0, 4)
    in3, in2 = inside(g, K // 32, BN, G)
    row = base + n * (K // 32 * 17)
    p = row[:, None, None] + (g * 17 + 1)[None, :, None] + 4 * i[None, None, :]
    w = tl.load(p, in3, 0).to(tl.int32)
    w |= tl.load(p + 1, in3, 0).to(tl.int32) << 8
    w |= tl.load(p + 2, in3, 0).to(tl.int32) << 16
    w |= tl.load(p + 3, in3, 0).to(tl.int32) << 24
    lo, hi = lut16(w, E2M1_0, E2M1_1, E2M1_2, E2M1_3)
    d = e8m0_half(tl.load(row[:, None] + (g * 17)[None, :], in2, 0))
    kx = tl.broadcast_to((g * 8)[None, :, None] + i[None, None, :], (BN, G, 4))
    ks = tl.broadcast_to(g[None, :], (BN, G))
    out = ()
    for m in tl.static_range(MB):
        r = tl.minimum(m, M - 1)
        px = xq + r * (K // 4) + kx
        v = tl.sum(dot4(lo, tl.load(px, in3, 0), True) + dot4(hi, tl.load(px + 4, in3, 0), True), 2)
        px2 = xd + 2 * (r * (K // 32) + ks)
        dx = tl.load(px2, in2, 0.0)
        out = out + (acc[m] + (d * dx) * v.to(tl.float32),)
    return out


@triton.jit
def step_q80(
    acc, base, n, g0, M, xq, xd, xs, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr
):  # fmt: skip
    """Q8_0: f16 d and 32 int8; 34 bytes. A group is 16 weights."""
    g = g0 + tl.arange(0, G)
    i = tl.arange(0, 4)
    blk = g // 2
    in3, in2 = inside(g, K // 16, BN, G)
    row = base.to(tl.pointer_type(tl.uint16), bitcast=True) + n * (K // 32 * 17)
    w = _pair(row[:, None, None] + (blk * 17 + 1 + g % 2 * 8)[None, :, None] + 2 * i[None, None, :], in3)
    d = half_bits(tl.load(row[:, None] + (blk * 17)[None, :], in2, 0))
    kx = tl.broadcast_to((g * 4)[None, :, None] + i[None, None, :], (BN, G, 4))
    ks = tl.broadcast_to(blk[None, :], (BN, G))
    out = ()
    for m in tl.static_range(MB):
        r = tl.minimum(m, M - 1)
        v = tl.sum(dot4(w, tl.load(xq + r * (K // 4) + kx, in3, 0), True), 2)
        px2 = xd + 2 * (r * (K // 32) + ks)
        dx = tl.load(px2, in2, 0.0)
        out = out + (acc[m] + (d * dx) * v.to(tl.float32),)
    return out
