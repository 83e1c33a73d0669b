"""What metadata and tensors does a GGUF file of each architecture hold?

Written from llama.cpp's loaders (`src/models/*.cpp`, names in `src/llama-arch.cpp`) and checked by loading every
family in libllama. Shapes are slowest dimension first, so a projection is (outputs, inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a synthetic model; the defaults suit every tensor type (multiples of 256)."""

    n_layer: int = 2
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 64
    """Dimensions of a head that RoPE turns."""
    n_ff: int = 512
    """Width of dense feed-forward networks."""
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_expert: int = 256
    n_ff_shared: int = 0
    """Width of the shared expert; 0 where the architecture can do without."""
    n_dense: int = 0
    """Leading layers with a dense feed-forward network."""
    n_context: int = 4096
    rope_base: float = 1e4
    eps: float = 1e-5
    qk_norm: bool = False
    """glm4moe: RMS norm on each head's Q and K, as the 355B model has."""
    window: int = 32
    """Sliding window of the layers that have one."""
    attention_interval: int = 4
    """Hybrid models: every n-th layer has full attention."""
    ssm_state: int = 64
    ssm_key_heads: int = 2
    ssm_value_heads: int = 4
    ssm_kernel: int = 4
    q_rank: int = 256
    kv_rank: int = 256
    v_dim: int = 64
    """Latent attention: ranks of Q and KV, and the value's dimension per head."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: values are normal with `mean` and `std`; `fixed` ones stay F32 whatever types were asked for."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: its sizes unless asked otherwise, extra metadata, and the tensors of layer i."""

    defaults: Sizes
    metadata: Callable[[Sizes], dict[str, Any]]
    layer: Callable[[str, int, Sizes], Iterator[Weight]]
    embedding_std: float = 1.0


# ------------------------------------------------------------------------------------------------ building blocks


def linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
    """A projection whose outputs have about `gain` times the inputs' variance."""
    return Weight(name, (outputs, inputs), gain * inputs**-0.5)


def norm(name: str, size: int) -> Weight:
    """An RMS norm's weight, around 1 but not 1: one that was left out shows."""
    return Weight(name, (size,), 0.1, 1.0, fixed=True)


def vector(name: str, *shape: int, std: float = 0.1, mean: float = 0.0) -> Weight:
    """A bias or another small float32 tensor."""
    return Weight(name, shape, std, mean, fixed=True)


def attention(b: str, s: Sizes, *, bias: str = "", qk_norm: str = "", gate: bool = False) -> Iterator[Weight]:
    """Grouped-query attention. `bias` lists projections of `qkvo`; `qk_norm` is `head` or `full`; `gate` doubles Q."""
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    yield norm(b + "attn_norm.weight", s.n_embd)
    yield linear(b + "attn_q.weight", q * (2 if gate else 1), s.n_embd)
    yield linear(b + "attn_k.weight", kv, s.n_embd)
    yield linear(b + "attn_v.weight", kv, s.n_embd)
    yield linear(b + "attn_output.weight", s.n_embd, q)
    for letter, name, size in (
        ("q", "attn_q", q),
        ("k", "attn_k", kv),
        ("v", "attn_v", kv),
        ("o", "attn_output", s.n_embd),
    ):
        if letter in bias:
            yield vector(f"{b}{name}.bias", size)
    if qk_norm:
        yield norm(b + "attn_q_norm.weight", s.head_dim if qk_norm == "head" else q)
        yield norm(b + "attn_k_norm.weight", s.head_dim if qk_norm == "head" else kv)


def dense_ffn(b: str, s: Sizes) -> Iterator[Weight]:
    """A gated feed-forward network."""
    yield linear(b + "ffn_gate.weight", s.n_ff, s.n_embd)
    yield linear(b + "ffn_up.weight", s.n_ff, s.n_embd)
    yield linear(b + "ffn_down.weight", s.n_embd, s.n_ff)


