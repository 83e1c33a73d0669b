"""What a decode step went through, layer by layer and rounding by rounding, for tests of placement.

`Recorded` keeps, of every step of one row: each MoE layer's input and output, the experts' intermediate rows, and every
activation that was rounded to 8 bits. `ForcedLayers` runs the MoE layers alone, on inputs that the test gives. Both use
the product's own operators and work inside captured graphs. `CpuHidden` shows what the CPU's experts do not: the rows
between their two products, before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from store_helpers import Tap, hooked

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.experts.store import CachedStore
from ftgguf.gguf.reader import open_gguf
from ftgguf.kernels.activations import Activations, Planes
from ftgguf.kernels.formats import Activation
from ftgguf.kernels.linear import ExpertBatch
from ftgguf.kernels.norm import combine
from ftgguf.layers.params import Moe
from ftgguf.nouns import F32
from ftgguf.ops.cuda import CudaOps, Rows

F64 = NDArray[np.float64]
SCALE_STEP = 1e-5
"""Scales of two runs that differ by more than this fell on two neighbouring float16 numbers (2^-11 apart)."""


def nmse(got: NDArray[Any], want: NDArray[Any]) -> float:
    a, b = got.astype(np.float64), want.astype(np.float64)
    return float(((a - b) ** 2).sum() / max(float((b**2).sum()), 1e-30))


@dataclass
class Tensors:
    """Clones of a step's tensors, on the device; a captured graph writes the same ones again and again."""

    h: list[torch.Tensor] = field(default_factory=list)
    x: list[torch.Tensor] = field(default_factory=list)
    y: list[torch.Tensor] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    planes: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One step on the host. `h`, `x`, `y` [layers, n_embd]: residual stream before a MoE layer, the experts' input,
    their weighted sum. `hidden` [layers, k, n_ff]: garbage where `slots` [layers, k] is negative. `ids`, `weights`
    [layers, k]. `planes`: (layer, q, d) of every row that was rounded to 8 bits, in the order of the pass."""

    h: F32
    x: F32
    y: F32
    slots: NDArray[np.int32]
    hidden: F32
    ids: NDArray[np.int32]
    weights: F32
    planes: list[tuple[int, NDArray[np.int8], F32]]


class RecordingOps(CudaOps):
    """The product's pass, with `kept` filled on the way."""

    kept: Tensors | None = None

    def feed_forward(self, h: Any, norm: Any, eps: float, p: Any, factor: float) -> Any:
        out = super().feed_forward(h, norm, eps, p, factor)
        if self.kept is not None and isinstance(p, Moe):
            add = () if out.add is None else (out.add,)
            self.kept.h.append(h.clone())
            self.kept.y.append(combine(out.parts, out.slots, out.weights, *add))
            self.kept.slots.append(out.slots.clone())
        return out

    def _moe(self, layer: int, x: Activations, p: Moe) -> Any:
        if self.kept is not None:
            self.kept.x.append(x.x.clone())
        return super()._moe(layer, x, p)


@contextmanager
def watching(kept: Tensors) -> Iterator[None]:
    """Roundings and intermediate rows of what is queued meanwhile go to `kept`."""
    planes, down = Activations.planes, ExpertBatch.down
    known: list[Planes] = []

    def noted_planes(self: Activations, kind: Activation) -> Planes:
        p = planes(self, kind)
        # the experts' own rows are judged by `hidden`: not all of them are written
        if p.rows == 1 and not any(p is other for other in known):
            known.append(p)
            kept.planes.append((len(kept.y), p.q.clone(), p.d.clone()))
        return p

    def noted_down(self: ExpertBatch, h: Any, w: Any) -> torch.Tensor:
        kept.hidden.append((h.x if isinstance(h, Activations) else h).clone())
        return down(self, h, w)

    Activations.planes, ExpertBatch.down = noted_planes, noted_down  # type: ignore[method-assign]
    try:
        yield
    finally:
        Activations.planes, ExpertBatch.down = planes, down  # type: ignore[method-assign]


def _read(kept: Tensors, tap: Tap) -> Seen:
    def rows(tensors: list[torch.Tensor]) -> Any:
        return torch.stack([t.float() if t.is_floating_point() else t for t in tensors]).cpu().numpy()

    layers = len(kept.y)
    return Seen(
        rows(kept.h)[:, 0], rows(kept.x)[:, 0], rows(kept.y)[:, 0], rows(kept.slots)[:, 0], rows(kept.hidden),
        tap.ids[:layers, 0].cpu().numpy().copy(), tap.weights[:layers, 0].cpu().numpy().copy(),
        [(layer, q.cpu().numpy().copy(), d.cpu().numpy().copy()) for layer, q, d in kept.planes],
    )  # fmt: skip


