# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The activations of gated feed-forward blocks, as one device function and one elementwise kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activations import Activations, empty_planes, quantize_block, store_block
from .device import tanh
from .formats import Activation
from .overlap import after_previous, overlap

ACTIVATIONS = {
    "silu": 0,
    "silu_clamp": 1,
    "silu_clamp_after": 2,
    "swiglu_oai": 3,
    "gelu": 4,
    "relu2": 5,
    "relu": 6,
    "situ": 7,
}
"""Names to codes of `activate`. relu2 has no gate: it takes the up product alone."""


@triton.jit
def activate(A: tl.constexpr, g, u, limit, limit2):
    """The activation of float32 gate `g` and up `u` (formulas: llama.cpp's build_moe_ffn and ggml's GLU operators).

    silu: silu(g) u. silu_clamp: silu(min(g, L)) clamp(u, -L, L). silu_clamp_after: min(silu(g), L) clamp(u, -L, L).
    swiglu_oai: g = min(g, 7), u = clamp(u, -7, 7): g sigmoid(1.702 g) (u + 1). gelu: tanh form of gelu(g) u.
    relu2: relu(u)^2. relu: relu(g) u. situ: B tanh(g / B) sigmoid(g) * C tanh(u / C), with B `limit`, C `limit2`.
    """
    if A == 0:
        return g / (1.0 + tl.exp(-g)) * u
    elif A == 1:
        g = tl.minimum(g, limit)
        return g / (1.0 + tl.exp(-g)) * tl.minimum(tl.maximum(u, -limit), limit)
    elif A == 2:
        return tl.minimum(g / (1.0 + tl.exp(-g)), limit) * tl.minimum(tl.maximum(u, -limit), limit)
    elif A == 3:
        g = tl.minimum(g, 7.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0)
        return g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    elif A == 4:
        return 0.5 * g * (1.0 + tanh(0.79788456080286535588 * g * (1.0 + 0.044715 * g * g))) * u
    elif A == 5:
        u = tl.maximum(u, 0.0)
        return u * u
    elif A == 6:
        return tl.maximum(g, 0.0) * u
    else:
        return limit * tanh(g / limit) / (1.0 + tl.exp(-g)) * (limit2 * tanh(u / limit2))


@triton.jit
def _glu(
    g, u, out, xq, xd, xs, rows, limit, limit2,
    F: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    after_previous()
    i = tl.program_id(0) * R + tl.arange(0, R)
    ok = i < rows * (F // B)
    at = i.to(tl.int64)[:, None] * B + tl.arange(0, B)[None, :]
    uv = tl.load(u + at, mask=ok[:, None], other=0.0).to(tl.float32)
    gv = uv
    if A != 5:
        gv = tl.load(g + at, mask=ok[:, None], other=0.0).to(tl.float32)
    h = activate(A, gv, uv, limit, limit2)
    tl.store(out + at, h.to(out.dtype.element_ty), mask=ok[:, None])
    if KIND >= 3:
        q, d, s = quantize_block(h, KIND, R, B)
        store_block(q, d, s, xq, xd, xs, i // (F // B), i % (F // B), ok, F, KIND, R, B)


def glu(
    gate: torch.Tensor | None,
    up: torch.Tensor,
    activation: str,
    *,
    limit: float = 0.0,
    limit2: float = 0.0,
    quantize_to: Activation | None = None,
    dtype: torch.dtype = torch.float32,
) -> Activations:
    """Activation of gate and up rows [M, F] (F a multiple of 32), quantised for the next product if asked."""
    m, f = up.shape
    code = ACTIVATIONS[activation]
    if f % 32:
        raise ValueError(f"feed-forward width must be a multiple of 32, not {f}")
    if gate is None and code != ACTIVATIONS["relu2"]:
        raise ValueError(f"activation {activation} needs a gate")
    out = torch.empty(m, f, dtype=dtype, device=up.device)
    result = Activations(out)
    kind = quantize_to if quantize_to is not None and quantize_to >= Activation.Q8_0 else None
    block = 256 if kind == Activation.Q8_K else 32
    planes = None if kind is None else empty_planes(kind, m, f, up.device)
    r = 1024 // block
    xq, xd, xs = (out, out, out) if planes is None else (planes.q, planes.d, planes.s)
    _glu[(triton.cdiv(m * (f // block), r),)](
        up if gate is None else gate, up, out, xq, xd, xs, m, limit, limit2,
        F=f, A=code, KIND=-1 if kind is None else int(kind), R=r, B=block, num_warps=4, launch_pdl=overlap(),
    )  # fmt: skip
    if planes is not None:
        result.put(planes)
    return result
