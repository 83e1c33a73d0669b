"""The operators in plain float32 NumPy: slow and obvious, for finding faults and as the float reference of tests.

Weights are dequantised to float32 whole, so only small models fit. Nothing is fused and no coarse operator is
overridden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftgguf.layers.params import Attention, Embedding, Linear, Rope, RopeKind, Weight
from ftgguf.nouns import Batch
from ftgguf.ops.base import Ops

F32 = NDArray[np.float32]


@dataclass(slots=True)
class DebugCells:
    """K and V of each layer: float32 [cells, kv_heads, dim]."""

    k: list[F32]
    v: list[F32]


def frequencies(p: Rope) -> tuple[NDArray[np.float64], float]:
    """Angle per position of each pair (float64 [dims / 2]) and the magnitude, as `ggml_rope_ext` has them with YaRN.

    YaRN (arXiv 2309.00071): pairs that turn often keep their own frequency, slow ones are interpolated, with a ramp
    between the two correction dimensions.
    """
    pairs = np.arange(p.dims // 2)
    own = p.base ** (-2.0 * pairs / p.dims)
    if p.factors is not None:
        own = own / p.factors
    scaled = own * p.scale
    if p.ext == 0:
        return scaled, p.attn

    def correction(turns: float) -> float:
        return p.dims * math.log(p.ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(p.base))

    low = max(0.0, math.floor(correction(p.beta_fast)))
    high = min(p.dims - 1.0, math.ceil(correction(p.beta_slow)))
    ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    mix = ramp * p.ext
    return scaled * (1 - mix) + own * mix, p.attn * (1 + 0.1 * math.log(1 / p.scale))


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max(-1, keepdims=True))
    out: F32 = e / e.sum(-1, keepdims=True)
    return out


class DebugOps(Ops):
    """One pass over `batch` with float32 arrays [rows, features]."""

    def __init__(self, batch: Batch, cells: DebugCells) -> None:
        self.batch = batch
        self.cells = cells
        self.n_outputs = len(batch.outputs)

    def embed(self, p: Embedding) -> F32:
        out: F32 = p.weight[self.batch.token]
        return out

    def linear(self, p: Linear, x: F32) -> F32:
        y: F32 = x @ p.weight.T
        if p.scale is not None:
            y = y * p.scale
        if p.bias is not None:
            y = y + p.bias
        return y

    def rms_norm(self, x: F32, weight: Weight | None, eps: float) -> F32:
        y: F32 = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + np.float32(eps))
        if weight is not None:
            y = y * weight
        return y

    def add(self, a: F32, b: F32) -> F32:
        return a + b

    def mul(self, a: F32, b: F32) -> F32:
        return a * b

    def scale(self, x: F32, factor: float) -> F32:
        return x * np.float32(factor)

    def unary(self, kind: str, x: F32) -> F32:
        if kind == "softmax":
            return _softmax(x)
        if kind == "sqrt_softplus":
            out: F32 = np.sqrt(np.logaddexp(np.float32(0), x))
            return out
        other: F32 = UNARY[kind](x)
        return other

    def glu(self, kind: str, gate: F32, up: F32) -> F32:
        if kind == "swiglu_oai":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            out: F32 = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            return out
        product: F32 = UNARY[kind](gate) * up
        return product

    def split(self, x: F32, sizes: tuple[int, ...]) -> tuple[F32, ...]:
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))

    def heads(self, x: F32, heads: int, dim: int) -> F32:
        return x.reshape(len(x), heads, dim)

    def rope(self, x: F32, p: Rope) -> F32:
        angle, magnitude = frequencies(p)
        theta = self.batch.position[:, None] * angle
        cos, sin = np.cos(theta)[:, None] * magnitude, np.sin(theta)[:, None] * magnitude
        half = p.dims // 2
        if p.kind is RopeKind.NEOX:
            first, second = slice(0, half), slice(half, p.dims)
        else:
            first, second = slice(0, p.dims, 2), slice(1, p.dims, 2)
        a, b = x[..., first], x[..., second]
        out = x.copy()
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out

    def write_kv(self, layer: int, k: F32, v: F32) -> None:
        self.cells.k[layer][self.batch.cell] = k
        self.cells.v[layer][self.batch.cell] = v

    def attend(self, layer: int, q: F32, p: Attention) -> F32:
        out = np.empty((len(q), p.heads, p.v_dim), np.float32)
        group = p.heads // p.kv_heads
        for i in range(len(q)):
            position = self.batch.position[i]
            first = max(0, position - p.window + 1) if p.window else 0
            cells = self.batch.tables[self.batch.sequence[i]][first : position + 1]
            k = np.repeat(self.cells.k[layer][cells], group, 1)
            v = np.repeat(self.cells.v[layer][cells], group, 1)
            scores = np.einsum("hd,chd->hc", q[i], k) * np.float32(p.scale)
            if p.softcap:
                scores = p.softcap * np.tanh(scores / p.softcap)
            if p.sinks is not None:
                scores = np.concatenate([scores, p.sinks[:, None]], 1)
            weights = _softmax(scores)[:, : len(cells)]
            out[i] = np.einsum("hc,chd->hd", weights, v)
        return out.reshape(len(q), -1)

    def select(self, x: F32) -> F32:
        return x[self.batch.outputs]

    def top_k(self, x: F32, k: int) -> Any:
        return np.argsort(-x, -1, kind="stable")[:, :k]

    def mask_groups(self, scores: F32, groups: int, used: int) -> F32:
        grouped = scores.reshape(len(scores), groups, -1)
        sums = np.sort(grouped, -1)[..., -2:].sum(-1)
        out = np.full_like(grouped, -np.inf)
        rows = np.arange(len(scores))[:, None]
        kept = np.argsort(-sums, -1, kind="stable")[:, :used]
        out[rows, kept] = grouped[rows, kept]
        return out.reshape(scores.shape)

    def gather(self, x: F32, ids: Any) -> F32:
        return np.take_along_axis(x, ids, -1)

    def normalise(self, weights: F32, floor: float) -> F32:
        out: F32 = weights / np.maximum(weights.sum(-1, keepdims=True), np.float32(floor))
        return out

    def expert_linear(self, p: Linear, x: F32, ids: Any) -> F32:
        if x.ndim == 2:
            x = np.repeat(x[:, None], ids.shape[1], 1)
        y: F32 = np.einsum("rki,rkoi->rko", x, p.weight[ids])
        if p.scale is not None:
            y = y * p.scale[ids][..., None]
        if p.bias is not None:
            y = y + p.bias[ids]
        return y

    def combine(self, y: F32, weights: F32) -> F32:
        out: F32 = (y * weights[..., None]).sum(1)
        return out

    def width(self, x: F32) -> int:
        return int(x.shape[-1])


def _gelu(x: F32) -> F32:
    out: F32 = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))
    return out


UNARY: dict[str, Any] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "relu": lambda x: np.maximum(x, 0),
    "sqr": np.square,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}
