# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rotary embedding with everything around it in one launch: query and key norms, rotation, writing the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .activations import quantize_block
from .kvcache import KVCache
from .overlap import after_previous, overlap


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding with its scaling folded into a table.

    `frequency` float32 [rot / 2] on the device: the angle per position of each pair, all factors applied (linear and
    YaRN scalings are linear in the position, `rope_freqs` divides). `magnitude` multiplies cosine and sine. `axis`
    int32 [rot / 2] picks the position component of each pair (multi-section RoPE), or None where there is one.
    """

    frequency: torch.Tensor
    neox: bool
    magnitude: float = 1.0
    axis: torch.Tensor | None = None

    @property
    def rot(self) -> int:
        return 2 * int(self.frequency.shape[0])


def rope_frequencies(
    rot: int,
    base: float,
    *,
    scale: float = 1.0,
    factors: Sequence[float] | None = None,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    n_ctx_orig: int = 0,
) -> tuple[list[float], float]:
    """(angle per position for each of rot / 2 pairs, magnitude): ggml's `rope_yarn` with `scale` = freq_scale.

    Linear scaling is `scale` < 1; YaRN adds `ext_factor` > 0, whose ramp keeps fast pairs unscaled and whose magnitude
    grows by 1 + 0.1 ln(1 / scale). `factors` are the `rope_freqs` of the file (divisors).
    """
    low, high = 0.0, 0.0
    if ext_factor:

        def dim(turns: float) -> float:
            return rot * math.log(n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(0.0, math.floor(dim(beta_fast)))
        high = min(rot - 1.0, math.ceil(dim(beta_slow)))
    result = []
    for i in range(rot // 2):
        plain = base ** (-2.0 * i / rot) / (factors[i] if factors else 1.0)
        theta = scale * plain
        if ext_factor:
            ramp = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            mix = ramp * ext_factor
            theta = theta * (1.0 - mix) + plain * mix
        result.append(theta)
    if ext_factor:
        attn_factor *= 1.0 + 0.1 * math.log(1.0 / scale)
    return result, attn_factor


@triton.jit
def _normed(v, weight, i, ok, eps, HD: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / HD + eps))
        v = v * tl.load(weight + i, mask=ok, other=0.0)
    return v


@triton.jit
def _rotated(
    p, i, ok, weight, eps, angle_ptr, axis, position, m, rows, magnitude,
    HD: tl.constexpr, ROT: tl.constexpr, NEOX: tl.constexpr, AXIS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Head `p` (pointer) normalised and rotated: element i and its partner are read twice instead of shuffled."""
    v = tl.load(p + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / HD + eps)
        v = v * r * tl.load(weight + i, mask=ok, other=0.0)
    if ROT > 0:
        if NEOX:
            other = tl.where(i < ROT // 2, i + ROT // 2, i - ROT // 2)
            pair = tl.where(i < ROT // 2, i, i - ROT // 2)
            first = i < ROT // 2
        else:
            other = i ^ 1
            pair = i // 2
            first = (i & 1) == 0
        turn = i < ROT
        w = tl.load(p + other, mask=turn, other=0.0).to(tl.float32)
        if NORM:
            w = w * r * tl.load(weight + other, mask=turn, other=0.0)
        at = m
        if AXIS:
            at = tl.load(axis + pair, mask=turn, other=0) * rows + m
        angle = tl.load(position + at).to(tl.float32) * tl.load(angle_ptr + pair, mask=turn, other=0.0)
        c = tl.cos(angle) * magnitude
        s = tl.sin(angle) * magnitude
        v = tl.where(turn, v * c + tl.where(first, -w, w) * s, v)
    return v


@triton.jit
def _qk_rope(
    q, k, v, q_out, k_cache, v_cache, k_scale, v_scale, q_weight, k_weight, angle_ptr, axis, position, cell, rows,
    q_stride, k_stride, v_stride, eps, magnitude, q_scale,
    HQ: tl.constexpr, HK: tl.constexpr, HD: tl.constexpr, HV: tl.constexpr, BD: tl.constexpr, ROT: tl.constexpr,
    NEOX: tl.constexpr, AXIS: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr, WRITE: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    """Program (row, head): heads 0..HQ-1 are queries, then HK keys, then HK values."""
    after_previous()
    m = tl.program_id(0)
    h = tl.program_id(1)
    i = tl.arange(0, BD)
    m64 = m.to(tl.int64)
    if h < HQ:
        x = _rotated(q + m64 * q_stride + h * HD, i, i < HD, q_weight, eps, angle_ptr, axis, position, m, rows,
                     magnitude, HD, ROT, NEOX, AXIS, NORM_Q)  # fmt: skip
        tl.store(q_out + (m64 * HQ + h) * HD + i, (x * q_scale).to(q_out.dtype.element_ty), mask=i < HD)
    elif WRITE:
        row = tl.load(cell + m).to(tl.int64)
        if row >= 0:
            if h < HQ + HK:
                g = h - HQ
                x = _rotated(k + m64 * k_stride + g * HD, i, i < HD, k_weight, eps, angle_ptr, axis, position, m,
                             rows, magnitude, HD, ROT, NEOX, AXIS, NORM_K)  # fmt: skip
                _put(k_cache, k_scale, row * HK + g, i, x, HD, BD, QUANT)
            else:
                g = h - HQ - HK
                x = tl.load(v + m64 * v_stride + g * HV + i, mask=i < HV, other=0.0).to(tl.float32)
                _put(v_cache, v_scale, row * HK + g, i, x, HV, BD, QUANT)


@triton.jit
def _put(cache, scale, head, i, x, HD: tl.constexpr, BD: tl.constexpr, QUANT: tl.constexpr):
    """Write one head of a cell, as the cache's float type or as Q8_0 (int8 plane and f16 scales)."""
    if QUANT:
        qv, d, _ = quantize_block(tl.reshape(tl.where(i < HD, x, 0.0), (BD // 32, 32)), 3, BD // 32, 32)
        b = tl.arange(0, BD // 32)
        at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(cache + head * HD + at, qv.to(tl.int8), mask=at < HD)
        tl.store(scale + head * (HD // 32) + b, d.to(tl.float16), mask=b < HD // 32)
    else:
        tl.store(cache + head * HD + i, x.to(cache.dtype.element_ty), mask=i < HD)


def qk_norm_rope_write(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rope: Rope | None,
    position: torch.Tensor,
    *,
    cache: KVCache | None = None,
    cell: torch.Tensor | None = None,
    heads: tuple[int, int],
    head_size: tuple[int, int],
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    q_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and write keys and values into their cells.

    q [M, HQ * HD], k [M, HK * HD], v [M, HK * HV] (rows may be strided); heads (HQ, HK); head_size (HD, HV).
    `position` int32 [M], or [axes, M] for multi-section RoPE. `cell` int32 [M], negative: not written. Returns the
    queries [M, HQ, HD] of `dtype`, multiplied by `q_scale`.
    """
    m = q.shape[0]
    hq, hk = heads
    hd, hv = head_size
    rot = 0 if rope is None else rope.rot
    if rot > hd:
        raise ValueError(f"rotary size {rot} exceeds the head size {hd}")
    write = cache is not None
    if write and (k is None or v is None or cell is None):
        raise ValueError("writing the cache needs k, v and cell")
    out = torch.empty(m, hq, hd, dtype=dtype, device=q.device)
    kt, vt = q if k is None else k, q if v is None else v
    ck, cv, sk, sv = (out, out, out, out) if cache is None else cache.tensors()
    _qk_rope[(m, hq + (2 * hk if write else 0))](
        q, kt, vt, out, ck, cv, sk, sv, out if q_weight is None else q_weight, out if k_weight is None else k_weight,
        out if rope is None else rope.frequency, position if rope is None or rope.axis is None else rope.axis,
        position, position if cell is None else cell, m, q.stride(0), kt.stride(0), vt.stride(0), eps,
        1.0 if rope is None else rope.magnitude, q_scale,
        HQ=hq, HK=hk, HD=hd, HV=hv, BD=max(32, triton.next_power_of_2(max(hd, hv))), ROT=rot,
        NEOX=rope is not None and rope.neox, AXIS=rope is not None and rope.axis is not None,
        NORM_Q=q_weight is not None, NORM_K=k_weight is not None, WRITE=write,
        QUANT=cache is not None and cache.quantised, num_warps=1, launch_pdl=overlap(),
    )  # fmt: skip
    return out
