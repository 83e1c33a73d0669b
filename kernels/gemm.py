# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Products with more than 8 rows on the tensor cores: a plain matrix, and experts by tiles of routed rows.

Weights are the left operand (they come out of registers), activations the right one, so a tile of 16 rows costs no
padding of weights. Weights are rounded to bfloat16 (float16 for F16, float32 as three tf32 products for F32).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .act import ACTIVATIONS, activate
from .activations import Activations
from .dequant_iq import grid_table
from .formats import Type
from .group import Groups
from .matrix import ExpertMatrix, ExpertWeights, QuantMatrix
from .tile import tile_dot


def tile_dtype(type_: Type) -> torch.dtype:
    """The operand type of a weight type's tensor-core product."""
    return {Type.F32: torch.float32, Type.F16: torch.float16}.get(type_, torch.bfloat16)


_TL = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A program computes `bn` outputs of `bm` rows, `bk` columns at a time; `split` programs share the columns.
    `apart`: experts' gate and up are launches of their own."""

    bn: int
    bm: int
    bk: int
    warps: int
    stages: int
    split: int = 1
    apart: bool = False


def tile_config(m: int, n: int, k: int, type_: Type) -> TileConfig:
    """Fixed table, by measurement (docs/measurements/kernels.md); `m` is the rows a tile can be filled with."""
    if type_ == Type.F32:  # float32 operands: half the columns, or shared memory overflows
        return TileConfig(64, 16 if m <= 16 else 64, 32, 4, 3)
    if m <= 64:
        bm = max(16, triton.next_power_of_2(m))
        bn = 128 if type_ in (Type.Q4_K, Type.Q5_K) else 64
        split = max(1, min(8, 512 // triton.cdiv(n, bn), k // 512))
        return TileConfig(bn, bm, 128, 4, 3 if bn == 128 else 4, split)
    if type_ == Type.Q8_0:
        return TileConfig(128, 256, 64, 8, 3) if m > 1024 else TileConfig(64, 256, 64, 8, 3)
    if type_ == Type.Q6_K:
        return TileConfig(64, 128, 128, 4, 2)
    return TileConfig(128, 128, 64, 4, 3)


@triton.jit
def _gemm(
    address: tl.int64, x, y, tab, bias, residual, scale, M, N,
    T: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    KS: tl.constexpr, DT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """y float32 [M, N] = x [M, K] W^T (* scale) (+ bias) (+ residual), or with SPLIT > 1 partial sums [SPLIT, M, N]."""
    tiles_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    n = pid // tiles_m * BN + tl.arange(0, BN)
    m = pid % tiles_m * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    px = x + tl.minimum(m, M - 1).to(tl.int64) * K
    acc = tl.zeros((BN, BM), tl.float32)
    acc = tile_dot(acc, base, rows, px, m < M, tab, T, K, part * KS, tl.minimum(part * KS + KS, K), BN, BM, BK, DT)
    ok = (n < N)[:, None] & (m < M)[None, :]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT == 1:
        if SCALE:
            acc *= tl.load(scale)
        if BIAS:
            acc += tl.load(bias + rows)[:, None]
        if RESIDUAL:
            acc += tl.load(residual + at, mask=ok, other=0.0)
    else:
        at += part.to(tl.int64) * M * N
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _join(
    part, y, bias, residual, scale, size, N,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SCALE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a split product, in order."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    ok = i < size
    v = tl.zeros((B,), tl.float32)
    for s in tl.static_range(SPLIT):
        v += tl.load(part + s * size.to(tl.int64) + i, mask=ok, other=0.0)
    if SCALE:
        v *= tl.load(scale)
    if BIAS:
        v += tl.load(bias + i % N, mask=ok, other=0.0)
    if RESIDUAL:
        v += tl.load(residual + i, mask=ok, other=0.0)
    tl.store(y + i, v, mask=ok)


def gemm(
    x: Activations,
    w: QuantMatrix,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """float32 [M, N] = x [M, K] W^T (* w.scale) (+ bias [N]) (+ residual [M, N]), any M."""
    m = x.rows
    c = config or tile_config(m, w.n, w.k, w.type)
    rows = x.tile(tile_dtype(w.type))
    out = torch.empty(m, w.n, dtype=torch.float32, device=rows.device) if out is None else out
    target = out if c.split == 1 else torch.empty(c.split, m, w.n, dtype=torch.float32, device=rows.device)
    ks = triton.cdiv(triton.cdiv(w.k, c.split), c.bk) * c.bk
    extra = [out if t is None else t for t in (bias, residual, w.scale)]
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "SCALE": w.scale is not None}
    _gemm[(triton.cdiv(w.n, c.bn) * triton.cdiv(m, c.bm), c.split)](
        w.address, rows, target, w.grid, *extra, m, w.n,
        T=int(w.type), K=w.k, BN=c.bn, BM=c.bm, BK=c.bk, SPLIT=c.split, KS=ks, DT=_TL[rows.dtype], **flags,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    if c.split > 1:
        _join[(triton.cdiv(m * w.n, 1024),)](
            target, out, *extra, m * w.n, w.n, SPLIT=c.split, **flags, B=1024, num_warps=4
        )
    return out


@triton.jit
def _expert_tile(
    order, tile, table, experts, slot_addr, xg, xu, out, given, tab_g, tab_u, bias_g, bias_u, scale_g, scale_u,
    offset_g, offset_u, N, top_k, limit, limit2,
    TG: tl.constexpr, TU: tl.constexpr, K: tl.constexpr, A: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, DG: tl.constexpr, DU: tl.constexpr, BIAS: tl.constexpr, SCALE_G: tl.constexpr,
    SCALE_U: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """out [P, N] for the pairs of one tile: activation(gate x, up x) if TG >= 0, with the gate's product from `given`
    (float16 [P, N], perhaps out's own memory) if GIVEN, the activation of up alone if A >= 0, else the plain product
    (down). Row p // top_k of x belongs to pair p. A tile whose group has no slot in `table` is left out."""
    t = tl.program_id(1)
    group = tl.load(tile + 3 * t)
    slot_id = tl.load(table + tl.maximum(group, 0))
    if (group >= 0) & (slot_id >= 0):
        slot = tl.load(slot_addr + slot_id)
        count = tl.load(tile + 3 * t + 2)
        i = tl.arange(0, BM)
        ok = i < count
        pair = tl.load(order + tl.load(tile + 3 * t + 1) + tl.minimum(i, count - 1))
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = tl.minimum(n, N - 1).to(tl.int64)
        x_row = (pair // top_k).to(tl.int64) * K
        expert = tl.load(experts + tl.load(order + tl.load(tile + 3 * t + 1))).to(tl.int64)
        base = tl.multiple_of((slot + offset_u).to(tl.pointer_type(tl.uint8)), 16)
        v = tl.zeros((BN, BM), tl.float32)
        v = tile_dot(v, base, rows, xu + x_row, ok, tab_u, TU, K, 0, K, BN, BM, BK, DU)
        if SCALE_U:
            v *= tl.load(scale_u + expert)
        if BIAS:
            v += tl.load(bias_u + expert * N + rows)[:, None]
        if TG >= 0:
            base_g = tl.multiple_of((slot + offset_g).to(tl.pointer_type(tl.uint8)), 16)
            g = tl.zeros((BN, BM), tl.float32)
            g = tile_dot(g, base_g, rows, xg + x_row, ok, tab_g, TG, K, 0, K, BN, BM, BK, DG)
            if SCALE_G:
                g *= tl.load(scale_g + expert)
            if BIAS:
                g += tl.load(bias_g + expert * N + rows)[:, None]
            v = activate(A, g, v, limit, limit2)
        at = pair.to(tl.int64)[None, :] * N + n[:, None]
        inside = (n < N)[:, None] & ok[None, :]
        if GIVEN:
            v = activate(A, tl.load(given + at, mask=inside, other=0.0).to(tl.float32), v, limit, limit2)
        elif TG < 0 and A >= 0:
            v = activate(A, v, v, limit, limit2)
        if out.dtype.element_ty == tl.float16:
            v = tl.minimum(tl.maximum(v, -65504.0), 65504.0)
        tl.store(out + at, v.to(out.dtype.element_ty), mask=inside)


@functools.cache
def identity(slots: int, device: torch.device) -> torch.Tensor:
    """int32 [slots]: the table of groups that are slots themselves."""
    return torch.arange(slots, dtype=torch.int32, device=device)


def _launch(
    g: Groups, table: torch.Tensor | None, experts: torch.Tensor, slot_addr: torch.Tensor, x: Activations, gate:
    ExpertMatrix | None, up: ExpertMatrix, out: torch.Tensor, top_k: int, activation: int, limit: float, limit2:
    float, c: TileConfig, given: torch.Tensor | None = None,
) -> None:  # fmt: skip
    first = gate or up
    tensors = (first.bias, up.bias, first.scale, up.scale)
    table = identity(slot_addr.numel(), slot_addr.device) if table is None else table
    _expert_tile[(triton.cdiv(up.n, c.bn), g.tile.shape[0])](
        g.order, g.tile, table, experts, slot_addr, x.tile(tile_dtype(first.type)), x.tile(tile_dtype(up.type)), out,
        out if given is None else given, grid_table(first.type, out.device), grid_table(up.type, out.device),
        *[out if t is None else t for t in tensors], first.offset, up.offset, up.n, top_k, limit, limit2,
        TG=-1 if gate is None else int(gate.type), TU=int(up.type), K=up.k, A=activation, BN=c.bn, BM=g.bm, BK=c.bk,
        DG=_TL[tile_dtype(first.type)], DU=_TL[tile_dtype(up.type)], BIAS=up.bias is not None,
        SCALE_G=first.scale is not None, SCALE_U=up.scale is not None, GIVEN=given is not None, num_warps=c.warps,
        num_stages=c.stages,
    )  # fmt: skip


def expert_config(rows_per_expert: int, pair: bool, types: Iterable[Type] = ()) -> TileConfig:
    """Tile of the grouped product of matrices of `types`; `pair`: gate and up share a program (two accumulators)."""
    if Type.F32 in types:
        return TileConfig(64, 16 if rows_per_expert <= 16 else 32, 32, 4, 2)
    if rows_per_expert <= 8:
        return TileConfig(64, 16, 128, 4, 3)
    if rows_per_expert <= 64:  # routing is uneven: a tile of twice the mean takes most experts in one
        return TileConfig(64, 64 if rows_per_expert > 16 else 32, 64, 4, 3)
    # 65536 pairs at 128 experts of 768 x 2048 on an H200: two launches for gate and up 1890 us, one of both 2769; down
    # 945, with 64 outputs a program 1103 (q6_K: 1548 and 1393).
    if set(types) == {Type.Q4_K}:
        return TileConfig(128, 128, 64, 4, 3, apart=True)
    return TileConfig(64, 128, 128, 4, 2) if pair else TileConfig(64, 128, 64, 4, 3)


def gate_up(
    x: Activations, g: Groups, experts: torch.Tensor, slot_addr: torch.Tensor, w: ExpertWeights, top_k: int,
    config: TileConfig, dtype: torch.dtype = torch.bfloat16, table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Activated [P, F] of `dtype` for rows x [M, D] grouped by `group_pairs`; pairs without a slot stay unwritten.
    `table` int32 [groups]: each group's slot, or -1; None: the groups are slots."""
    if out is None:
        out = torch.empty(g.order.numel(), w.up.n, dtype=dtype, device=g.order.device)
    act = ACTIVATIONS[w.activation]
    where = (g, table, experts, slot_addr, x)
    if w.gate is not None and config.apart and out.element_size() == 2:
        first = out.view(torch.float16)  # 11 bits, where the activated rows may keep 8
        _launch(*where, None, w.gate, first, top_k, -1, 0.0, 0.0, config)
        _launch(*where, None, w.up, out, top_k, act, w.limit, w.limit2, config, first)
    else:
        _launch(*where, w.gate, w.up, out, top_k, act, w.limit, w.limit2, config)
    return out


def down(
    h: Activations, g: Groups, experts: torch.Tensor, slot_addr: torch.Tensor, w: ExpertMatrix, config: TileConfig,
    dtype: torch.dtype = torch.float32, table: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The down product [P, D] of each pair's own row of `h` [P, F]."""
    if out is None:
        out = torch.empty(g.order.numel(), w.n, dtype=dtype, device=g.order.device)
    _launch(g, table, experts, slot_addr, h, None, w, out, 1, -1, 0.0, 0.0, config)
    return out