def experts(b: str, s: Sizes, *, selection_bias: bool = False, bias: bool = False) -> Iterator[Weight]:
    """Router and routed experts; the router's logits spread by 2, so that few tokens are near a tie."""
    e, f, d = s.n_expert, s.n_ff_expert, s.n_embd
    yield Weight(b + "ffn_gate_inp.weight", (e, d), 2 * d**-0.5, fixed=True)
    if selection_bias:
        yield vector(b + "exp_probs_b.bias", e)
    yield Weight(b + "ffn_gate_exps.weight", (e, f, d), d**-0.5)
    yield Weight(b + "ffn_up_exps.weight", (e, f, d), d**-0.5)
    yield Weight(b + "ffn_down_exps.weight", (e, d, f), f**-0.5)
    if bias:
        yield vector(b + "ffn_gate_inp.bias", e)
        yield vector(b + "ffn_gate_exps.bias", e, f)
        yield vector(b + "ffn_up_exps.bias", e, f)
        yield vector(b + "ffn_down_exps.bias", e, d)


def shared_expert(b: str, s: Sizes, *, gate: bool = False) -> Iterator[Weight]:
    """The always-on expert, `gate`: weighted by the sigmoid of a projection."""
    if not s.n_ff_shared:
        return
    if gate:
        yield vector(b + "ffn_gate_inp_shexp.weight", s.n_embd, std=s.n_embd**-0.5)
    yield linear(b + "ffn_gate_shexp.weight", s.n_ff_shared, s.n_embd)
    yield linear(b + "ffn_up_shexp.weight", s.n_ff_shared, s.n_embd)
    yield linear(b + "ffn_down_shexp.weight", s.n_embd, s.n_ff_shared)


# ------------------------------------------------------------------------------------------------ architectures


def _llama(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s)
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from experts(b, s) if s.n_expert else dense_ffn(b, s)
    yield from shared_expert(b, s)


def _qwen2(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, bias="qkv")
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from dense_ffn(b, s)


def _gemma3(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, qk_norm="head")
    yield norm(b + "post_attention_norm.weight", s.n_embd)
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from dense_ffn(b, s)
    yield norm(b + "post_ffw_norm.weight", s.n_embd)


def _qwen3(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, qk_norm="head")
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from experts(b, s) if s.n_expert else dense_ffn(b, s)


def _qwen2moe(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, bias="qkv")
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from experts(b, s)
    yield from shared_expert(b, s, gate=True)


def _olmoe(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, qk_norm="full")
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from experts(b, s)


def _minimax_m2(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, qk_norm="full")
    yield norm(b + "ffn_norm.weight", s.n_embd)
    yield from experts(b, s, selection_bias=True)


def _glm4moe(b: str, i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, bias="qkv", qk_norm="head" if s.qk_norm else "")
    yield norm(b + "post_attention_norm.weight", s.n_embd)
    if i < s.n_dense:
        yield from dense_ffn(b, s)
    else:
        yield from experts(b, s, selection_bias=True)
        yield from shared_expert(b, s)


def _ernie(b: str, i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s)
    yield norm(b + "ffn_norm.weight", s.n_embd)
    if i < s.n_dense:
        yield from dense_ffn(b, s)
    else:
        yield from experts(b, s, selection_bias=True)
        yield from shared_expert(b, s)


def _gpt_oss(b: str, _i: int, s: Sizes) -> Iterator[Weight]:
    yield from attention(b, s, bias="qkvo")
    yield vector(b + "attn_sinks.weight", s.n_head, std=1.0)
    yield norm(b + "post_attention_norm.weight", s.n_embd)
    yield from experts(b, s, bias=True)


def _delta_net(b: str, s: Sizes, *, fused: bool) -> Iterator[Weight]:
    """Gated DeltaNet; `fused`: beta and alpha in one tensor (qwen3next)."""
    keys, values = s.ssm_state * s.ssm_key_heads, s.ssm_state * s.ssm_value_heads
    yield norm(b + "attn_norm.weight", s.n_embd)
    yield linear(b + "attn_qkv.weight", 2 * keys + values, s.n_embd)
    yield linear(b + "attn_gate.weight", values, s.n_embd)
    yield vector(b + "ssm_conv1d.weight", 2 * keys + values, s.ssm_kernel, std=0.5)
    yield vector(b + "ssm_dt.bias", s.ssm_value_heads, std=0.5)
    yield vector(b + "ssm_a", s.ssm_value_heads, std=0.1, mean=-0.5)
    if fused:
        yield linear(b + "ssm_ba.weight", 2 * s.ssm_value_heads, s.n_embd)
    else:
        yield linear(b + "ssm_beta.weight", s.ssm_value_heads, s.n_embd)
        yield linear(b + "ssm_alpha.weight", s.ssm_value_heads, s.n_embd)
    yield norm(b + "ssm_norm.weight", s.ssm_state)
    yield linear(b + "ssm_out.weight", s.n_embd, values)


