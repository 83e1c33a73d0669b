"""Logits of the CPU executor against libllama on the same file (compat.oracle): the same ggml kernels in the same
order, so the two agree to the last bit, in both weight layouts. A tolerance would hide a wrong operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from compat.oracle import Oracle
from ftgguf.engine.layout import Layout

from .helpers import load, rows, some_tokens, step_by_step

FAMILIES = ["llama", "qwen3", "qwen3moe", "granitemoe", "glm4moe"]
TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
    "NVFP4",
    "Q1_0",
    "Q2_0",
]


def compare(path: Path, layout: Layout, n: int = 70, steps: int = 12) -> None:
    oracle = Oracle(path, n_ctx=256, n_threads=2, repack=layout is not Layout.PLAIN)
    executor = load(path, layout)
    tokens = some_tokens(executor, n)
    np.testing.assert_array_equal(executor.forward(rows(tokens, 0, range(n))), oracle.prefill_logits(tokens))
    np.testing.assert_array_equal(step_by_step(executor, tokens[:steps]), oracle.decode_logits(tokens[:steps]))
    oracle.close()


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("layout", [Layout.PLAIN, Layout.REPACKED])
def test_families(synthetic: Callable[..., Path], arch: str, layout: Layout) -> None:
    compare(synthetic(arch, "Q4_K"), layout)


def test_dense_llama(synthetic: Callable[..., Path]) -> None:
    compare(synthetic("llama", "Q8_0", n_expert=0), Layout.PLAIN)


@pytest.mark.parametrize("types", TYPES)
def test_every_tensor_type(synthetic: Callable[..., Path], types: str) -> None:
    compare(synthetic("qwen3moe", types), Layout.PLAIN, n=20, steps=4)


def test_glm4moe_with_leading_dense_block_and_qk_norm(synthetic: Callable[..., Path]) -> None:
    compare(synthetic("glm4moe", "Q8_0", n_layer=3, n_dense=1, qk_norm=True), Layout.PLAIN)


@pytest.mark.parametrize(
    ("arch", "kind"), [("llama", "Q8_0"), ("llama", "MXFP4"), ("granitemoe", "Q4_0"), ("glm4moe", "F16")]
)
def test_trained_weights(stories_moe: Callable[..., Path], arch: str, kind: str) -> None:
    """Real text weights, where a wrong expert turns the story to garbage."""
    compare(stories_moe(arch, kind), Layout.PLAIN, n=100, steps=20)


def test_both_layouts_agree_with_plain(synthetic: Callable[..., Path]) -> None:
    """BOTH decodes with the repacked weights and prefills with the file's: each as the oracle of that layout."""
    path = synthetic("qwen3moe", "Q4_K")
    executor, plain, packed = load(path, Layout.BOTH), load(path, Layout.PLAIN), load(path, Layout.REPACKED)
    tokens = some_tokens(executor, 200)
    np.testing.assert_array_equal(executor.forward(rows(tokens, 0, [199])), plain.forward(rows(tokens, 0, [199])))
    np.testing.assert_array_equal(step_by_step(executor, tokens[:5]), step_by_step(packed, tokens[:5]))


def with_keys(source: Path, target: Path, keys: dict[str, object]) -> Path:
    """A copy of `source` with more metadata."""
    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind is GGUFValueType.ARRAY else None)
    for name, value in keys.items():
        getattr(writer, {str: "add_string", float: "add_float32", int: "add_uint32"}[type(value)])(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.attn_factor": 1.25},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {"rope.scale_linear": 4.0, "rope.freq_base": 5e5},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"attention.scale": 0.3},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_rope_scaling_keys(stories_dense: Path, tmp_path: Path, keys: dict[str, object]) -> None:
    """libllama derives its rotation from the same keys, and ignores `attention.scale` in this family."""
    compare(with_keys(stories_dense, tmp_path / "m.gguf", {f"llama.{k}": v for k, v in keys.items()}), Layout.PLAIN, 90)
