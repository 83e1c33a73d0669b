"""The compute interface: fine operators that an executor must have, and coarse ones with a default body.

A family's forward is written once in coarse operators on opaque tensors. `ggml.py` inherits the bodies and lets
ggml's graph do the rest; `cuda.py` overrides the coarse ones with fused kernels; `debug.py` computes the fine ones in
plain float32. Activations are [rows, features] unless a docstring says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ftgguf.layers.params import Attention, Embedding, Experts, Gating, Head, Linear, Mlp, Moe, Rope, Router, Weight

Tensor = Any

WEIGHT_SUM_FLOOR = 6.103515625e-5
"""Smallest normal float16: llama.cpp clamps the sum of expert weights to it before it divides."""


class Ops(ABC):
    """One pass over one batch. An instance knows its rows, positions, cells and masks."""

    n_outputs: int
    """Rows whose logits are wanted; 0 in the middle of a prompt."""
    wants_features: bool = False
    """The pass ends with the final norm instead of logits."""

    # ------------------------------------------------------------------------------------------------ fine

    @abstractmethod
    def embed(self, p: Embedding) -> Tensor:
        """Look the batch's tokens up: float32 [rows, n_embd]."""

    @abstractmethod
    def linear(self, p: Linear, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Weight | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    @abstractmethod
    def add(self, a: Tensor, b: Tensor) -> Tensor: ...

    @abstractmethod
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise; `b` may be [rows, 1]."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    @abstractmethod
    def unary(self, kind: str, x: Tensor) -> Tensor:
        """`silu`, `gelu`, `relu`, `sqr`, `sigmoid`, `softmax` (last dimension), `sqrt_softplus`, `tanh`."""

    @abstractmethod
    def glu(self, kind: str, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up; `swiglu_oai` is gpt-oss's clamped form."""

    @abstractmethod
    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Parts of the last dimension."""

    @abstractmethod
    def heads(self, x: Tensor, heads: int, dim: int) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim]."""

    @abstractmethod
    def rope(self, x: Tensor, p: Rope) -> Tensor:
        """Rotate [rows, heads, dim] by the batch's positions."""

    @abstractmethod
    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store [rows, kv_heads, dim] into the batch's cells of `layer` (counted within the segment)."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, p: Attention) -> Tensor:
        """[rows, heads, head_dim] -> [rows, heads * v_dim] over the cells of each row's sequence, its own included."""

    @abstractmethod
    def select(self, x: Tensor) -> Tensor:
        """Keep only the rows whose logits are wanted."""

    @abstractmethod
    def top_k(self, x: Tensor, k: int) -> Tensor:
        """Indices int32 [rows, k] of the largest values, largest first."""

    @abstractmethod
    def mask_groups(self, scores: Tensor, groups: int, used: int) -> Tensor:
        """Minus infinity for experts outside the `used` groups with the largest sum of their two best scores."""

    @abstractmethod
    def gather(self, x: Tensor, ids: Tensor) -> Tensor:
        """x[row, ids[row, j]]: [rows, k]."""

    @abstractmethod
    def normalise(self, weights: Tensor, floor: float) -> Tensor:
        """[rows, k] divided by its row sums, which are at least `floor`."""

    @abstractmethod
    def expert_linear(self, p: Linear, x: Tensor, ids: Tensor) -> Tensor:
        """Row r through experts ids[r]: x [rows, in] or [rows, k, in] -> [rows, k, out]."""

    @abstractmethod
    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """Sum over k of y [rows, k, n] * weights [rows, k], in order of rank."""

    # ---------------------------------------------------------------------------------------------- coarse

    def norm_qkv(self, h: Tensor, p: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, then q, k, v as [rows, heads, dim]."""
        x = self.rms_norm(h, p.norm, p.eps)
        if p.fused is not None:
            sizes = (p.heads * p.head_dim, p.kv_heads * p.head_dim, p.kv_heads * p.v_dim)
            q, k, v = self.split(self.linear(p.fused, x), sizes)
        else:
            assert p.q is not None
            assert p.k is not None
            assert p.v is not None
            q, k, v = self.linear(p.q, x), self.linear(p.k, x), self.linear(p.v, x)
        return (
            self.heads(q, p.heads, p.head_dim),
            self.heads(k, p.kv_heads, p.head_dim),
            self.heads(v, p.kv_heads, p.v_dim),
        )

    def rope_write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, p: Attention) -> Tensor:
        """QK-norm, rotation, KV write; returns q."""
        if p.q_norm is not None:
            q = self.rms_norm(q, p.q_norm, p.eps)
        if p.k_norm is not None:
            k = self.rms_norm(k, p.k_norm, p.eps)
        if p.rope is not None:
            q, k = self.rope(q, p.rope), self.rope(k, p.rope)
        self.write_kv(layer, k, v)
        return q

    def attention_out(self, y: Tensor, p: Linear, h: Tensor, factor: float, last: bool) -> Tensor:
        """h + factor * (y W^T), in the model's last block for the wanted rows only."""
        y = self.linear(p, y)
        if last:
            y, h = self.select(y), self.select(h)
        return self.add(y if factor == 1.0 else self.scale(y, factor), h)

    def feed_forward(self, h: Tensor, norm: Weight, eps: float, p: Mlp | Moe, factor: float) -> Tensor:
        """h + factor * ffn(norm(h)), dense or routed."""
        x = self.rms_norm(h, norm, eps)
        y = self.mlp(x, p) if isinstance(p, Mlp) else self.moe(x, p)
        return self.add(y if factor == 1.0 else self.scale(y, factor), h)

    def route(self, x: Tensor, p: Router) -> tuple[Tensor, Tensor]:
        """(ids int32 [rows, k], weights float32 [rows, k]) by llama.cpp's order of operations."""
        logits = self.linear(p.gate, x)
        kinds = {Gating.SOFTMAX: "softmax", Gating.SIGMOID: "sigmoid", Gating.SQRT_SOFTPLUS: "sqrt_softplus"}
        probs = self.unary(kinds[p.gating], logits) if p.gating in kinds else logits
        chosen = probs if p.selection_bias is None else self.add(probs, p.selection_bias)
        if p.groups > 1:
            chosen = self.mask_groups(chosen, p.groups, p.groups_used)
        ids = self.top_k(chosen, p.top_k)
        weights = self.gather(probs, ids)
        if p.gating is Gating.SOFTMAX_AFTER_TOP_K:
            weights = self.unary("softmax", weights)
        if p.normalise:
            weights = self.normalise(weights, WEIGHT_SUM_FLOOR)
        if p.scale not in (0.0, 1.0):
            weights = self.scale(weights, p.scale)
        return ids, weights

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, p: Experts) -> Tensor:
        """The routed experts' weighted sum, [rows, n_embd]."""
        gate: Tensor | None = None
        if p.gate_up is not None:
            both = self.expert_linear(p.gate_up, x, ids)
            half = self.width(both) // 2
            gate, up = self.split(both, (half, half))
        else:
            assert p.up is not None, "experts have up, or a fused gate_up"
            up = self.expert_linear(p.up, x, ids)
            gate = self.expert_linear(p.gate, x, ids) if p.gate is not None else None
        y = self.expert_linear(p.down, self._activate(p.activation, gate, up), ids)
        return self.combine(y, weights)

    @abstractmethod
    def width(self, x: Tensor) -> int:
        """Size of the last dimension."""

    def mlp(self, x: Tensor, p: Mlp) -> Tensor:
        up = self.linear(p.up, x)
        gate = self.linear(p.gate, x) if p.gate is not None else None
        return self.linear(p.down, self._activate(p.activation, gate, up))

    def moe(self, x: Tensor, p: Moe) -> Tensor:
        """Routed experts plus the shared one."""
        ids, weights = self.route(x, p.router)
        y = self.experts(x, ids, weights, p.experts)
        if p.shared is not None:
            shared = self.mlp(x, p.shared)
            if p.shared_gate is not None:
                shared = self.mul(shared, self.unary("sigmoid", self.linear(p.shared_gate, x)))
            y = self.add(y, shared)
        return y

    def _activate(self, kind: str, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is not None:
            return self.glu(kind, gate, up)
        if kind == "relu_sqr":
            return self.unary("sqr", self.unary("relu", up))
        return self.unary(kind, up)

    def head(self, h: Tensor, p: Head) -> Tensor:
        """Logits float32 [outputs, vocab]; `h` holds the selected rows."""
        logits = self.linear(p.out, self.rms_norm(h, p.norm, p.eps))
        if p.softcap > 0:
            logits = self.scale(self.unary("tanh", self.scale(logits, 1 / p.softcap)), p.softcap)
        return logits if p.scale == 1.0 else self.scale(logits, p.scale)

    def features(self, h: Tensor, p: Head) -> Tensor:
        """The final norm of the selected rows, float32 [outputs, n_embd]: what llama.cpp's embeddings are made of."""
        return self.rms_norm(h, p.norm, p.eps)
