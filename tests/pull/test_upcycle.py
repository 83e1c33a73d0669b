"""Exact sparse upcycling, checked against libllama on the dense source and against the source's bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from compat.oracle import F32, Oracle, kld, nmse
from compat.synth import make
from ftgguf.pull.upcycle import UpcycleError, upcycle

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(scope="module")
def dense(stories_dense: Path) -> tuple[list[int], F32, bytes]:
    """Tokens, libllama's logits [n, 512] and 60 greedy tokens of the dense model."""
    with Oracle(stories_dense) as oracle:
        tokens = oracle.tokenize(TEXT)
        return tokens, oracle.prefill_logits(tokens), oracle.greedy(tokens[:5], 60).text


@pytest.mark.parametrize(
    ("arch", "type_", "bound"),
    [
        ("llama", None, 1e-7),  # the same float32 weights: only the order of summation differs
        ("granitemoe", None, 1e-7),
        ("glm4moe", None, 1e-7),
        ("glm4moe", "F16", 1e-5),
        ("llama", "Q8_0", 1e-3),
    ],
)
def test_moe_equals_dense(
    stories_moe: Callable[..., Path], dense: tuple[list[int], F32, bytes], arch: str, type_: str | None, bound: float
) -> None:
    """Logits (NMSE) and greedy text against the dense model, in libllama."""
    tokens, logits, text = dense
    with Oracle(stories_moe(arch, type_)) as oracle:
        assert nmse(oracle.prefill_logits(tokens), logits) < bound
        assert kld(oracle.decode_logits(tokens), logits) < 30 * bound
        assert oracle.greedy(tokens[:5], 60).text == text


@pytest.mark.parametrize(("arch", "type_"), [("llama", "MXFP4"), ("granitemoe", "Q4_0")])
def test_coarse_types_still_tell_a_story(
    stories_moe: Callable[..., Path], dense: tuple[list[int], F32, bytes], arch: str, type_: str
) -> None:
    """4-bit experts stay near the dense logits (libllama); a wrong expert mix gives an NMSE near 1."""
    tokens, logits, _ = dense
    with Oracle(stories_moe(arch, type_)) as oracle:
        assert nmse(oracle.prefill_logits(tokens), logits) < 0.05


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_quantised_blocks_are_moved_not_changed(tmp_path: Path, quantisation: str) -> None:
    """Each expert's blocks are the dense tensor's in another order; no two experts have the same bytes."""
    width = 1024
    source = make("llama", tmp_path / "dense.gguf", types=quantisation, n_expert=0, n_ff=width, n_layer=1)
    moe = upcycle(source, tmp_path / "moe.gguf", experts=4)
    before = {t.name: np.array(t.data) for t in GGUFReader(source).tensors}
    after = {t.name: np.array(t.data) for t in GGUFReader(moe).tensors}
    for kind in ("ffn_gate", "ffn_up"):
        rows = {row.tobytes() for row in before[f"blk.0.{kind}.weight"]}
        experts = after[f"blk.0.{kind}_exps.weight"]
        assert all({row.tobytes() for row in expert} == rows for expert in experts)
        assert len({expert.tobytes() for expert in experts}) == 4
    down = after["blk.0.ffn_down_exps.weight"]
    assert len({expert.tobytes() for expert in down}) == 4
    for expert in down:
        assert np.array_equal(np.sort(expert, axis=1), np.sort(before["blk.0.ffn_down.weight"], axis=1))
    for name, data in before.items():
        if "ffn_gate" not in name and "ffn_up" not in name and "ffn_down" not in name:
            assert np.array_equal(after[name], data), name


def test_quantised_upcycling_is_exact_in_libllama(tmp_path: Path) -> None:
    """A random Q8_0 model and its MoE, logits in libllama: block sums are equal, so only summation order differs."""
    source = make("llama", tmp_path / "dense.gguf", types="Q8_0", n_expert=0)
    moe = upcycle(source, tmp_path / "moe.gguf", experts=8, used=3)
    tokens = list(range(40))
    with Oracle(source) as a, Oracle(moe) as b:
        assert nmse(b.prefill_logits(tokens), a.prefill_logits(tokens)) < 1e-4


def test_progress_ends_at_one_and_the_same_seed_gives_the_same_file(stories_dense: Path, tmp_path: Path) -> None:
    """Fractions ascend to 1; equal bytes for equal seeds, others for another."""
    seen: list[float] = []
    first = upcycle(stories_dense, tmp_path / "a.gguf", name="x", progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    second = upcycle(stories_dense, tmp_path / "b.gguf", name="x")
    third = upcycle(stories_dense, tmp_path / "c.gguf", name="x", seed=2)
    assert first.read_bytes() == second.read_bytes() != third.read_bytes()


def test_a_failure_leaves_no_file(stories_dense: Path, tmp_path: Path) -> None:
    """The target and its temporary are absent after an exception in the middle."""

    def interrupt(fraction: float) -> None:
        if fraction > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upcycle(stories_dense, tmp_path / "x.gguf", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exact_is_refused(stories_dense: Path, stories_moe: Callable[..., Path], tmp_path: Path) -> None:
    """Every refusal names its cause."""
    target = tmp_path / "x.gguf"
    with pytest.raises(UpcycleError, match="qwen3moe"):
        upcycle(stories_dense, target, arch="qwen3moe")
    with pytest.raises(UpcycleError, match="dense"):
        upcycle(stories_moe(), target)
    with pytest.raises(UpcycleError, match="used"):
        upcycle(stories_dense, target, experts=2, used=3)
    with pytest.raises(UpcycleError, match="unknown tensor type"):
        upcycle(stories_dense, target, expert_type="Q9_Z")
    with pytest.raises(UpcycleError, match="no quantiser"):
        upcycle(stories_dense, target, expert_type="IQ4_NL")
    narrow = make("llama", tmp_path / "narrow.gguf", types="Q4_K", n_expert=0, n_ff=512)
    with pytest.raises(UpcycleError, match="orders"):
        upcycle(narrow, target, experts=4)  # two blocks of 256: two orders
    assert not target.exists()
