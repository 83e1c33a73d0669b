# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Experts for few rows: one program per (routed pair, tile of weight rows), reading slots by address.

A pair p = row * k + rank. `ids[p]` is its slot, negative where the expert is not on this device: the programs of such
a pair leave at once and its outputs stay unwritten, whatever the slot memory holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .act import ACTIVATIONS, activate
from .activations import Activations
from .device import INTERPRET
from .formats import Activation, Type
from .gemv import QuantFormats, operands
from .matrix import ExpertMatrix, ExpertWeights
from .overlap import after_previous, overlap
from .rowdot import row_dot


@triton.jit
def _matrix(
    slot, offset, n, x_row, expert, xq, xd, xs, tab, bias, scale, N,
    T: tl.constexpr, KIND: tl.constexpr, INTEGER: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """float32 [BN]: rows `n` of the slot's matrix at `offset` times activation row `x_row`, scaled, plus bias."""
    base = tl.multiple_of((slot + offset).to(tl.pointer_type(tl.uint8)), 16)
    x = x_row.to(tl.int64)
    if INTEGER:
        xq += x * (K // 4)
        xd += x * (K // 256 if KIND == 5 else K // 16)
        xs += x * (K // 16)
    else:
        xq += x * K
    v = row_dot(base, n, 1, xq, xd, xs, tab, T, K, BN, G, 1)[0]
    if HAS_SCALE:
        v *= tl.load(scale + expert)
    if HAS_BIAS:
        v += tl.load(bias + expert.to(tl.int64) * N + n)
    return v


@triton.jit
def _gate_up(
    ids, experts, slot_addr, gq, gd, gs, uq, ud, us, tab_g, tab_u, bias_g, bias_u, scale_g, scale_u, out,
    offset_g, offset_u, F, limit, limit2, top_k,
    TG: tl.constexpr, TU: tl.constexpr, KG: tl.constexpr, KU: tl.constexpr, IG: tl.constexpr, IU: tl.constexpr,
    K: tl.constexpr, A: tl.constexpr, BN: tl.constexpr, GG: tl.constexpr, GU: tl.constexpr, BIAS: tl.constexpr,
    SCALE_G: tl.constexpr, SCALE_U: tl.constexpr,
):  # fmt: skip
    """out float32 [P, F] = activation(gate x, up x); TG is -1 without a gate."""
    after_previous()
    p = tl.program_id(1)
    slot_id = tl.load(ids + p)
    if slot_id >= 0:
        slot = tl.load(slot_addr + slot_id)
        expert = tl.load(experts + p)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = tl.minimum(n, F - 1).to(tl.int64)
        x = p // top_k
        u = _matrix(slot, offset_u, rows, x, expert, uq, ud, us, tab_u, bias_u, scale_u, F, TU, KU, IU, K, BN, GU,
                    BIAS, SCALE_U)  # fmt: skip
        g = u
        if TG >= 0:
            g = _matrix(slot, offset_g, rows, x, expert, gq, gd, gs, tab_g, bias_g, scale_g, F, TG, KG, IG, K, BN,
                        GG, BIAS, SCALE_G)  # fmt: skip
        tl.store(out + p.to(tl.int64) * F + n, activate(A, g, u, limit, limit2), mask=n < F)


@triton.jit
def _down(
    ids, experts, slot_addr, xq, xd, xs, tab, bias, scale, out, offset, N,
    T: tl.constexpr, KIND: tl.constexpr, INTEGER: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """out float32 [P, N] = down h[p] (* scale) (+ bias)."""
    after_previous()
    p = tl.program_id(1)
    slot_id = tl.load(ids + p)
    if slot_id >= 0:
        slot = tl.load(slot_addr + slot_id)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = tl.minimum(n, N - 1).to(tl.int64)
        v = _matrix(slot, offset, rows, p, tl.load(experts + p), xq, xd, xs, tab, bias, scale, N, T, KIND, INTEGER,
                    K, BN, G, BIAS, SCALE)  # fmt: skip
        tl.store(out + p.to(tl.int64) * N + n, v, mask=n < N)


def tile_rows(down: bool) -> tuple[int, int]:
    """(weight rows of a program, warps), by measurement (docs/measurements/kernels.md)."""
    return (64, 4) if INTERPRET.value else (4, 2) if down else (2, 1)


def groups(type_: Type, k: int) -> int:
    """Groups a program takes at once for a matrix of row length `k`."""
    if not QuantFormats.integer(type_):
        return 128
    return int(min(32, triton.next_power_of_2(k // (16 if type_ == Type.Q8_0 else 32))))


def _operands(m: ExpertMatrix, x: Activations) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return operands(x, m.format.activation, m.format.integer)


def gate_up(
    x: Activations,
    ids: torch.Tensor,
    experts: torch.Tensor,
    slot_addr: torch.Tensor,
    w: ExpertWeights,
    out: torch.Tensor | None = None,
    config: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Activated float32 [M * k, F] for rows x [M, D] and slots `ids` int32 [M, k]; `experts` int32 [M, k] are the
    experts' own numbers (biases and scales), `slot_addr` int64 [slots] device addresses. One launch."""
    m, k = ids.shape
    up, gate = w.up, w.gate or w.up
    bn, warps = config or tile_rows(False)
    out = torch.empty(m * k, up.n, dtype=torch.float32, device=ids.device) if out is None else out
    from .dequant_iq import grid_table

    none = out
    _gate_up[(triton.cdiv(up.n, bn), m * k)](
        ids, experts, slot_addr, *_operands(gate, x), *_operands(up, x),
        grid_table(gate.type, out.device), grid_table(up.type, out.device),
        *[none if t is None else t for t in (gate.bias, up.bias, gate.scale, up.scale)], out,
        gate.offset, up.offset, up.n, w.limit, w.limit2, k,
        TG=-1 if w.gate is None else int(gate.type), TU=int(up.type), KG=int(gate.format.activation),
        KU=int(up.format.activation), IG=gate.format.integer, IU=up.format.integer, K=up.k,
        A=ACTIVATIONS[w.activation], BN=bn, GG=groups(gate.type, up.k), GU=groups(up.type, up.k),
        BIAS=up.bias is not None, SCALE_G=gate.scale is not None, SCALE_U=up.scale is not None, num_warps=warps,
        launch_pdl=overlap(),
    )  # fmt: skip
    return out


def down(
    h: Activations,
    ids: torch.Tensor,
    experts: torch.Tensor,
    slot_addr: torch.Tensor,
    w: ExpertMatrix,
    out: torch.Tensor | None = None,
    config: tuple[int, int] | None = None,
) -> torch.Tensor:
    """float32 [M * k, D]: the down product of each pair's own row of `h` [M * k, F]. One launch."""
    pairs = ids.numel()
    bn, warps = config or tile_rows(True)
    out = torch.empty(pairs, w.n, dtype=torch.float32, device=ids.device) if out is None else out
    from .dequant_iq import grid_table

    _down[(triton.cdiv(w.n, bn), pairs)](
        ids, experts, slot_addr, *_operands(w, h), grid_table(w.type, out.device),
        out if w.bias is None else w.bias, out if w.scale is None else w.scale, out, w.offset, w.n,
        T=int(w.type), KIND=int(w.format.activation), INTEGER=w.format.integer, K=w.k, BN=bn, G=groups(w.type, w.k),
        BIAS=w.bias is not None, SCALE=w.scale is not None, num_warps=warps, launch_pdl=overlap(),
    )  # fmt: skip
    return out


__all__ = ["Activation", "down", "gate_up", "groups"]
