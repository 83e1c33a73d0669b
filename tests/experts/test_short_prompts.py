"""Prompts of a few rows that run as decode's rows do, against the resident store's passes, under the interpreter or on
a device: the same experts, whoever computes them. Where all of it is on the GPU the products are the same; the CPU
rounds inputs to 8 bits, the GPU's tiles to bfloat16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from store_helpers import TINY, CachedExecutor, load_cached, rows  # noqa: E402

from compat.routes import decided_routes  # noqa: E402
from compat.synth import make  # noqa: E402
from compat.vocab import tiny  # noqa: E402
from ftgguf.experts.costs import PathCosts  # noqa: E402
from ftgguf.experts.pinning import cuda_pinner  # noqa: E402
from ftgguf.experts.residency import Stat, check  # noqa: E402
from ftgguf.experts.samples import Bandwidths  # noqa: E402
from ftgguf.experts.split import rows_each  # noqa: E402
from ftgguf.nouns import F32  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TOKENS = [int(t) for t in np.random.default_rng(4).integers(3, 250, 12)]
FILL, CPU, MIXED = (65536, 1), (0, 0), (32768, 1)


def nmse(got: F32, want: F32) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routers that rounding does not change: bfloat16 and 8 bits are compared."""
    values = decided_routes(TINY["n_layer"], TINY["n_expert"], 2, TINY["n_embd"], tiny().size)
    return make("qwen3moe", tmp_path_factory.mktemp("short") / "m.gguf", types="Q8_0", values=values, **TINY)


@pytest.fixture(scope="module")
def resident(path: Path) -> tuple[F32, F32]:
    """Logits of rows 3 and 11 of the prompt, and of the token after it."""
    executor = load_cached(path, DEVICE, None)
    prompt = executor.forward(rows(TOKENS, 0, [3, 11])).copy()
    return prompt, executor.forward(rows([7], len(TOKENS), [0])).copy()


def cached(path: Path, slots: int, **options: Any) -> CachedExecutor:
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        options["pinner"] = cuda_pinner(DEVICE)
    executor = load_cached(path, DEVICE, slots, short_rows=(16, 32), decode_rows=2, **options)
    assert executor.sizes == [1, 2, 16, 32]
    if on_gpu:  # captured, as in service
        executor.warm_up()
        assert sorted(executor.graphs.decode) == executor.sizes
        executor.store.prefill_passes = 0
    return executor


@pytest.mark.parametrize(("split", "bound"), [(FILL, 1e-6), (MIXED, 1e-3), (CPU, 1e-3)])
def test_a_short_prompt_is_served_as_decode_is(
    path: Path, resident: tuple[F32, F32], split: tuple[int, int], bound: float
) -> None:
    executor = cached(path, 9)
    store = executor.store
    store.force_split(*split)
    before = store.statistics().sum(0)
    prompt = executor.forward(rows(TOKENS, 0, [3, 11])).copy()
    assert store.prefill_passes == 0
    count = store.statistics().sum(0) - before
    # 12 rows and 4 that pad them, two experts each; the last layer runs for the two wanted rows
    assert count[Stat.ENTRIES] == 16 * 2 * (TINY["n_layer"] - 1) + 2 * 2
    assert count[Stat.MISSES] > 0
    assert count[Stat.FILLS] == (0 if split is CPU else count[Stat.MISSES] - count[Stat.CPU])
    assert bool(count[Stat.CPU] == 0) is (split is FILL)
    assert nmse(prompt, resident[0]) < bound
    assert nmse(executor.forward(rows([7], len(TOKENS), [0])), resident[1]) < bound
    store.device_state.store(store.state)
    check(store.state)
    store.close()


def test_only_wanted_rows_come_back_in_their_order(path: Path, resident: tuple[F32, F32]) -> None:
    executor = cached(path, 9)
    executor.store.force_split(*FILL)
    one = executor.forward(rows(TOKENS, 0, [11])).copy()
    assert one.shape == (1, executor.n_vocab)
    assert nmse(one, resident[0][1:]) < 1e-6
    assert executor.forward(rows(TOKENS, 0, [])).shape == (0, executor.n_vocab)
    assert executor.store.prefill_passes == 0
    assert executor.forward(rows(TOKENS, 0, [1, 3, 11])).shape == (3, executor.n_vocab)
    assert executor.store.prefill_passes == 1, "more logits than a graph keeps"
    executor.store.close()


def test_a_small_cache_is_not_emptied_by_a_prompt(path: Path, resident: tuple[F32, F32]) -> None:
    """12 rows of 2 may want all 8 experts; with 6 slots the prompt's own way is taken, which leaves them alone (but for
    the last layer, which runs for the wanted rows)."""
    executor = cached(path, 6)
    store = executor.store
    store.device_state.store(store.state)
    before = store.state.owner_of.copy()
    executor.forward(rows(TOKENS, 0, []))
    assert store.prefill_passes == 1
    store.device_state.store(store.state)
    assert (store.state.owner_of == before).all()
    assert nmse(executor.forward(rows(TOKENS, 0, [3, 11])), resident[0]) < 1e-3
    assert store.prefill_passes == 2
    store.close()


def test_the_split_learns_from_decode_alone(path: Path) -> None:
    """A row of several costs the CPU more than the rates of one row say."""
    executor = cached(path, 9)
    executor.forward(rows(TOKENS, 0, [11]))
    assert executor.store._taken is None
    executor.forward(rows([7], len(TOKENS), [0]))
    assert executor.store._taken is not None
    assert executor.store._taken[1] == 1
    executor.store.close()


def test_several_rows_at_an_expert_move_the_split_to_the_link(path: Path) -> None:
    """A byte takes both paths as long here: half of a decode step's misses are filled. 12 rows that want 2 of 8 experts
    are 3.1 at each that gets any; further ones cost the CPU time and the link none."""
    size = 1 << 13
    costs = PathCosts({"Q8_0": Bandwidths(1e9, 2e9, 1e9, 1e9)}, cpu_entry={"Q8_0": 0.5e-9 * size})
    executor = cached(path, 9, costs=costs)
    store = executor.store
    assert [spec.slot_bytes for spec in store.order] == [store.order[0].slot_bytes] * TINY["n_layer"]
    each = rows_each(12, 2, 8)
    assert 12 * 2 / 8 <= each < 3.1
    executor.forward(rows(TOKENS, 0, [11]))
    more = 0.5 * size / store.order[0].slot_bytes * (each - 1)
    want = (1 + more) / (2 + more)
    assert abs(store.state.split[:, 0] / 65536 - want).max() < 1e-3
    executor.forward(rows([7], len(TOKENS), [0]))
    if DEVICE.type == "cpu":  # no clock there, so the rates are as given
        assert (store.state.split[:, 0] == 32768).all()
    store.close()


def test_decodes_inputs_do_not_depend_on_whose_rows_they_are(path: Path) -> None:
    """A captured pass has its launches for ever: more than 16 rows had as many attention tiles as the warm-up's one
    sequence, and 17 to 24 streams at once got others' answers."""
    executor = load_cached(path, DEVICE, None, decode_rows=24)
    for count in (24, 17):
        batch = rows(TOKENS[:1] * count, 0, [])
        executor.small.fill(batch, 24)
        assert executor.small.rows(24, 24, all_outputs=True).tiles is None
