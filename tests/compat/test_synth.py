"""Synthetic models: every architecture and every tensor type loads in libllama and computes finite logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from compat import vocab
from compat.blocks import LAYOUTS, dequantize, nbytes, random_tensor
from compat.families import FAMILIES, Sizes
from compat.oracle import Oracle, nmse
from compat.shapes import SHAPES, q4_k_m
from compat.synth import main, make

TOKENS = list(range(30, 62))


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_architecture_runs_in_libllama(arch: str, tmp_path: Path) -> None:
    """Finite logits with spread, alike for prefill and step by step (libllama against itself)."""
    with Oracle(make(arch, tmp_path / "m.gguf", types="Q8_0"), n_ctx=64) as oracle:
        logits = oracle.prefill_logits(TOKENS)
        assert logits.shape == (len(TOKENS), 320)
        assert np.isfinite(logits).all()
        assert logits.std() > 0.3
        assert nmse(oracle.decode_logits(TOKENS[:16]), logits[:16]) < 1e-2


@pytest.mark.parametrize("type_", LAYOUTS)
def test_every_type_runs_in_libllama(type_: str, tmp_path: Path) -> None:
    """As experts and as all other weights: finite logits that differ from token to token."""
    path = make("llama", tmp_path / "m.gguf", types=type_, n_layer=1, n_expert=4)
    with Oracle(path, n_ctx=64) as oracle:
        logits = oracle.prefill_logits(TOKENS[:8])
        assert np.isfinite(logits).all()
        assert len(np.unique(logits.argmax(axis=1))) > 1


@pytest.mark.parametrize("type_", LAYOUTS)
def test_random_blocks_have_the_asked_spread(type_: str) -> None:
    """Values by the gguf package's dequantiser; scales differ between blocks."""
    shape, std = (64, 512), 0.05
    data = random_tensor(type_, shape, std, np.random.default_rng(3))
    assert data.nbytes == nbytes(type_, shape)
    values = dequantize(type_, data, shape)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=0.25)
    per_block = np.abs(values.reshape(-1, max(LAYOUTS[type_].block, 64))).mean(axis=1)
    assert per_block.std() > 0.1 * per_block.mean() or LAYOUTS[type_].block == 1


def test_dequantised_weights_are_what_libllama_computes_with(tmp_path: Path) -> None:
    """A model whose experts are Q2_0 or Q1_0 equals one with their dequantised values in F32 (libllama on both)."""
    for type_ in ("Q1_0", "Q2_0"):
        types = {"*_exps.weight": type_, "*": "F32"}
        source = make("llama", tmp_path / f"{type_}.gguf", types=types, n_layer=1, n_expert=4)
        plain = make("llama", tmp_path / "plain.gguf", types="F32", n_layer=1, n_expert=4)
        _copy_tensors(source, plain, type_)
        with Oracle(source, n_ctx=64) as a, Oracle(plain, n_ctx=64) as b:
            assert nmse(a.prefill_logits(TOKENS), b.prefill_logits(TOKENS)) < 1e-3  # activations are quantised in a


