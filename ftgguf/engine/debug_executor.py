"""A whole model in float32 NumPy behind the executor interface: the reference that quantised paths are held to."""

from __future__ import annotations

import numpy as np
from gguf.quants import dequantize

from ftgguf.engine.executor import NotSupported
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.types import TensorType
from ftgguf.layers.block import segment
from ftgguf.layers.params import Decoder, Weight
from ftgguf.models.source import Source, Use
from ftgguf.nouns import F32, I32, Batch
from ftgguf.ops.debug import DebugCells, DebugOps


class DebugSource(Source):
    """Hands out float32 arrays, dequantised by the `gguf` package."""

    def handle(self, info: TensorInfo, use: Use, layer: int) -> Weight:
        data = self.gguf.data(info.name)
        if info.type is TensorType.F32:
            values = data.view(np.float32)
        else:
            values = dequantize(data, info.type).astype(np.float32)  # type: ignore[arg-type]
        return values.reshape(tuple(reversed(info.shape)))


class DebugExecutor:
    """engine.executor.Executor for small models."""

    recurrent = False

    def __init__(self, model: Decoder, *, n_cells: int, max_rows: int) -> None:
        self.model = model
        self.n_cells = n_cells
        self.max_rows = max_rows
        self.n_vocab = model.n_vocab
        layers = [block.attention for block in model.blocks]
        self.cells = DebugCells(
            k=[np.zeros((n_cells, a.kv_heads, a.head_dim), np.float32) for a in layers],
            v=[np.zeros((n_cells, a.kv_heads, a.v_dim), np.float32) for a in layers],
        )

    def forward(self, batch: Batch) -> F32:
        if any(batch.adapters):
            raise NotSupported("the debug executor applies no adapters")
        ops = DebugOps(batch, self.cells)
        ops.wants_features = batch.features
        out: F32 | None = segment(ops, self.model, 0, len(self.model.blocks), batch.embedding)
        return np.empty((0, self.n_vocab), np.float32) if out is None else np.ascontiguousarray(out, np.float32)

    def copy_cells(self, src: I32, dst: I32) -> None:
        for pool in (*self.cells.k, *self.cells.v):
            pool[dst] = pool[src]

    def shift_cells(self, cells: I32, delta: int) -> None:
        raise NotSupported("the debug executor does not shift the context")

    def read_cells(self, cells: I32) -> bytes:
        return b"".join(pool[cells].tobytes() for pool in (*self.cells.k, *self.cells.v))

    def write_cells(self, cells: I32, data: bytes) -> None:
        values = np.frombuffer(data, np.float32)
        if values.size != sum(pool[cells].size for pool in (*self.cells.k, *self.cells.v)):
            raise ValueError("the bytes do not fit these cells")
        at = 0
        for pool in (*self.cells.k, *self.cells.v):
            size = pool[cells].size
            pool[cells] = values[at : at + size].reshape(pool[cells].shape)
            at += size
