"""GGUF files as Ollama's own converter writes them: `gptoss` is translated while it is opened, the rest is refused.

Most of Ollama's library is llama.cpp's format and passes through untouched. Its own conversions differ in names,
metadata and in what else is packed into the file; read as they are they fail late ("missing tensor") or, worse, run
wrong. What differs for `gptoss`, against llama.cpp's `gpt-oss`:

- the architecture's name, and with it the prefix of its keys;
- no `expert_feed_forward_length`: it is the second dimension of an expert's gate;
- tensors `attn_out`, `attn_sinks` (no `.weight`) and `ffn_norm`, there `attn_output`, `attn_sinks.weight` and
  `post_attention_norm`;
- no `rope.scaling.type` (yarn), and a pre-tokenizer that is not `gpt-4o`.

The data are the same bytes, so nothing is copied: the reader gets another header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ftgguf.gguf import GGUFError, GGUFFile, Shard, open_gguf
from ftgguf.gguf.metadata import Override
from ftgguf.quoting import shown

_OLD, _NEW = "gptoss", "gpt-oss"
_RENAMES = (
    (re.compile(r"(blk\.\d+\.)attn_out\.(weight|bias)"), r"\1attn_output.\2"),
    (re.compile(r"(blk\.\d+\.)attn_sinks"), r"\1attn_sinks.weight"),
    (re.compile(r"(blk\.\d+\.)ffn_norm\.weight"), r"\1post_attention_norm.weight"),
)
_FUSED = re.compile(r"blk\.\d+\.(attn_qkv|ffn_gate_up_exps)\.")
_GATE = "blk.0.ffn_gate_exps.weight"

_ONLY_OLLAMA = ("glm4moelite", "glmocr", "deepseekocr", "qwen25vl", "nemotron_h_omni", "mllama", "laguna")
"""Architectures that llama.cpp has under another name, or not at all."""
_EMBEDDED = re.compile(r"(?:v|mm|a|mtp|s)\.")
"""Prefixes of a vision, audio or draft part inside the file; llama.cpp keeps those in files of their own."""
_MARKS = {
    "qwen35": re.compile(r"blk\.\d+\.ssm_dt"),
    "qwen35moe": re.compile(r"blk\.\d+\.ssm_dt"),
    "qwen3next": re.compile(r"blk\.\d+\.ssm_dt"),
    "gemma4": re.compile(r"blk\.\d+\.ffn_gate_inp\.per_expert_scale"),
    "nemotron_h_moe": re.compile(r"blk\.\d+\.ffn_latent_(?:in|out)\..*"),
}
"""Tensors, by their whole names, that only Ollama's conversion of the architecture has."""
_INSTEAD = {
    "gptoss": "hf.co/ggml-org/gpt-oss-20b-GGUF",
    "qwen3next": "hf.co/unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF:Q4_K_M",
    "glm4moelite": "hf.co/unsloth/GLM-4.7-Flash-GGUF:Q4_K_M",
    "llama4": "hf.co/unsloth/Llama-4-Scout-17B-16E-Instruct-GGUF:Q4_K_M",
    "gemma3": "hf.co/ggml-org/gemma-3-4b-it-GGUF",
}
"""A repository with the same model in llama.cpp's format, where one is well known."""


def open_model(path: str | Path, overrides: Mapping[str, Override] | None = None) -> GGUFFile:
    """`open_gguf` for a model that is to be run: translated where that is possible.

    Raises GGUFError for a file that cannot be used, and for Ollama's conversions by their name, with the command that
    gets a file that works.
    """
    gguf = open_gguf(path)
    try:
        architecture = gguf.get("general.architecture", "", str)
        if architecture == _OLD:
            return _translated(gguf, dict(overrides or {}))
        _refuse_foreign(gguf, architecture)
    except BaseException:
        gguf.close()
        raise
    return GGUFFile(gguf.path, gguf.shards, overrides) if overrides else gguf


def is_translated(gguf: GGUFFile) -> bool:
    """Whether `open_model` gave this file another header."""
    return gguf.metadata.overrides.get("general.architecture") == _NEW and gguf.metadata.decoded(
        "general.architecture"
    ) == (_OLD)


def _translated(gguf: GGUFFile, overrides: dict[str, Override]) -> GGUFFile:
    fused = next((name for name in gguf.tensors if _FUSED.match(name)), None)
    gate = gguf.tensors.get(_GATE)
    if fused is not None or gate is None or len(gate.shape) != 3:
        found = f"it has {shown(fused)}" if fused else f"it lacks {shown(_GATE)}"
        raise GGUFError(gguf.path, None, _refusal(_OLD, f"an early conversion: {found}"))
    shards = tuple(_renamed(shard) for shard in gguf.shards)
    added: dict[str, Override] = {
        "general.architecture": _NEW,
        f"{_NEW}.expert_feed_forward_length": gate.shape[1],
        f"{_NEW}.rope.scaling.type": "yarn",
        "tokenizer.ggml.pre": "gpt-4o",
    }
    return GGUFFile(gguf.path, shards, added | overrides)


def _renamed(shard: Shard) -> Shard:
    """The shard with llama.cpp's names for tensors and keys; records and data stay where they are."""
    tensors = [tensor._replace(name=_tensor_name(tensor.name)) for tensor in shard.header.tensors]
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise GGUFError(shard.path, None, "tensors of the same meaning appear twice: the file is damaged")
    records = {
        re.sub(rf"^{_OLD}\.", f"{_NEW}.", key): record
        for key, record in shard.header.records.items()
        if not key.startswith(f"{_NEW}.")
    }
    return replace(shard, header=replace(shard.header, tensors=tensors, records=records))


def _tensor_name(name: str) -> str:
    for pattern, new in _RENAMES:
        if pattern.fullmatch(name):
            return pattern.sub(new, name)
    return name


def _refuse_foreign(gguf: GGUFFile, architecture: str) -> None:
    if architecture in ("clip", ""):
        return
    mark = _MARKS.get(architecture)
    for name in gguf.tensors:
        if _EMBEDDED.match(name):
            why = f"it has parts of another model inside, such as {shown(name)}"
        elif mark is not None and mark.fullmatch(name):
            why = f"a tensor is called {shown(name)}"
        else:
            continue
        raise GGUFError(gguf.path, None, _refusal(architecture, why))
    if architecture in _ONLY_OLLAMA:
        raise GGUFError(gguf.path, None, _refusal(architecture, "the architecture's name"))
    if architecture == "gemma4" and gguf.get("tokenizer.ggml.model") == "llama":
        raise GGUFError(gguf.path, None, _refusal(architecture, "its tokenizer is declared as 'llama'"))


def _refusal(architecture: str, why: str) -> str:
    instead = _INSTEAD.get(architecture, "hf.co/USER/REPO-GGUF:Q4_K_M")
    known = "" if architecture in _INSTEAD else ", with a repository that has the model in llama.cpp's format"
    return (
        f"an Ollama-format {shown(architecture)} GGUF ({why}), which only Ollama reads: "
        f"get the model by 'ftgguf pull {instead}'{known}"
    )