def _hybrid(fused: bool) -> Callable[[str, int, Sizes], Iterator[Weight]]:
    def layer(b: str, i: int, s: Sizes) -> Iterator[Weight]:
        if (i + 1) % s.attention_interval:
            yield from _delta_net(b, s, fused=fused)
        else:
            yield from attention(b, s, qk_norm="head", gate=True)
        yield norm(b + "post_attention_norm.weight", s.n_embd)
        yield from experts(b, s)
        yield from shared_expert(b, s, gate=True)

    return layer


def _deepseek2(b: str, i: int, s: Sizes) -> Iterator[Weight]:
    nope = s.head_dim - s.n_rot
    yield norm(b + "attn_norm.weight", s.n_embd)
    yield linear(b + "attn_q_a.weight", s.q_rank, s.n_embd)
    yield norm(b + "attn_q_a_norm.weight", s.q_rank)
    yield linear(b + "attn_q_b.weight", s.n_head * s.head_dim, s.q_rank)
    yield linear(b + "attn_kv_a_mqa.weight", s.kv_rank + s.n_rot, s.n_embd)
    yield norm(b + "attn_kv_a_norm.weight", s.kv_rank)
    yield Weight(b + "attn_k_b.weight", (s.n_head, s.kv_rank, nope), nope**-0.5)
    yield Weight(b + "attn_v_b.weight", (s.n_head, s.v_dim, s.kv_rank), s.kv_rank**-0.5)
    yield linear(b + "attn_output.weight", s.n_embd, s.n_head * s.v_dim)
    yield norm(b + "ffn_norm.weight", s.n_embd)
    if i < s.n_dense:
        yield from dense_ffn(b, s)
    else:
        yield from experts(b, s, selection_bias=True)
        yield from shared_expert(b, s)


# ------------------------------------------------------------------------------------------------ metadata


def _plain(_s: Sizes) -> dict[str, Any]:
    return {}


def _expert_width(s: Sizes) -> dict[str, Any]:
    return {"expert_feed_forward_length": s.n_ff_expert} if s.n_expert else {}


def _gemma3_metadata(s: Sizes) -> dict[str, Any]:
    return {"attention.sliding_window": s.window}


def _shared_width(s: Sizes) -> dict[str, Any]:
    extra = {"expert_shared_feed_forward_length": s.n_ff_shared} if s.n_ff_shared else {}
    return _expert_width(s) | extra


def _llama_metadata(s: Sizes) -> dict[str, Any]:
    """Mixtral's experts have the width of `feed_forward_length`."""
    width: dict[str, Any] = {"feed_forward_length": s.n_ff_expert} if s.n_expert else {}
    return width | ({"expert_shared_feed_forward_length": s.n_ff_shared} if s.n_ff_shared else {})


def _granite_metadata(s: Sizes) -> dict[str, Any]:
    scales = {
        "logit_scale": 6.0,
        "residual_scale": 0.22,
        "embedding_scale": 12.0,
        "attention.scale": 1.0 / s.head_dim,
    }
    return _llama_metadata(s) | scales


def _glm_metadata(s: Sizes) -> dict[str, Any]:
    return _expert_width(s) | {
        "expert_shared_count": s.n_ff_shared // s.n_ff_expert,
        "leading_dense_block_count": s.n_dense,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }


def _minimax_metadata(s: Sizes) -> dict[str, Any]:
    return _expert_width(s) | {"feed_forward_length": s.n_ff_expert, "expert_gating_func": 2}


def _ernie_metadata(s: Sizes) -> dict[str, Any]:
    return _shared_width(s) | {"interleave_moe_layer_step": 1, "leading_dense_block_count": s.n_dense}


def _gpt_oss_metadata(s: Sizes) -> dict[str, Any]:
    return _expert_width(s) | {
        "attention.sliding_window": s.window,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }


