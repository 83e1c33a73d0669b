"""Blocks that several families are built from: embedding, head, grouped-query attention, feed-forwards."""

from __future__ import annotations

from ftgguf.layers.params import Attention, Embedding, Experts, Gating, Head, Linear, Mlp, Moe, Rope, Router
from ftgguf.models.config import ModelError, Numbers
from ftgguf.models.source import Source, Use


def embedding(s: Source, n: Numbers, scale: float = 1.0) -> Embedding:
    return Embedding(s.take("token_embd.weight", (n.n_vocab, n.n_embd), Use.EMBEDDING), scale)


def head(s: Source, n: Numbers, *, scale: float = 1.0, softcap: float = 0.0) -> Head:
    """The output projection, or the token embedding where the file ties them."""
    if s.has("output.weight"):
        out = s.linear("output", n.n_vocab, n.n_embd)
    else:
        out = Linear(s.take("token_embd.weight", (n.n_vocab, n.n_embd), Use.LINEAR))
    return Head(s.vector("output_norm.weight", n.n_embd), out, n.eps, scale, softcap)


def attention(
    s: Source,
    n: Numbers,
    layer: int,
    rope: Rope | None,
    *,
    qk_norm: str = "none",
    scale: float = 0.0,
    norm: str = "attn_norm",
    window: int = 0,
    sinks: bool = False,
) -> Attention:
    """GQA of block `layer`. `qk_norm`: `none`, `required`, `optional`. `scale` 0: 1 / sqrt(head_dim)."""
    b = f"blk.{layer}."
    heads, kv = n.heads[layer], n.kv_heads[layer]
    q_out, k_out, v_out = heads * n.head_dim, kv * n.head_dim, kv * n.v_dim
    fused = s.maybe_linear(b + "attn_qkv", q_out + k_out + v_out, n.n_embd)
    qk = {"none": False, "required": True, "optional": s.has(b + "attn_q_norm.weight")}[qk_norm]
    return Attention(
        norm=s.vector(b + norm + ".weight", n.n_embd),
        out=s.linear(b + "attn_output", n.n_embd, heads * n.v_dim),
        heads=heads,
        kv_heads=kv,
        head_dim=n.head_dim,
        v_dim=n.v_dim,
        scale=scale or n.head_dim**-0.5,
        eps=n.eps,
        q=None if fused else s.linear(b + "attn_q", q_out, n.n_embd),
        k=None if fused else s.linear(b + "attn_k", k_out, n.n_embd),
        v=None if fused else s.linear(b + "attn_v", v_out, n.n_embd),
        fused=fused,
        rope=rope,
        q_norm=s.vector(b + "attn_q_norm.weight", n.head_dim) if qk else None,
        k_norm=s.vector(b + "attn_k_norm.weight", n.head_dim) if qk else None,
        sinks=s.vector(b + "attn_sinks.weight", heads) if sinks else None,
        window=window,
    )


def mlp(s: Source, n: Numbers, layer: int, width: int, suffix: str = "", activation: str = "silu") -> Mlp:
    """A gated feed-forward of block `layer`; `suffix` `_shexp` is the shared expert."""
    b = f"blk.{layer}.ffn_"
    if width <= 0:
        raise ModelError(f"{s.gguf.path}: block {layer} has a feed-forward, but the file gives no width for it")
    return Mlp(
        up=s.linear(b + "up" + suffix, width, n.n_embd),
        down=s.linear(b + "down" + suffix, n.n_embd, width),
        gate=s.linear(b + "gate" + suffix, width, n.n_embd),
        activation=activation,
    )


def experts(s: Source, n: Numbers, layer: int, width: int, activation: str = "silu") -> Experts:
    """Routed experts of block `layer`, separate or with gate and up in one tensor."""
    b = f"blk.{layer}.ffn_"
    both = s.maybe_experts(b + "gate_up_exps", n.n_expert, 2 * width, n.n_embd)
    return Experts(
        down=s.experts(b + "down_exps", n.n_expert, n.n_embd, width),
        gate=None if both else s.experts(b + "gate_exps", n.n_expert, width, n.n_embd),
        up=None if both else s.experts(b + "up_exps", n.n_expert, width, n.n_embd),
        gate_up=both,
        activation=activation,
    )


def router(
    s: Source,
    n: Numbers,
    layer: int,
    *,
    gating: Gating,
    normalise: bool,
    bias: bool = False,
    scale: float | None = None,
) -> Router:
    """The router of block `layer`. `bias`: the file may hold a selection bias (`exp_probs_b`)."""
    b = f"blk.{layer}."
    if n.n_expert <= 0:
        raise ModelError(
            f"{s.gguf.path}: key '{n.architecture}.expert_count' is missing or 0, and the blocks have experts"
        )
    groups = n.groups if n.groups > 1 else 1
    return Router(
        gate=s.linear(b + "ffn_gate_inp", n.n_expert, n.n_embd),
        experts=n.n_expert,
        top_k=n.top_k,
        gating=gating,
        selection_bias=s.maybe_vector(b + "exp_probs_b.bias", n.n_expert) if bias else None,
        groups=groups,
        groups_used=n.groups_used if groups > 1 else 1,
        normalise=normalise,
        scale=n.weights_scale if scale is None else scale,
    )


def gating_of(n: Numbers, default: Gating) -> Gating:
    return Gating(n.gating) if n.gating else default


def softmax_moe(s: Source, n: Numbers, layer: int, width: int, *, normalise: bool = True, shared: int = 0) -> Moe:
    """Softmax routing as in Mixtral and Qwen; `shared`: width of an ungated shared expert, 0 for none."""
    return Moe(
        router=router(s, n, layer, gating=Gating.SOFTMAX, normalise=normalise),
        experts=experts(s, n, layer, width),
        shared=mlp(s, n, layer, shared, "_shexp") if shared else None,
    )


def expert_width(s: Source, n: Numbers, default: int) -> int:
    width = n.expert_ff or default
    if width <= 0:
        raise ModelError(
            f"{s.gguf.path}: the file gives no width for its experts ('{n.architecture}.expert_feed_forward_length')"
        )
    return width
