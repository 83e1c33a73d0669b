"""`-ngl N` on two layers: the first on the CPU executor, the second on the GPU path, against the CPU executor alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compat.oracle import nmse
from ftgguf.engine.executor import Executor
from ftgguf.engine.ggml_executor import GgmlExecutor
from ftgguf.engine.segments import SegmentedExecutor

from .cuda_helpers import load_cuda
from .helpers import load, rows, some_tokens


@pytest.fixture
def both(synthetic: Callable[..., Path]) -> tuple[GgmlExecutor, SegmentedExecutor]:
    path = synthetic("qwen3moe", "Q4_K", n_head=2, n_head_kv=1, n_expert=4)
    cpu = load(path, kv="f32", n_cells=256, max_rows=64)
    front = GgmlExecutor(
        cpu.source, cpu.model, n_cells=256, max_rows=64, threads=2, threads_batch=2, type_k="f32", type_v="f32", last=1
    )
    return cpu, SegmentedExecutor((front, load_cuda(path, first=1, max_rows=64)))


def test_segments_compute_what_the_cpu_does(both: tuple[GgmlExecutor, SegmentedExecutor]) -> None:
    cpu, split = both
    assert isinstance(split, Executor)
    tokens = some_tokens(cpu, 2)
    for i, t in enumerate(tokens):
        got = split.forward(rows([t], i, [0]))
        assert nmse(got, cpu.forward(rows([t], i, [0]))) < 1e-9


def test_cells_of_all_segments_move_together(both: tuple[GgmlExecutor, SegmentedExecutor]) -> None:
    cpu, split = both
    tokens = some_tokens(cpu, 2)
    for i, t in enumerate(tokens):
        expected = split.forward(rows([t], i, [0])).copy()
    cells = np.arange(2, dtype=np.int32)
    saved = split.read_cells(cells)
    split.copy_cells(cells, cells + 64)
    for i in range(2):
        split.forward(rows([9], i, [0]))
    assert nmse(split.forward(rows(tokens[1:], 1, [0], np.arange(64, 66, dtype=np.int32))), expected) < 1e-9
    split.write_cells(cells, saved)
    assert nmse(split.forward(rows(tokens[1:], 1, [0])), expected) < 1e-9
    with pytest.raises(ValueError, match="do not fit"):
        split.write_cells(cells, saved + b"0")
