"""The threads that compute a store's experts on the CPU, in place in the host bank: which CPUs, and what they are
told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.engine.cuda_experts import ExpertSpec
from ftgguf.experts.bank import Bank
from ftgguf.experts.disk import DiskBank
from ftgguf.kernels.matrix import ExpertMatrix

CPU_NAMES = {"silu": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu_sqr", "swiglu_oai": "swiglu_oai"}
"""The kernels' activations -> the worker's."""


def cpu_threads(count: int) -> list[int]:
    """CPUs for `count` workers, of those this process may use; the last ones first: the first serve interrupts."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1] * count
    chosen = allowed[::-1][: max(1, count)]
    return chosen if len(chosen) > 1 else [-1]


def make_worker(
    order: Sequence[ExpertSpec], bank: Bank | DiskBank, cpus: list[int]
) -> tuple[native.ExpertWorker, list[Any]]:
    """A worker that knows the layers of `order` by their place in it, and the arrays that must live as long."""
    worker = native.ExpertWorker(cpus)
    kept: list[Any] = []
    for i, spec in enumerate(order):
        resident = bank.layers[spec.layer]
        w = spec.weights

        def matrix(m: ExpertMatrix, resident: Any = resident) -> Any:
            address, stride = resident.at(m.offset)
            vectors = []
            for v in (m.bias, m.scale):
                values = None if v is None else np.ascontiguousarray(v.detach().float().cpu().numpy())
                kept.append(values)
                vectors.append(0 if values is None else values.ctypes.data)
            return native.ExpertMatrix.make(int(m.type), address, stride, m.n, m.k, *vectors)

        gate = None if w.gate is None else matrix(w.gate)
        worker.add_layer(i, spec.experts, CPU_NAMES[w.activation], gate, matrix(w.up), matrix(w.down))
    return worker, kept
