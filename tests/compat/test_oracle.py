"""The oracle's own arithmetic and bookkeeping: against NumPy, and libllama against itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compat.oracle import Oracle, OracleError, kld, log_softmax, nmse
from compat.synth import make

TEXT = "Once upon a time, there was a little girl named Lily."


def test_nmse_and_kld_by_hand() -> None:
    """Small cases worked out by hand."""
    expected = np.array([[3.0, 4.0]], np.float32)
    assert nmse(expected, expected) == 0.0
    assert nmse(np.array([[3.0, 3.0]], np.float32), expected) == pytest.approx(1 / 25)
    uniform, skewed = np.zeros((1, 2), np.float32), np.log(np.array([[0.25, 0.75]], np.float32))
    assert kld(uniform, uniform) == pytest.approx(0.0)
    assert kld(uniform, skewed) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5), rel=1e-5)
    assert np.exp(log_softmax(np.array([[1e4, 1e4 - 1]], np.float32))).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("repack", [False, True])
def test_prefill_batches_and_steps_agree(stories_moe: Callable[..., Path], repack: bool) -> None:
    """One batch, several batches and single steps give the same logits."""
    with Oracle(stories_moe("llama", "Q8_0"), repack=repack) as whole:
        tokens = whole.tokenize(TEXT)
        logits = whole.prefill_logits(tokens)
        assert logits.shape == (len(tokens), 512)
        assert nmse(whole.decode_logits(tokens), logits) < 1e-4
        whole.truncate(5)
        assert nmse(whole.evaluate(tokens[5:]), logits[5:]) < 1e-4
    with Oracle(stories_moe("llama", "Q8_0"), n_batch=7, n_ubatch=7, repack=repack) as cut:
        assert nmse(cut.prefill_logits(tokens), logits) < 1e-4
        assert cut.evaluate([1], all_logits=False).shape == (1, 512)


def test_repacked_kernels_are_those_of_the_default_build(tmp_path: Path) -> None:
    """Q4_0 is repacked by libllama on every CPU it knows: other kernels, nearly the same logits."""
    path = make("llama", tmp_path / "m.gguf", types="Q4_0")
    tokens = list(range(30))
    with Oracle(path) as plain, Oracle(path, repack=True) as repacked:
        assert nmse(repacked.prefill_logits(tokens), plain.prefill_logits(tokens)) < 1e-3


def test_kv_cache_types(tmp_path: Path) -> None:
    """A coarser cache moves the logits, a little."""
    path = make("llama", tmp_path / "m.gguf", types="F32", n_expert=0)
    tokens = list(range(30))
    with Oracle(path, type_k="f32", type_v="f32") as fine, Oracle(path, type_k="q8_0", type_v="q8_0") as coarse:
        error = nmse(coarse.prefill_logits(tokens), fine.prefill_logits(tokens))
        assert 0 < error < 1e-2


def test_greedy_gaps_and_speed(stories_dense: Path) -> None:
    """The gap is the difference of the two best logits; timings count their tokens."""
    with Oracle(stories_dense) as oracle:
        prompt = oracle.tokenize("Once upon a time")
        found = oracle.greedy(prompt, 3)
        last = np.sort(oracle.prefill_logits([*prompt, *found.tokens[:2]])[-1])
        assert found.gaps[2] == pytest.approx(last[-1] - last[-2], rel=1e-3)
        speed = oracle.bench_prefill(64, repetitions=2)
        assert (speed.name, speed.n_tokens, len(speed.samples)) == ("pp64", 64, 2)
        assert oracle.bench_decode(4, repetitions=1).mean > 0


def test_misuse_is_told(stories_dense: Path, tmp_path: Path) -> None:
    """Errors name the cause instead of crashing libllama."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF no")
    with pytest.raises(OracleError, match=r"bad\.gguf"):
        Oracle(tmp_path / "bad.gguf")
    with Oracle(stories_dense, n_ctx=256) as oracle:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            oracle.evaluate([512])
        with pytest.raises(OracleError, match="do not fit"):
            oracle.evaluate([1] * 300)
        with pytest.raises(ValueError, match="no tokens"):
            oracle.evaluate([])
