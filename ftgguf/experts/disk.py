"""The bank where host memory is too small: experts stay in the mapped file (`--expert-disk`).

The system's page cache holds what it can; the CPU computes experts where they are mapped, and what goes to the GPU is
put together in pinned memory first (`ring`, `promote`), since mapped pages cannot be registered with the driver. A
stand-in for `experts.bank.Bank` with the same parts that a store uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ftgguf.experts.bank import U8, BankReport, LayerLayout, Pinner, Progress
from ftgguf.gguf.reader import GGUFFile


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A layer in the file: `tensors[p]` uint8 [experts, bytes] is part p of the layout, mapped."""

    layout: LayerLayout
    tensors: tuple[U8, ...]
    address: int = 0

    def at(self, offset: int) -> tuple[int, int]:
        """Where the bytes at `offset` of expert 0 lie, and the distance to the next expert's."""
        for (_, start), tensor in zip(self.layout.parts, self.tensors, strict=True):
            if start <= offset < start + tensor.shape[1]:
                return int(tensor.ctypes.data) + offset - start, tensor.shape[1]
        raise ValueError(f"no part of the experts at {offset}")

    def read(self, experts: Sequence[int], out: U8) -> None:
        """Put `experts` together in `out`, uint8 [len(experts), slot_bytes], as they lie in slots."""
        for (_, start), tensor in zip(self.layout.parts, self.tensors, strict=True):
            for row, expert in zip(out, experts, strict=True):
                row[start : start + tensor.shape[1]] = tensor[expert]


class DiskBank:
    """The experts of some layers, in the file. No layer is pinned."""

    def __init__(self, gguf: GGUFFile, layers: dict[int, LayerLayout], reason: str) -> None:
        self.report = BankReport()
        self.report.bytes = sum(i.nbytes for layout in layers.values() for i, _ in layout.parts)
        self.report.notes.append(f"--expert-disk: they stay in the mapped file, because {reason}")
        self.pinned = dict.fromkeys(layers, False)
        maps = [np.memmap(shard.path, np.uint8, "r") for shard in gguf.shards]
        self.layers: dict[int, OnDisk] = {}
        for layer, layout in layers.items():
            tensors = []
            for info, _ in layout.parts:
                data = maps[info.shard][info.offset : info.offset + info.nbytes]
                tensors.append(np.asarray(data).reshape(layout.experts, -1))
            self.layers[layer] = OnDisk(layout, tuple(tensors))

    def load(self, progress: Progress = lambda f: None) -> None:
        """Nothing is read ahead."""
        progress(1.0)

    def pin(self, pinner: Pinner) -> None:
        """Mapped pages of a file cannot be registered."""

    def close(self) -> None:
        """The mapping goes with its last view."""
