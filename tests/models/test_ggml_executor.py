"""Cells, page tables and masks of the CPU executor: where a sequence's cells lie must not change its logits.

Expectations come from the same executor run on one sequence in cells 0, 1, 2 ... (itself checked against libllama in
test_against_libllama.py); flash attention adds in the order of the cells, hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compat.oracle import nmse
from ftgguf.engine.ggml_executor import KV_PAD, GgmlExecutor
from ftgguf.nouns import Batch

from .helpers import load, rows, some_tokens, step_by_step, with_kv

CLOSE = 1e-8
"""NMSE of two summation orders with float32 weights and KV (ggml sums float16 V in float16, where 3e-5 was measured).
`test_a_wrong_cell_shows` holds the bound to account."""


@pytest.fixture
def exact(synthetic: Callable[..., Path]) -> Callable[..., GgmlExecutor]:
    """`exact(arch)`: an executor whose weights and KV are float32."""
    return lambda arch, **options: load(synthetic(arch, "F32"), kv="f32", **options)


def test_a_wrong_cell_shows(exact: Callable[..., GgmlExecutor]) -> None:
    """One cell of ninety swapped against another moves the last row's logits by a hundred times the bound."""
    executor = exact("qwen3moe")
    tokens = some_tokens(executor, 90)
    straight = executor.forward(rows(tokens, 0, [89])).copy()
    swapped = [*tokens[:87], tokens[88], tokens[87], tokens[89]]
    assert nmse(executor.forward(rows(swapped, 0, [89])), straight) > 100 * CLOSE


def test_scattered_cells(exact: Callable[..., GgmlExecutor]) -> None:
    executor = exact("qwen3moe")
    tokens = some_tokens(executor, 90)
    straight = executor.forward(rows(tokens, 0, range(90))).copy()
    table = np.random.default_rng(1).permutation(executor.n_cells)[:90].astype(np.int32)
    assert nmse(executor.forward(rows(tokens, 0, range(90), table)), straight) < CLOSE


def test_chunked_prefill_equals_one_pass(exact: Callable[..., GgmlExecutor]) -> None:
    executor = exact("granitemoe")
    tokens = some_tokens(executor, 130)
    whole = executor.forward(rows(tokens, 0, [129])).copy()
    for start, end in ((0, 1), (1, 40), (40, 129)):
        assert executor.forward(rows(tokens[start:end], start, [])).shape == (0, executor.n_vocab)
    assert nmse(executor.forward(rows(tokens[129:], 129, [0])), whole) < CLOSE


def test_sequences_in_one_batch_do_not_see_each_other(exact: Callable[..., GgmlExecutor]) -> None:
    executor = exact("llama")
    a, b = some_tokens(executor, 33, 1), some_tokens(executor, 57, 2)
    alone = [executor.forward(rows(t, 0, [len(t) - 1])).copy() for t in (a, b)]
    tables = tuple(np.arange(len(t), dtype=np.int32) * 2 + i for i, t in enumerate((a, b)))
    order = [(s, p) for p in range(57) for s in (0, 1) if p < len((a, b)[s])]
    batch = Batch(
        token=np.array([(a, b)[s][p] for s, p in order], np.int32),
        position=np.array([p for _, p in order], np.int32),
        sequence=np.array([s for s, _ in order], np.int32),
        cell=np.array([tables[s][p] for s, p in order], np.int32),
        tables=tables,
        outputs=np.array([order.index((0, 32)), order.index((1, 56))], np.int32),
    )
    got = executor.forward(batch)
    assert nmse(got[:1], alone[0]) < CLOSE
    assert nmse(got[1:], alone[1]) < CLOSE


def test_window_far_from_cell_zero(exact: Callable[..., GgmlExecutor]) -> None:
    """The attention window moves without a new graph: the same sequence at the end of the pool, then at its start."""
    executor = exact("qwen3", n_cells=4 * KV_PAD)
    tokens = some_tokens(executor, 50)
    straight = step_by_step(executor, tokens)[-1]
    table = np.arange(executor.n_cells - 50, executor.n_cells, dtype=np.int32)
    built = len(executor.passes)
    far = [executor.forward(rows([t], i, [0], table))[0].copy() for i, t in enumerate(tokens)][-1]
    assert len(executor.passes) == built
    assert nmse(far, straight) < CLOSE


def test_copied_and_saved_cells(exact: Callable[..., GgmlExecutor]) -> None:
    executor = exact("glm4moe")
    tokens = some_tokens(executor, 40)
    executor.forward(rows(tokens, 0, []))
    expected = executor.forward(rows([5], 40, [0]))[0].copy()
    first, second = np.arange(40, dtype=np.int32), np.arange(300, 340, dtype=np.int32)
    executor.copy_cells(first, second)
    saved = executor.read_cells(first)
    executor.forward(rows(some_tokens(executor, 40, 9), 0, []))  # overwrites the originals
    table = np.append(second, np.int32(340))
    assert nmse(executor.forward(rows([5], 40, [0], table))[0], expected) < CLOSE
    executor.write_cells(first, saved)
    assert nmse(executor.forward(rows([5], 40, [0]))[0], expected) < CLOSE
    with pytest.raises(ValueError, match="do not fit"):
        executor.write_cells(first, saved[:-1])
    with pytest.raises(IndexError):
        executor.read_cells(np.array([executor.n_cells], np.int32))


def test_shifted_cells(exact: Callable[..., GgmlExecutor]) -> None:
    """K computed at positions 8.. and shifted by -8 equals K computed at 0..: attention sees only distances, so one
    layer's K and V are equal; deeper layers saw the same inputs because the shifted prefix was the whole context."""
    executor = exact("llama")
    tokens = some_tokens(executor, 20)
    expected = executor.forward(rows(tokens, 0, [19]))[0].copy()
    table = np.arange(100, 128, dtype=np.int32)
    positions = np.arange(8, 28, dtype=np.int32)
    late = Batch(
        token=np.array(tokens, np.int32),
        position=positions,
        sequence=np.zeros(20, np.int32),
        cell=table[positions],
        # positions 0..7 of this sequence do not exist: its table starts with cells of the sequence itself
        tables=(np.concatenate([np.full(8, table[8]), table[8:]]).astype(np.int32),),
        outputs=np.array([], np.int32),
    )
    executor.forward(late)
    executor.shift_cells(table[8:27], -8)
    got = executor.forward(rows(tokens[19:], 19, [0], table[8:]))[0]
    assert nmse(got, expected) < CLOSE


@pytest.mark.parametrize("types", ["f16", "bf16", "q8_0", "f32"])
def test_kv_types_stay_close_to_f32(synthetic: Callable[..., Path], types: str) -> None:
    """q8_0 and the 16-bit types round K and V; NMSE bounds are ten times what was measured."""
    full = load(synthetic("qwen3moe"), n_cells=256, max_rows=64, kv="f32")
    executor = with_kv(full.source, full.model, types, 256, 64)
    tokens = some_tokens(executor, 48)
    bound = {"f32": 1e-12, "f16": 1e-3, "bf16": 1e-3, "q8_0": 3e-3}[types]
    assert nmse(executor.forward(rows(tokens, 0, [47])), full.forward(rows(tokens, 0, [47]))) < bound
