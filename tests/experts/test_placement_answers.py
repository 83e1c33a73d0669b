"""Placement does not change the answer: the argument of docs/measurements/placement.md on tiny models, under the
interpreter. tests/gpu/test_store_gpu.py has the same checks on a CUDA device and larger models.

The oracle is the store with every expert resident, on the same inputs; the bound where 8-bit roundings differ comes
from the CPU executor against itself (rounding_noise). Faults put in on purpose show that the checks see them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from placement_checks import (  # noqa: E402
    LAYER,
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
    steps_under,
)
from placement_faults import BROKEN, assert_fault_shows, jitter, nearest_ties, with_steps  # noqa: E402
from placement_helpers import nmse  # noqa: E402
from rounding_noise import Nudged  # noqa: E402
from store_helpers import decoded, load_cached  # noqa: E402

from compat.synth import make  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EXPERTS, K = 8, 4
NARROW = {
    "n_expert": EXPERTS, "n_expert_used": K, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_rot": 32, "n_embd": 64,
    "n_ff": 64, "n_ff_expert": 64,
}  # fmt: skip
WIDE = NARROW | {"n_embd": 256, "n_ff_expert": 256}
TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "F32": ("F32", NARROW | {"n_layer": 2}),
    "F16": ("F16", NARROW | {"n_layer": 2}),
    "Q8_0": ("Q8_0", NARROW | {"n_layer": 2}),
    "MXFP4": ({"*_exps.weight": "MXFP4", "*": "Q8_0"}, NARROW | {"n_layer": 1}),
    "Q4_K and Q6_K": (
        {"*ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"}, WIDE | {"n_layer": 1}
    ),
    "IQ4_XS": ({"*_exps.weight": "IQ4_XS", "*": "Q8_0"}, WIDE | {"n_layer": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    """`benches(type, tokens)`: the resident run of a tiny model, made once."""
    folder, made = tmp_path_factory.mktemp("placement"), {}

    def get(kind: str, tokens: int, layers: int | None = None) -> Bench:
        key = (kind, tokens, layers)
        if key not in made:
            types, sizes = TYPES[kind]
            sizes = sizes if layers is None else sizes | {"n_layer": layers}
            path = make("qwen3moe", folder / f"{kind}-{layers}.gguf", types=types, **sizes)
            ids = np.random.default_rng(0).integers(3, 300, tokens)
            made[key] = Bench.of(path, DEVICE, [int(t) for t in ids])
        return made[key]

    return get


def placed(bench: Bench) -> dict[str, Placing]:
    return placings(len(bench.seen[0].y), EXPERTS, K)


@pytest.mark.parametrize("kind", [k if k != "IQ4_XS" else pytest.param(k, marks=pytest.mark.slow) for k in TYPES])
def test_a_layer_is_the_same_for_every_placement(benches: Callable[..., Bench], kind: str) -> None:
    """Each layer on the resident run's input. Where experts run on the device, nothing differs at all."""
    bench = benches(kind, {"F32": 3, "F16": 3, "Q8_0": 2}.get(kind, 1))
    for name, placing in placed(bench).items():
        with bench.placed(placing) as executor:
            found = layers_under(bench, executor, slice(1))
        print(kind, name, found)
        assert_layers_same(found)
        if name in ("hit", "filled"):
            assert found.raw == 0


def test_a_rounding_tie_is_the_whole_difference(benches: Callable[..., Bench]) -> None:
    """Inputs chosen so that an intermediate value lies at a tie: the CPU rounds some to the other side, which moves
    the layer by up to 1e-5 here, and by exactly what the other rounding brings."""
    bench = benches("Q8_0", 2)
    with bench.placed(placed(bench)["cpu"]) as executor:
        ties = with_steps(bench, nearest_ties(executor, 1000, 6))
        found = layers_under(ties, executor)
    assert_layers_same(found, reference=0.1)  # a flip in each of a dozen rows of 64
    print(found)
    assert found.flips > 0
    assert found.raw > 100 * LAYER


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_shows(benches: Callable[..., Bench], fault: str) -> None:
    bench = benches("Q8_0", 2)
    name, break_it = BROKEN[fault]
    with bench.placed(placed(bench)[name]) as executor:
        assert_fault_shows(bench, executor, break_it)


def test_steps_part_at_a_rounding_tie_only(benches: Callable[..., Bench], tmp_path: Path) -> None:
    """Decode steps after the same prefill. Nothing passes a tie here by itself; with the CPU's sums worse by a
    thousand times something does, and the logits then are as far off as one tie on the CPU executor brings."""
    bench = benches("Q8_0", 2)
    nudged = Nudged(bench.path, tmp_path, 256)
    bound = bound_of(nudged.noise(bench.tokens, 12))
    nudged.close()
    assert 1e-5 < bound < 1e-2
    apart = []
    for name, by in (("cpu", 0.0), ("mixed 50 %", 0.0), ("cpu", 3e-4)):
        with bench.placed(placed(bench)[name]) as executor:
            if by:
                jitter(executor, by)
            steps = steps_under(bench, executor)
        print(name, by, steps, f"bound {bound:.1e}")
        assert_chain(steps, bound)
        if by:
            apart = [s for s in steps if s.first is not None]
        else:
            assert all(s.before < PASS for s in steps)
    assert apart
    assert max(s.logits for s in apart) > SAME


@pytest.mark.parametrize(("kind", "bound"), [("F32", 1e-10), ("F16", SAME)])
def test_a_whole_run_is_the_same_where_nothing_is_rounded_to_8_bits(
    benches: Callable[..., Bench], kind: str, bound: float
) -> None:
    """Each run on its own KV, routed as the resident run was; and as far from the float reference as that."""
    bench = benches(kind, 3)
    want = bench.reference.logits(bench.tokens, bench.decoded.ids)
    resident = nmse(bench.decoded.logits, want)
    for name in ("cpu", "shared"):
        with bench.placed(placed(bench)[name]) as executor:
            got = decoded(executor, bench.tokens, replay=bench.decoded)
        print(kind, name, f"NMSE {got.nmse(bench.decoded):.1e}, to the reference {nmse(got.logits, want):.1e}")
        assert got.nmse(bench.decoded) < bound
        assert nmse(got.logits, want) < max(1.5 * resident, 1e-11)


@pytest.mark.parametrize(
    ("names", "tokens"), [(["mixed 25 %"], 2), pytest.param(["hit", "cpu", "mixed 50 %"], 12, marks=pytest.mark.slow)]
)
def test_the_text_is_the_same(stories_moe: Callable[..., Path], tmp_path: Path, names: list[str], tokens: int) -> None:
    """The beginning of a real text, on every run's own KV and routes, as the CPU executor has it: random weights would
    do for the sums, but only a trained model is decided about its next token."""
    path = stories_moe("llama", "Q8_0")
    text = Text.of(path, tmp_path, 256)
    for name in names:
        placing = placings(5, 8, 2)[name]
        executor = load_cached(path, DEVICE, placing.slots, decode_rows=1, warm=placing.warm)
        store = executor.store
        placing.force(store)
        assert_says_the_same(along(executor, text.tokens[:tokens]), text.logits[:tokens], text.noise)
        placing.check(store.statistics().sum(0))
        store.close()
