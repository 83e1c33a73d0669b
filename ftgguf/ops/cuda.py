"""The coarse operators as fused Triton kernels, on rows that live on the device.

Up to 8 rows every product quantises its input as ggml does and multiplies integers, so logits agree with the CPU
executor up to the order of float32 sums; more rows go through tensor-core tiles in bfloat16. A decode layer is about a
dozen launches, all of fixed shape: a pass may be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ftgguf.engine.cuda_experts import ACTIVATION_NAMES, ExpertStore
from ftgguf.kernels.act import ACTIVATIONS, glu
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.attention import AttentionSpec, attention_decode, attention_prefill
from ftgguf.kernels.formats import Activation
from ftgguf.kernels.gemv import MAX_ROWS
from ftgguf.kernels.kvcache import KVCache
from ftgguf.kernels.linear import ExpertBatch, linear, linear_many
from ftgguf.kernels.norm import combine, norm
from ftgguf.kernels.rope import Rope as DeviceRope
from ftgguf.kernels.rope import qk_norm_rope_write, rope_frequencies
from ftgguf.kernels.router import route
from ftgguf.kernels.rows import get_rows
from ftgguf.layers.params import Attention, Embedding, Gating, Head, Linear, Mlp, Moe, Rope, RopeKind, Router, Weight
from ftgguf.ops.base import Tensor
from ftgguf.ops.cuda_fine import FineCudaOps

Matrix: TypeAlias = Any
"""A kernels.matrix.QuantMatrix or ExpertMatrix: what has a `format`."""

Routed: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(parts [rows * k, n_embd], slots [rows, k], weights [rows, k], what else to add [rows, n_embd])."""

ATTENTION_ROWS = 16
"""Rows up to which attention splits the context over programs (decode's kernel) instead of tiling rows."""
GATING_NAMES = {
    Gating.SOFTMAX: "softmax", Gating.SIGMOID: "sigmoid", Gating.SOFTMAX_AFTER_TOP_K: "softmax_weight",
    Gating.SQRT_SOFTPLUS: "sqrt_softplus",
}  # fmt: skip


