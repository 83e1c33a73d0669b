"""The operators as nodes of a ggml graph, for the CPU.

Nothing is computed here: each call adds nodes, in the order in which llama.cpp's graphs have them, so that both
engines do the same arithmetic. ggml's shapes have the fastest dimension first: [rows, features] is (features, rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftgguf.gguf.types import TensorType
from ftgguf.layers.params import Attention, Embedding, Linear, Rope, RopeKind, Router, Weight
from ftgguf.ops.base import Ops, Tensor

if TYPE_CHECKING:
    from ftgguf._ggml_cpu import Cells, Graph


NEVER = 1 << 30
"""More rows than any batch has."""


@dataclass(slots=True)
class GgmlWeight:
    """A tensor of the file in one or two layouts: as in the file, and repacked for ggml's interleaved kernels."""

    plain: Any
    packed: Any | None = None
    plain_from: int = NEVER
    """Batches of this many rows and more read the file's layout although a repacked copy exists."""

    def pick(self, rows: int) -> Any:
        return self.plain if self.packed is None or rows >= self.plain_from else self.packed


@dataclass(slots=True)
class Inputs:
    """The graph's inputs; filled anew for each pass."""

    token: Any
    position: Any
    cell: Any
    outputs: Any
    masks: dict[int, Any]
    """Attention window (0: none) -> float16 mask [rows, n_kv]."""
    hidden: Any = None


