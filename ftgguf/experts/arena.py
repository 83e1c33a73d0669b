"""The memory of the expert cache on the device: chunks of an `ArenaPlan`, each an allocation of its own.

Kernels read a slot's address from a table, so chunks need not lie together: a smaller budget frees the last ones (the
driver gets them back), a larger one adds some, and nothing that a captured graph holds changes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.experts.slots import ArenaPlan

CHUNK_BYTES = 64 << 20
"""About the size of a chunk: what a resize gives back is a multiple of it."""


class Arena:
    """Chunks for `plan`. A chunk holds whole slabs."""

    def __init__(self, memory: DeviceMemory, plan: ArenaPlan) -> None:
        """Raises MemoryError where the budget has no room."""
        self.memory = memory
        self.plan = plan
        self.chunk = plan.slab_bytes * max(1, CHUNK_BYTES // plan.slab_bytes)
        self.chunks: list[torch.Tensor] = []
        self.fit(plan)

    @property
    def bytes(self) -> int:
        return sum(c.numel() for c in self.chunks)

    def fit(self, plan: ArenaPlan) -> None:
        """Have memory for `plan`, and no chunk that it does not touch. The caller has waited for the device. Raises
        MemoryError where there is no room: plan and slots are as before then, but addresses may have changed."""
        sizes = [min(self.chunk, plan.bytes - at) for at in range(0, plan.bytes, self.chunk)]
        kept = 0
        while kept < min(len(sizes), len(self.chunks)) and self.chunks[kept].numel() >= sizes[kept]:
            kept += 1
        if kept < len(sizes) and kept < len(self.chunks):
            self._regrow(kept, sizes[kept])
            kept += 1
        self._forget(self.chunks[kept:])
        del self.chunks[kept:]
        if self.memory.device.type == "cuda":
            torch.cuda.empty_cache()
        more: list[torch.Tensor] = []
        try:
            for size in sizes[kept:]:
                more.append(self.memory.tensor("experts", (size,), torch.uint8))
        except BaseException:
            self._forget(more)
            raise
        self.chunks += more
        self.plan = plan

    def _forget(self, chunks: list[torch.Tensor]) -> None:
        for chunk in chunks:
            self.memory.held["experts"] -= chunk.numel()

    def _regrow(self, at: int, size: int) -> None:
        """The last chunk of the old plan was cut short: a longer one takes its place with its contents."""
        old = self.chunks[at]
        new = self.memory.tensor("experts", (size,), torch.uint8)
        new[: old.numel()].copy_(old)
        self.chunks[at] = new
        self._forget([old])

    def addresses(self) -> NDArray[np.int64]:
        """int64: the device address of each slot of the plan."""
        bases = np.array([c.data_ptr() for c in self.chunks] or [0], np.int64)
        offsets = self.plan.offsets()
        result: NDArray[np.int64] = bases[offsets // self.chunk] + offsets % self.chunk
        return result

    def slot(self, offset: int, size: int) -> torch.Tensor:
        """uint8 [size]: the memory at `offset` of the plan."""
        at = offset % self.chunk
        return self.chunks[offset // self.chunk][at : at + size]