class RopeTables:
    """Device tables of a model's rotations, made once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[int, tuple[Rope, DeviceRope]] = {}

    def get(self, p: Rope) -> DeviceRope:
        """The table of `p` (known by identity: factors are device tensors)."""
        if id(p) not in self._made:
            values, magnitude = rope_frequencies(
                p.dims,
                p.base,
                scale=p.scale,
                factors=None if p.factors is None else p.factors.tolist(),
                ext_factor=p.ext,
                attn_factor=p.attn,
                beta_fast=p.beta_fast,
                beta_slow=p.beta_slow,
                n_ctx_orig=p.ctx_orig,
            )
            table = torch.tensor(values, dtype=torch.float32, device=self.device)
            self._made[id(p)] = (p, DeviceRope(table, p.kind is RopeKind.NEOX, magnitude))
        return self._made[id(p)][1]


@dataclass(slots=True)
class Rows:
    """A batch on the device. int32: `token`, `position`, `sequence`, `cell` [rows] (a negative cell is not written),
    `table` [sequences, pages]; `tiles` int32 [n, 3] for tiled attention, None for the decode kernel; `outputs` int32
    or None for all rows."""

    token: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    cell: torch.Tensor
    table: torch.Tensor
    tiles: torch.Tensor | None
    outputs: torch.Tensor | None
    n_outputs: int


@dataclass(slots=True)
class Stream:
    """The residual stream after a routed block: `h` (+ `add`) + the experts' weighted sum, which the next norm forms
    in its own launch. `value` is the sum once somebody has formed it."""

    h: torch.Tensor
    parts: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    add: torch.Tensor | None
    value: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        if self.value is None:
            adds = (self.h,) if self.add is None else (self.add, self.h)
            self.value = combine(self.parts, self.slots, self.weights, *adds)
        return self.value


def _value(h: Tensor) -> torch.Tensor:
    total: torch.Tensor = h.total() if isinstance(h, Stream) else h
    return total


class CudaOps(FineCudaOps):
    """One pass. `layers[i]` is the block number of the segment's i-th block, whose cells are `caches[i]`."""

    def __init__(
        self, rows: Rows, caches: Sequence[KVCache], ropes: RopeTables, store: ExpertStore, first_layer: int
    ) -> None:
        self.rows = rows
        self.caches = caches
        self.ropes = ropes
        self.store = store
        self.layer = first_layer
        self.n_outputs = rows.n_outputs
        self.outputs = rows.outputs
        self.keep_hidden = False
        """The head passes the hidden state on: its caller computes logits a few rows at a time."""

    # ------------------------------------------------------------------------------------------ embedding, head

    def embed(self, p: Embedding) -> Tensor:
        return get_rows(p.weight, self.rows.token)

    def head(self, h: Tensor, p: Head) -> Tensor:
        if self.keep_hidden:
            return _value(h)
        x = self._normed(h, p.norm, p.eps, [p.out.weight])
        logits = linear(x, self.matrix(p.out), bias=p.out.bias)
        if p.softcap > 0:
            logits = torch.tanh(logits / p.softcap).mul_(p.softcap)
        return logits if p.scale == 1.0 else logits.mul_(p.scale)

    def features(self, h: Tensor, p: Head) -> Tensor:
        return self._normed(h, p.norm, p.eps, []).x

    def _normed(self, h: Tensor, weight: Weight, eps: float, matrices: Sequence[Matrix]) -> Activations:
        """The norm, with the quantised planes that products with `matrices` take when they have few rows."""
        few = (h.h if isinstance(h, Stream) else h).shape[0] <= MAX_ROWS
        kinds = _plane_kinds(matrices) if few else ()
        if not isinstance(h, Stream) or h.value is not None:
            return norm(_value(h), weight, eps, kinds=kinds)[0]
        experts = (h.parts, h.slots, h.weights)
        x, h.value = norm(h.h, weight, eps, add=h.add, experts=experts, kinds=kinds)
        return x

    # ------------------------------------------------------------------------------------------------ attention

    def norm_qkv(self, h: Tensor, p: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, heads * head_dim], k and v accordingly; rows may be strided."""
        if p.fused is not None:
            x = self._normed(h, p.norm, p.eps, [p.fused.weight])
            sizes = [p.heads * p.head_dim, p.kv_heads * p.head_dim, p.kv_heads * p.v_dim]
            q, k, v = torch.split(linear(x, self.matrix(p.fused), bias=p.fused.bias), sizes, -1)
            return q, k, v
        if p.q is None or p.k is None or p.v is None:
            raise ValueError("attention has q, k and v, or a fused attn_qkv")
        three = [p.q, p.k, p.v]
        x = self._normed(h, p.norm, p.eps, [w.weight for w in three])
        q, k, v = linear_many(x, [self.matrix(w) for w in three], [w.bias for w in three])
        return q, k, v

    def rope_write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, p: Attention) -> Tensor:
        return qk_norm_rope_write(
            q, k, v, None if p.rope is None else self.ropes.get(p.rope), self.rows.position,
            cache=self.caches[layer], cell=self.rows.cell, heads=(p.heads, p.kv_heads),
            head_size=(p.head_dim, p.v_dim), q_weight=p.q_norm, k_weight=p.k_norm, eps=p.eps,
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor, p: Attention) -> Tensor:
        spec = AttentionSpec(p.scale, p.softcap, p.window, sinks=p.sinks)
        r = self.rows
        if r.tiles is None:
            kind = p.out.weight.format.activation if q.shape[0] <= MAX_ROWS else None
            return attention_decode(q, self.caches[layer], r.table, r.sequence, r.position, spec, quantize_to=kind)
        return Activations(attention_prefill(q, self.caches[layer], r.table, r.tiles, r.position, spec))

    def attention_out(self, y: Tensor, p: Linear, h: Tensor, factor: float, last: bool) -> Tensor:
        h = _value(h)
        if last and self.outputs is not None:
            y, h = Activations(self.select(y.x)), self.select(h)
        if factor == 1.0:
            return linear(y, self.matrix(p), bias=p.bias, residual=h)
        return torch.add(h, linear(y, self.matrix(p), bias=p.bias), alpha=factor)

    def finish(self, h: Tensor) -> torch.Tensor:
        """The hidden state that a segment hands on."""
        return _value(h)

    # --------------------------------------------------------------------------------------------- feed-forward

    def feed_forward(self, h: Tensor, norm: Weight, eps: float, p: Mlp | Moe, factor: float) -> Tensor:
        layer, self.layer = self.layer, self.layer + 1
        if isinstance(p, Mlp):
            y = self._mlp(self._normed(h, norm, eps, _inputs(p)), p, h if factor == 1.0 else None)
            return y if factor == 1.0 else torch.add(h, y, alpha=factor)
        experts = self.store.specs[layer].weights
        matrices = [p.router.gate.weight, experts.gate or experts.up, experts.up]
        if p.shared is not None:
            matrices += _inputs(p.shared)
        routed = self._moe(layer, self._normed(h, norm, eps, matrices), p)
        if factor == 1.0:
            return Stream(h, *routed)
        parts, slots, weights, add = routed
        return torch.add(h, combine(parts, slots, weights, *([] if add is None else [add])), alpha=factor)

    def mlp(self, x: Tensor, p: Mlp) -> Tensor:
        return self._mlp(Activations(x), p, None)

    def _mlp(self, x: Activations, p: Mlp, residual: Tensor | None) -> Tensor:
        name = ACTIVATION_NAMES[p.activation]
        down = self.matrix(p.down)
        if p.gate is None:
            up, gate = linear(x, self.matrix(p.up), bias=p.up.bias), None
        else:
            gate, up = linear_many(x, [self.matrix(p.gate), self.matrix(p.up)], [p.gate.bias, p.up.bias])
        if gate is None and ACTIVATIONS[name] != ACTIVATIONS["relu2"]:
            hidden = Activations(self.unary(p.activation, up))
        else:
            kinds = _plane_kinds([down]) if x.rows <= MAX_ROWS else ()
            hidden = glu(gate, up, name, quantize_to=kinds[0] if kinds else None)
        return linear(hidden, down, bias=p.down.bias, residual=residual)

    def _moe(self, layer: int, x: Activations, p: Moe) -> Routed:
        ids, weights = self.store.routed(layer, *self._route(x, p.router))
        add = None
        if p.shared is not None:
            add = self._mlp(x, p.shared, None)
            if p.shared_gate is not None:
                add = add * torch.sigmoid(linear(x, self.matrix(p.shared_gate), bias=p.shared_gate.bias))
        spec = self.store.specs[layer]
        placement = self.store.place(layer, x, ids, weights)
        parts = placement.parts
        if parts is None:
            batch = ExpertBatch(placement.slots, ids, placement.slot_addr)
            hidden = batch.gate_up(x, spec.weights)
            if placement.down is not None:
                self.store.complete(layer, placement, hidden)
                batch = ExpertBatch(placement.down, ids, placement.slot_addr)
            parts = batch.down(hidden, spec.weights)
        share = self.store.collect(layer, placement)
        if share is not None:
            add = share if add is None else add + share
        return parts, placement.down_slots, weights, add

    def _route(self, x: Activations, p: Router) -> tuple[Tensor, Tensor]:
        logits = linear(x, self.matrix(p.gate), bias=p.gate.bias)
        ids, weights = route(
            logits, p.top_k, gating=GATING_NAMES[p.gating], bias=p.selection_bias, groups=p.groups,
            groups_used=p.groups_used, normalise=p.normalise, scale=p.scale,
        )  # fmt: skip
        return ids, weights

    # --------------------------------------------------------------------------- fine operators with a place here

    def rope(self, x: Tensor, p: Rope) -> Tensor:
        m, heads, dim = x.shape
        return qk_norm_rope_write(
            x.reshape(m, heads * dim), None, None, self.ropes.get(p), self.rows.position, heads=(heads, 0),
            head_size=(dim, dim),
        )  # fmt: skip

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("the device writes K and V in rope_write")

    def expert_linear(self, p: Linear, x: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError("the device computes experts through their slots (feed_forward)")


def _plane_kinds(matrices: Sequence[Matrix]) -> tuple[Activation, ...]:
    """The quantised planes that products with `matrices` take; at most one of Q8_0 and Q8_1 fits one norm."""
    found: list[Activation] = []
    for m in matrices:
        kind = m.format.activation
        small = kind in (Activation.Q8_0, Activation.Q8_1)
        if kind < Activation.Q8_0 or kind in found or (small and any(k != Activation.Q8_K for k in found)):
            continue
        found.append(kind)
    return tuple(found)


def _inputs(p: Mlp) -> list[Matrix]:
    """The matrices of a feed-forward that read its input."""
    return [p.up.weight] if p.gate is None else [p.gate.weight, p.up.weight]
