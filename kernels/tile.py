# ruff: noqa: SIM300
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Tiles of weights in floating point for the tensor cores.

A packed format is read in chunks of 16 bytes that hold 32 weights: the low nibbles are 16 consecutive columns, the
high nibbles 16 others. The order of columns within a dot product is free, so the two halves go into two dots and no
weight is ever moved between lanes; scales are decoded once per chunk. Formats that are not packed so are dequantised
element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import dequant, table16
from .device import E2M1_0, E2M1_1, E2M1_2, E2M1_3, IQ4_0, IQ4_1, IQ4_2, IQ4_3, dot, e8m0_half, half_bits


@triton.jit
def _halves_q45k(base, n, c, ok2, ok3, K: tl.constexpr, HIGH_BIT: tl.constexpr):
    SIZE: tl.constexpr = 176 if HIGH_BIT else 144
    i = tl.arange(0, 16)
    blk = c // 8
    o = c % 8
    j = o // 2
    row = base + n[:, None] * (K // 256 * SIZE) + (blk * SIZE)[None, :]
    head = row.to(tl.pointer_type(tl.uint16), bitcast=True)
    w = tl.load(row[:, :, None] + (o * 16 + (48 if HIGH_BIT else 16))[None, :, None] + i[None, None, :], ok3, 0)
    w = w.to(tl.int32)
    lo = w & 15
    hi = w >> 4
    if HIGH_BIT:
        h = tl.load(row[:, :, None] + (16 + o % 2 * 16)[None, :, None] + i[None, None, :], ok3, 0).to(tl.int32)
        h = h >> (2 * j)[None, :, None]
        lo |= (h & 1) << 4
        hi |= (h & 2) << 3
    d = half_bits(tl.load(head, ok2, 0))
    dmin = half_bits(tl.load(head + 1, ok2, 0))
    pair = head + (j & 1)[None, :]
    a = tl.load(pair + 2, ok2, 0).to(tl.int32)
    b = tl.load(pair + 4, ok2, 0).to(tl.int32)
    e = tl.load(pair + 6, ok2, 0).to(tl.int32)
    first = (j < 2)[None, :]
    scale = tl.where(first, a & 0x3F3F, (e & 0x0F0F) | ((a >> 2) & 0x3030))
    low = tl.where(first, b & 0x3F3F, ((e >> 4) & 0x0F0F) | ((b >> 2) & 0x3030))
    s0 = d * (scale & 0xFF).to(tl.float32)
    s1 = d * (scale >> 8).to(tl.float32)
    return lo, hi, s0, s1, -dmin * (low & 0xFF).to(tl.float32), -dmin * (low >> 8).to(tl.float32)


@triton.jit
def _halves_q6k(base, n, c, ok2, ok3, K: tl.constexpr):
    i = tl.arange(0, 16)
    blk = c // 8
    h = c % 8 // 4
    q = c % 4
    row = base + n[:, None] * (K // 256 * 210) + (blk * 210)[None, :]
    w = tl.load(row[:, :, None] + (c % 8 * 16)[None, :, None] + i[None, None, :], ok3, 0).to(tl.int32)
    t = tl.load(row[:, :, None] + (128 + h * 32 + q % 2 * 16)[None, :, None] + i[None, None, :], ok3, 0).to(tl.int32)
    t = t >> (2 * (q // 2))[None, :, None]
    lo = (w & 15) | ((t & 3) << 4)
    hi = (w >> 4) | (t & 0x30)
    d = half_bits(tl.load((row + 208).to(tl.pointer_type(tl.uint16), bitcast=True), ok2, 0))
    sc = (row + (192 + h * 8 + q)[None, :]).to(tl.pointer_type(tl.int8), bitcast=True)
    s0 = d * tl.load(sc, ok2, 0).to(tl.float32)
    s1 = d * tl.load(sc + 4, ok2, 0).to(tl.float32)
    return lo, hi, s0, s1, -32.0 * s0, -32.0 * s1


@triton.jit
def _halves_iq4xs(base, n, c, ok2, ok3, K: tl.constexpr):
    i = tl.arange(0, 16)
    sub = c % 8
    row = base + n[:, None] * (K // 256 * 136) + (c // 8 * 136)[None, :]
    w = tl.load(row[:, :, None] + (8 + sub * 16)[None, :, None] + i[None, None, :], ok3, 0).to(tl.int32)
    words = row.to(tl.pointer_type(tl.int32), bitcast=True)
    w0 = tl.load(words, ok2, 0)
    w1 = tl.load(words + 1, ok2, 0)
    scale = (((w1 >> (4 * sub)[None, :]) & 15) | (((w0 >> (16 + 2 * sub)[None, :]) & 3) << 4)) - 32
    s = half_bits(w0) * scale.to(tl.float32)
    return w & 15, w >> 4, s, s, s * 0.0, s * 0.0


@triton.jit
def _halves_32(base, n, c, ok2, ok3, K: tl.constexpr, T: tl.constexpr):
    FIFTH: tl.constexpr = T == 6 or T == 7
    MIN: tl.constexpr = T == 3 or T == 7
    HEAD: tl.constexpr = 1 if T == 39 else (4 if MIN else 2)
    SIZE: tl.constexpr = HEAD + (4 if FIFTH else 0) + 16
    i = tl.arange(0, 16)
    row = base + n[:, None] * (K // 32 * SIZE) + (c * SIZE)[None, :]
    w = tl.load(row[:, :, None] + (SIZE - 16) + i[None, None, :], ok3, 0).to(tl.int32)
    lo = w & 15
    hi = w >> 4
    if T == 39:
        d = e8m0_half(tl.load(row, ok2, 0))
    else:
        head = row.to(tl.pointer_type(tl.uint16), bitcast=True)
        d = half_bits(tl.load(head, ok2, 0))
    if FIFTH:
        low = tl.load(head + HEAD // 2, ok2, 0).to(tl.int32)[:, :, None]
        high = tl.load(head + HEAD // 2 + 1, ok2, 0).to(tl.int32)[:, :, None]
        lo |= ((low >> i[None, None, :]) & 1) << 4
        hi |= ((high >> i[None, None, :]) & 1) << 4
    m = d * 0.0
    if MIN:
        m = half_bits(tl.load(head + 1, ok2, 0))
    elif T == 2:
        m = d * -8.0
    elif T == 6:
        m = d * -16.0
    return lo, hi, d, d, m, m


@triton.jit
def tile_halves(T: tl.constexpr, base, n, c, K: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """Chunks `c` (int32 [C]) of rows `n` (int64 [BN]) as two `DT` tiles [BN, 16 C]; chunks past the row are zero."""
    ok = c < K // 32
    ok2 = tl.broadcast_to(ok[None, :], (BN, C))
    ok3 = tl.broadcast_to(ok[None, :, None], (BN, C, 16))
    if T == 12 or T == 13:
        lo, hi, s0, s1, m0, m1 = _halves_q45k(base, n, c, ok2, ok3, K, T == 13)
    elif T == 14:
        lo, hi, s0, s1, m0, m1 = _halves_q6k(base, n, c, ok2, ok3, K)
    elif T == 23:
        lo, hi, s0, s1, m0, m1 = _halves_iq4xs(base, n, c, ok2, ok3, K)
    else:
        lo, hi, s0, s1, m0, m1 = _halves_32(base, n, c, ok2, ok3, K, T)
    if T == 39:
        a = table16(lo, E2M1_0, E2M1_1, E2M1_2, E2M1_3)
        b = table16(hi, E2M1_0, E2M1_1, E2M1_2, E2M1_3)
    elif T == 20 or T == 23:
        a = table16(lo, IQ4_0, IQ4_1, IQ4_2, IQ4_3)
        b = table16(hi, IQ4_0, IQ4_1, IQ4_2, IQ4_3)
    else:
        a = lo.to(tl.float32)
        b = hi.to(tl.float32)
    a = (a * s0[:, :, None] + m0[:, :, None]).to(DT)
    b = (b * s1[:, :, None] + m1[:, :, None]).to(DT)
    return tl.reshape(a, (BN, C * 16)), tl.reshape(b, (BN, C * 16))


@triton.jit
def tile_q80(base, n, c, K: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """Blocks `c` (int32 [C]) of Q8_0 rows `n` as a `DT` tile [BN, 32 C]; blocks past the row are zero."""
    ok = c < K // 32
    row = base + n[:, None] * (K // 32 * 34) + (c * 34)[None, :]
    q = row.to(tl.pointer_type(tl.int8), bitcast=True)[:, :, None] + 2 + tl.arange(0, 32)[None, None, :]
    w = tl.load(q, tl.broadcast_to(ok[None, :, None], (BN, C, 32)), 0)
    d = half_bits(tl.load(row.to(tl.pointer_type(tl.uint16), bitcast=True), tl.broadcast_to(ok[None, :], (BN, C)), 0))
    return tl.reshape((w.to(tl.float32) * d[:, :, None]).to(DT), (BN, C * 32))


@triton.jit
def chunk_column(T: tl.constexpr, c):
    """The column of a chunk's first low nibble."""
    if T == 12 or T == 13:
        return c // 2 * 64 + c % 2 * 16
    elif T == 14:
        return c // 4 * 128 + c % 4 * 16
    else:
        return c * 32


@triton.jit
def tile_dot(
    acc, base, n, px, okx, tab,
    T: tl.constexpr, K: tl.constexpr, K0, K1, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """acc float32 [BN, BM] += W[n, K0:K1] x^T: rows `n` (int64 [BN]) at byte pointer `base` with activation rows at
    `px` ([BM] pointers to `DT`, `okx` the valid ones); K0 and K1 are multiples of BK, or K1 is K."""
    PREC: tl.constexpr = "tf32x3" if DT == tl.float32 else "ieee"
    if T == 2 or T == 3 or T == 6 or T == 7 or T == 12 or T == 13 or T == 14 or T == 20 or T == 23 or T == 39:
        HALF: tl.constexpr = 32 if (T == 12 or T == 13) else 64 if T == 14 else 16
        C: tl.constexpr = BK // 32
        for k0 in tl.range(K0, K1, BK):
            c = k0 // 32 + tl.arange(0, C)
            a, b = tile_halves(T, base, n, c, K, BN, C, DT)
            t = tl.arange(0, C * 16)
            ct = k0 // 32 + t // 16
            col = chunk_column(T, ct) + t % 16
            ok = (ct < K // 32)[:, None] & okx[None, :]
            p = px[None, :] + col[:, None]
            acc = dot(a, tl.load(p, ok, 0.0), acc, PREC)
            acc = dot(b, tl.load(p + HALF, ok, 0.0), acc, PREC)
    elif T == 8:
        for k0 in tl.range(K0, K1, BK):
            w = tile_q80(base, n, k0 // 32 + tl.arange(0, BK // 32), K, BN, BK // 32, DT)
            k = k0 + tl.arange(0, BK)
            x = tl.load(px[None, :] + k[:, None], (k < K)[:, None] & okx[None, :], 0.0)
            acc = dot(w, x, acc, PREC)
    else:
        for k0 in tl.range(K0, K1, BK):
            k = k0 + tl.arange(0, BK)
            kk = tl.minimum(k, K - 1)
            w = dequant(T, base, n[:, None], kk[None, :], K, tab)
            w = tl.where((k < K)[None, :], w, 0.0).to(DT)
            x = tl.load(px[None, :] + k[:, None], (k < K)[:, None] & okx[None, :], 0.0)
            acc = dot(w, x, acc, PREC)
    return acc
