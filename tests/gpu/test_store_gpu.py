"""The cached store on a CUDA device, decode captured: the same answers for every placement, and a watchdog that
releases a waiting GPU. The resident store is the oracle (tests/experts/test_expert_store.py has the same under the
interpreter, with prefill's modes).

Two models, one bound: NMSE 1e-6, with the resident run's routes replayed. With F16 experts nothing is rounded to 8
bits, so only a race or a wrong expert can exceed it. With Q4_K and Q6_K experts rounding can, too: a unit in the last
place moves an activation over an 8-bit step now and then, which moves hundreds of the next products' over theirs, and
the error jumps from 0 to the size of the 8-bit rounding itself, 5e-5 to 9e-5. That happens where nothing runs at
once, under the interpreter (six tokens: two placements equal to the bit, two at 8e-5), and on the CPU executor alone
when the norms' weights move by a unit in the last place. `mixed` with 32 slots is known to fail by it (5.4e-5) until
the CPU's experts are added up in the order of ranks with the GPU's (docs/measurements/offload.md).

Routed freely, the first other expert must be at a tie; the same run twice gives the same bits, since the split is fixed
and every sum has an order."""

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
    "F16": {"*_exps.weight": "F16", "*": "Q8_0"},
    "Q4_K": {"*ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"},
}
SAME = 1e-6
"""How far placement may move the logits (NMSE)."""


def made(folder: Path, types: dict[str, str]) -> Path:
    return make("qwen3moe", folder / "m.gguf", types=types, n_layer=4, n_expert=32, n_expert_used=8, n_embd=1024,
                n_ff_expert=512)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("gpu"), TYPES["Q4_K"])


def load(path: Path, slots: int | None, **options: Any) -> Any:
    if slots is not None:
        options.setdefault("pinner", cuda_pinner(DEVICE))
    executor = load_cached(path, DEVICE, slots, decode_rows=2, ring_slots=16, **options)
    hooked(executor)
    executor.warm_up()
    return executor


@pytest.fixture(scope="module", params=list(TYPES))
def resident(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoded]:
    """A model, and what it says with every expert resident."""
    path = made(tmp_path_factory.mktemp(request.param), TYPES[request.param])
    return path, decoded(load(path, None), TOKENS)


@pytest.mark.parametrize("slots", [0, 1, 32, 64, 128])
@pytest.mark.parametrize("split", SPLITS)
def test_captured_decode_is_the_same_for_every_placement(
    resident: tuple[Path, Decoded], slots: int, split: str
) -> None:
    path, want = resident
    executor = load(path, slots)
    store = executor.store
    store.force_split(*SPLITS[split])
    before = store.statistics().sum(0)
    got = decoded(executor, TOKENS, replay=want)
    assert got.nmse(want) < SAME, "the same experts, so a race or a wrong expert"
    total = store.statistics().sum(0) - before
    assert total[Stat.EXPERTS] == len(TOKENS) * 4 * 8
    assert total[Stat.HITS] + total[Stat.FILLS] + total[Stat.CPU] == total[Stat.EXPERTS]
    if split != "cpu" and slots in (32, 64):
        assert total[Stat.FILLS] > 0
    assert judge(decoded(executor, TOKENS), want, SAME) == ""
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


def test_a_resize_gives_memory_back_and_keeps_the_answer(resident: tuple[Path, Decoded]) -> None:
    path, want = resident
    executor = load(path, 128)
    store = executor.store
    for slots in (16, 100):
        store.resize(2 * store.ring.half + slots * max(s.slot_bytes for s in store.order))
        assert decoded(executor, TOKENS, replay=want).nmse(want) < SAME
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
