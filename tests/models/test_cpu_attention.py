"""Our attention on the CPU (ggml_cpu/attention.cpp) against ggml's operator: the same bits, and which one a graph has.

Expectations come from `ggml_flash_attn_ext` on the same inputs. Where the processor or this build of ggml leaves no
room for ours, the cases are skipped; that alone may not hide it, so that `test_this_processor_has_it` says when it must
be there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.gguf.types import TensorType
from ftgguf.nouns import Batch

from .helpers import load, rows, some_tokens

F32, F16, Q8_0 = int(TensorType.F32), int(TensorType.F16), int(TensorType.Q8_0)
FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c", "fma"}
OWN, GGML = "CUSTOM", "FLASH_ATTN_EXT"

Mask = Callable[[np.random.Generator, int, int], np.ndarray]


def whole(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    return np.zeros((rows, cells), np.float16)


def causal(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    """The rows of one prompt's end; the last third of the cells is nobody's."""
    last = np.arange(rows)[:, None] + cells * 2 // 3 - rows
    return np.where(np.arange(cells)[None] <= last, 0, -np.inf).astype(np.float16)


def holes(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    return np.where(rng.random((rows, cells)) < 0.6, 0, -np.inf).astype(np.float16)


def sequences(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    """Row i is sequence i's, whose cells lie interleaved with the others'."""
    return np.where(np.arange(cells)[None] % rows == np.arange(rows)[:, None], 0, -np.inf).astype(np.float16)


def window(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    """Few cells: whole chunks of a thread see nothing."""
    at = np.arange(cells)[None] - np.arange(rows)[:, None]
    return np.where((at > 130) & (at < 200), 0, -np.inf).astype(np.float16)


def biases(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    return rng.standard_normal((rows, cells)).astype(np.float16)


def nothing(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
    return np.full((rows, cells), -np.inf, np.float16)


MASKS: tuple[Mask, ...] = (whole, causal, holes, sequences, window, biases, nothing)


def attention(
    own: bool,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (6, 2),
    cells: int = 300,
    n_rows: int = 1,
    mask: Mask = whole,
    sinks: float | None = None,
    softcap: float = 0.0,
    threads: int = 1,
    kinds: tuple[int, int] = (F16, F16),
    size: float = 1.0,
    seed: int = 0,
) -> tuple[np.ndarray, list[str]]:
    """The result [rows, heads * v_dim] of one pass and the graph's operators. `sinks`: their standard deviation."""
    rng = np.random.default_rng(seed)
    (k_dim, v_dim), (n_heads, kv_heads) = dims, heads
    backend = native.Backend(threads)
    pools = native.Cells(backend, [k_dim * kv_heads, v_dim * kv_heads], list(kinds), cells)
    if kinds == (F16, F16):
        k = (rng.standard_normal((cells, kv_heads * k_dim)) * size).astype(np.float16)
        v = rng.standard_normal((cells, kv_heads * v_dim)).astype(np.float16)
        pools.write(np.arange(cells, dtype=np.int32), k.tobytes() + v.tobytes())
    arena = native.Arena(backend)
    g = native.Graph(arena, 32)
    q = g.input("q", F32, [k_dim, n_heads, n_rows])
    m = g.input("mask", F16, [cells, n_rows])
    s = None if sinks is None else g.input("sinks", F32, [n_heads])
    views = [g.window(pools.pool(i), dim, kv_heads, cells) for i, dim in enumerate(dims)]
    op = g.attention if own else g.flash_attention
    out = op(g.permute(q, 0, 2, 1, 3), *views, m, s, k_dim**-0.5, softcap)
    g.output(out)
    g.place()
    g.move_windows(0)
    g.set(q, rng.standard_normal((n_rows, n_heads, k_dim)).astype(np.float32))
    g.set(m, mask(rng, n_rows, cells))
    if sinks is not None:
        g.set(s, (rng.standard_normal(n_heads) * sinks).astype(np.float32))
    g.compute()
    return g.values(out).copy(), g.operators


@cache
def available() -> bool:
    return OWN in attention(True)[1]


needs_own = pytest.mark.skipif(not available(), reason="no AVX-512 here, or a ggml built for other instructions")


def check(**case: object) -> None:
    ours, operators = attention(True, **case)  # type: ignore[arg-type]
    theirs, others = attention(False, **case)  # type: ignore[arg-type]
    assert OWN in operators
    assert GGML not in operators
    assert GGML in others
    assert np.isfinite(theirs).all()
    np.testing.assert_array_equal(ours, theirs)


