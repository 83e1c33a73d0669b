# ruff: noqa: SIM300
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products with 1 to 8 rows: up to three matrices that share their input in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .activations import Activations
from .device import INTERPRET
from .formats import FORMATS, Activation, Type
from .matrix import QuantMatrix
from .overlap import after_previous, overlap
from .rowdot import row_dot

MAX_ROWS = 8


@triton.jit
def _one(
    pid, address, N, M, xq, xd, xs, tab, y, bias, residual, scale,
    T: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    n = pid * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    acc = row_dot(base, rows, M, xq, xd, xs, tab, T, K, BN, G, MB)
    for m in tl.static_range(MB):
        v = acc[m]
        if HAS_SCALE:
            v *= tl.load(scale)
        if HAS_BIAS:
            v += tl.load(bias + rows)
        ok = n < tl.where(M > m, N, 0)
        at = m * N.to(tl.int64) + n
        if HAS_RESIDUAL:
            v += tl.load(residual + at, mask=ok, other=0.0)
        tl.store(y + at, v, mask=ok)


@triton.jit
def _gemv(
    address0: tl.int64, address1: tl.int64, address2: tl.int64,
    N0, N1, N2, M, xq, xd, xs, tab0, tab1, tab2, y0, y1, y2, bias0, bias1, bias2,
    residual, scale0, scale1, scale2,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, G: tl.constexpr, MB: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """y_i [M, N_i] = x [M, K] W_i^T (* scale_i) (+ bias_i [N_i]) (+ residual [M, N_0] for the first).

    T1, T2 are -1 where there are fewer matrices. BIAS, SCALE: bit i for matrix i. Programs are dealt to the matrices
    in order of their row tiles.
    """
    after_previous()
    pid = tl.program_id(0)
    t0 = tl.cdiv(N0, BN)
    if T1 < 0:
        _one(pid, address0, N0, M, xq, xd, xs, tab0, y0, bias0, residual, scale0, T0, K, BN, G, MB,
             BIAS & 1, RESIDUAL, SCALE & 1)  # fmt: skip
    else:
        t1 = t0 + tl.cdiv(N1, BN)
        if pid < t0:
            _one(pid, address0, N0, M, xq, xd, xs, tab0, y0, bias0, residual, scale0, T0, K, BN, G, MB,
                 BIAS & 1, RESIDUAL, SCALE & 1)  # fmt: skip
        elif pid < t1:
            _one(pid - t0, address1, N1, M, xq, xd, xs, tab1, y1, bias1, residual, scale1, T1, K, BN, G, MB,
                 (BIAS >> 1) & 1, False, (SCALE >> 1) & 1)  # fmt: skip
        elif T2 >= 0:
            _one(pid - t1, address2, N2, M, xq, xd, xs, tab2, y2, bias2, residual, scale2, T2, K, BN, G, MB,
                 (BIAS >> 2) & 1, False, (SCALE >> 2) & 1)  # fmt: skip


SMALL = 24 << 20
"""Bytes up to which a matrix is read in one wave: every thread loads one vector, so all of it is in flight at once."""


def tile_config(type_: Type, n: int, k: int) -> tuple[int, int, int]:
    """(BN weight rows, G groups, warps) for a matrix; chosen by measurement, see docs/measurements/kernels.md."""
    if INTERPRET.value:  # whole arrays are cheap there, programs are not
        return 64, 32, 4
    if not QuantFormats.integer(type_):
        return (4, 128, 4) if n >= 1024 else (1, 512, 4)
    groups = triton.next_power_of_2(k // 16 if type_ == Type.Q8_0 else k // 32)
    if type_ == Type.Q8_0:
        return 1, min(32, groups), 1
    if type_ in (Type.Q4_K, Type.Q5_K):
        return 2, min(32, groups), 2
    if n * FORMATS[type_].row_bytes(k) <= SMALL:
        return (2, min(64, groups), 4) if groups >= 64 else (4, groups, 4)
    if type_ == Type.IQ4_XS:
        return 4, min(32, groups), 2
    return 2, min(64 if type_ == Type.MXFP4 else 32, groups), 2


class QuantFormats:
    """Small predicates on types that the launchers share."""

    @staticmethod
    def integer(type_: Type) -> bool:
        return FORMATS[type_].integer


def operands(x: Activations, kind: Activation, integer: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(xq, xd, xs) for `row_dot`: packed planes, or float32 rows (twice more as placeholders)."""
    if integer:
        p = x.planes(kind)
        return p.q.view(torch.int32), p.d, p.s
    rows = x.rounded(kind)
    return rows, rows, rows


def gemv(
    x: Activations,
    weights: Sequence[QuantMatrix],
    *,
    bias: Sequence[torch.Tensor | None] | None = None,
    residual: torch.Tensor | None = None,
    out: Sequence[torch.Tensor] | None = None,
    config: tuple[int, int, int] | None = None,
) -> list[torch.Tensor]:
    """Products of 1 to 8 rows with one to three matrices of one activation kind; see `_gemv`. float32 outputs."""
    m = x.rows
    if not 1 <= m <= MAX_ROWS or not 1 <= len(weights) <= 3:
        raise ValueError(f"gemv takes 1 to {MAX_ROWS} rows and 1 to 3 matrices, got {m} and {len(weights)}")
    first = weights[0]
    fmt = first.format
    for w in weights:
        if w.k != x.width or w.format.activation != fmt.activation or w.format.integer != fmt.integer:
            raise ValueError("matrices of one launch must share the row length and the kind of activations")
    xq, xd, xs = operands(x, fmt.activation, fmt.integer)
    bias = bias or [None] * len(weights)
    out = out or [torch.empty(m, w.n, dtype=torch.float32, device=x.x.device) for w in weights]
    bn, g, warps = config or tile_config(first.type, first.n, first.k)
    pad = [first] * (3 - len(weights))
    ws = [*weights, *pad]
    ys = [*out, *[out[0]] * len(pad)]
    bs = [*bias, *[None] * len(pad)]
    scales = [w.scale for w in weights] + [None] * len(pad)
    none = xd
    grid = (sum(triton.cdiv(w.n, bn) for w in weights),)
    _gemv[grid](
        *[w.address for w in ws], *[w.n for w in ws], m, xq, xd, xs, *[w.grid for w in ws], *ys,
        *[none if b is None else b for b in bs], none if residual is None else residual,
        *[none if s is None else s for s in scales],
        T0=int(first.type), T1=int(ws[1].type) if len(weights) > 1 else -1,
        T2=int(ws[2].type) if len(weights) > 2 else -1, K=first.k, BN=bn, G=g, MB=triton.next_power_of_2(m),
        BIAS=sum(1 << i for i, b in enumerate(bs) if b is not None), RESIDUAL=residual is not None,
        SCALE=sum(1 << i for i, s in enumerate(scales) if s is not None), num_warps=warps, launch_pdl=overlap(),
    )  # fmt: skip
    return list(out)
