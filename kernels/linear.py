"""The products of a forward pass behind one interface: the number of rows picks the kernel.

1 to 8 rows: integer dot products on activations quantised as ggml does for the weight's type, so the result agrees
with the CPU executor up to the order of float32 sums. More: tensor-core tiles in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import expert_gemv
from . import gemm as tiles
from .activations import Activations
from .gemm import expert_config, gemm
from .gemv import MAX_ROWS, gemv
from .group import Groups, group_pairs
from .matrix import ExpertWeights, QuantMatrix


def _shared(x: torch.Tensor | Activations) -> Activations:
    return x if isinstance(x, Activations) else Activations(x)


def linear(
    x: torch.Tensor | Activations,
    w: QuantMatrix,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [M, N] = x [M, K] W^T (* w.scale) (+ bias [N]) (+ residual [M, N])."""
    x = _shared(x)
    if x.width != w.k:
        raise ValueError(f"rows of {x.width} do not fit a matrix of {w.k} columns")
    if x.rows <= MAX_ROWS:
        return gemv(x, [w], bias=[bias], residual=residual, out=None if out is None else [out])[0]
    return gemm(x, w, bias=bias, residual=residual, out=out)


def linear_many(
    x: torch.Tensor | Activations,
    weights: Sequence[QuantMatrix],
    bias: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """Products of the same rows with several matrices (query, key, value): one launch for few rows where at most three
    share their activation kind, else one launch each."""
    x = _shared(x)
    bias = bias or [None] * len(weights)
    kinds = {(w.format.activation, w.format.integer) for w in weights}
    if x.rows <= MAX_ROWS and len(weights) <= 3 and len(kinds) == 1:
        return gemv(x, weights, bias=bias)
    return [linear(x, w, bias=b) for w, b in zip(weights, bias, strict=True)]


class ExpertBatch:
    """One layer's routed pairs, kept between the two expert products. `ids` int32 [M, k] slots (negative: not on this
    device); `experts` int32 [M, k] expert numbers; `slot_addr` int64 [slots] device addresses (multiples of 16)."""

    def __init__(self, ids: torch.Tensor, experts: torch.Tensor, slot_addr: torch.Tensor) -> None:
        if ids.dtype != torch.int32 or experts.dtype != torch.int32 or slot_addr.dtype != torch.int64:
            raise ValueError("ids and experts must be int32 and slot_addr int64")
        if ids.shape != experts.shape or ids.dim() != 2 or slot_addr.dim() != 1:
            raise ValueError("ids and experts must both be [rows, k], slot_addr [slots]")
        self.ids, self.experts, self.slot_addr = ids.contiguous(), experts.contiguous(), slot_addr
        rows, self.top_k = ids.shape
        self.few = rows <= MAX_ROWS
        per_expert = max(1, rows * self.top_k // max(1, slot_addr.numel()))
        self._per_expert = per_expert
        self._groups: Groups | None = None

    def groups(self, bm: int) -> Groups:
        """The pairs sorted into tiles of `bm` rows (computed once where both products use the same size)."""
        if self._groups is None or self._groups.bm != bm:
            self._groups = group_pairs(self.ids, self.slot_addr.numel(), bm)
        return self._groups

    def gate_up(self, x: torch.Tensor | Activations, w: ExpertWeights) -> torch.Tensor:
        """Activated rows [M * k, F] for x [M, D]: float32 for few rows, else bfloat16. Pairs whose slot is negative
        stay unwritten."""
        x = _shared(x)
        if self.few:
            return expert_gemv.gate_up(x, self.ids, self.experts, self.slot_addr, w)
        config = expert_config(self._per_expert, w.gate is not None, [(w.gate or w.up).type, w.up.type])
        return tiles.gate_up(x, self.groups(config.bm), self.experts, self.slot_addr, w, self.top_k, config)

    def down(self, h: torch.Tensor | Activations, w: ExpertWeights) -> torch.Tensor:
        """float32 [M * k, D] from `gate_up`'s rows; pairs whose slot is negative stay unwritten."""
        h = _shared(h)
        if self.few:
            return expert_gemv.down(h, self.ids, self.experts, self.slot_addr, w.down)
        config = expert_config(self._per_expert, False, [w.down.type])
        return tiles.down(h, self.groups(config.bm), self.experts, self.slot_addr, w.down, config)


class ExpertPieces:
    """One layer's routed pairs over experts that come in pieces: sorted by expert once, then a product over those
    that a table has a slot for, into the same rows. `ids` int32 [M, k] expert numbers, none negative."""

    def __init__(self, ids: torch.Tensor, experts: int, w: ExpertWeights) -> None:
        self.ids, self.w = ids.contiguous(), w
        rows, self.top_k = ids.shape
        self.few = rows <= MAX_ROWS
        per = max(1, rows * self.top_k // experts)
        self._up = expert_config(per, w.gate is not None, [(w.gate or w.up).type, w.up.type])
        self._down = expert_config(per, False, [w.down.type])
        self._groups = {} if self.few else {bm: group_pairs(ids, experts, bm) for bm in {self._up.bm, self._down.bm}}
        pairs, device = ids.numel(), ids.device
        kind = torch.float32 if self.few else torch.bfloat16
        self.hidden = torch.empty(pairs, w.up.n, dtype=kind, device=device)
        self.parts = torch.empty(pairs, w.down.n, dtype=torch.float32, device=device)

    def add(self, x: Activations, table: torch.Tensor, slot_addr: torch.Tensor) -> torch.Tensor:
        """The rows of `parts` (float32 [M * k, D]) of the experts that have a slot in `table` (int32 [experts], -1:
        none), whose device addresses are `slot_addr`; the other rows stay as they are."""
        w, ids = self.w, self.ids
        if self.few:
            slots = table[ids.long()].contiguous()
            expert_gemv.gate_up(x, slots, ids, slot_addr, w, out=self.hidden)
            return expert_gemv.down(Activations(self.hidden), slots, ids, slot_addr, w.down, out=self.parts)
        up, down = self._groups[self._up.bm], self._groups[self._down.bm]
        tiles.gate_up(x, up, ids, slot_addr, w, self.top_k, self._up, table=table, out=self.hidden)
        h = Activations(self.hidden)
        return tiles.down(h, down, ids, slot_addr, w.down, self._down, table=table, out=self.parts)


def expert_gate_up(x: torch.Tensor | Activations, batch: ExpertBatch, w: ExpertWeights) -> torch.Tensor:
    """See `ExpertBatch.gate_up`."""
    return batch.gate_up(x, w)


def expert_down(h: torch.Tensor | Activations, batch: ExpertBatch, w: ExpertWeights) -> torch.Tensor:
    """See `ExpertBatch.down`."""
    return batch.down(h, w)
