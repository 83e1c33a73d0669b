# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Integer dot products of Q4_K, Q5_K, Q6_K and IQ4_XS rows with Q8_K activations.

One step works on a tile [BN rows, G groups, 4 words]: a thread owns the four consecutive 32-bit words of a group (32
weights), so the sum over them stays in the thread, and scales are applied once per group, in integers where ggml
does. Every load has the tile's shape (activations are broadcast over rows by their address), because a load of lower
rank gets a layout of its own and a trip through shared memory to join the rest.

Arguments of every step: `acc` tuple of MB float32 [BN, G]; `base` weight pointer (byte, 16-aligned); `n` int64 [BN]
row numbers; `g0` first group; `K` row length; `xq` int32 words [M, K/4], `xd` float32 [M, K/256], `xs` int32
[M, K/16] (sums of 16 in the order of `activations.sum_order`). Rows of x beyond `M` repeat the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import IQ4_0, IQ4_1, IQ4_2, IQ4_3, dot4, half_bits, lut16


@triton.jit
def inside(g, GROUPS: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    """Masks [BN, G, 4] and [BN, G] of the groups within a row: constant (so none) where G divides the row."""
    if GROUPS % G == 0:
        return tl.full((BN, G, 4), True, tl.int1), tl.full((BN, G), True, tl.int1)
    else:
        ok = g < GROUPS
        return tl.broadcast_to(ok[None, :, None], (BN, G, 4)), tl.broadcast_to(ok[None, :], (BN, G))


@triton.jit
def step_q45k(
    acc, base, n, g0, M, xq, xd, xs,
    K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr, HIGH_BIT: tl.constexpr,
):  # fmt: skip
    """Q4_K, or Q5_K if HIGH_BIT: block words are d|dmin, 12 scale bytes, (32 bytes of fifth bits), 128 bytes."""
    WORDS: tl.constexpr = 44 if HIGH_BIT else 36
    QS: tl.constexpr = 12 if HIGH_BIT else 4
    g = g0 + tl.arange(0, G)
    i = tl.arange(0, 4)
    blk = g // 8
    j = (g % 8) // 2
    half = g % 2
    in3, in2 = inside(g, K // 32, BN, G)
    row = base.to(tl.pointer_type(tl.int32), bitcast=True) + n * (K // 256 * WORDS)
    w = tl.load(row[:, None, None] + (blk * WORDS + QS + (g % 8) * 4)[None, :, None] + i[None, None, :], in3, 0)
    lo = w & 0x0F0F0F0F
    hi = (w >> 4) & 0x0F0F0F0F
    if HIGH_BIT:
        h = tl.load(row[:, None, None] + (blk * WORDS + 4 + half * 4)[None, :, None] + i[None, None, :], in3, 0)
        h = h >> (2 * j)[None, :, None]
        lo |= (h & 0x01010101) << 4
        hi |= ((h >> 1) & 0x01010101) << 4
    # Six-bit scales and minima of sub-blocks 2j and 2j+1, two per 16-bit word (ggml's get_scale_min_k4 layout).
    head = row.to(tl.pointer_type(tl.int64), bitcast=True)[:, None] + (blk * (WORDS // 2))[None, :]
    w01 = tl.load(head, in2, 0)
    w23 = tl.load(head + 1, in2, 0)
    shift = (j & 1)[None, :] * 16
    dd = w01.to(tl.int32)
    a = (w01 >> 32).to(tl.int32) >> shift
    b = w23.to(tl.int32) >> shift
    c = (w23 >> 32).to(tl.int32) >> shift
    first = (j < 2)[None, :]
    scale = tl.where(first, a & 0x3F3F, (c & 0x0F0F) | ((a >> 2) & 0x3030))
    low = tl.where(first, b & 0x3F3F, ((c >> 4) & 0x0F0F) | ((b >> 2) & 0x3030))
    d = half_bits(dd)
    dmin = half_bits(dd >> 16)
    kx = tl.broadcast_to((blk * 64 + j * 16 + half * 4)[None, :, None] + i[None, None, :], (BN, G, 4))
    ks = tl.broadcast_to(
        (g & 0x7FFFFFFF)[None, :], (BN, G)
    )  # the mask hides that it is contiguous: see xd in rowdot_32
    kd = tl.broadcast_to(blk[None, :], (BN, G))
    out = ()
    for m in tl.static_range(MB):
        r = tl.minimum(m, M - 1)
        px = xq + r * (K // 4) + kx
        dl = tl.sum(dot4(lo, tl.load(px, in3, 0), False), 2)
        dh = tl.sum(dot4(hi, tl.load(px + 8, in3, 0), False), 2)
        sums = tl.load(xs.to(tl.pointer_type(tl.int64), bitcast=True) + r * (K // 32) + ks, in2, 0)
        s0 = sums.to(tl.int32)
        s1 = (sums >> 32).to(tl.int32)
        dx = tl.load(xd + r * (K // 256) + kd, in2, 0.0)
        total = (dl * (scale & 0xFF) + dh * (scale >> 8)).to(tl.float32)
        lows = ((low & 0xFF) * s0 + (low >> 8) * s1).to(tl.float32)
        out = out + (acc[m] + dx * (d * total - dmin * lows),)
    return out


@triton.jit
def step_q6k(
    acc, base, n, g0, M, xq, xd, xs, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr
):  # fmt: skip
    """Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d; 210 bytes, so 16-bit loads."""
    g = g0 + tl.arange(0, G)
    i = tl.arange(0, 4)
    blk = g // 8
    h = (g % 8) // 4
    q = g % 4
    in3, in2 = inside(g, K // 32, BN, G)
    row = base.to(tl.pointer_type(tl.uint16), bitcast=True) + n * (K // 256 * 105)
    pl = row[:, None, None] + (blk * 105 + h * 32 + q * 8)[None, :, None] + 2 * i[None, None, :]
    ph = row[:, None, None] + (blk * 105 + 64 + h * 16 + (q % 2) * 8)[None, :, None] + 2 * i[None, None, :]
    w = tl.load(pl, in3, 0).to(tl.int32) | (tl.load(pl + 1, in3, 0).to(tl.int32) << 16)
    t = tl.load(ph, in3, 0).to(tl.int32) | (tl.load(ph + 1, in3, 0).to(tl.int32) << 16)
    t = t >> (2 * (q // 2))[None, :, None]
    lo = (w & 0x0F0F0F0F) | ((t & 0x03030303) << 4)
    hi = ((w >> 4) & 0x0F0F0F0F) | (t & 0x30303030)
    head = row[:, None] + (blk * 105)[None, :]
    d = half_bits(tl.load(head + 104, in2, 0))
    sc = head.to(tl.pointer_type(tl.int8), bitcast=True) + (192 + h * 8 + q)[None, :]
    s0 = tl.load(sc, in2, 0).to(tl.int32)
    s1 = tl.load(sc + 4, in2, 0).to(tl.int32)
    kx = tl.broadcast_to((blk * 64 + h * 32 + q * 4)[None, :, None] + i[None, None, :], (BN, G, 4))
    ks = tl.broadcast_to((blk * 16 + h * 8 + q % 2 * 2 + q // 2)[None, :], (BN, G))
    kd = tl.broadcast_to(blk[None, :], (BN, G))
    out = ()
    for m in tl.static_range(MB):
        r = tl.minimum(m, M - 1)
        px = xq + r * (K // 4) + kx
        dl = tl.sum(dot4(lo, tl.load(px, in3, 0), False), 2)
        dh = tl.sum(dot4(hi, tl.load(px + 16, in3, 0), False), 2)
        ps = xs + r * (K // 16) + ks
        b0 = tl.load(ps, in2, 0)
        b1 = tl.load(ps + 4, in2, 0)
        dx = tl.load(xd + r * (K // 256) + kd, in2, 0.0)
        total = (s0 * (dl - 32 * b0) + s1 * (dh - 32 * b1)).to(tl.float32)
        out = out + (acc[m] + (d * dx) * total,)
    return out


@triton.jit
def step_iq4xs(
    acc, base, n, g0, M, xq, xd, xs, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr
):  # fmt: skip
    """IQ4_XS: d, scales_h, scales_l[4], 128 bytes of indices into a table of 16; 34 words."""
    g = g0 + tl.arange(0, G)
    i = tl.arange(0, 4)
    blk = g // 8
    sub = g % 8
    in3, in2 = inside(g, K // 32, BN, G)
    row = base.to(tl.pointer_type(tl.int32), bitcast=True) + n * (K // 256 * 34)
    w = tl.load(row[:, None, None] + (blk * 34 + 2 + sub * 4)[None, :, None] + i[None, None, :], in3, 0)
    lo, hi = lut16(w, IQ4_0, IQ4_1, IQ4_2, IQ4_3)
    head = row[:, None] + (blk * 34)[None, :]
    w0 = tl.load(head, in2, 0)
    w1 = tl.load(head + 1, in2, 0)
    d = half_bits(w0)
    scale = (((w1 >> (4 * sub)[None, :]) & 15) | (((w0 >> (16 + 2 * sub)[None, :]) & 3) << 4)) - 32
    kx = tl.broadcast_to((g * 8)[None, :, None] + i[None, None, :], (BN, G, 4))
    kd = tl.broadcast_to(blk[None, :], (BN, G))
    out = ()
    for m in tl.static_range(MB):
        r = tl.minimum(m, M - 1)
        px = xq + r * (K // 4) + kx
        v = dot4(lo, tl.load(px, in3, 0), True) + dot4(hi, tl.load(px + 4, in3, 0), True)
        dx = tl.load(xd + r * (K // 256) + kd, in2, 0.0)
        out = out + (acc[m] + (d * dx) * (tl.sum(v, 2) * scale).to(tl.float32),)
    return out
