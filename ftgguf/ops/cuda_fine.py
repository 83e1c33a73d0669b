"""The fine operators on device tensors, in torch: what the fused coarse ones of ops.cuda do not cover.

Activations are float32 tensors [rows, features]; nothing here synchronises with the host, so a captured pass may use
them.
"""

from __future__ import annotations

from typing import Any

import torch

from ftgguf.kernels.linear import linear
from ftgguf.kernels.matrix import QuantMatrix
from ftgguf.kernels.norm import norm
from ftgguf.layers.params import Linear, Weight
from ftgguf.ops.base import Ops, Tensor


class FineCudaOps(Ops):
    """Elementwise and row operators; a subclass adds what needs the batch and the cells."""

    outputs: torch.Tensor | None
    """int32 [outputs], or None where every row's logits are wanted."""

    def linear(self, p: Linear, x: Tensor) -> Tensor:
        return linear(x, self.matrix(p), bias=p.bias)

    def matrix(self, p: Linear) -> QuantMatrix:
        """The weight with its NVFP4 factor."""
        from ftgguf.engine.cuda_weights import scaled

        return scaled(p.weight, p.scale)

    def rms_norm(self, x: Tensor, weight: Weight | None, eps: float) -> Tensor:
        if x.dim() == 2:
            return norm(x.contiguous(), weight, eps)[0].x
        flat = norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps)[0].x
        return flat.view(x.shape)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def unary(self, kind: str, x: Tensor) -> Tensor:
        f = torch.nn.functional
        table: dict[str, Any] = {
            "silu": f.silu, "relu": f.relu, "sqr": torch.square, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
            "gelu": lambda v: f.gelu(v, approximate="tanh"), "softmax": lambda v: torch.softmax(v, -1),
            "sqrt_softplus": lambda v: torch.sqrt(f.softplus(v)),
        }  # fmt: skip
        return table[kind](x)

    def glu(self, kind: str, gate: Tensor, up: Tensor) -> Tensor:
        if kind == "swiglu_oai":
            g, u = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return g * torch.sigmoid(1.702 * g) * (u + 1.0)
        return self.unary(kind, gate) * up

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.split(x, sizes, -1))

    def heads(self, x: Tensor, heads: int, dim: int) -> Tensor:
        return x.reshape(x.shape[0], heads, dim)

    def select(self, x: Tensor) -> Tensor:
        return x if self.outputs is None else x.index_select(0, self.outputs)

    def top_k(self, x: Tensor, k: int) -> Tensor:
        return torch.topk(x, k, -1).indices.int()

    def mask_groups(self, scores: Tensor, groups: int, used: int) -> Tensor:
        rows, n = scores.shape
        grouped = scores.view(rows, groups, n // groups)
        sums = grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, sums.topk(used, -1).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).view(rows, n)

    def gather(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.gather(1, ids.long())

    def normalise(self, weights: Tensor, floor: float) -> Tensor:
        return weights / weights.sum(-1, keepdim=True).clamp(min=floor)

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        return (y * weights[..., None]).sum(1)

    def width(self, x: Tensor) -> int:
        return int(x.shape[-1])