class Recorded:
    """An executor whose steps of one row are recorded. Make it before `warm_up`, which captures."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.tap = executor.store.hook if isinstance(executor.store.hook, Tap) else hooked(executor)
        self.kept = Tensors()
        decode = executor._decode

        def ops(rows: Rows) -> CudaOps:
            made = RecordingOps(rows, executor.cells.caches, executor.ropes, executor.store, executor.first)
            made.kept = self.kept if self._recording else None
            return made

        def recorded(rows: int) -> None:
            if rows != 1:
                return decode(rows)
            self.kept.__init__()  # type: ignore[misc]
            self._recording = True
            try:
                with watching(self.kept):
                    decode(rows)
            finally:
                self._recording = False

        self._recording = False
        executor._ops = ops  # type: ignore[method-assign]
        executor._decode = recorded  # type: ignore[method-assign]

    def seen(self) -> Seen:
        """The last step."""
        return _read(self.kept, self.tap)


class ForcedLayers:
    """The MoE layers of an executor, each on an input of the test's own; captured where the executor captures."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.tap = executor.store.hook if isinstance(executor.store.hook, Tap) else hooked(executor)
        self.blocks = [(i, b) for i, b in enumerate(executor.model.blocks) if isinstance(b.ffn, Moe)]
        self.h = torch.zeros(len(self.blocks), executor.model.n_embd, device=executor.device)
        self.kept = Tensors()
        self.graph: Any = None

    def _queue(self) -> None:
        none = torch.zeros(1, dtype=torch.int32, device=self.executor.device)
        ops = RecordingOps(
            Rows(none, none, none, none, none, None, None, 1), (), self.executor.ropes, self.executor.store, 0
        )
        self.kept.__init__()  # type: ignore[misc]
        ops.kept = self.kept
        with watching(self.kept):
            for i, (layer, block) in enumerate(self.blocks):
                ops.layer = layer
                ops.feed_forward(self.h[i : i + 1], block.ffn_norm, block.eps, block.ffn, 1.0)

    def run(self, h: F32) -> Seen:
        """h float32 [layers, n_embd]: the residual stream before each layer."""
        store = self.executor.store
        with self.executor._on_device():
            self.h.copy_(torch.from_numpy(np.ascontiguousarray(h)))
            store.start()
            if self.graph is None:
                self._queue()
            else:
                self.graph.replay()
            self.executor._wait()
            if self.graph is None and self.executor.captures:  # every kernel is loaded now
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self._queue()
                self.graph.replay()
                self.executor._wait()
            store.finish(1, waited=True)
        return _read(self.kept, self.tap)


class CpuHidden:
    """The rows between the CPU's two products: a worker of its own with the same gate and up, and the identity as down
    (float32, so that nothing is rounded and every sum has one term)."""

    def __init__(self, store: CachedStore) -> None:
        self.worker = native.ExpertWorker([-1])
        self.width = store.order[0].weights.down.k
        self.eye = np.eye(self.width, dtype=np.float32)
        for i, spec in enumerate(store.order):
            resident, w = store.bank.layers[spec.layer], spec.weights
            made = [
                None if m is None else native.ExpertMatrix.make(int(m.type), *resident.at(m.offset), m.n, m.k)
                for m in (w.gate, w.up)
            ]
            eye = native.ExpertMatrix.make(0, self.eye.ctypes.data, 0, self.width, self.width)
            self.worker.add_layer(i, spec.experts, w.activation, *made, eye)

    def rows(self, layer: int, x: F32, ids: NDArray[np.int32]) -> F32:
        """[k, n_ff] for the layer's experts `ids` and one input row x [n_embd]."""
        out = np.zeros((len(ids), self.width), np.float32)
        one, at = np.ones((1, 1), np.float32), np.array([0, 1], np.int32)
        x = np.ascontiguousarray(x[None])
        for j, expert in enumerate(ids):
            self.worker.compute(layer, x, one, np.array([expert], np.int32), at, at[:1].copy(), out[j : j + 1])
        return out


def rounded(hidden: F32, kind: Activation, device: torch.device) -> F32:
    """`hidden` [rows, n] as the next product sees it."""
    rows: F32 = Activations(torch.from_numpy(np.ascontiguousarray(hidden)).to(device)).rounded(kind).cpu().numpy()
    return rows


class DownWeights:
    """float64 weights of the experts' second product, by the `gguf` package."""

    def __init__(self, path: Path, layers: int) -> None:
        gguf = open_gguf(path)
        self.values: list[F64] = []
        for i in range(layers):
            name = f"blk.{i}.ffn_down_exps.weight"
            info = gguf.tensors[name]
            n, experts = info.shape[1], info.shape[2]
            values = dequantize(gguf.data(name), info.type)  # type: ignore[arg-type]
            self.values.append(values.reshape(experts, n, info.shape[0]).astype(np.float64))


def roundings_that_differ(a: Seen, b: Seen) -> list[tuple[int, int, int]]:
    """(layer, values, scales) that two runs rounded to other numbers, for each rounded row where any did, in order."""
    assert len(a.planes) == len(b.planes)
    found = []
    for (layer, q, d), (_, q2, d2) in zip(a.planes, b.planes, strict=True):
        values = int((q != q2).sum())
        scale, scale2 = (t.reshape(1, t.shape[1], -1)[..., 0] for t in (d, d2))
        scales = int((np.abs(scale - scale2) > SCALE_STEP * np.abs(scale2)).sum())
        if values or scales:
            found.append((layer, values, scales))
    return found
