"""Weights on the CPU: tensors of the mapped file, and repacked copies where ggml's interleaved kernels are faster."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from gguf.quants import dequantize

from ftgguf import _ggml_cpu as native
from ftgguf.engine.layout import Layout, plain_from
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile
from ftgguf.gguf.types import TensorType
from ftgguf.layers.params import Weight
from ftgguf.models.config import ModelError
from ftgguf.models.source import Source, Use
from ftgguf.ops.ggml import GgmlWeight

Progress = Callable[[float], None]


@dataclass(slots=True)
class _Pending:
    weight: GgmlWeight
    info: TensorInfo
    keep_plain: bool


class GgmlSource(Source):
    """Hands out GgmlWeights. After the model is built, `pack()` makes the repacked copies.

    `fraction`: of the experts, the share that one row visits (top_k / experts); a batch of r rows gives each expert
    about r * fraction rows, which decides when the file's layout is the faster one. `packs`: the blocks that may be
    repacked, None for all of the file (a segment's executor reads no others).
    """

    def __init__(
        self,
        gguf: GGUFFile,
        backend: native.Backend,
        layout: Layout,
        fraction: float = 1.0,
        packs: range | None = None,
    ) -> None:
        super().__init__(gguf)
        self.packs = packs
        self.backend = backend
        self.layout = layout
        self.fraction = fraction
        self.weights = native.Weights(backend, 2 * len(gguf.tensors) + 8)
        self.maps = [np.frombuffer(shard.map, np.uint8) for shard in gguf.shards]
        for view in self.maps:
            self.weights.map(view)
        self._made: dict[tuple[str, Use], GgmlWeight] = {}
        self._pending: dict[str, _Pending] = {}

    def handle(self, info: TensorInfo, use: Use, layer: int) -> Weight:
        key = (info.name, use)
        if key not in self._made:
            self._made[key] = self._vector(info) if use is Use.VECTOR else self._matrix(info, use, layer)
        return self._made[key]

    def _vector(self, info: TensorInfo) -> GgmlWeight:
        """Norms, biases and scales as float32: ggml's CPU operators mix float32 with nothing else."""
        if info.type is TensorType.F32:
            return GgmlWeight(self._plain(info))
        values = dequantize(self.gguf.data(info.name), info.type).astype(np.float32)  # type: ignore[arg-type]
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return GgmlWeight(self.weights.owned(info.name, int(TensorType.F32), list(info.shape), flat))

    def _plain(self, info: TensorInfo) -> object:
        return self.weights.mapped(info.name, int(info.type), list(info.shape), info.shard, info.offset)

    def _matrix(self, info: TensorInfo, use: Use, layer: int) -> GgmlWeight:
        if not native.has_kernel(int(info.type)):
            raise ModelError(
                f"{self.gguf.path}: tensor '{info.name}' has type {info.type.name}, for which ggml has no CPU kernel"
            )
        weight = GgmlWeight(self._plain(info))
        packs = self.packs is None or layer in self.packs
        if use is Use.EMBEDDING or self.layout is Layout.PLAIN or not packs:
            return weight
        packed = self.weights.packed(weight.plain, use is Use.EXPERTS)
        if packed is not None:
            weight.packed = packed
            if self.layout is Layout.BOTH:
                weight.plain_from = plain_from(info.type, self.fraction if use is Use.EXPERTS else 1.0)
            self._pending[info.name] = _Pending(weight, info, weight.plain_from < 1 << 30)
        return weight

    @property
    def packed_bytes(self) -> int:
        """Bytes of the repacked copies."""
        return sum(p.info.nbytes for p in self._pending.values())

    def pack(self, threads: int, progress: Progress) -> None:
        """Make the repacked copies, several tensors at a time; pages of the file that nothing reads any more go."""
        self.weights.allocate_packed()
        jobs = list(self._pending.values())
        total, done = sum(j.info.nbytes for j in jobs) or 1, 0

        def one(job: _Pending) -> int:
            self.weights.pack(job.weight.packed, job.weight.plain)
            if not job.keep_plain and (job.info.name, Use.EMBEDDING) not in self._made:
                self._forget(job.info)
            return job.info.nbytes

        with ThreadPoolExecutor(max(1, threads)) as pool:
            for nbytes in pool.map(one, jobs):
                done += nbytes
                progress(done / total)

    def _forget(self, info: TensorInfo) -> None:
        """Give back the page cache's share of our resident set for a tensor that now lives in its repacked copy."""
        page = mmap.PAGESIZE
        start = -(-info.offset // page) * page
        length = (info.offset + info.nbytes) // page * page - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.gguf.shards[info.shard].map.madvise(mmap.MADV_DONTNEED, start, length)
