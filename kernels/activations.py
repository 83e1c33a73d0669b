# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Activations as ggml's CPU backend rounds them before a product: Q8_0, Q8_1, Q8_K, F16, BF16.

Bit for bit what ggml's x86 backend computes (`quantize_row_q8_0`, `_q8_1`: scale 127/amax, ties to even; its C
reference multiplies by 1/(amax/127) and rounds halves away, which differs in the last place on rare inputs;
`quantize_row_q8_K_ref`: scale -127/max with max the signed value of largest magnitude, d = 1/scale).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from .device import round_even
from .formats import Activation
from .overlap import after_previous, overlap


@triton.jit
def quantize_block(x, KIND: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """Quantise float32 [R, B], one block a row (B = 256 for Q8_K, 32 for Q8_0 and Q8_1).

    Returns (q int32 [R, B], d float32 [R], s [R, B // 16] int32 for Q8_K, else [R] float32: the sum, times d for Q8_1).
    """
    mag = tl.abs(x)
    amax = tl.max(mag, 1)
    if KIND == 5:
        at = tl.arange(0, B)[None, :]
        first = tl.min(tl.where(mag == amax[:, None], at, B), 1)
        big = tl.sum(tl.where(at == first[:, None], x, 0.0), 1)
        safe = tl.where(amax > 0, big, 1.0)
        inverse = tl.div_rn(tl.full((R,), -127.0, tl.float32), safe)
        q = tl.minimum(round_even(x * inverse[:, None]), 127)
        q = tl.where((amax > 0)[:, None], q, 0)
        d = tl.where(amax > 0, tl.div_rn(tl.full((R,), 1.0, tl.float32), inverse), 0.0)
        return q, d, tl.sum(tl.reshape(q, (R, B // 16, 16)), 2)
    else:
        safe = tl.where(amax > 0, amax, 1.0)
        inverse = tl.where(amax > 0, tl.div_rn(tl.full((R,), 127.0, tl.float32), safe), 0.0)
        d = tl.div_rn(amax, tl.full((R,), 127.0, tl.float32))
        q = round_even(x * inverse[:, None])
        total = tl.sum(q, 1)
        if KIND == 4:
            return q, d.to(tl.float16).to(tl.float32), (d * total.to(tl.float32)).to(tl.float16).to(tl.float32)
        else:
            return q, d.to(tl.float16).to(tl.float32), total.to(tl.float32)


@triton.jit
def store_block(
    q, d, s, xq, xd, xs, row, b, ok, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Store blocks `b` [R] of row `row` (scalar or [R]) where `ok` [R]."""
    row = row.to(tl.int64)
    at = tl.arange(0, B)
    tl.store(xq + (row * K + b * B)[:, None] + at[None, :], q.to(tl.int8), mask=ok[:, None])
    if KIND == 5:
        tl.store(xd + row * (K // B) + b, d, mask=ok)
        i = tl.arange(0, B // 16)
        sub = i // 4 * 4 + i % 2 * 2 + i % 4 // 2  # sum_order
        tl.store(xs + (row * (K // 16) + b * (B // 16))[:, None] + sub[None, :], s, mask=ok[:, None])
    else:
        tl.store(xd + 2 * (row * (K // B) + b), d, mask=ok)
        tl.store(xd + 2 * (row * (K // B) + b) + 1, s, mask=ok)


@triton.jit
def _quantize(
    x, xq, xd, xs, blocks, K: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """x float [M, K] -> planes; `blocks` = M * K / B, R of them in each program."""
    after_previous()
    i = tl.program_id(0) * R + tl.arange(0, R)
    ok = i < blocks
    v = tl.load(x + i.to(tl.int64)[:, None] * B + tl.arange(0, B)[None, :], mask=ok[:, None], other=0.0)
    q, d, s = quantize_block(v.to(tl.float32), KIND, R, B)
    store_block(q, d, s, xq, xd, xs, i // (K // B), i % (K // B), ok, K, KIND, R, B)


@dataclass(frozen=True, slots=True)
class Planes:
    """Quantised rows: `q` int8 [M, K]. Q8_K: `d` float32 [M, K / 256], `s` int32 [M, K / 16], the sums of 16
    in the order 0 2 1 3 of every four (`sum_order`): Q4_K and Q5_K use them in these pairs. Q8_0 and Q8_1:
    `d` float32 [M, K / 32, 2] holds scale and sum (Q8_1: scale times sum), and `s` is the same tensor."""

    kind: Activation
    q: torch.Tensor
    d: torch.Tensor
    s: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.q.shape[0])


def empty_planes(kind: Activation, m: int, k: int, device: torch.device) -> Planes:
    """Uninitialised planes for `m` rows of `k`; ValueError unless `k` is a whole number of blocks."""
    block = 256 if kind == Activation.Q8_K else 32
    if k % block:
        raise ValueError(f"{kind.name} activations need rows of a multiple of {block} elements, not {k}")
    q = torch.empty(m, k, dtype=torch.int8, device=device)
    if kind != Activation.Q8_K:
        d = torch.empty(m, k // block, 2, dtype=torch.float32, device=device)
        return Planes(kind, q, d, d)
    d = torch.empty(m, k // block, dtype=torch.float32, device=device)
    return Planes(kind, q, d, torch.empty(m, k // 16, dtype=torch.int32, device=device))


def quantize(x: torch.Tensor, kind: Activation) -> Planes:
    """Quantise contiguous float rows [M, K] (float32, or a half type that is widened first)."""
    m, k = x.shape
    planes = empty_planes(kind, m, k, x.device)
    block = 256 if kind == Activation.Q8_K else 32
    rows = 1024 // block
    blocks = m * (k // block)
    _quantize[(triton.cdiv(blocks, rows),)](
        x.contiguous(), planes.q, planes.d, planes.s, blocks, K=k, KIND=int(kind), R=rows, B=block, num_warps=4,
        launch_pdl=overlap(),
    )  # fmt: skip
    return planes


@dataclass(slots=True)
class Activations:
    """Rows [M, K] that several products share; each rounding is computed once, on first use."""

    x: torch.Tensor
    _planes: dict[Activation, Planes] = field(default_factory=dict)
    _tile: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])

    @property
    def width(self) -> int:
        return int(self.x.shape[1])

    def put(self, planes: Planes) -> None:
        """Supply planes that another kernel (norm, activation) has computed from the same rows."""
        self._planes[planes.kind] = planes

    def planes(self, kind: Activation) -> Planes:
        """Quantised planes of `kind` (Q8_0, Q8_1 or Q8_K)."""
        if kind not in self._planes:
            self._planes[kind] = quantize(self.x, kind)
        return self._planes[kind]

    def rounded(self, kind: Activation) -> torch.Tensor:
        """float32 [M, K] with the values that ggml's product of this kind sees."""
        if kind == Activation.F32:
            return self.x.float().contiguous()
        if kind == Activation.F16:
            return self.x.to(torch.float16).float().contiguous()
        if kind == Activation.BF16:
            return self.x.to(torch.bfloat16).float().contiguous()
        p = self.planes(kind)
        m, k = self.x.shape
        block = k // p.d.shape[1]
        d = p.d if kind == Activation.Q8_K else p.d[..., 0]
        return (p.q.view(m, -1, block).float() * d[..., None]).view(m, k)

    def tile(self, dtype: torch.dtype) -> torch.Tensor:
        """Rows as `dtype` for the tensor-core path."""
        if dtype not in self._tile:
            self._tile[dtype] = self.x.to(dtype).contiguous()
        return self._tile[dtype]
