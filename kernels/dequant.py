# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Any weight type to float32, one element at a time: the generic path, the embedding look-up and the reference that
the packed kernels are checked against. Layouts: ggml's block definitions; oracle: the gguf package's dequantisers."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant_iq import iq1, iq2, iq3
from .device import E2M1_0, E2M1_1, E2M1_2, E2M1_3, IQ4_0, IQ4_1, IQ4_2, IQ4_3, e8m0_half, wide


@triton.jit
def byte_at(p):
    """The byte at a pointer as int32."""
    return wide(tl.load(p))


@triton.jit
def half_at(p):
    """The f16 at a 2-byte aligned byte pointer as float32."""
    return tl.load(p.to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)


@triton.jit
def table16(v, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """Entry `v` (0..15) of a table of 16 int8 packed in four words, as float32."""
    word = tl.where(v < 8, tl.where(v < 4, T0, T1), tl.where(v < 12, T2, T3))
    byte = (word >> (8 * (v & 3))) & 0xFF
    return (byte - ((byte & 0x80) << 1)).to(tl.float32)


@triton.jit
def _legacy(T: tl.constexpr, b, e):
    """Blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4. `b` block pointer, `e` element."""
    if T == 8:
        q = tl.load((b + 2 + e).to(tl.pointer_type(tl.int8), bitcast=True))
        return half_at(b) * q.to(tl.float32)
    MIN: tl.constexpr = T == 3 or T == 7
    FIFTH: tl.constexpr = T == 6 or T == 7
    HEAD: tl.constexpr = 1 if T == 39 else (4 if MIN else 2)
    QS: tl.constexpr = HEAD + (4 if FIFTH else 0)
    q = (byte_at(b + QS + e % 16) >> (e // 16 * 4)) & 15
    if FIFTH:
        q |= ((byte_at(b + HEAD + e // 8) >> (e % 8)) & 1) << 4
    if T == 39:
        return table16(q, E2M1_0, E2M1_1, E2M1_2, E2M1_3) * e8m0_half(byte_at(b))
    elif T == 20:
        return half_at(b) * table16(q, IQ4_0, IQ4_1, IQ4_2, IQ4_3)
    elif MIN:
        return half_at(b) * q.to(tl.float32) + half_at(b + 2)
    else:
        return half_at(b) * (q - (16 if FIFTH else 8)).to(tl.float32)


@triton.jit
def _kquant(T: tl.constexpr, b, e):
    """Super-blocks of 256: Q2_K to Q6_K and IQ4_XS."""
    h = e // 128
    l32 = e % 32
    if T == 10:  # scales 16, qs 64, d, dmin
        s = byte_at(b + e // 16)
        q = (byte_at(b + 16 + h * 32 + l32) >> (e % 128 // 32 * 2)) & 3
        return half_at(b + 80) * (s & 15).to(tl.float32) * q.to(tl.float32) - half_at(b + 82) * (s >> 4).to(tl.float32)
    elif T == 11:  # hmask 32, qs 64, scales 12, d
        i = e // 16
        s = ((byte_at(b + 96 + i % 8) >> (i // 8 * 4)) & 15) | (((byte_at(b + 104 + i % 4) >> (i // 4 * 2)) & 3) << 4)
        q = (byte_at(b + 32 + h * 32 + l32) >> (e % 128 // 32 * 2)) & 3
        q -= 4 - (((byte_at(b + l32) >> (e // 32)) & 1) << 2)
        return half_at(b + 108) * (s - 32).to(tl.float32) * q.to(tl.float32)
    elif T == 12 or T == 13:  # d, dmin, scales 12, (qh 32), qs 128
        s = e // 32
        first = s < 4
        a = byte_at(b + 4 + tl.where(first, s, s + 4))
        c = byte_at(b + 4 + tl.where(first, s, s - 4))
        m = byte_at(b + 4 + tl.where(first, s + 4, s))
        scale = tl.where(first, a & 63, (a & 15) | (c >> 6 << 4))
        low = tl.where(first, m & 63, (a >> 4) | (m >> 6 << 4))
        q = (byte_at(b + (48 if T == 13 else 16) + e // 64 * 32 + l32) >> (e % 64 // 32 * 4)) & 15
        if T == 13:
            q |= ((byte_at(b + 16 + l32) >> s) & 1) << 4
        return half_at(b) * scale.to(tl.float32) * q.to(tl.float32) - half_at(b + 2) * low.to(tl.float32)
    elif T == 14:  # ql 128, qh 64, scales 16, d
        r = e % 128
        q = (byte_at(b + h * 64 + r % 64) >> (r // 64 * 4)) & 15
        q |= ((byte_at(b + 128 + h * 32 + l32) >> (r // 32 * 2)) & 3) << 4
        s = tl.load((b + 192 + e // 16).to(tl.pointer_type(tl.int8), bitcast=True)).to(tl.float32)
        return half_at(b + 208) * s * (q - 32).to(tl.float32)
    else:  # IQ4_XS: d, scales_h, scales_l 4, qs 128
        s = e // 32
        high = (byte_at(b + 2 + s // 4) >> (s % 4 * 2)) & 3
        scale = ((byte_at(b + 4 + s // 2) >> (s % 2 * 4)) & 15) | (high << 4)
        q = (byte_at(b + 8 + s * 16 + e % 16) >> (l32 // 16 * 4)) & 15
        return half_at(b) * (scale - 32).to(tl.float32) * table16(q, IQ4_0, IQ4_1, IQ4_2, IQ4_3)


@triton.jit
def _pow3(n):
    return tl.where(n < 2, tl.where(n < 1, 1, 3), tl.where(n < 3, 9, tl.where(n < 4, 27, 81)))


@triton.jit
def _few_bits(T: tl.constexpr, b, e):
    """TQ1_0, TQ2_0, NVFP4, Q1_0, Q2_0."""
    if T == 34:  # five trits a byte: 32 bytes (160 elements), 16 bytes (80), then four trits in 4 bytes (16), d
        e = wide(e)
        at = tl.where(e < 160, e % 32, tl.where(e < 240, 32 + e % 16, 48 + e % 4))
        n = tl.where(e < 160, e // 32, tl.where(e < 240, (e - 160) // 16, (e - 240) // 4))
        q = wide((byte_at(b + at) * _pow3(n)) & 0xFF)
        return (((q * 3) >> 8) - 1).to(tl.float32) * half_at(b + 52)
    elif T == 35:
        q = (byte_at(b + e // 128 * 32 + e % 32) >> (e % 128 // 32 * 2)) & 3
        return (q - 1).to(tl.float32) * half_at(b + 64)
    elif T == 40:  # four E4M3 scales without sign, 32 bytes of E2M1
        s = byte_at(b + e // 16)
        exponent = (s >> 3) & 15
        bits = ((exponent + 119) << 23) | ((s & 7) << 20)
        d = tl.where(exponent == 0, (s & 7).to(tl.float32) * 0.0009765625, bits.to(tl.float32, bitcast=True))
        d = tl.where(s == 0x7F, 0.0, d)
        q = (byte_at(b + 4 + e // 16 * 8 + e % 8) >> (e % 16 // 8 * 4)) & 15
        return table16(q, E2M1_0, E2M1_1, E2M1_2, E2M1_3) * d
    elif T == 41:
        bit = (byte_at(b + 2 + e // 8) >> (e % 8)) & 1
        return (2 * bit - 1).to(tl.float32) * half_at(b)
    else:
        q = (byte_at(b + 2 + e // 4) >> (e % 4 * 2)) & 3
        return (q - 1).to(tl.float32) * half_at(b)


@triton.jit
def dequant(T: tl.constexpr, base, n, k, K: tl.constexpr, tab):
    """Elements (n, k) of a matrix of type `T` at byte pointer `base`, row length K.

    `n` int64 and `k` int32 broadcast against each other; `tab` is the type's grid (int8 pointer, any pointer for
    types without one). Returns float32.
    """
    if T == 0:
        return tl.load(base.to(tl.pointer_type(tl.float32), bitcast=True) + n * K + k)
    elif T == 1:
        return tl.load(base.to(tl.pointer_type(tl.float16), bitcast=True) + n * K + k).to(tl.float32)
    elif T == 30:
        bits = tl.load(base.to(tl.pointer_type(tl.uint16), bitcast=True) + n * K + k).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    elif T == 2 or T == 3 or T == 6 or T == 7 or T == 8 or T == 20 or T == 39:
        BYTES: tl.constexpr = (
            34 if T == 8 else 17 if T == 39 else 20 if T == 3 else 22 if T == 6 else 24 if T == 7 else 18
        )
        return _legacy(T, base + n * (K // 32 * BYTES) + k // 32 * BYTES, k % 32)
    elif T == 10 or T == 11 or T == 12 or T == 13 or T == 14 or T == 23:
        BYTES_K: tl.constexpr = (
            84 if T == 10 else 110 if T == 11 else 144 if T == 12 else 176 if T == 13 else 210 if T == 14 else 136
        )
        return _kquant(T, base + n * (K // 256 * BYTES_K) + k // 256 * BYTES_K, k % 256)
    elif T >= 34:
        BLOCK: tl.constexpr = 256 if T < 36 else 64 if T != 41 else 128
        BYTES_F: tl.constexpr = 54 if T == 34 else 66 if T == 35 else 36 if T == 40 else 18
        return _few_bits(T, base + n * (K // BLOCK * BYTES_F) + k // BLOCK * BYTES_F, k % BLOCK)
    elif T == 19 or T == 29:
        BYTES_1: tl.constexpr = 50 if T == 19 else 56
        return iq1(T, base + n * (K // 256 * BYTES_1) + k // 256 * BYTES_1, k % 256, tab)
    elif T == 18 or T == 21:
        BYTES_3: tl.constexpr = 98 if T == 18 else 110
        return iq3(T, base + n * (K // 256 * BYTES_3) + k // 256 * BYTES_3, k % 256, tab)
    else:
        BYTES_2: tl.constexpr = 66 if T == 16 else 74 if T == 17 else 82
        return iq2(T, base + n * (K // 256 * BYTES_2) + k // 256 * BYTES_2, k % 256, tab)
