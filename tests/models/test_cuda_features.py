"""The final norm's rows on the GPU path (embeddings), alone and as the last segment, against libllama and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compat.oracle import nmse
from compat.oracle_states import pooled
from ftgguf.engine.executor import NotSupported
from ftgguf.engine.ggml_executor import GgmlExecutor
from ftgguf.engine.segments import SegmentedExecutor

from .cuda_helpers import load_cuda
from .helpers import load, rows, some_tokens

SMALL: dict[str, int] = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "n_ff": 256, "n_expert": 4}


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_states_agree_with_libllama(synthetic: Callable[..., Path], arch: str) -> None:
    """All rows of a prompt, some of them, and none; logits are as they were afterwards."""
    path = synthetic(arch, "F16", **SMALL)
    cuda = load_cuda(path, max_rows=64)
    tokens = some_tokens(cuda, 21)
    (expected,) = pooled(path, [tokens], "none", kv="f32")
    before = cuda.forward(rows(tokens, 0, [20])).copy()
    for wanted in (list(range(21)), [3, 20], []):
        batch = replace(rows(tokens, 0, wanted), features=True)
        states = cuda.forward(batch)
        assert states.shape == (len(wanted), cuda.model.n_embd)
        assert not wanted or nmse(states, expected[wanted]) < 1e-5
    assert nmse(cuda.forward(rows(tokens, 0, [20])), before) == 0.0


def test_states_of_the_last_segment(synthetic: Callable[..., Path]) -> None:
    """`-ngl N`: the first block on the CPU."""
    path = synthetic("qwen3moe", "Q4_K", n_head=2, n_head_kv=1, n_expert=4)
    cpu = load(path, kv="f32", n_cells=256, max_rows=64)
    front = GgmlExecutor(
        cpu.source, cpu.model, n_cells=256, max_rows=64, threads=1, threads_batch=1, type_k="f32", type_v="f32", last=1
    )
    split = SegmentedExecutor((front, load_cuda(path, first=1, max_rows=64)))
    batch = replace(rows(some_tokens(cpu, 4), 0, [0, 3]), features=True)
    expected = cpu.forward(batch).copy()
    assert nmse(split.forward(batch), expected) < 1e-6


def test_adapters_are_refused(synthetic: Callable[..., Path]) -> None:
    """No kernel applies them: an error with the cure, never an answer without them."""
    cuda = load_cuda(synthetic("qwen3moe", "F16", **SMALL))
    with pytest.raises(NotSupported, match="-ngl 0"):
        cuda.forward(replace(rows([1], 0, [0]), adapters=(1.0,)))
