"""The cached store on a CUDA device, decode captured: placement does not change the answer, and a watchdog releases a
waiting GPU. The store with every expert resident is the oracle; the checks of placement are those of
tests/experts/test_placement_answers.py, on 12 layers of 32 experts, and docs/measurements/placement.md argues for them:

- one layer on one input: NMSE 1e-11 once other roundings of intermediate values are taken off, each of which is seen;
- F16 everywhere: 1e-6 over 40 tokens (F32: 1e-10), each run on its own KV, with the resident run's routes replayed. F16
  experts in a model with 8-bit attention are not enough: the CPU executor alone then moves by 7e-5 or more at a tie;
- Q4_K_M: each token as a first step on the resident run's KV. Equal up to the first value that is rounded otherwise;
  from there below twice what the CPU executor does to itself when one weight changes by one unit in the last place.

Routed freely, the first other expert must be at a tie; the same run twice gives the same bits, since the split is fixed
and every sum has an order. Numbers are printed: `pytest -rP`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, overload

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "experts"))
from placement_checks import (
    PASS,
    SAME,
    Bench,
    Placing,
    Text,
    along,
    assert_chain,
    assert_layers_same,
    assert_says_the_same,
    bound_of,
    layers_under,
    placings,
    ready,
    steps_under,
)  # fmt: skip
from placement_faults import BROKEN, assert_fault_shows
from placement_helpers import nmse
from rounding_noise import Nudged
from store_helpers import CachedExecutor, decoded, hooked, judge, load_cached, rows

from compat.synth import make
from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.engine.executor import ExecutorLost
from ftgguf.experts.measure import Probe
from ftgguf.experts.pinning import cuda_pinner
from ftgguf.experts.prefill import Mode
from ftgguf.experts.residency import Stat
from ftgguf.nouns import F32
from ftgguf.pull.upcycle import upcycle

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 300, 40)]
LAYERS, EXPERTS, K = 12, 32, 8
SIZES: dict[str, Any] = {"n_layer": LAYERS, "n_expert": EXPERTS, "n_expert_used": K, "n_embd": 512, "n_ff_expert": 256}
TYPES: dict[str, Any] = {
    "F32": "F32",
    "F16": "F16",
    "Q4_K_M": {
        "*ffn_down_exps.weight": "Q6_K", "*attn_v.weight": "Q6_K", "output.weight": "Q6_K", "*": "Q4_K",
    },
}  # fmt: skip
PLACINGS = placings(LAYERS, EXPERTS, K)
LAYER_STEPS = 16
"""Tokens whose layers are all compared; the float reference is NumPy's."""
SPLITS: dict[str, tuple[Any, ...]] = {
    "filled": (65536, 1), "cpu": (0, 0), "mixed": (32768, 1), "mostly cpu": (16384, 1),
    "shared": (40000, 1, (1, 40000)),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"*ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"}
    return make("qwen3moe", tmp_path_factory.mktemp("gpu") / "m.gguf", types=types, n_layer=4, n_expert=32,
                n_expert_used=8, n_embd=1024, n_ff_expert=512)  # fmt: skip


@overload
def load(path: Path, slots: int, **options: Any) -> CachedExecutor: ...


@overload
def load(path: Path, slots: None, **options: Any) -> CudaExecutor: ...


def load(path: Path, slots: int | None, **options: Any) -> CudaExecutor:
    if slots is not None:
        options.setdefault("pinner", cuda_pinner(DEVICE))
    executor = load_cached(path, DEVICE, slots, decode_rows=2, ring_slots=16, **options)
    hooked(executor)
    executor.warm_up()
    return executor


def bench_of(kind: str, folder: Path, **sizes: int) -> Bench:
    path = make("qwen3moe", folder / "m.gguf", types=TYPES[kind], **SIZES | sizes)
    return Bench.of(path, DEVICE, TOKENS, ring_slots=16, pinner=cuda_pinner(DEVICE))


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of("F16", tmp_path_factory.mktemp("f16"))


