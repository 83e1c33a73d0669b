# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Device functions shared by the kernels: packed integer dot, nibble tables, exact rounding, pointers.

Each one that needs a machine instruction has a plain body for the Triton interpreter, which rejects inline assembly.
Both bodies give the same bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRET: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot4(a, b, SIGNED: tl.constexpr):
    """Sum of four byte products of int32 words: bytes of `a` unsigned (or signed if SIGNED), of `b` signed."""
    if INTERPRET:
        total = a * 0
        for i in tl.static_range(4):
            x = (a >> (8 * i)) & 0xFF
            if SIGNED:
                x = x - ((x & 0x80) << 1)
            y = (b >> (8 * i)) & 0xFF
            total += x * (y - ((y & 0x80) << 1))
        return total
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def round_even(x):
    """float32 to the nearest int32, ties to even (|x| < 2^22). An instruction of its own, because a multiply before
    the usual add-a-magic-number trick would be contracted into one fused multiply-add and round differently."""
    if INTERPRET:
        return ((x + 12582912.0) - 12582912.0).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def wide(x):
    """An 8- or 16-bit integer as int32 whose range the compiler does not know.

    Otherwise LLVM narrows the shifts and masks that follow to packed 16-bit arithmetic, and ptxas 12.8 drops the
    constant of some packed additions (seen on an H200 with IQ1_M and TQ1_0: `add.s16x2` with 0x00060000 became
    VIADD.16x2 with 0)."""
    x = x.to(tl.int32)
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


_LUT16_ASM: tl.constexpr = tl.constexpr("""
{
    .reg .b32 a, s, l, h, r0, r1;
    and.b32 a, $2, 0x77777777;
    and.b32 s, $2, 0x88888888;
    shr.u32 s, s, 1;
    prmt.b32 l, $3, $4, a;
    prmt.b32 h, $5, $6, a;
    or.b32 r0, s, 0x32103210;
    prmt.b32 r0, l, h, r0;
    shr.u32 a, a, 16;
    shr.u32 s, s, 16;
    prmt.b32 l, $3, $4, a;
    prmt.b32 h, $5, $6, a;
    or.b32 r1, s, 0x3210;
    prmt.b32 r1, l, h, r1;
    prmt.b32 $0, r0, r1, 0x6420;
    prmt.b32 $1, r0, r1, 0x7531;
}
""")


@triton.jit
def lut16(w, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """Look up the eight nibbles of each int32 word in a table of 16 int8 packed into four words (lowest first).

    Returns (values of the four low nibbles, values of the four high nibbles), each packed into one int32.
    """
    if INTERPRET:
        lo = w * 0
        hi = w * 0
        for i in tl.static_range(4):
            for j in tl.static_range(2):
                v = (w >> (8 * i + 4 * j)) & 15
                word = tl.where(v < 8, tl.where(v < 4, T0, T1), tl.where(v < 12, T2, T3))
                byte = ((word >> (8 * (v & 3))) & 0xFF).to(tl.int32)
                if j == 0:
                    lo = lo | (byte << (8 * i))
                else:
                    hi = hi | (byte << (8 * i))
        return lo, hi
    else:
        z = w * 0
        return tl.inline_asm_elementwise(
            _LUT16_ASM,
            "=&r,=&r,r,r,r,r,r",
            [w, z + T0, z + T1, z + T2, z + T3],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


# The two 16-entry int8 tables (IQ4's non-linear values, doubled E2M1), four values to a word, lowest index lowest.
IQ4_0: tl.constexpr = tl.constexpr(-1079142271)
IQ4_1: tl.constexpr = tl.constexpr(-152379953)
IQ4_2: tl.constexpr = tl.constexpr(639175937)
IQ4_3: tl.constexpr = tl.constexpr(1901675829)
E2M1_0: tl.constexpr = tl.constexpr(50462976)
E2M1_1: tl.constexpr = tl.constexpr(201852420)
E2M1_2: tl.constexpr = tl.constexpr(-33620224)
E2M1_3: tl.constexpr = tl.constexpr(-185009412)


@triton.jit
def half_bits(bits):
    """The float32 value of the low 16 bits of an integer read as IEEE half."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e8m0_half(e):
    """Half of 2^(e - 127) as float32, subnormals included (ggml doubles the E2M1 table and halves the scale)."""
    e = e.to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def aligned(address, dtype: tl.constexpr):
    """An int64 device address as a pointer to `dtype` that is known to be a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def tanh(x):
    """Hyperbolic tangent that does not overflow (the interpreter has none)."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. The interpreter multiplies the bits of bfloat16 as integers, so there the operands are widened first
    (their products are exact in float32 either way)."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