class GgmlOps(Ops):
    """Builds one graph for `rows` rows of which `n_outputs` are wanted; attention spans `n_kv` cells."""

    def __init__(
        self,
        graph: Graph,
        inputs: Inputs,
        cells: Cells,
        n_kv: int,
        rows: int,
        n_outputs: int,
        mask: Callable[[int], Any],
    ) -> None:
        self.g = graph
        self.inputs = inputs
        self.cells = cells
        self.n_kv = n_kv
        self.rows = rows
        self.n_outputs = n_outputs
        self.mask = mask
        self.deltas: Mapping[str, Sequence[tuple[Any, Any, float]]] = {}
        """LoRA: name of a weight -> (A, B, factor) of each adapter in use (`engine.lora`)."""
        self.routes: list[tuple[Tensor, Tensor]] | None = None
        """(ids as float32, weights) of each routed block, where somebody wants to read them."""

    def _w(self, weight: Weight) -> Any:
        return weight.pick(self.rows)

    def embed(self, p: Embedding) -> Tensor:
        h = self.g.get_rows(p.weight.plain, self.inputs.token)
        for a, b, factor in self.deltas.get(p.weight.plain.name, ()):
            h = self.g.add(h, self.g.scale(self.g.mul_mat(b, self.g.get_rows(a, self.inputs.token)), factor))
        return h

    def linear(self, p: Linear, x: Tensor) -> Tensor:
        y = self.g.mul_mat(self._w(p.weight), x)
        for a, b, factor in self.deltas.get(p.weight.plain.name, ()):
            y = self.g.add(y, self.g.scale(self.g.mul_mat(b, self.g.mul_mat(a, x)), factor))
        if p.scale is not None:
            y = self.g.mul(y, p.scale.plain)
        return y if p.bias is None else self.g.add(y, p.bias.plain)

    def rms_norm(self, x: Tensor, weight: Weight | None, eps: float) -> Tensor:
        y = self.g.rms_norm(x, eps)
        return y if weight is None else self.g.mul(y, weight.plain)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.g.add(a, b.plain if isinstance(b, GgmlWeight) else b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.g.mul(a, b)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self.g.scale(x, factor)

    def unary(self, kind: str, x: Tensor) -> Tensor:
        if kind == "sqrt_softplus":
            return self.g.sqrt(self.g.softplus(x))
        return getattr(self.g, kind)(x)

    def glu(self, kind: str, gate: Tensor, up: Tensor) -> Tensor:
        if kind == "swiglu_oai":
            # alpha and limit are constants of gpt-oss, written into llama.cpp's graph as well
            return self.g.swiglu_oai(gate, up, 1.702, 7.0)
        return self.g.glu(gate, up, kind)

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        shape, strides, parts, offset = x.shape, self.g.strides(x), [], 0
        for size in sizes:
            ne = [size, *shape[1:]]
            parts.append(self.g.view(x, ne, strides[1 : len(ne)], offset))
            offset += size * 4
        return tuple(parts)

    def heads(self, x: Tensor, heads: int, dim: int) -> Tensor:
        strides = self.g.strides(x)
        return self.g.view(x, [dim, heads, x.ne(1)], [dim * 4, strides[1]], 0)

    def rope(self, x: Tensor, p: Rope) -> Tensor:
        factors = None if p.factors is None else p.factors.plain
        return self.g.rope(
            x,
            self.inputs.position,
            factors,
            p.dims,
            p.kind is RopeKind.NEOX,
            p.ctx_orig,
            p.base,
            p.scale,
            p.ext,
            p.attn,
            p.beta_fast,
            p.beta_slow,
        )

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        for i, x in ((2 * layer, k), (2 * layer + 1, v)):
            row, strides = x.ne(0) * x.ne(1), self.g.strides(x)
            flat = self.g.view(x, [row, x.ne(2)], [strides[2]], 0)
            self.g.expand(self.g.set_rows(self.cells.pool(i), flat, self.inputs.cell))

    def attend(self, layer: int, q: Tensor, p: Attention) -> Tensor:
        k = self.g.window(self.cells.pool(2 * layer), p.head_dim, p.kv_heads, self.n_kv)
        v = self.g.window(self.cells.pool(2 * layer + 1), p.v_dim, p.kv_heads, self.n_kv)
        sinks = None if p.sinks is None else p.sinks.plain
        q = self.g.permute(q, 0, 2, 1, 3)
        return self.g.attention(q, k, v, self.mask(p.window), sinks, p.scale, p.softcap)

    def select(self, x: Tensor) -> Tensor:
        return self.g.get_rows(x, self.inputs.outputs)

    def top_k(self, x: Tensor, k: int) -> Tensor:
        return self.g.top_k(x, k)

    def route(self, x: Tensor, p: Router) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x, p)
        if self.routes is not None:
            self.routes.append((self.g.cast(self.g.cont(ids), int(TensorType.F32)), self.g.cont(weights)))
        return ids, weights

    def mask_groups(self, scores: Tensor, groups: int, used: int) -> Tensor:
        g, n, rows = self.g, scores.ne(0), scores.ne(1)
        grouped = g.reshape(scores, [n // groups, groups, rows])
        best = g.get_rows(g.reshape(grouped, [1, n // groups, groups, rows]), g.top_k(grouped, 2))
        sums = g.reshape(g.sum_rows(g.reshape(best, [2, groups, rows])), [groups, rows])
        kept = g.top_k(sums, used)
        hidden = g.fill(grouped, float("-inf"))
        return g.reshape(g.set_rows(hidden, g.get_rows(grouped, kept), kept), [n, rows])

    def gather(self, x: Tensor, ids: Tensor) -> Tensor:
        picked = self.g.get_rows(self.g.reshape(x, [1, x.ne(0), x.ne(1)]), ids)
        return self.g.reshape(picked, [picked.ne(1), picked.ne(2)])

    def normalise(self, weights: Tensor, floor: float) -> Tensor:
        total = self.g.clamp(self.g.sum_rows(weights), floor, float("inf"))
        return self.g.div(weights, total)

    def expert_linear(self, p: Linear, x: Tensor, ids: Tensor) -> Tensor:
        k, rows = ids.ne(0), ids.ne(1)
        if not (x.ne(1) == k and x.ne(2) == rows):  # one input for all k experts of a row
            x = self.g.reshape(x, [x.ne(0), 1, rows])
        y = self.g.mul_mat_id(self._w(p.weight), x, ids)
        if p.scale is not None:
            y = self.g.mul(y, self.g.expert_scale(p.scale.plain, ids))
        return y if p.bias is None else self.g.add_id(y, p.bias.plain, ids)

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        k, rows = weights.ne(0), weights.ne(1)
        return self.g.sum_ranks(self.g.mul(y, self.g.reshape(weights, [1, k, rows])))

    def width(self, x: Tensor) -> int:
        return int(x.ne(0))


KV_TYPES = {
    "f32": TensorType.F32,
    "f16": TensorType.F16,
    "bf16": TensorType.BF16,
    "q8_0": TensorType.Q8_0,
    "q4_0": TensorType.Q4_0,
    "q4_1": TensorType.Q4_1,
    "iq4_nl": TensorType.IQ4_NL,
    "q5_0": TensorType.Q5_0,
    "q5_1": TensorType.Q5_1,
}