def test_this_processor_has_it() -> None:
    """Off without a word is a fault where the processor has AVX-512 and ggml was built for it (its own report)."""
    cpu = Path("/proc/cpuinfo")
    found = set(cpu.read_text().split("flags", 1)[1].split("\n", 1)[0].split()) if cpu.exists() else set()
    report = ctypes.string_at(llama_cpp.llama_print_system_info()).decode()
    if not found >= FLAGS or "AVX512 = 1" not in report:
        pytest.skip("no AVX-512 in the processor or in this build of ggml")
    assert available()


@needs_own
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("n_rows", [1, 2, 63])
@pytest.mark.parametrize("cells", [33, 511, 512, 777])
def test_masks(mask: Mask, n_rows: int, cells: int) -> None:
    for threads in (1, 2):
        check(mask=mask, n_rows=n_rows, cells=cells, threads=threads)


@needs_own
@pytest.mark.parametrize("k_dim", [8, 32, 40, 64, 72, 80, 96, 112, 120, 127, 128, 192, 200, 256])
def test_head_sizes(k_dim: int) -> None:
    for v_dim in (k_dim, 64, 100):
        if v_dim < 128:
            for n_rows, heads in ((1, (4, 4)), (3, (6, 2))):
                check(dims=(k_dim, v_dim), n_rows=n_rows, heads=heads, cells=600, threads=2)


@needs_own
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (6, 3), (9, 3), (8, 2), (14, 2), (16, 1)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    """Groups of one to sixteen heads, more than are taken at a time, and threads that part within a group."""
    for threads in (1, 2, 3):
        for n_rows, cells in ((1, 100), (1, 600), (4, 100)):
            check(heads=heads, threads=threads, n_rows=n_rows, cells=cells, mask=holes)


@needs_own
@pytest.mark.parametrize("sinks", [None, 1.0, 30.0])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_sinks_and_softcap(sinks: float | None, softcap: float) -> None:
    """Sinks below and above the greatest logit, which then shrinks what was summed; logits that the cap bends."""
    for mask in (biases, nothing):
        for n_rows, threads in ((1, 1), (1, 3), (5, 2)):
            check(sinks=sinks, softcap=softcap, mask=mask, n_rows=n_rows, threads=threads, cells=700, size=20.0)


@needs_own
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_more_threads_than_heads_and_cells(size: float) -> None:
    """Flat and steep softmax; one row over more threads than it has heads, and chunks of a few cells."""
    for threads in (4, 7):
        for cells in (20, 520):
            check(heads=(2, 1), cells=cells, threads=threads, size=size)


@needs_own
def test_a_wrong_weight_shows() -> None:
    """The comparison is of bits: one cell hidden from one row changes them."""

    def one_hidden(rng: np.random.Generator, rows: int, cells: int) -> np.ndarray:
        mask = whole(rng, rows, cells)
        mask[0, 7] = -np.inf
        return mask

    assert not np.array_equal(attention(True)[0], attention(False, mask=one_hidden)[0])


@pytest.mark.parametrize(
    "case",
    [{"dims": (128, 128)}, {"dims": (256, 256)}, {"n_rows": 64}, {"kinds": (Q8_0, Q8_0)}, {"kinds": (F32, F32)}],
    ids=lambda case: next(iter(case)) + str(next(iter(case.values()))),
)
def test_the_rest_is_ggmls(case: dict[str, object]) -> None:
    """Head sizes that ggml is fast at, its tiles of rows, and other types of K and V."""
    operators = attention(True, **case)[1]  # type: ignore[arg-type]
    assert GGML in operators
    assert OWN not in operators


@needs_own
def test_the_executor_uses_it(synthetic: Callable[..., Path]) -> None:
    """Decode's graphs and small batches' have ours, a prompt's has ggml's."""
    executor = load(synthetic("llama", "F32"))
    assert executor.model.blocks[0].attention.v_dim < 128
    tokens = some_tokens(executor, 70)

    def operators(batch: Batch) -> list[str]:
        executor.forward(batch)
        found: list[str] = next(reversed(executor.passes.values())).graph.operators
        return found

    prompt = operators(rows(tokens[:64], 0, [63]))
    assert GGML in prompt
    assert OWN not in prompt
    for batch in (rows(tokens[64:65], 64, [0]), rows(tokens[65:], 65, [4])):
        short = operators(batch)
        assert OWN in short
        assert GGML not in short
