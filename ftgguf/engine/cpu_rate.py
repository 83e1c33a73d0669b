"""How fast do this machine's threads multiply a model's weights, one row at a time?"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.engine.fit import MIB
from ftgguf.engine.survey import Survey
from ftgguf.gguf.types import TensorType, row_bytes
from ftgguf.layers.params import Moe
from ftgguf.models.source import Use

MAIN_SHARE = 0.05
"""Of the bytes a token reads, from which a type's own rate is measured; the rest is taken to be as fast."""


def product_rate(found: Survey, threads: int, seconds: float = 0.1) -> float:
    """Bytes of this model's weights that `threads` threads of this machine multiply in a second, one row at a time.

    Measured with ggml's products on each of the model's main types, on more memory than caches hold; what a token reads
    of each type weighs them.
    """
    shares: dict[int, float] = {}
    for taken in [t for t in found.tensors.values() if t.layer >= 0] + found.outside_tensors(
        embedding=False, head=True
    ):
        ffn = found.model.blocks[taken.layer].ffn if taken.layer >= 0 else None
        routed = taken.use is Use.EXPERTS and isinstance(ffn, Moe)
        share = ffn.router.top_k / ffn.router.experts if routed and isinstance(ffn, Moe) else 1.0
        kind = int(taken.info.type)
        shares[kind] = shares.get(kind, 0.0) + share * taken.info.nbytes
    whole = sum(shares.values())
    main = {kind: size for kind, size in shares.items() if size >= MAIN_SHARE * whole}
    took = sum(size / _type_rate(kind, threads, seconds) for kind, size in main.items())
    return sum(main.values()) / took


def _type_rate(kind: int, threads: int, seconds: float, side: int = 2048, size: int = 192 * MIB) -> float:
    """Bytes/s of matrix-vector products of one type, `side` by `side` matrices out of `size` bytes."""
    nbytes = side * row_bytes(TensorType(kind), side)
    count = max(2, size // (2 * nbytes))
    data = np.full(2 * count * nbytes, 1, np.uint8)  # written, so that it is memory of its own
    worker = native.ExpertWorker([-1] * threads)

    def half(offset: int) -> Any:
        return native.ExpertMatrix.make(kind, data.ctypes.data + offset, 2 * nbytes, side, side)

    worker.add_layer(0, count, "relu", None, half(0), half(nbytes))
    x, y = np.ones((1, side), np.float32), np.empty((1, side), np.float32)
    weights, start = np.ones((1, 2), np.float32), np.arange(3, dtype=np.int32)
    done, at, started = 0, 0, 0.0
    while not started or time.perf_counter() - started < seconds:
        ids = np.arange(at, at + 2, dtype=np.int32) % count
        worker.compute(0, x, weights, np.sort(ids), start, start[:2], y)
        if started:
            done += 1
        else:
            started = time.perf_counter()  # the first call wakes the threads
        at += 2
    return done * 4 * nbytes / (time.perf_counter() - started)
