"""Weights on a CUDA device: the file's bytes as they are, read in large blocks and copied through pinned memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.engine.survey import Survey, Taken, aligned
from ftgguf.experts.pinning import pinned_bytes
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile
from ftgguf.gguf.types import TensorType
from ftgguf.kernels.formats import FORMATS, Type
from ftgguf.kernels.matrix import QuantMatrix
from ftgguf.kernels.rows import dequantize
from ftgguf.models.config import ModelError
from ftgguf.models.source import Source, Use

STAGING = 32 << 20
"""Bytes of one of the two pinned buffers: copies of 16 MiB and more reach the link's rate (54.7 of 55.0 GB/s)."""
PIECE = 4 << 20
"""Bytes one thread reads at a time."""

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """The handle of one expert tensor [experts, n, k]: still in the file, an ExpertStore places it."""

    info: TensorInfo
    layer: int

    @property
    def k(self) -> int:
        return self.info.shape[0]

    @property
    def n(self) -> int:
        return self.info.shape[1]

    @property
    def experts(self) -> int:
        return self.info.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return self.info.nbytes // self.experts


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The handle of a tensor that another segment's executor holds."""

    name: str


class Reader:
    """Copies parts of a file's tensors to the device: two pinned buffers, filled by several threads in turns."""

    def __init__(self, gguf: GGUFFile, device: torch.device, threads: int = 8) -> None:
        self.gguf = gguf
        self.device = device
        self.pool = ThreadPoolExecutor(threads)
        self.files = [os.open(shard.path, os.O_RDONLY) for shard in gguf.shards]
        self.turn = 0
        self.buffers: list[torch.Tensor] = []
        self.events: list[Any] = []
        if device.type == "cuda":
            self.buffers = [torch.empty(STAGING, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self.events = [torch.cuda.Event() for _ in range(2)]

    def close(self) -> None:
        """Wait for the copies and give the buffers back."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.pool.shutdown()
        for fd in self.files:
            os.close(fd)
        self.buffers, self.files = [], []

    def copy(self, info: TensorInfo, target: torch.Tensor) -> None:
        """The whole tensor into `target`: uint8 [nbytes], or [parts, bytes] whose rows may lie apart."""
        parts = target.view(1, -1) if target.dim() == 1 else target
        each = parts.shape[1]
        if each <= STAGING:
            step = max(1, STAGING // each)
            for first in range(0, parts.shape[0], step):
                rows = parts[first : first + step]
                self._piece(info, first * each, rows.shape[0] * each, rows)
            return
        for row in range(parts.shape[0]):
            for at in range(0, each, STAGING):
                part = parts[row, at : at + STAGING]
                self._piece(info, row * each + at, part.shape[0], part)

    def _piece(self, info: TensorInfo, start: int, nbytes: int, target: torch.Tensor) -> None:
        if self.device.type != "cuda":
            staged = torch.empty(nbytes, dtype=torch.uint8)
            self._read(info, start, staged)
            target.copy_(staged.view(target.shape))
            return
        turn, self.turn = self.turn, 1 - self.turn
        self.events[turn].synchronize()
        staged = self.buffers[turn][:nbytes]
        self._read(info, start, staged)
        target.copy_(staged.view(target.shape), non_blocking=True)
        self.events[turn].record()

    def _read(self, info: TensorInfo, start: int, into: torch.Tensor) -> None:
        view = memoryview(into.numpy())
        fd = self.files[info.shard]

        def one(at: int) -> None:
            end = min(at + PIECE, len(view))
            while at < end:
                got = os.preadv(fd, [view[at:end]], info.offset + start + at)
                if got <= 0:
                    raise OSError(f"{self.gguf.shards[info.shard].path}: the file ended inside tensor '{info.name}'")
                at += got

        if len(view) <= PIECE:
            one(0)
            return
        list(self.pool.map(one, range(0, len(view), PIECE)))


def kernel_type(gguf: GGUFFile, info: TensorInfo) -> Type:
    """The kernels' type of a tensor. Raises ModelError where no GPU kernel reads it."""
    try:
        kind = Type(int(info.type))
        FORMATS[kind].row_bytes(info.shape[0])
    except ValueError as error:
        raise ModelError(
            f"{gguf.path}: tensor '{info.name}' of type {info.type.name} with rows of {info.shape[0]} has no GPU "
            f"kernel ({error}): run this file with -ngl 0"
        ) from error
    return kind


class CudaSource(Source):
    """Hands out device weights of blocks [first, last): vectors as float32 tensors, matrices as QuantMatrix, expert
    tensors as ExpertTensor. The bytes arrive with `load()`."""

    def __init__(
        self, gguf: GGUFFile, memory: DeviceMemory, survey: Survey, first: int, last: int, on_host: Taken | None = None
    ) -> None:
        """`on_host`: a matrix whose rows are only looked up, to be kept in pinned memory, which kernels read over the
        link."""
        super().__init__(gguf)
        self.on_host = "" if on_host is None else on_host.info.name
        self.memory = memory
        self.device = memory.device
        n_layer = len(survey.model.blocks)
        self.wanted = {t.info.name for t in survey.tensors.values() if first <= t.layer < last}
        outside = survey.outside_tensors(embedding=first == 0, head=last == n_layer)
        self.wanted |= {t.info.name for t in outside}
        size = sum(_size(t) for t in survey.tensors.values() if t.info.name in self.wanted - {self.on_host})
        self.arena = memory.tensor("weights", (max(size, 16),), torch.uint8)
        self.filled = 0
        self.made: dict[str, Any] = {}
        self.jobs: list[tuple[TensorInfo, torch.Tensor, torch.Tensor | None]] = []

    def handle(self, info: TensorInfo, use: Use, layer: int) -> Any:
        if info.name not in self.wanted:
            return Elsewhere(info.name)
        if use is Use.EXPERTS:
            kernel_type(self.gguf, info)
            return ExpertTensor(info, layer)
        if info.name not in self.made:
            self.made[info.name] = self._vector(info) if use is Use.VECTOR else self._matrix(info)
        return self.made[info.name]

    def _take(self, nbytes: int) -> torch.Tensor:
        part = self.arena[self.filled : self.filled + nbytes]
        self.filled += aligned(nbytes)
        return part

    def _vector(self, info: TensorInfo) -> torch.Tensor:
        values = self._take(4 * info.n_elements).view(torch.float32)
        raw = values.view(torch.uint8)
        if info.type is not TensorType.F32:
            kernel_type(self.gguf, info)
            raw = self._take(info.nbytes)
        self.jobs.append((info, raw, None if info.type is TensorType.F32 else values))
        shape = tuple(reversed(info.shape))
        return values.view(shape if len(shape) > 1 else -1)

    def _matrix(self, info: TensorInfo) -> QuantMatrix:
        kind = kernel_type(self.gguf, info)
        if info.name == self.on_host:
            data = pinned_bytes(info.nbytes, self.device)
        else:
            data = self._take(info.nbytes)
        self.jobs.append((info, data, None))
        return QuantMatrix(kind, info.shape[1] if len(info.shape) > 1 else 1, info.shape[0], data)

    def load(self, reader: Reader, progress: Progress) -> None:
        """Read every tensor that was handed out, in the file's order."""
        total = sum(info.nbytes for info, _, _ in self.jobs) or 1
        done = 0
        for info, raw, values in sorted(self.jobs, key=lambda job: (job[0].shard, job[0].offset)):
            reader.copy(info, raw)
            if values is not None:
                rows = info.n_elements // info.shape[0]
                matrix = QuantMatrix(Type(int(info.type)), rows, info.shape[0], raw)
                values.copy_(dequantize(matrix, torch.float32).view(-1))
            done += info.nbytes
            progress(done / total)
        self.jobs = []


def _size(t: Taken) -> int:
    """Arena bytes of one tensor."""
    if t.use is Use.EXPERTS:
        return 0
    if t.use is not Use.VECTOR:
        return aligned(t.info.nbytes)
    as_float = aligned(4 * t.info.n_elements)
    return as_float if t.info.type is TensorType.F32 else as_float + aligned(t.info.nbytes)


def scaled(matrix: QuantMatrix, scale: torch.Tensor | None) -> QuantMatrix:
    """`matrix` with NVFP4's second-level factor."""
    return matrix if scale is None else replace(matrix, scale=scale.view(-1))
