"""An executor over a cached store, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.engine.cuda_experts import ExpertStore, ResidentStore, expert_spec
from ftgguf.engine.cuda_weights import CudaSource, Reader
from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.engine.survey import survey
from ftgguf.experts.store import CachedStore
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.layers.params import Moe
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import Batch

TINY = {
    "n_layer": 2, "n_expert": 8, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_rot": 32, "n_embd": 64, "n_ff": 64,
    "n_ff_expert": 64,
}  # fmt: skip
"""Sizes of a model that the interpreter runs quickly (compat.synth.make; two of eight experts a token)."""


def rows(tokens: list[int], start: int, outputs: list[int]) -> Batch:
    """One sequence's `tokens` at cells and positions from `start` on."""
    n = len(tokens)
    at = np.arange(start, start + n, dtype=np.int32)
    table = np.arange(start + n, dtype=np.int32)
    return Batch(np.array(tokens, np.int32), at, np.zeros(n, np.int32), at, (table,), np.array(outputs, np.int32))


def load_cached(
    path: Path, device: Any, slots: int | None, *, ring_slots: int = 4, decode_rows: int = 4, n_cells: int = 256,
    max_rows: int = 64, kv: str = "f32", eager: bool = False, budget: int | None = None, **options: Any,
) -> CudaExecutor:  # fmt: skip
    """`slots`: slots of the cache besides a ring of `ring_slots`; None: every expert resident."""
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, ContextConfig())
    memory = DeviceMemory(device, budget)
    source = CudaSource(gguf, memory, found, 0, len(found.model.blocks))
    model = family(gguf.architecture)(source, numbers, ContextConfig())
    specs = [expert_spec(i, b.ffn.experts) for i, b in enumerate(model.blocks) if isinstance(b.ffn, Moe)]
    store: ExpertStore = ResidentStore(memory)
    if slots is not None:
        size = max(spec.slot_bytes for spec in specs)
        store = CachedStore(
            memory,
            budget=(slots + ring_slots) * size,
            ring_bytes=ring_slots * size,
            top_k=numbers.top_k,
            decode_rows=decode_rows,
            **({"cpus": [-1, -1]} | options),
        )
    for spec in specs:
        store.add(spec)
    reader = Reader(gguf, device, 2)
    source.load(reader, lambda f: None)
    store.load(reader, lambda f: None)
    reader.close()
    return CudaExecutor(
        memory, model, store, n_cells=n_cells, max_rows=max_rows, kv=kv, decode_rows=decode_rows, max_sequences=4,
        eager=eager,
    )  # fmt: skip
