# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""RMS and layer normalisation fused with what surrounds them in a block: the experts' weighted sum, the residual
addition before, the quantisation for the next product after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activations import Activations, Planes, empty_planes, quantize_block, store_block
from .formats import Activation
from .overlap import after_previous, overlap


@triton.jit
def _combine_row(m, i, ok, parts, ids, weights, TOP_K: tl.constexpr, D: tl.constexpr):
    """Sum over ranks of weight * part, in order of rank, skipping pairs without a slot (their parts are unwritten)."""
    v = i.to(tl.float32) * 0.0
    for j in tl.static_range(TOP_K):
        p = m * TOP_K + j
        here = tl.load(ids + p) >= 0
        part = tl.load(parts + p.to(tl.int64) * D + i, mask=ok & (i < tl.where(here, D, 0)), other=0.0)
        v += part.to(tl.float32) * tl.load(weights + p)
    return v


@triton.jit
def _combine(
    parts, ids, weights, a, b, out, D: tl.constexpr, TOP_K: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    after_previous()
    m = tl.program_id(0)
    i = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = i < D
    v = _combine_row(m, i, ok, parts, ids, weights, TOP_K, D)
    at = m.to(tl.int64) * D + i
    if A:
        v += tl.load(a + at, mask=ok, other=0.0).to(tl.float32)
    if B:
        v += tl.load(b + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, v, mask=ok)


def combine(
    parts: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *adds: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [M, D] = sum over ranks of weights [M, k] * parts [M * k, D] where ids [M, k] >= 0, plus up to two
    addends [M, D] (the CPU's share, the shared expert, the residual)."""
    m, k = ids.shape
    d = parts.shape[1]
    if len(adds) > 2:
        raise ValueError("combine takes at most two addends")
    out = torch.empty(m, d, dtype=torch.float32, device=parts.device) if out is None else out
    a, b = (*adds, out, out)[:2]
    block = min(1024, triton.next_power_of_2(d))
    _combine[(m, triton.cdiv(d, block))](
        parts, ids, weights, a, b, out, D=d, TOP_K=k, A=len(adds) > 0, B=len(adds) > 1, BD=block, num_warps=4,
        launch_pdl=overlap(),
    )  # fmt: skip
    return out


@triton.jit
def _norm(
    x, add, weight, bias, parts, ids, gates, total, y, q8k, d8k, s8k, q80, d80, eps,
    TOP_K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    CENTRE: tl.constexpr, TOTAL: tl.constexpr, KIND_K: tl.constexpr, KIND_0: tl.constexpr,
):  # fmt: skip
    """One row: t = x (+ add) (+ the experts' weighted sum, TOP_K > 0); y = t / sqrt(mean(t^2) + eps) * weight
    (+ bias); quantised copies of y."""
    after_previous()
    m = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BD)
    ok = i < D
    v = tl.load(x + m * D + i, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(add + m * D + i, mask=ok, other=0.0).to(tl.float32)
    if TOP_K > 0:
        v += _combine_row(tl.program_id(0), i, ok, parts, ids, gates, TOP_K, D)
    if TOTAL:
        tl.store(total + m * D + i, v, mask=ok)
    if CENTRE:
        v = tl.where(ok, v - tl.sum(v, 0) / D, 0.0)
    v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps))
    if WEIGHT:
        v = v * tl.load(weight + i, mask=ok, other=0.0)
    if BIAS:
        v = v + tl.load(bias + i, mask=ok, other=0.0)
    tl.store(y + m * D + i, v.to(y.dtype.element_ty), mask=ok)
    if KIND_K:
        q, d, s = quantize_block(tl.reshape(v, (BD // 256, 256)), 5, BD // 256, 256)
        blk = tl.arange(0, BD // 256)
        store_block(q, d, s, q8k, d8k, s8k, m, blk, blk < D // 256, D, 5, BD // 256, 256)
    if KIND_0 >= 0:
        q, d, s = quantize_block(tl.reshape(v, (BD // 32, 32)), KIND_0, BD // 32, 32)
        blk = tl.arange(0, BD // 32)
        store_block(q, d, s, q80, d80, d80, m, blk, blk < D // 32, D, KIND_0, BD // 32, 32)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    add: torch.Tensor | None = None,
    experts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    centre: bool = False,
    kinds: tuple[Activation, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[Activations, torch.Tensor]:
    """RMS norm (layer norm with `centre`) of rows x [M, D] (+ add [M, D]) (+ `combine(*experts)`, with `experts` =
    (parts [M * k, D], ids [M, k], weights [M, k]): the end of one block and the start of the next in one launch).

    Returns (normalised rows with their quantised planes for `kinds`, the sum that was normalised as float32 for the
    residual stream; x itself where nothing is added). ggml: y = x * (1 / sqrtf(mean + eps)) * weight.
    """
    m, d = x.shape
    sums = add is not None or experts is not None
    y = torch.empty(m, d, dtype=dtype, device=x.device)
    total = torch.empty(m, d, dtype=torch.float32, device=x.device) if sums else x
    planes: dict[Activation, Planes] = {k: empty_planes(k, m, d, x.device) for k in kinds if k >= Activation.Q8_0}
    small = [k for k in planes if k != Activation.Q8_K]
    if len(small) > 1:
        raise ValueError("a norm quantises to at most one of Q8_0 and Q8_1")
    pk, p0 = planes.get(Activation.Q8_K), planes[small[0]] if small else None
    bd = triton.next_power_of_2(d)
    fill = y
    _norm[(m,)](
        x, fill if add is None else add, fill if weight is None else weight, fill if bias is None else bias,
        *((fill, fill, fill) if experts is None else experts), total, y,
        *((fill, fill, fill) if pk is None else (pk.q, pk.d, pk.s)), *((fill, fill) if p0 is None else (p0.q, p0.d)),
        eps, TOP_K=0 if experts is None else experts[1].shape[1], D=d, BD=bd, ADD=add is not None,
        WEIGHT=weight is not None, BIAS=bias is not None, CENTRE=centre,
        TOTAL=sums, KIND_K=pk is not None, KIND_0=int(small[0]) if small else -1,
        num_warps=max(1, min(16, bd // 256)), launch_pdl=overlap(),
    )  # fmt: skip
    out = Activations(y)
    for p in planes.values():
        out.put(p)
    return out, total
