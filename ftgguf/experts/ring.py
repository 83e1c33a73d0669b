"""Two buffers on the device through which a prompt's missing experts go: one is copied while the other computes.

Apart from the cache, so that a prompt throws nothing out of it. Copies run on a stream of their own; `use` makes the
current stream wait for a buffer's copy, `done` lets the next copy into it once the work queued so far has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.experts.bank import Resident
from ftgguf.experts.disk import OnDisk


def runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, last) stretches."""
    found: list[tuple[int, int]] = []
    for e in experts:
        if found and found[-1][1] == e:
            found[-1] = (found[-1][0], e + 1)
        else:
            found.append((e, e + 1))
    return found


@dataclass(slots=True)
class Buffer:
    """One half of the ring. `table` int32 [experts]: an expert's place, or -1; `layer`, `experts`: what it holds."""

    memory: torch.Tensor
    bounce: torch.Tensor | None = None
    """Pinned memory for experts that are not registered; made when it is needed."""
    ready: Any = None
    free: Any = None
    layer: int = -1
    experts: tuple[int, ...] = ()
    table: torch.Tensor | None = None
    addresses: dict[int, torch.Tensor] = field(default_factory=dict)


class Ring:
    """`nbytes` in two buffers. `capacity(slot_bytes)` experts fit into one."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self.device = memory.device
        half = nbytes // 2 // 256 * 256
        self.half = half
        self.buffers = [Buffer(memory.tensor("prefill ring", (half,), torch.uint8)) for _ in range(2 if half else 0)]
        self.turn = 0
        self.on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.copied_bytes = 0
        for b in self.buffers:
            if self.on_gpu:
                b.ready, b.free = torch.cuda.Event(), torch.cuda.Event()

    def capacity(self, slot_bytes: int) -> int:
        return self.half // slot_bytes if self.buffers else 0

    def copy(self, resident: Resident | OnDisk, layer: int, experts: Sequence[int], pinned: bool = True) -> Buffer:
        """Begin to copy `experts` (ascending, at most `capacity`) of a layer into the buffer whose turn it is; by way
        of pinned memory where they are not `pinned` themselves, which the host fills before this returns."""
        buffer = self.buffers[self.turn]
        self.turn = 1 - self.turn
        size = resident.layout.slot_bytes
        table = np.full(resident.layout.experts, -1, np.int32)
        table[list(experts)] = np.arange(len(experts), dtype=np.int32)
        listed: Sequence[int] = experts
        if isinstance(resident, OnDisk) or not pinned:
            source, listed = self._bounce(buffer, resident, experts), range(len(experts))
        else:
            source = torch.from_numpy(resident.view)
        if self.stream is None:
            self._copy_runs(buffer, source, listed, size)
            buffer.table = torch.from_numpy(table)
        else:
            staged = torch.from_numpy(table).pin_memory()
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(buffer.free)
                self._copy_runs(buffer, source, listed, size)
                buffer.table = staged.to(self.device, non_blocking=True)
                buffer.ready.record(self.stream)
        buffer.layer, buffer.experts = layer, tuple(experts)
        self.copied_bytes += len(experts) * size
        if size not in buffer.addresses:
            first = buffer.memory.data_ptr()
            where = [first + i * size for i in range(self.capacity(size))]
            buffer.addresses[size] = torch.tensor(where, dtype=torch.int64, device=self.device)
        return buffer

    def _bounce(self, buffer: Buffer, resident: Resident | OnDisk, experts: Sequence[int]) -> torch.Tensor:
        """uint8 [len(experts), slot_bytes] in pinned memory, once the copy before has left it."""
        if buffer.bounce is None:
            buffer.bounce = torch.empty(self.half, dtype=torch.uint8, pin_memory=self.on_gpu)
        elif self.on_gpu:
            buffer.ready.synchronize()
        size = resident.layout.slot_bytes
        staged = buffer.bounce[: len(experts) * size].view(len(experts), size)
        resident.read(experts, staged.numpy())
        return staged

    def _copy_runs(self, buffer: Buffer, source: torch.Tensor, experts: Sequence[int], size: int) -> None:
        at = 0
        for first, last in runs(experts):
            n = (last - first) * size
            buffer.memory[at : at + n].copy_(source[first:last].reshape(-1), non_blocking=True)
            at += n

    def use(self, buffer: Buffer) -> None:
        """The current stream waits for the copy."""
        if self.on_gpu:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(buffer.ready)
            assert buffer.table is not None
            buffer.table.record_stream(stream)

    def done(self, buffer: Buffer) -> None:
        """What was queued on the current stream is the last that reads the buffer."""
        buffer.layer = -1
        if self.on_gpu:
            buffer.free.record(torch.cuda.current_stream(self.device))