def _copy_tensors(source: Path, plain: Path, type_: str) -> None:
    """Overwrite the tensors of `plain` (all F32) with the values of `source`; offsets read by name from the bytes."""
    raw, target = source.read_bytes(), bytearray(plain.read_bytes())
    wanted = {t.name: t for t in GGUFReader(plain).tensors}
    offset = _data_start(raw)
    for name, tensor in wanted.items():  # the same order in both files
        shape = tuple(int(n) for n in reversed(tensor.shape))
        kind = type_ if "_exps." in name else "F32"
        size = nbytes(kind, shape)
        values = dequantize(kind, np.frombuffer(raw, np.uint8, size, offset).copy(), shape)
        start = int(tensor.data_offset)
        target[start : start + values.nbytes] = values.tobytes()
        offset += -(-size // 32) * 32
    plain.write_bytes(target)


def _data_start(raw: bytes) -> int:
    """Where tensor data starts: behind the last tensor's info (name, dims, type, offset), on a multiple of 32."""
    last = b"blk.0.ffn_down_exps.weight"
    end = raw.rindex(last) + len(last) + 4 + 3 * 8 + 4 + 8
    return -(-end // 32) * 32


def test_nvfp4_with_second_level_scales(tmp_path: Path) -> None:
    """libllama multiplies by the `.scale` tensors: other scales for one tensor give other logits."""
    scaled = make("qwen3moe", tmp_path / "a.gguf", types="NVFP4", scales=True)
    name = "blk.0.ffn_up_exps.scale"
    tensor = next(t for t in GGUFReader(scaled).tensors if t.name == name)
    assert tuple(tensor.shape) == (8,)
    other = make("qwen3moe", tmp_path / "b.gguf", types="NVFP4", scales=True, values={name: 3 * np.array(tensor.data)})
    with Oracle(scaled, n_ctx=64) as a, Oracle(other, n_ctx=64) as b:
        logits = a.prefill_logits(TOKENS)
        assert np.isfinite(logits).all()
        assert nmse(b.prefill_logits(TOKENS), logits) > 1e-2


def test_types_by_pattern_and_fallback(tmp_path: Path) -> None:
    """A mix as Q4_K_M has; rows that a block does not fit become Q8_0, but never silently so for experts."""
    path = make("qwen3moe", tmp_path / "m.gguf", types=q4_k_m(2))
    types = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert types["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    odd = make("llama", tmp_path / "n.gguf", types={"*_exps.*": "Q4_0", "*": "Q4_K"}, n_embd=320, n_head=5, n_head_kv=1)
    assert {t.name: t.tensor_type.name for t in GGUFReader(odd).tensors}["blk.0.attn_q.weight"] == "Q8_0"
    with pytest.raises(ValueError, match="ffn_gate_exps"):
        make("llama", tmp_path / "o.gguf", types="Q4_K", n_embd=320)
    with pytest.raises(ValueError, match="no pattern"):
        make("llama", tmp_path / "o.gguf", types={"*_exps.*": "Q4_K"})
    with pytest.raises(ValueError, match="unknown sizes"):
        make("llama", tmp_path / "o.gguf", n_layers=3)
    with pytest.raises(ValueError, match="unknown architecture"):
        make("lama", tmp_path / "o.gguf")


def test_tiny_vocabulary_knows_its_control_tokens(tmp_path: Path) -> None:
    """libllama's tokenizer: one token per marker, all bytes survive a round trip, generation ends at <|im_end|>."""
    path = make("llama", tmp_path / "m.gguf", n_layer=1, n_expert=0)
    with Oracle(path, n_ctx=64) as oracle:
        for name, _ in vocab.SPECIALS:
            assert len(oracle.tokenize(name)) == 1, name
        text = "the thing \u00e9 \U0001f600\n\tx"
        assert oracle.detokenize(oracle.tokenize(text)) == text.encode()
        assert oracle.is_end(oracle.tokenize("<|im_end|>")[0])
        assert oracle.tokenize("the") != oracle.tokenize("th") + oracle.tokenize("e")  # merges are applied


def test_plausible_vocabulary_loads(tmp_path: Path) -> None:
    """A generated vocabulary of 20,000: unique tokens, and libllama round-trips text with it."""
    made = vocab.plausible(20_000)
    tokens = next(value for key, value, *_ in made.entries if key == "tokenizer.ggml.tokens")
    assert len(tokens) == len(set(tokens)) == made.size == 20_000
    path = make("llama", tmp_path / "m.gguf", vocab=made, n_layer=1, n_expert=0, n_ff=256)
    with Oracle(path, n_ctx=64) as oracle:
        text = "A sentence of ordinary words, 123."
        ids = oracle.tokenize(text)
        assert oracle.detokenize(ids) == text.encode()
        assert len(ids) < len(text) * 0.8
    assert vocab.from_gguf(path).size == made.size


def test_the_command_line_writes_a_real_shape(tmp_path: Path, stories_dense: Path) -> None:
    """One layer of OLMoE's shape with another file's vocabulary (libllama loads it)."""
    out = tmp_path / "olmoe.gguf"
    main([str(out), "--shape", "olmoe", "--layers", "1", "--vocab", str(stories_dense)])
    with Oracle(out, n_ctx=64) as oracle:
        assert oracle.n_vocab == 512
        assert np.isfinite(oracle.prefill_logits(TOKENS[:4])).all()


def test_shapes_are_those_of_the_models() -> None:
    """Parameters of the routed experts against the models' published totals (30.5B, 35B, 20.9B with the rest)."""

    def routed(size: Sizes) -> float:
        return 3 * size.n_layer * size.n_expert * size.n_ff_expert * size.n_embd / 1e9

    assert routed(SHAPES["qwen3-30b"].sizes) == pytest.approx(29.0, abs=0.1)
    assert routed(SHAPES["qwen36-35b"].sizes) == pytest.approx(32.2, abs=0.1)
    assert routed(SHAPES["gpt-oss-20b"].sizes) == pytest.approx(19.1, abs=0.1)


def test_no_two_rows_of_a_large_matrix_are_the_same() -> None:
    """Twins in the head are exact ties between tokens, which would excuse any difference of greedy texts."""
    rows = 80000
    data = random_tensor("Q8_0", (rows, 64), 1.0, np.random.default_rng(1)).reshape(rows, -1)
    assert len(np.unique(data, axis=0)) == rows
