"""What the scheduler asks of whatever computes a model: the executor interface.

Implementations: the ggml and CUDA executors, `engine.scripted` (given tokens), and the checking executor of the
tests. An executor knows cells and rows, never requests; it has no state besides the contents of its cells (and, for
recurrent models, the states behind its snapshots).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ftgguf.nouns import F32, I32, Batch


class NotSupported(Exception):
    """The model or executor cannot do this (context shift on a recurrent model, for instance)."""


class ExecutorLost(Exception):
    """The executor cannot compute any more (device gone): the engine reports it and exits."""


@runtime_checkable
class Executor(Protocol):
    """Computes rows and moves cells. One thread calls it; no call may overlap another."""

    @property
    def n_vocab(self) -> int:
        """Columns of the logits."""

    @property
    def n_cells(self) -> int:
        """Cells of the KV pool."""

    @property
    def max_rows(self) -> int:
        """Rows of one forward pass at most (the physical batch, `-ub`)."""

    @property
    def recurrent(self) -> bool:
        """The model has recurrent state: a prefix can be reused only where a snapshot exists."""

    def forward(self, batch: Batch) -> F32:
        """Write the K and V of every row to its cell and return the logits of `batch.outputs`.

        Returns float32 [len(batch.outputs), n_vocab] (with `batch.features`: [.., n_embd]), C-contiguous, valid until
        the next call. Row i attends to the cells `tables[sequence[i]][: position[i] + 1]`; rows of one sequence are in
        ascending position, and a row sees the rows before it in the same batch. Raises NotSupported for features or
        adapters that the executor does not have, and ExecutorLost when no further call can succeed.
        """

    def copy_cells(self, src: I32, dst: I32) -> None:
        """Copy the K and V of cell src[i] to cell dst[i] in every layer; the two sets are disjoint."""

    def shift_cells(self, cells: I32, delta: int) -> None:
        """Re-rotate K of `cells` by `delta` positions (context shift). Raises NotSupported."""

    def read_cells(self, cells: I32) -> bytes:
        """The contents of `cells` in every layer, in an order of the executor's own. Same length per cell."""

    def write_cells(self, cells: I32, data: bytes) -> None:
        """The inverse of `read_cells`. Raises ValueError when `data` has the wrong length."""