@pytest.fixture(scope="module")
def f32(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of("F32", tmp_path_factory.mktemp("f32"), n_layer=4)


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of("Q4_K_M", tmp_path_factory.mktemp("q4"))


@pytest.fixture(scope="module")
def bound(q4: Bench, tmp_path_factory: pytest.TempPathFactory) -> float:
    """What a step may show after a tie, from the CPU executor alone."""
    nudged = Nudged(q4.path, tmp_path_factory.mktemp("noise"), 256)
    noise = nudged.noise(TOKENS, 20)
    nudged.close()
    print("CPU executor, one unit in the last place:", sorted(f"{n.nmse:.1e}" for n in noise if n.routed))
    return bound_of(noise)


@pytest.mark.parametrize("kind", ["F16", "Q4_K_M"])
@pytest.mark.parametrize("name", PLACINGS)
def test_a_layer_is_the_same_for_every_placement(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    bench: Bench = request.getfixturevalue({"F16": "f16", "Q4_K_M": "q4"}[kind])
    with bench.placed(PLACINGS[name]) as executor:
        found = layers_under(bench, executor, slice(LAYER_STEPS))
    print(kind, name, found)
    assert_layers_same(found)
    if name in ("hit", "filled"):
        assert found.raw == 0


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_shows(q4: Bench, fault: str) -> None:
    name, break_it = BROKEN[fault]
    with q4.placed(PLACINGS[name]) as executor:
        assert_fault_shows(q4, executor, break_it)


@pytest.mark.parametrize("name", PLACINGS)
def test_steps_part_at_a_rounding_tie_only(q4: Bench, bound: float, name: str) -> None:
    with q4.placed(PLACINGS[name]) as executor:
        steps = steps_under(q4, executor)
    apart = [s.logits for s in steps if s.first is not None]
    print(f"{name}: {len(apart)} of {len(steps)} steps pass a tie: NMSE {max(apart, default=0):.1e} of {bound:.1e}")
    print(f"layers before it, and steps without: {max(s.before for s in steps):.1e}")
    assert_chain(steps, bound)
    assert all(s.before < PASS for s in steps)
    if name in ("hit", "filled"):
        assert not apart


@pytest.mark.parametrize(("kind", "bound"), [("F16", SAME), ("F32", 1e-10)])
def test_a_whole_run_is_the_same_where_nothing_is_rounded_to_8_bits(
    request: pytest.FixtureRequest, kind: str, bound: float
) -> None:
    """Every placement of the resident run's experts, on its own float32 KV; and as far from the float reference."""
    bench: Bench = request.getfixturevalue(kind.lower())
    exact = bench.reference.logits(TOKENS, bench.decoded.ids)
    resident = nmse(bench.decoded.logits, exact)
    layers = len(bench.seen[0].y)
    for slots in (0, 1, layers * EXPERTS // 4, layers * EXPERTS // 2, layers * EXPERTS):
        executor = load_cached(bench.path, DEVICE, slots, decode_rows=1, ring_slots=16, pinner=cuda_pinner(DEVICE))
        store = executor.store
        hooked(executor)
        ready(executor)
        for split, how in SPLITS.items():
            store.force_split(*how)
            before = store.statistics().sum(0)
            got = decoded(executor, TOKENS, replay=bench.decoded)
            total = store.statistics().sum(0) - before
            error, far = got.nmse(bench.decoded), nmse(got.logits, exact)
            print(f"{kind}, {slots} slots, {split}: NMSE {error:.1e}; to the reference {far:.1e} of {resident:.1e}")
            assert error < bound
            assert far < max(1.5 * resident, 1e-10)
            assert total[Stat.EXPERTS] == len(TOKENS) * layers * K
            assert total[Stat.HITS] + total[Stat.FILLS] + total[Stat.CPU] == total[Stat.EXPERTS]
        assert judge(decoded(executor, TOKENS), bench.decoded, bound) == ""
        store.close()


def test_a_text_is_the_same(tmp_path: Path) -> None:
    """256 tokens of a trained model with Q8_0 experts, every run on its own KV and routes."""
    path = tmp_path / "stories.gguf"
    upcycle(Path(__file__).parents[1] / "data" / "stories260K.gguf", path, arch="llama", expert_type="Q8_0")
    text = Text.of(path, tmp_path, 256)

    def said(placing: Placing | None) -> F32:
        options: dict[str, Any] = {} if placing is None else {"pinner": cuda_pinner(DEVICE), "warm": placing.warm}
        slots = None if placing is None else placing.slots
        executor = load_cached(path, DEVICE, slots, decode_rows=1, n_cells=512, **options)
        ready(executor)
        if placing is not None:
            assert isinstance(executor, CachedExecutor)
            placing.force(executor.store)
        logits = along(executor, text.tokens)
        executor.store.close()
        return logits

    want = said(None)
    assert_says_the_same(want, text.logits, text.noise)
    for placing in placings(5, 8, 2).values():
        got = said(placing)
        print(placing.name, f"NMSE {nmse(got, want):.1e}, other tokens {(got.argmax(-1) != want.argmax(-1)).sum()}")
        assert_says_the_same(got, want, text.noise)


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


def test_a_resize_gives_memory_back_and_keeps_the_answer(f16: Bench) -> None:
    executor = load(f16.path, 128)
    store = executor.store
    for slots in (16, 100):
        store.resize(2 * store.ring.half + slots * max(s.slot_bytes for s in store.order))
        assert decoded(executor, TOKENS, replay=f16.decoded).nmse(f16.decoded) < SAME
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
