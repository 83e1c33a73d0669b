# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The dot products of a tile of weight rows with up to eight activation rows, for any type: the core of the
few-row kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import dequant
from .rowdot_32 import step_4bit, step_mxfp4, step_q80
from .rowdot_k import step_iq4xs, step_q6k, step_q45k


@triton.jit
def row_dot(
    base, n, M, xq, xd, xs, tab,
    T: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr,
):  # fmt: skip
    """Products of weight rows `n` (int64 [BN]) at `base` (byte pointer) with activation rows 0..M-1.

    Integer formats take the planes of `activations.quantize`; the others take float32 rows [M, K] in `xq` (rounded
    as ggml rounds them) and dequantise element by element, `tab` being the type's grid. Returns a tuple of MB float32
    [BN]; those past M repeat row M-1.
    """
    INTEGER: tl.constexpr = (
        T == 2 or T == 3 or T == 6 or T == 7 or T == 8 or T == 12 or T == 13 or T == 14 or T == 20 or T == 23 or T == 39
    )
    acc = ()
    for _ in tl.static_range(MB):
        acc = acc + (tl.zeros((BN, G), tl.float32),)
    if INTEGER:
        GROUPS: tl.constexpr = K // 16 if T == 8 else K // 32
        for g0 in tl.range(0, GROUPS, G):
            if T == 12 or T == 13:
                acc = step_q45k(acc, base, n, g0, M, xq, xd, xs, K, BN, G, MB, T == 13)
            elif T == 14:
                acc = step_q6k(acc, base, n, g0, M, xq, xd, xs, K, BN, G, MB)
            elif T == 23:
                acc = step_iq4xs(acc, base, n, g0, M, xq, xd, xs, K, BN, G, MB)
            elif T == 39:
                acc = step_mxfp4(acc, base, n, g0, M, xq, xd, xs, K, BN, G, MB)
            elif T == 8:
                acc = step_q80(acc, base, n, g0, M, xq, xd, xs, K, BN, G, MB)
            else:
                acc = step_4bit(acc, base, n, g0, M, xq, xd, xs, K, BN, G, MB, T)
    else:
        for k0 in tl.range(0, K, G):
            k = k0 + tl.arange(0, G)
            inside = tl.broadcast_to((k < K)[None, :], (BN, G))
            kk = tl.broadcast_to(tl.minimum(k, K - 1)[None, :], (BN, G))
            w = tl.where(inside, dequant(T, base, n[:, None], kk, K, tab), 0.0)
            out = ()
            for m in tl.static_range(MB):
                x = tl.load(xq + tl.minimum(m, M - 1) * K + kk, inside, 0.0)
                out = out + (acc[m] + w * x,)
            acc = out
    result = ()
    for m in tl.static_range(MB):
        result = result + (tl.sum(acc[m], 1),)
    return result
