"""The whole GPU path on tiny models: under the Triton interpreter, or on a CUDA device where there is one.

Decode is checked against the CPU executor, which equals libllama to the bit (test_against_libllama.py) and computes
the same integer products; its cells are float32, since ggml adds float16 values up in float16. Prefill on the GPU
keeps activations in 16 bits where ggml rounds them to 8, so with quantised weights the float32 reference executor is
the judge, and with F16 weights libllama itself (compat.oracle).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from compat.oracle import Oracle, kld, nmse
from ftgguf.engine.debug_executor import DebugExecutor, DebugSource
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32, PAGE, Batch

from .cuda_helpers import load_cuda, page_table
from .helpers import load, rows, some_tokens, step_by_step

if TYPE_CHECKING:
    from ftgguf.engine.cuda_executor import CudaExecutor

FAMILIES = ["qwen3moe", "qwen3", "llama", "granitemoe", "glm4moe"]
DENSE: dict[str, int] = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "n_ff": 256}
SMALL: dict[str, int] = {**DENSE, "n_expert": 4}
SAME_PRODUCTS = 1e-9
"""NMSE of decode logits; 1e-6 is asked for, 3e-14 was measured. A wrong scale or rank moves them by 1e-3 and more."""


def sizes(arch: str) -> dict[str, int]:
    return DENSE if arch == "qwen3" else SMALL


def reference(path: Path, tokens: Sequence[int]) -> F32:
    """Logits of every token by the float32 reference executor."""
    gguf = open_gguf(path)
    model = family(gguf.architecture)(DebugSource(gguf), read_numbers(gguf), ContextConfig())
    return DebugExecutor(model, n_cells=256, max_rows=128).forward(rows(tokens, 0, range(len(tokens))))


def decode(executor: CudaExecutor, tokens: Sequence[int]) -> F32:
    return np.stack([executor.forward(rows([t], i, [0]))[0].copy() for i, t in enumerate(tokens)])


@pytest.mark.parametrize("arch", FAMILIES)
def test_decode_computes_the_cpu_executors_products(synthetic: Callable[..., Path], arch: str) -> None:
    path = synthetic(arch, "Q4_K", **sizes(arch))
    cuda, cpu = load_cuda(path), load(path, kv="f32", n_cells=256, max_rows=64)
    tokens = some_tokens(cuda, 2)
    assert nmse(decode(cuda, tokens), step_by_step(cpu, tokens)) < SAME_PRODUCTS


@pytest.mark.parametrize("arch", FAMILIES)
def test_prefill_agrees_with_libllama(synthetic: Callable[..., Path], arch: str) -> None:
    path = synthetic(arch, "F16", **sizes(arch))
    cuda = load_cuda(path)
    tokens = some_tokens(cuda, 20)
    oracle = Oracle(path, n_ctx=256, n_threads=1, repack=False, type_k="f32", type_v="f32")
    want = oracle.prefill_logits(tokens)
    oracle.close()
    got = cuda.forward(rows(tokens, 0, range(20)))
    assert kld(got, want) < 1e-3
    assert nmse(got, want) < 1e-5


def test_prefill_of_quantised_weights_agrees_with_the_float_reference(synthetic: Callable[..., Path]) -> None:
    path = synthetic("qwen3moe", "Q4_K", **SMALL)
    cuda = load_cuda(path)
    tokens = some_tokens(cuda, 20)
    assert kld(cuda.forward(rows(tokens, 0, range(20))), reference(path, tokens)) < 1e-3


@pytest.mark.parametrize("types", ["Q8_0", "MXFP4", "IQ4_XS", "NVFP4", "Q5_1", "BF16"])
def test_types_in_decode(synthetic: Callable[..., Path], types: str) -> None:
    """One type of each activation kind. BF16 on the CPU multiplies in another order of sums (AVX-512 BF16), and NVFP4
    has no integer kernel here, hence their bound."""
    path = synthetic("qwen3moe", types, **SMALL, **({"scales": True} if types == "NVFP4" else {}))
    cuda, cpu = load_cuda(path), load(path, kv="f32", n_cells=256, max_rows=64)
    tokens = some_tokens(cuda, 2)
    bound = 1e-6 if types in ("BF16", "NVFP4") else SAME_PRODUCTS
    assert nmse(decode(cuda, tokens), step_by_step(cpu, tokens)) < bound


def test_sequences_in_one_batch_do_not_see_each_other(synthetic: Callable[..., Path]) -> None:
    """Four sequences in scattered pages: their prompts in one pass, then a step together, against each alone."""
    path = synthetic("qwen3moe", "F16", **SMALL)
    cuda = load_cuda(path, n_cells=512, max_rows=64)
    lengths = [5, 33, 1, 12]
    prompts = [some_tokens(cuda, n, seed) for seed, n in enumerate(lengths)]
    pages = [[9], [3, 7], [1], [12]]
    alone = []
    for prompt in prompts:
        cuda.forward(rows(prompt, 0, []))
        alone.append(cuda.forward(rows([7], len(prompt), [0]))[0].copy())
    tables = [page_table(p, n) for p, n in zip(pages, lengths, strict=True)]
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    batch = Batch(
        token=np.concatenate(prompts).astype(np.int32),
        position=position,
        sequence=np.repeat(np.arange(4, dtype=np.int32), lengths),
        cell=np.concatenate(tables).astype(np.int32),
        tables=tuple(tables),
        outputs=np.zeros(0, np.int32),
    )
    cuda.forward(batch)
    tables = [page_table(p, n + 1) for p, n in zip(pages, lengths, strict=True)]
    together = cuda.forward(
        Batch(
            token=np.full(4, 7, np.int32),
            position=np.array(lengths, np.int32),
            sequence=np.arange(4, dtype=np.int32),
            cell=np.array([t[-1] for t in tables], np.int32),
            tables=tuple(tables),
            outputs=np.arange(4, dtype=np.int32),
        )
    )
    # prompts of up to 8 rows alone go through the integer kernels, in one pass of 51 through tiles
    assert nmse(together, np.stack(alone)) < 1e-5


def test_moved_saved_and_shifted_cells(synthetic: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied cells, and cells written back after their pages were overwritten, give the same logits; K rotated from
    positions 32.. to 0.. equals K computed at 0.. (one layer sees only distances). All in parts of 8 cells."""
    monkeypatch.setattr("ftgguf.engine.cuda_cells.COPIED", 8)
    path = synthetic("llama", "F16", **SMALL)
    cuda = load_cuda(path, n_cells=512)
    tokens = some_tokens(cuda, 20)
    cuda.forward(rows(tokens, 0, []))
    expected = cuda.forward(rows([5], 20, [0]))[0].copy()
    first = np.arange(20, dtype=np.int32)
    cuda.copy_cells(first, first + 4 * PAGE)
    saved = cuda.read_cells(first)
    cuda.forward(rows(some_tokens(cuda, 20, 9), 0, []))
    assert nmse(cuda.forward(rows([5], 20, [0], page_table([4], 21)))[0], expected) < 1e-12
    cuda.write_cells(first, saved)
    assert nmse(cuda.forward(rows([5], 20, [0]))[0], expected) < 1e-12
    with pytest.raises(ValueError, match="do not fit"):
        cuda.write_cells(first, saved[:-1])
    with pytest.raises(IndexError):
        cuda.read_cells(np.array([512], np.int32))
    late = page_table([8, 9], 2 * PAGE)
    position = np.arange(PAGE, PAGE + 20, dtype=np.int32)
    zeros = np.zeros(20, np.int32)
    # the first page of this sequence repeats its second: every row sees its own prefix twice, its weights are the same
    table = np.concatenate([late[PAGE:], late[PAGE:]]).astype(np.int32)
    cuda.forward(Batch(np.array(tokens, np.int32), position, zeros, table[position], (table[: PAGE + 20],), zeros[:0]))
    cuda.shift_cells(table[position], -PAGE)
    assert nmse(cuda.forward(rows([5], 20, [0], page_table([9], 21)))[0], expected) < 1e-7


