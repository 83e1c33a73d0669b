"""The float reference against libllama on float32 files: every operator of the five families, written twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compat.oracle import Oracle, nmse
from ftgguf.engine.debug_executor import DebugExecutor, DebugSource
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family

from .helpers import load, rows, some_tokens


def debug(path: Path) -> DebugExecutor:
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    model = family(gguf.architecture)(DebugSource(gguf), numbers, ContextConfig())
    return DebugExecutor(model, n_cells=256, max_rows=128)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3moe", "granitemoe", "glm4moe"])
def test_logits(synthetic: Callable[..., Path], arch: str) -> None:
    """libllama rounds K and V to float16 before its flash attention, the CPU executor keeps them in float32; the rest
    is float32 sums in another order (3e-7 and 3e-12 measured)."""
    path = synthetic(arch, "F32")
    executor = debug(path)
    tokens = some_tokens(load(path), 40)
    with Oracle(path, n_ctx=256, type_k="f32", type_v="f32") as oracle:
        expected = oracle.prefill_logits(tokens)
    executor.forward(rows(tokens[:15], 0, []))
    got = executor.forward(rows(tokens[15:], 15, range(25)))
    assert nmse(got, expected[15:]) < 1e-6
    assert nmse(got, load(path, kv="f32").forward(rows(tokens, 0, range(40)))[15:]) < 1e-10


def test_yarn(synthetic: Callable[..., Path]) -> None:
    """The ramp, the interpolation and the magnitude of YaRN scaling, at positions beyond the original context."""
    path = synthetic("qwen3moe", "F32")
    flags: dict[str, Any] = {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}
    gguf = open_gguf(path)
    model = family(gguf.architecture)(DebugSource(gguf), read_numbers(gguf), ContextConfig(**flags))
    executor = DebugExecutor(model, n_cells=256, max_rows=128)
    tokens = some_tokens(load(path), 100)
    got = executor.forward(rows(tokens, 0, range(100)))
    plain = load(path, kv="f32").forward(rows(tokens, 0, range(100))).copy()
    assert nmse(got, plain) > 1e-3
    assert nmse(got, load(path, kv="f32", context=ContextConfig(**flags)).forward(rows(tokens, 0, range(100)))) < 1e-9


def test_cells_move(synthetic: Callable[..., Path]) -> None:
    executor = debug(synthetic("qwen3moe", "F32"))
    tokens = list(range(5, 25))
    executor.forward(rows(tokens, 0, []))
    expected = executor.forward(rows([3], 20, [0]))
    first, second = np.arange(20, dtype=np.int32), np.arange(100, 120, dtype=np.int32)
    saved = executor.read_cells(first)
    executor.copy_cells(first, second)
    table = np.append(second, np.int32(50))
    np.testing.assert_array_equal(executor.forward(rows([3], 20, [0], table)), expected)
    executor.forward(rows(tokens[::-1], 0, []))
    executor.write_cells(first, saved)
    np.testing.assert_array_equal(executor.forward(rows([3], 20, [0])), expected)
