"""The executor of a segment on the CPU: weights in the mapped file, KV cells, and one ggml graph for each shape."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from ftgguf import _ggml_cpu as native
from ftgguf.engine.executor import NotSupported
from ftgguf.engine.ggml_weights import GgmlSource
from ftgguf.engine.lora import AdapterWeights, Delta
from ftgguf.experts.trace import RoutingTrace
from ftgguf.gguf.types import TensorType
from ftgguf.layers.block import segment
from ftgguf.layers.params import Decoder, Moe
from ftgguf.nouns import F32, I32, Batch
from ftgguf.ops.ggml import KV_TYPES, GgmlOps, Inputs

KV_PAD = 256
"""Attention spans a multiple of this many cells, so that a graph serves 256 decode steps (llama.cpp's padding)."""
KEPT_GRAPHS = 24
"""Graphs kept for reuse: decode at several batch sizes, and the prompt chunks seen last."""


Key = tuple[int, int, int, bool, bool, tuple[float, ...]]
"""What a graph is built for: rows, cells of attention, outputs, starts from a hidden state, ends with the final norm
instead of logits, scales of the adapters."""


class _Pass:
    """One graph with its inputs."""

    def __init__(
        self, graph: Any, inputs: Inputs, output: Any | None, hidden: Any | None, routes: list[tuple[Any, Any]]
    ) -> None:
        self.graph = graph
        self.routes = routes
        self.inputs = inputs
        self.output = output
        self.hidden = hidden


class GgmlExecutor:
    """Blocks [first, last) of a model on the CPU (engine.executor.Executor for a whole model)."""

    recurrent = False

    def __init__(
        self,
        source: GgmlSource,
        model: Decoder,
        *,
        n_cells: int,
        max_rows: int,
        threads: int,
        threads_batch: int,
        type_k: str = "f16",
        type_v: str = "f16",
        first: int = 0,
        last: int | None = None,
        adapters: AdapterWeights | None = None,
    ) -> None:
        self.source = source
        self.adapters = adapters
        self.model = model
        self.first, self.last = first, len(model.blocks) if last is None else last
        self.n_vocab = model.n_vocab
        self.max_rows = max_rows
        self.threads, self.threads_batch = threads, threads_batch
        self.n_cells = -(-n_cells // KV_PAD) * KV_PAD
        rows, types = [], []
        for block in model.blocks[self.first : self.last]:
            a = block.attention
            rows += [a.kv_heads * a.head_dim, a.kv_heads * a.v_dim]
            types += [int(KV_TYPES[type_k]), int(KV_TYPES[type_v])]
        self.cells = native.Cells(source.backend, rows, types, self.n_cells)
        self.arena = native.Arena(source.backend)
        self.passes: OrderedDict[Key, _Pass] = OrderedDict()
        self.trace: RoutingTrace | None = None
        """Where the routes of decode steps go (`--record-routing`); set before the first one."""
        # 40 nodes cover a block with attention and a MoE of 8 ranks; the rest is head-room
        self.max_nodes = 64 + (self.last - self.first) * (96 + 4 * max(64, _most_ranks(model)))
        self._threads_set = 0
        self.reserve()

    # --------------------------------------------------------------------------------------------- the graphs

    def reserve(self) -> None:
        """Size the work memory for the largest pass, so that later graphs never lose theirs."""
        self._pass((self.max_rows, min(self.n_cells, KV_PAD), 1, False, False, ()))

    def warm_up(self) -> None:
        """One decode step at position 0 of cell 0, whose contents nobody has claimed yet: starts the threads and
        reads the dense weights in."""
        zero = np.zeros(1, np.int32)
        trace, self.trace = self.trace, None
        self.forward(Batch(zero, zero, zero, zero, (zero,), zero))
        if trace is not None:
            self.trace = trace
            self.passes.clear()  # built without the routes

    def _pass(self, key: Key) -> _Pass:
        found = self.passes.get(key)
        if found is not None and not found.graph.stale:
            self.passes.move_to_end(key)
            return found
        built = self._build(key)
        self.passes[key] = built
        self.passes.move_to_end(key)
        while len(self.passes) > KEPT_GRAPHS:
            self.passes.popitem(last=False)
        return built

    def _build(self, key: Key) -> _Pass:
        rows, n_kv, n_outputs, hidden, features, adapters = key
        deltas: dict[str, list[Delta]] = {}
        if adapters:
            if self.adapters is None:
                raise NotSupported("no LoRA adapters are loaded")
            deltas = self.adapters.deltas(adapters)
        g = native.Graph(self.arena, self.max_nodes + sum(4 * len(each) for each in deltas.values()))
        i32, i64 = int(TensorType.I32), int(TensorType.I64)
        inputs = Inputs(
            token=g.input("token", i32, [rows]),
            position=g.input("position", i32, [rows]),
            cell=g.input("cell", i64, [rows]),
            outputs=g.input("outputs", i32, [n_outputs]) if n_outputs else None,
            masks={},
        )

        def mask(window: int) -> Any:
            if window not in inputs.masks:
                inputs.masks[window] = g.input(f"mask{window}", int(TensorType.F16), [n_kv, rows])
            return inputs.masks[window]

        h = None
        if hidden:
            h = inputs.hidden = g.input("hidden", int(TensorType.F32), [self.model.n_embd, rows])
        ops = GgmlOps(g, inputs, self.cells, n_kv, rows, n_outputs, mask)
        ops.wants_features, ops.deltas = features, deltas
        ops.routes = [] if self.trace is not None and rows == n_outputs else None
        out = segment(ops, self.model, self.first, self.last, h)
        if out is not None:
            g.output(out)
        for tensors in ops.routes or ():
            for tensor in tensors:
                g.output(tensor)
        g.place()
        final = self.last == len(self.model.blocks)
        return _Pass(g, inputs, out if final else None, None if final else out, ops.routes or [])

    # --------------------------------------------------------------------------------------------------- a pass

    def forward(self, batch: Batch) -> F32:
        """See engine.executor.Executor.forward."""
        return self.run(batch)

    def run(self, batch: Batch, hidden: F32 | None = None) -> F32:
        """One pass: logits [outputs, vocab], or the hidden state [rows, n_embd] of a segment that is not the last.

        `hidden` float32 [rows, n_embd]: the hidden state of the segment before (or embeddings).
        """
        hidden = batch.embedding if hidden is None else hidden
        rows, n_outputs = batch.rows, len(batch.outputs)
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"a batch of {rows} rows, the executor takes 1 to {self.max_rows}")
        low, high = native.span(list(batch.tables))
        n_kv = min(-(-(high - low) // KV_PAD) * KV_PAD, self.n_cells)
        low = min(low, self.n_cells - n_kv)
        p = self._pass((rows, n_kv, n_outputs, hidden is not None, batch.features, batch.adapters))
        g, inputs = p.graph, p.inputs
        if hidden is not None:
            g.set(inputs.hidden, np.ascontiguousarray(hidden, np.float32))
        else:
            g.set_used(inputs.token, batch.token)
        g.set_used(inputs.position, batch.position)
        g.set_used(inputs.cell, batch.cell.astype(np.int64))
        if n_outputs:
            g.set_used(inputs.outputs, batch.outputs)
        for window, mask in inputs.masks.items():
            native.fill_mask(mask, low, list(batch.tables), batch.sequence, batch.position, window)
        g.move_windows(low)
        threads = self.threads if rows == 1 else self.threads_batch
        if threads != self._threads_set:
            self.source.backend.set_threads(threads)
            self._threads_set = threads
        g.compute()
        if self.trace is not None:
            self._record(self.trace, p, batch)
        result = p.output if p.output is not None else p.hidden
        if result is None:
            return np.empty((0, self.n_vocab), np.float32)
        values: F32 = g.values(result)
        return values

    def _record(self, trace: RoutingTrace, p: _Pass, batch: Batch) -> None:
        """A step of one row for each sequence is decode; anything else is a prompt's."""
        if not p.routes or batch.rows != len(batch.tables):
            trace.session()
            return
        both = zip(*p.routes, strict=True)
        ids, weights = (np.stack([p.graph.values(t).reshape(batch.rows, -1) for t in each]) for each in both)
        trace.add(ids.astype(np.int32), weights)

    # -------------------------------------------------------------------------------------------------- the cells

    def copy_cells(self, src: I32, dst: I32) -> None:
        self.cells.copy(np.ascontiguousarray(src, np.int32), np.ascontiguousarray(dst, np.int32))

    def read_cells(self, cells: I32) -> bytes:
        data: bytes = self.cells.read(np.ascontiguousarray(cells, np.int32))
        return data

    def write_cells(self, cells: I32, data: bytes) -> None:
        self.cells.write(np.ascontiguousarray(cells, np.int32), data)

    def shift_cells(self, cells: I32, delta: int) -> None:
        """Rotate K of `cells` by `delta` positions, layer by layer, as llama.cpp's context shift does."""
        cells = np.ascontiguousarray(cells, np.int32)
        g = native.Graph(self.arena, 16 * (self.last - self.first) + 8)
        where = g.input("cells", int(TensorType.I64), [len(cells)])
        by = g.input("delta", int(TensorType.I32), [len(cells)])
        pick = g.input("pick", int(TensorType.I32), [len(cells)])
        for layer, block in enumerate(self.model.blocks[self.first : self.last]):
            a = block.attention
            if a.rope is None:
                raise NotSupported("the context of a model without RoPE cannot be shifted")
            pool = self.cells.pool(2 * layer)
            k = g.reshape(g.get_rows(pool, pick), [a.head_dim, a.kv_heads, len(cells)])
            inputs = Inputs(token=None, position=by, cell=where, outputs=None, masks={})
            ops = GgmlOps(g, inputs, self.cells, KV_PAD, len(cells), 0, _no_mask)
            turned = g.reshape(ops.rope(k, a.rope), [a.head_dim * a.kv_heads, len(cells)])
            g.expand(g.set_rows(pool, turned, where))
        g.place()
        g.set_used(where, cells.astype(np.int64))
        g.set_used(pick, cells)
        g.set_used(by, np.full(len(cells), delta, np.int32))
        g.compute()


def _no_mask(window: int) -> Any:
    raise AssertionError("no attention in this graph")


def _most_ranks(model: Decoder) -> int:
    return max((b.ffn.router.top_k if isinstance(b.ffn, Moe) else 1) for b in model.blocks)
