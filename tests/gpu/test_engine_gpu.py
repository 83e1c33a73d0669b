"""The CUDA executor on a device: captured graphs against the same passes without capture, batch sizes, the budget.

The families and types themselves are checked by tests/models/test_cuda_*.py, which run on the device where there is
one. Here the expectation is the same executor run eagerly (`--debug-eager`): the same kernels on the same inputs, so
the logits are equal to the bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from compat.synth import make
from ftgguf.engine import devices
from ftgguf.engine.device_memory import MIB, DeviceMemory, context_overhead
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.nouns import PAGE, Batch
from tests.models.cuda_helpers import DEVICE, load_cuda, page_table, torch

if TYPE_CHECKING:
    from ftgguf.engine.load_cuda import GpuModel

ARCH = os.environ.get("FTGGUF_TEST_ARCH", "qwen3moe")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("models")

    def get(arch: str = ARCH, types: str = "Q4_K") -> Path:
        path = folder / f"{arch}-{types}.gguf"
        return path if path.exists() else make(arch, path, types=types)

    return get


def step(count: int, position: list[int], seed: int) -> Batch:
    """Row i: one token of sequence i, whose pages are 2 i and 2 i + 1."""
    tables = tuple(page_table([2 * i, 2 * i + 1], position[i] + 1) for i in range(count))
    return Batch(
        np.random.default_rng(seed).integers(3, 300, count).astype(np.int32),
        np.array(position[:count], np.int32),
        np.arange(count, dtype=np.int32),
        np.array([t[-1] for t in tables], np.int32),
        tables,
        np.arange(count, dtype=np.int32),
    )


@pytest.mark.parametrize("arch", ["qwen3moe", "glm4moe", "granitemoe", "llama", "qwen3"])
def test_captured_decode_equals_eager(model: Callable[..., Path], arch: str) -> None:
    path = model(arch)
    captured, eager = (
        load_cuda(path, decode_rows=8, max_sequences=8, n_cells=16 * PAGE, eager=e) for e in (False, True)
    )
    captured.warm_up()
    eager.warm_up()
    assert sorted(captured.graphs.decode) == list(range(1, 9))
    assert not eager.graphs.decode
    for i in range(12):
        count = 1 + i % 8
        batch = step(count, [i + 3 * s for s in range(8)], i)
        np.testing.assert_array_equal(captured.forward(batch), eager.forward(batch))


def test_more_rows_than_graphs_of_their_own_are_padded(model: Callable[..., Path]) -> None:
    path = model()
    captured, eager = (
        load_cuda(path, decode_rows=20, max_sequences=24, n_cells=64 * PAGE, eager=e) for e in (False, True)
    )
    captured.warm_up()
    eager.warm_up()
    assert sorted(captured.graphs.decode) == [*range(1, 9), 16, 24]
    for i in range(4):
        batch = step(11, [i] * 11, i)
        got, want = captured.forward(batch), eager.forward(batch)
        assert got.shape == (11, captured.n_vocab)
        np.testing.assert_array_equal(got, want)


def test_more_streams_than_a_tile_of_attention(model: Callable[..., Path]) -> None:
    """20 streams in the graph of 24 rows: its launches are those of the warm-up, whose rows are of one sequence."""
    path = model()
    captured, eager = (
        load_cuda(path, decode_rows=24, max_sequences=24, n_cells=64 * PAGE, eager=e) for e in (False, True)
    )
    captured.warm_up()
    eager.warm_up()
    for i in range(4):
        batch = step(20, [i + s for s in range(20)], i)
        np.testing.assert_array_equal(captured.forward(batch), eager.forward(batch))


def test_graphs_come_back_with_their_rows_when_cells_have_moved(model: Callable[..., Path]) -> None:
    path = model()
    captured, eager = (
        load_cuda(path, decode_rows=4, max_sequences=4, n_cells=16 * PAGE, eager=e) for e in (False, True)
    )
    captured.warm_up()
    eager.warm_up()
    for i in range(6):
        if i in (2, 4):
            for executor in (captured, eager):
                executor.resize_cells((8 if i == 2 else 16) * PAGE)
            assert not captured.graphs.decode
        batch = step(2 + i % 2, [i + 3 * s for s in range(4)], i)
        np.testing.assert_array_equal(captured.forward(batch), eager.forward(batch))
        assert batch.rows in captured.graphs.decode
    assert sorted(captured.graphs.decode) == [2, 3]
    assert not eager.graphs.decode


def test_a_replay_allocates_nothing(model: Callable[..., Path]) -> None:
    executor = load_cuda(model(), decode_rows=4, n_cells=16 * PAGE)
    executor.warm_up()
    batch = step(2, [4, 7], 0)
    executor.forward(batch)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    for _ in range(5):
        executor.forward(batch)
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before


def test_the_budget_holds_and_is_refused_in_words(model: Callable[..., Path]) -> None:
    from ftgguf.engine.load_cuda import load_gpu

    gguf = open_gguf(model())
    device = devices.list_devices()[0]
    base = ServerConfig()

    def no_cpu(first: int, last: int, cells: int) -> NoReturn:
        raise AssertionError("every layer fits")

    def load(budget: int) -> GpuModel | str:
        config = replace(
            base,
            placement=replace(base.placement, vram_budget=budget, gpu_layers=-2),
            context=replace(base.context, size=1024, n_ubatch=64),
        )
        return load_gpu(config, gguf, read_numbers(gguf), device, lambda stage, f: None, no_cpu)

    try:
        loaded = load(2048)
        assert not isinstance(loaded, str)
        loaded.executor.warm_up()
        assert torch.cuda.max_memory_reserved(DEVICE) + context_overhead(DEVICE) <= 2048 * MIB
        with pytest.raises(MemoryError, match="--vram-budget"):
            load(256)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_one_tensor_too_many_names_what_is_held() -> None:
    memory = DeviceMemory(DEVICE, 64 * MIB, overhead=8 * MIB)
    memory.tensor("weights", (40 * MIB,), torch.uint8)
    with pytest.raises(MemoryError, match=r"KV: 32 MiB needed, 16 MiB of the budget are left .*weights 40"):
        memory.tensor("KV", (32 * MIB,), torch.uint8)


def test_devices_agree_with_torch() -> None:
    found = devices.list_devices()
    assert len(found) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    assert found[0].name == properties.name
    assert found[0].capability == (properties.major, properties.minor)
    assert devices.problem(found[0], devices.driver()) is None
    assert found[0].id in devices.listing()
