"""Loading an executor and making batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.engine.executor import Executor
from ftgguf.engine.ggml_executor import GgmlExecutor
from ftgguf.engine.ggml_weights import GgmlSource
from ftgguf.engine.layout import Layout
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.layers.params import Decoder
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32, Batch


def load(
    path: Path,
    layout: Layout = Layout.PLAIN,
    n_cells: int = 1024,
    max_rows: int = 256,
    kv: str = "f16",
    context: ContextConfig | None = None,
) -> GgmlExecutor:
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    fraction = numbers.top_k / numbers.n_expert if numbers.n_expert else 1.0
    source = GgmlSource(gguf, native.Backend(2), layout, fraction)
    model = family(gguf.architecture)(source, numbers, context or ContextConfig())
    assert not source.left_over(), "the model takes every tensor of the file"
    source.pack(2, lambda fraction: None)
    return with_kv(source, model, kv, n_cells, max_rows)


def with_kv(source: GgmlSource, model: Decoder, kv: str, n_cells: int, max_rows: int) -> GgmlExecutor:
    """An executor of its own cells over weights that are loaded already."""
    return GgmlExecutor(
        source, model, n_cells=n_cells, max_rows=max_rows, threads=2, threads_batch=2, type_k=kv, type_v=kv
    )


def rows(tokens: Sequence[int], start: int, outputs: Sequence[int], table: np.ndarray | None = None) -> Batch:
    """`tokens` of one sequence at positions from `start`; its cells are `table` (default: cell = position)."""
    n = len(tokens)
    table = np.arange(start + n, dtype=np.int32) if table is None else table
    position = np.arange(start, start + n, dtype=np.int32)
    return Batch(
        token=np.array(tokens, np.int32),
        position=position,
        sequence=np.zeros(n, np.int32),
        cell=table[position],
        tables=(table[: start + n],),
        outputs=np.array(outputs, np.int32),
    )


def step_by_step(executor: Executor, tokens: Sequence[int]) -> F32:
    """Decode logits [len(tokens), vocab], one row a pass."""
    return np.stack([executor.forward(rows([t], i, [0]))[0].copy() for i, t in enumerate(tokens)])


def some_tokens(executor: Executor, n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, executor.n_vocab, n)]
