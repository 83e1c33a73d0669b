"""A model in two segments: the first blocks on the CPU, the last on the GPU, one executor to the scheduler (`-ngl N`).

Both segments have cells of the same numbers, each for its own blocks. A pass goes through them in order; the hidden
state [rows, n_embd] crosses as float32 through host memory.
"""

from __future__ import annotations

from typing import Protocol

from ftgguf.engine.executor import Executor
from ftgguf.nouns import F32, I32, Batch


class Segment(Executor, Protocol):
    """An executor of some blocks."""

    def run(self, batch: Batch, hidden: F32 | None = None) -> F32:
        """Logits, or the hidden state [rows, n_embd] of a segment that is not the model's last."""

    def warm_up(self) -> None: ...


class SegmentedExecutor:
    """Segments in the model's order (engine.executor.Executor)."""

    recurrent = False

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        if not segments:
            raise ValueError("a model has at least one segment")
        self.segments = segments
        self.n_vocab = segments[-1].n_vocab
        self.n_cells = min(s.n_cells for s in segments)
        self.max_rows = min(s.max_rows for s in segments)

    def warm_up(self) -> None:
        for s in self.segments:
            s.warm_up()

    def forward(self, batch: Batch) -> F32:
        """See engine.executor.Executor.forward."""
        hidden = batch.embedding
        for s in self.segments:
            hidden = s.run(batch, hidden)
        assert hidden is not None
        return hidden

    def copy_cells(self, src: I32, dst: I32) -> None:
        for s in self.segments:
            s.copy_cells(src, dst)

    def shift_cells(self, cells: I32, delta: int) -> None:
        for s in self.segments:
            s.shift_cells(cells, delta)

    def read_cells(self, cells: I32) -> bytes:
        """The segments' bytes one after the other."""
        return b"".join(s.read_cells(cells) for s in self.segments)

    def write_cells(self, cells: I32, data: bytes) -> None:
        sizes = [len(s.read_cells(cells[:1])) * len(cells) for s in self.segments]
        if len(data) != sum(sizes):
            raise ValueError(f"{len(data)} bytes do not fit {len(cells)} cells of {sum(sizes)} bytes in all")
        at = 0
        for s, size in zip(self.segments, sizes, strict=True):
            s.write_cells(cells, data[at : at + size])
            at += size