@pytest.mark.parametrize(("kind", "bound"), [("f16", 1e-5), ("q8_0", 1e-3)])
def test_cell_types_stay_close_to_f32(synthetic: Callable[..., Path], kind: str, bound: float) -> None:
    path = synthetic("qwen3moe", "F16", **SMALL)
    full, other = load_cuda(path), load_cuda(path, kv=kind)
    tokens = some_tokens(full, 3)
    error = nmse(decode(other, tokens), decode(full, tokens))
    assert 0 < error < bound


def test_many_outputs_and_none(synthetic: Callable[..., Path]) -> None:
    """More wanted rows than the head computes at once, some of them, and none: the same rows of one prefill."""
    path = synthetic("qwen3", "F16", **DENSE)
    cuda = load_cuda(path, max_rows=96)
    tokens = some_tokens(cuda, 70)
    every = cuda.forward(rows(tokens, 0, range(70))).copy()
    some = cuda.forward(rows(tokens, 0, [0, 31, 69])).copy()
    assert nmse(some, every[[0, 31, 69]]) < 1e-6  # the last block's tiles have other sizes
    assert cuda.forward(rows(tokens, 0, [])).shape == (0, cuda.n_vocab)
    assert cuda.forward(rows(tokens[:2], 0, [])).shape == (0, cuda.n_vocab)


def test_batches_that_do_not_fit_are_refused(synthetic: Callable[..., Path]) -> None:
    cuda = load_cuda(synthetic("qwen3", "F16", **DENSE), max_rows=32)
    with pytest.raises(ValueError, match="takes 1 to 32"):
        cuda.forward(rows([3] * 33, 0, []))
    with pytest.raises(ValueError, match="whole pages"):
        cuda.forward(rows([3], 0, [0], np.array([5], np.int32)))
    five = tuple(page_table([i], 1) for i in range(5))
    token, position, sequence, cell = (np.arange(5, dtype=np.int32) * k for k in (1, 0, 1, PAGE))
    batch = Batch(token, position, sequence, cell, five, np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="5 sequences"):
        cuda.forward(batch)