def _hybrid_metadata(s: Sizes) -> dict[str, Any]:
    return _shared_width(s) | {
        "ssm.conv_kernel": s.ssm_kernel,
        "ssm.inner_size": s.ssm_state * s.ssm_value_heads,
        "ssm.state_size": s.ssm_state,
        "ssm.time_step_rank": s.ssm_value_heads,
        "ssm.group_count": s.ssm_key_heads,
        "full_attention_interval": s.attention_interval,
    }


def _qwen35_metadata(s: Sizes) -> dict[str, Any]:
    """RoPE sections (time, height, width) in the ratio 11:11:10 of half the rotated dimensions."""
    half = s.n_rot // 2
    side = half * 11 // 32
    return _hybrid_metadata(s) | {"rope.dimension_sections": [side, side, half - 2 * side, 0]}


def _deepseek2_metadata(s: Sizes) -> dict[str, Any]:
    return _expert_width(s) | {
        "attention.q_lora_rank": s.q_rank,
        "attention.kv_lora_rank": s.kv_rank,
        "attention.head_count_kv": 1,
        "attention.key_length": s.kv_rank + s.n_rot,
        "attention.value_length": s.kv_rank,
        "attention.key_length_mla": s.head_dim,
        "attention.value_length_mla": s.v_dim,
        "leading_dense_block_count": s.n_dense,
        "expert_shared_count": s.n_ff_shared // s.n_ff_expert,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    }


_BASE = Sizes()
_DENSE = replace(_BASE, n_expert=0, n_expert_used=0)
_SHARED = replace(_BASE, n_ff_shared=256)
_LEADING = replace(_SHARED, n_layer=3, n_dense=1)
_HYBRID = replace(_SHARED, n_layer=4, n_rot=32)

FAMILIES: dict[str, Family] = {
    "llama": Family(_BASE, _llama_metadata, _llama),
    "qwen2": Family(_DENSE, _plain, _qwen2),
    "qwen3": Family(_DENSE, _plain, _qwen3),
    "gemma3": Family(replace(_DENSE, n_layer=6), _gemma3_metadata, _gemma3, embedding_std=1 / 16),
    "qwen3moe": Family(_BASE, _expert_width, _qwen3),
    "qwen2moe": Family(_SHARED, _shared_width, _qwen2moe),
    "olmoe": Family(replace(_BASE, n_head_kv=4), _llama_metadata, _olmoe),
    "granitemoe": Family(_BASE, _granite_metadata, _llama, embedding_std=1 / 12),
    "glm4moe": Family(replace(_LEADING, n_rot=32), _glm_metadata, _glm4moe),
    "minimax-m2": Family(replace(_BASE, n_rot=32), _minimax_metadata, _minimax_m2),
    "ernie4_5-moe": Family(_LEADING, _ernie_metadata, _ernie),
    "gpt-oss": Family(replace(_BASE, n_head=8), _gpt_oss_metadata, _gpt_oss),
    "qwen3next": Family(_HYBRID, _hybrid_metadata, _hybrid(fused=True)),
    "qwen35moe": Family(_HYBRID, _qwen35_metadata, _hybrid(fused=False)),
    "deepseek2": Family(replace(_LEADING, head_dim=96, n_rot=32), _deepseek2_metadata, _deepseek2),
}
"""By `general.architecture`. `llama` with `n_expert=0` is the dense model."""


def metadata(arch: str, s: Sizes) -> dict[str, Any]:
    """All architecture keys, without the `<arch>.` prefix. Floats become float32, other numbers uint32."""
    common: dict[str, Any] = {
        "block_count": s.n_layer,
        "context_length": s.n_context,
        "embedding_length": s.n_embd,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps,
        "rope.dimension_count": s.n_rot,
        "rope.freq_base": s.rope_base,
    }
    if s.n_expert:
        common |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used}
    return common | FAMILIES[arch].metadata(s)


def weights(arch: str, s: Sizes, n_vocab: int) -> Iterator[Weight]:
    """All tensors in file order."""
    family = FAMILIES[arch]
    yield Weight("token_embd.weight", (n_vocab, s.n_embd), family.embedding_std)
    yield linear("output.weight", n_vocab, s.n_embd, gain=3.0)
    yield norm("output_norm.weight", s.n_embd)
    for i in range(s.n_layer):
        yield from family.layer(f"blk.{i}.", i, s)
