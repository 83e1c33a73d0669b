"""The memory of the expert cache on the device: chunks of an `ArenaPlan`, each an allocation of its own.

Kernels read a slot's address from a table, so chunks need not lie together: a smaller budget frees the last ones (the
driver gets them back), a larger one adds some, and nothing that a captured graph holds changes. A chunk never moves and
never changes its size: one that was cut short where the plan ended stays short, and growth begins another behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.experts.slots import ArenaPlan

CHUNK_BYTES = 64 << 20
"""About the size of a chunk: what a resize gives back is a multiple of it."""


class Arena:
    """Chunks for `plan`. A chunk holds whole slabs; together they may be longer than the plan, by less than a chunk."""

    def __init__(self, memory: DeviceMemory, plan: ArenaPlan) -> None:
        """Raises MemoryError where the budget has no room."""
        self.memory = memory
        self.plan = plan
        self.chunk = plan.slab_bytes * max(1, CHUNK_BYTES // plan.slab_bytes)
        """Bytes of a chunk at most."""
        self.chunks: list[torch.Tensor] = []
        self.starts: list[int] = []
        """Where each chunk begins in the plan."""
        self.fit(plan)

    @property
    def bytes(self) -> int:
        return sum(c.numel() for c in self.chunks)

    def fit(self, plan: ArenaPlan) -> None:
        """Have memory for `plan`, and no chunk that it does not touch. The caller has waited for the device. Raises
        MemoryError where there is no room: everything is as before then. (A plan either lets chunks go or needs more.)
        """
        kept, at = 0, 0
        while kept < len(self.chunks) and at < plan.bytes:
            at += self.chunks[kept].numel()
            kept += 1
        self._drop(self.chunks, kept)
        more: list[torch.Tensor] = []
        try:
            while at < plan.bytes:
                more.append(self.memory.tensor("experts", (min(self.chunk, plan.bytes - at),), torch.uint8))
                at += more[-1].numel()
        except BaseException:
            self._drop(more, 0)  # the traceback would keep them
            raise
        self.chunks += more
        self.starts = [0, *accumulate(c.numel() for c in self.chunks)][:-1]
        self.plan = plan

    def _drop(self, chunks: list[torch.Tensor], first: int) -> None:
        """Give `chunks` from `first` on back to the driver."""
        while len(chunks) > first:
            self.memory.held["experts"] -= chunks.pop().numel()
        if self.memory.device.type == "cuda":
            torch.cuda.empty_cache()

    def addresses(self) -> NDArray[np.int64]:
        """int64: the device address of each slot of the plan."""
        bases = np.array([c.data_ptr() for c in self.chunks] or [0], np.int64)
        starts, offsets = np.array(self.starts or [0], np.int64), self.plan.offsets()
        chunk = np.searchsorted(starts, offsets, "right") - 1
        result: NDArray[np.int64] = bases[chunk] + offsets - starts[chunk]
        return result

    def slot(self, offset: int, size: int) -> torch.Tensor:
        """uint8 [size]: the memory at `offset` of the plan."""
        chunk = bisect_right(self.starts, offset) - 1
        at = offset - self.starts[chunk]
        return self.chunks[chunk][at : at + size]
