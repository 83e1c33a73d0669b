"""`granitemoe` (Granite 3 MoE): Mixtral's routing with constant multipliers on embedding, residuals and logits."""

from __future__ import annotations

from ftgguf.flags.config import ContextConfig
from ftgguf.layers.params import Block, Decoder, RopeKind
from ftgguf.models import parts
from ftgguf.models.config import Keys, ModelError, Numbers, read_rope
from ftgguf.models.source import Source


def build(s: Source, n: Numbers, context: ContextConfig) -> Decoder:
    keys = Keys(s.gguf)
    logit_scale = keys.number("logit_scale")
    if logit_scale == 0:
        raise ModelError(f"{s.gguf.path}: key '{n.architecture}.logit_scale' is 0: logits are divided by it")
    scale = keys.number("attention.scale", 0.0)
    # 0 or absent means no scaling, as in llama.cpp
    residual = keys.number("residual_scale", 0.0) or 1.0
    embedding = keys.number("embedding_scale", 0.0) or 1.0
    factors = s.maybe_vector("rope_freqs.weight", n.rope_dims // 2)
    rope = read_rope(s.gguf, n, context, RopeKind.NORM, factors) if keys.flag("rope.scaling.finetuned", True) else None
    blocks = []
    for i in range(n.n_layer):
        attention = parts.attention(s, n, i, rope, scale=scale)
        norm = s.vector(f"blk.{i}.ffn_norm.weight", n.n_embd)
        if n.n_expert:
            moe = parts.softmax_moe(s, n, i, parts.expert_width(s, n, n.ff[i]), shared=n.shared_ff)
            blocks.append(Block(attention, norm, moe, n.eps, residual))
        else:
            blocks.append(Block(attention, norm, parts.mlp(s, n, i, n.ff[i]), n.eps, residual))
    head = parts.head(s, n, scale=1.0 / logit_scale)
    return Decoder(parts.embedding(s, n, embedding), tuple(blocks), head, n.n_embd, n.n_vocab)
