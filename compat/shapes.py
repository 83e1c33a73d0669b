"""Which shapes and type mixes do the models have that people run? For files with random weights and true sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from compat.families import Sizes


@dataclass(frozen=True, slots=True)
class Shape:
    """A real model: architecture, dimensions, vocabulary size and `types(n_layer)`, its usual quantisation mix."""

    arch: str
    sizes: Sizes
    n_vocab: int
    types: Callable[[int], Callable[[str], str]]


def q4_k_m(n_layer: int) -> Callable[[str], str]:
    """llama-quantize's Q4_K_M: Q6_K for the output, and for V and down in an eighth of the layers at each end and
    every third between."""

    def type_of(name: str) -> str:
        if name == "output.weight":
            return "Q6_K"
        part = name.split(".")
        if part[0] == "blk" and part[2] in ("attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp"):
            i, eighth = int(part[1]), n_layer // 8
            more = i < eighth or i >= 7 * n_layer // 8 or (i - eighth) % 3 == 2
            return "Q6_K" if more else "Q4_K"
        return "Q4_K"

    return type_of


def mxfp4_moe(_n_layer: int) -> Callable[[str], str]:
    """gpt-oss as it is published: MXFP4 experts, the rest Q8_0."""
    return lambda name: "MXFP4" if "_exps." in name else "Q8_0"


_QWEN3_30B = Sizes(
    n_layer=48,
    n_embd=2048,
    n_head=32,
    n_head_kv=4,
    head_dim=128,
    n_rot=128,
    n_ff=6144,
    n_expert=128,
    n_expert_used=8,
    n_ff_expert=768,
    n_context=40960,
    rope_base=1e6,
    eps=1e-6,
)
_QWEN36_35B = Sizes(
    n_layer=40,
    n_embd=2048,
    n_head=16,
    n_head_kv=2,
    head_dim=256,
    n_rot=64,
    n_ff=512,
    n_expert=256,
    n_expert_used=8,
    n_ff_expert=512,
    n_ff_shared=512,
    n_context=262144,
    rope_base=1e7,
    eps=1e-6,
    ssm_state=128,
    ssm_key_heads=16,
    ssm_value_heads=32,
)
_GPT_OSS_20B = Sizes(
    n_layer=24,
    n_embd=2880,
    n_head=64,
    n_head_kv=8,
    head_dim=64,
    n_rot=64,
    n_ff=2880,
    n_expert=32,
    n_expert_used=4,
    n_ff_expert=2880,
    n_context=131072,
    rope_base=150000.0,
    window=128,
)
_OLMOE = Sizes(
    n_layer=16,
    n_embd=2048,
    n_head=16,
    n_head_kv=16,
    head_dim=128,
    n_rot=128,
    n_ff=1024,
    n_expert=64,
    n_expert_used=8,
    n_ff_expert=1024,
)

SHAPES: dict[str, Shape] = {
    "qwen3-30b": Shape("qwen3moe", _QWEN3_30B, 151_936, q4_k_m),
    "qwen36-35b": Shape("qwen35moe", _QWEN36_35B, 248_320, q4_k_m),
    "gpt-oss-20b": Shape("gpt-oss", _GPT_OSS_20B, 201_088, mxfp4_moe),
    # the same expert traffic in a family without sinks and windows, for measurements of the expert cache
    "gpt-oss-20b-experts": Shape("qwen3moe", replace(_GPT_OSS_20B, window=0), 201_088, mxfp4_moe),
    "olmoe": Shape("olmoe", _OLMOE, 50_304, q4_k_m),
}
