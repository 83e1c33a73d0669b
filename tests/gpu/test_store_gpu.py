"""The cached store on a CUDA device, decode captured: the same answers for every placement, and a watchdog that
releases a waiting GPU. The resident store is the oracle (tests/experts/test_expert_store.py has the same under the
interpreter, with prefill's modes).

Two models. In the one with F16 experts nothing is rounded to 8 bits, so placement may move the logits by the order of
sums only: NMSE below 1e-6. In the one with Q4_K and Q6_K experts a unit in the last place moves an activation over an
8-bit step now and then; that moves the next products' inputs by a thousandth, which moves hundreds over theirs: the
error jumps from 0 to the size of the 8-bit rounding itself, in a race-free run under the interpreter too (routes
replayed, six tokens: three placements 0 to the bit, two 8e-5; on the CPU executor alone a unit in the last place of the
norms' weights: up to 9e-5). There the bound is 1e-3, which a wrong expert misses by two orders of magnitude
(tests/experts/test_expert_store.py). Routed freely, the first other expert must be at a tie; the same run twice gives
the same bits, since the split is fixed and every sum has an order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "experts"))
from store_helpers import Decoded, decoded, hooked, judge, load_cached, rows

from compat.synth import make
from ftgguf.engine.executor import ExecutorLost
from ftgguf.experts.measure import Probe
from ftgguf.experts.pinning import cuda_pinner
from ftgguf.experts.prefill import Mode
from ftgguf.experts.residency import Stat
from ftgguf.nouns import F32

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 300, 40)]


SPLITS = {"filled": (65536, 1), "cpu": (0, 0), "mixed": (32768, 1), "mostly cpu": (16384, 1)}


def nmse(got: F32, want: F32) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


TYPES = {
    "F16": ({"*_exps.weight": "F16", "*": "Q8_0"}, 1e-6),
    "Q4_K": ({"*ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"}, 1e-3),
}
"""Types of the model's tensors, and how far placement may move its logits (NMSE)."""


def made(folder: Path, types: dict[str, str]) -> Path:
    return make("qwen3moe", folder / "m.gguf", types=types, n_layer=4, n_expert=32, n_expert_used=8, n_embd=1024,
                n_ff_expert=512)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("gpu"), TYPES["Q4_K"][0])


def load(path: Path, slots: int | None, **options: Any) -> Any:
    if slots is not None:
        options.setdefault("pinner", cuda_pinner(DEVICE))
    executor = load_cached(path, DEVICE, slots, decode_rows=2, ring_slots=16, **options)
    hooked(executor)
    executor.warm_up()
    return executor


@pytest.fixture(scope="module", params=list(TYPES))
def resident(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoded, float]:
    """A model, what it says with every expert resident, and the bound for other placements."""
    types, bound = TYPES[request.param]
    path = made(tmp_path_factory.mktemp(request.param), types)
    return path, decoded(load(path, None), TOKENS), bound


@pytest.mark.parametrize("slots", [0, 1, 32, 64, 128])
@pytest.mark.parametrize("split", SPLITS)
def test_captured_decode_is_the_same_for_every_placement(
    resident: tuple[Path, Decoded, float], slots: int, split: str
) -> None:
    path, want, bound = resident
    executor = load(path, slots)
    store = executor.store
    store.force_split(*SPLITS[split])
    before = store.statistics().sum(0)
    got = decoded(executor, TOKENS, replay=want)
    assert got.nmse(want) < bound, "the same experts, so a race or a wrong expert"
    total = store.statistics().sum(0) - before
    assert total[Stat.EXPERTS] == len(TOKENS) * 4 * 8
    assert total[Stat.HITS] + total[Stat.FILLS] + total[Stat.CPU] == total[Stat.EXPERTS]
    if split != "cpu" and slots in (32, 64):
        assert total[Stat.FILLS] > 0
    assert judge(decoded(executor, TOKENS), want, bound) == ""
    store.close()


@pytest.mark.parametrize("slots", [1, 32])
def test_the_same_run_gives_the_same_bits(path: Path, slots: int) -> None:
    """From the same cache, 40 steps with fills and the CPU in every one of them: a race shows as another bit."""
    runs = []
    for _ in range(3):
        executor = load(path, slots)
        executor.store.force_split(*SPLITS["mixed"])
        runs.append(decoded(executor, TOKENS))
        executor.store.close()
    for other in runs[1:]:
        np.testing.assert_array_equal(other.ids, runs[0].ids)
        np.testing.assert_array_equal(other.logits, runs[0].logits)


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.GATHER, Mode.SHARE, Mode.CPU])
def test_prefill_modes(path: Path, mode: Mode) -> None:
    expected = load(path, None).forward(rows(TOKENS, 0, list(range(40)))).copy()
    executor = load(path, 64)
    executor.store.prefill.force = mode
    got = executor.forward(rows(TOKENS, 0, list(range(40))))
    assert nmse(got, expected) < (1e-6 if mode in (Mode.STREAM, Mode.GATHER) else 1e-3)
    executor.store.close()


def test_the_watchdog_releases_the_gpu(path: Path) -> None:
    executor = load(path, 0, timeout=0.5)
    executor.store.mail.doorbell.stall(2.0)
    with pytest.raises(ExecutorLost, match="did not finish request"):
        executor.forward(rows([5], 0, [0]))
    executor.store.close()


def test_a_resize_gives_memory_back_and_keeps_the_answer(resident: tuple[Path, Decoded, float]) -> None:
    path, want, bound = resident
    executor = load(path, 128)
    store = executor.store
    for slots in (16, 100):
        store.resize(2 * store.ring.half + slots * max(s.slot_bytes for s in store.order))
        assert decoded(executor, TOKENS, replay=want).nmse(want) < bound
    store.close()


def test_the_probe_measures_both_paths(path: Path) -> None:
    executor = load(path, 0)
    p = Probe(executor.store, 0.05)
    for kind in p.kinds():
        rates = p.measure(kind).rates
        assert rates.fill > 1e9
        assert rates.cpu > 1e8
        assert 0 < rates.fill_contended <= rates.fill
    executor.store.close()
