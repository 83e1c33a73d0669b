# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rows of a weight matrix in floating point: the embedding look-up, and whole matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dequant import dequant
from .dequant_iq import grid_table
from .matrix import QuantMatrix
from .overlap import after_previous, overlap


@triton.jit
def _get_rows(address: tl.int64, ids, tab, out, N, scale, T: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    after_previous()
    base = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    m = tl.program_id(0)
    n = tl.load(ids + m)
    n = tl.minimum(tl.maximum(n, 0), N - 1).to(tl.int64)
    k = tl.program_id(1) * B + tl.arange(0, B)
    v = dequant(T, base, n, tl.minimum(k, K - 1), K, tab) * scale
    tl.store(out + m.to(tl.int64) * K + k, v.to(out.dtype.element_ty), mask=k < K)


def get_rows(
    w: QuantMatrix, ids: torch.Tensor, *, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows `ids` (int32 [M], clamped to the matrix) of `w` times `scale`, as `dtype` [M, K] on the device of `ids`; `w`
    may lie in pinned host memory."""
    m = ids.numel()
    out = torch.empty(m, w.k, dtype=dtype, device=ids.device)
    block = min(512, triton.next_power_of_2(w.k))
    grid = grid_table(w.type, ids.device)
    _get_rows[(m, triton.cdiv(w.k, block))](
        w.address, ids, grid, out, w.n, scale, T=int(w.type), K=w.k, B=block, num_warps=4, launch_pdl=overlap()
    )
    return out


def dequantize(w: QuantMatrix, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The whole matrix as `dtype` [N, K]."""
    return get_rows(w, torch.arange(w.n, dtype=torch.int32, device=w.data.device), dtype=dtype)
