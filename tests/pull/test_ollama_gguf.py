"""Files as Ollama's converter writes them: made from llama.cpp's form by the table of differences, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from compat.synth import make
from ftgguf.gguf import GGUFError, open_gguf
from ftgguf.pull.ollama_gguf import open_model

_BACK = {"attn_output.": "attn_out.", "attn_sinks.weight": "attn_sinks", "post_attention_norm.": "ffn_norm."}
_DROPPED = ("gpt-oss.expert_feed_forward_length", "gpt-oss.rope.scaling.type")


def as_ollama_writes(source: Path, target: Path) -> None:
    """`source`, a llama.cpp `gpt-oss`, with Ollama's old names: the inverse of the published table."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "gptoss")
    for key, item in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", *_DROPPED):
            continue
        value: Any = "default" if key == "tokenizer.ggml.pre" else item.contents()
        kind = item.types[0]
        sub = item.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key.replace("gpt-oss.", "gptoss."), value, kind, sub)
    for tensor in reader.tensors:
        name = tensor.name
        for new, old in _BACK.items():
            name = name.replace(new, old)
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(llama.cpp's gpt-oss, the same as an Ollama blob without a suffix)."""
    folder = tmp_path_factory.mktemp("gptoss")
    good = folder / "good.gguf"
    make("gpt-oss", good, types={"*_exps.weight": "MXFP4", "*": "Q8_0"})
    blob = folder / f"sha256-{'a' * 64}"
    as_ollama_writes(good, blob)
    return good, blob


def test_gptoss_is_translated(pair: tuple[Path, Path]) -> None:
    """R67: every tensor under llama.cpp's name, with the same type, shape and bytes; the keys too."""
    good, blob = pair
    with open_gguf(blob) as raw:
        assert raw.architecture == "gptoss"
        assert "blk.0.attn_sinks" in raw.tensors
    with open_gguf(good) as wanted, open_model(blob) as found:
        assert found.architecture == "gpt-oss"
        assert set(found.tensors) == set(wanted.tensors)
        for name, tensor in wanted.tensors.items():
            assert found.tensors[name].type == tensor.type
            assert found.tensors[name].shape == tensor.shape
            assert np.array_equal(found.data(name), wanted.data(name))
        for name in ("expert_feed_forward_length", "block_count", "attention.sliding_window", "expert_count"):
            assert found.arch(name) == wanted.arch(name)
        assert found.arch("rope.scaling.type", kind=str) == "yarn"
        assert found.get("tokenizer.ggml.pre") == "gpt-4o"


def test_overrides_win_over_the_translation(pair: tuple[Path, Path]) -> None:
    """--override-kv names the keys that the model has after it."""
    with open_model(pair[1], {"gpt-oss.expert_used_count": 1}) as found:
        assert found.arch("expert_used_count") == 1


def test_llama_cpps_files_pass_untouched(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """gpt-oss itself and other architectures."""
    with open_model(pair[0]) as found:
        assert dict(found.metadata.overrides) == {}
    for architecture in ("qwen3moe", "qwen3next", "llama"):
        path = tmp_path / f"{architecture}.gguf"
        make(architecture, path)
        with open_model(path) as found:
            assert found.architecture == architecture


def _header(path: Path, architecture: str, tensors: list[str], **keys: str) -> Path:
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_string(key.replace("__", "."), value)
    for name in tensors:
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "tensors", "keys"),
    [
        ("gemma3", ["token_embd.weight", "v.patch_embd.weight"], {}),
        ("llama4", ["token_embd.weight", "mm.linear_1.weight"], {}),
        ("qwen35moe", ["blk.0.ssm_dt"], {}),
        ("qwen3next", ["blk.0.ssm_dt"], {}),
        ("qwen35moe", ["mtp.layers.0.weight"], {}),
        ("gemma4", ["blk.0.ffn_gate_inp.per_expert_scale"], {}),
        ("gemma4", ["token_embd.weight"], {"tokenizer__ggml__model": "llama"}),
        ("glm4moelite", ["token_embd.weight"], {}),
        ("nemotron_h_moe", ["blk.0.ffn_latent_in.weight"], {}),
        ("deepseekocr", ["token_embd.weight"], {}),
        ("gptoss", ["blk.0.attn_qkv.weight"], {}),
        ("gptoss", ["token_embd.weight"], {}),
    ],
)
def test_other_conversions_are_refused_by_name(
    tmp_path: Path, architecture: str, tensors: list[str], keys: dict[str, str]
) -> None:
    """The architecture, why, and a command; from the table of what Ollama's converter does differently."""
    path = _header(tmp_path / "blob", architecture, tensors, **keys)
    with pytest.raises(GGUFError, match=rf"Ollama-format '{architecture}' GGUF .*'ftgguf pull hf.co/"):
        open_model(path)
