"""`llama`: Llama and Mistral, dense, and Mixtral with softmax-routed experts."""

from __future__ import annotations

from ftgguf.flags.config import ContextConfig
from ftgguf.layers.params import Block, Decoder, RopeKind
from ftgguf.models import parts
from ftgguf.models.config import ModelError, Numbers, read_rope
from ftgguf.models.source import Source


def build(s: Source, n: Numbers, context: ContextConfig) -> Decoder:
    if n.rope_dims != n.head_dim:
        raise ModelError(f"{s.gguf.path}: invalid rope.dimension_count {n.rope_dims}, expected {n.head_dim}")
    # Llama 3 files carry one frequency table for all layers
    factors = s.maybe_vector("rope_freqs.weight", n.rope_dims // 2)
    rope = read_rope(s.gguf, n, context, RopeKind.NORM, factors)
    blocks = []
    for i in range(n.n_layer):
        attention = parts.attention(s, n, i, rope)
        norm = s.vector(f"blk.{i}.ffn_norm.weight", n.n_embd)
        if s.has(f"blk.{i}.ffn_gate_inp.weight"):
            ffn = parts.softmax_moe(s, n, i, parts.expert_width(s, n, n.ff[i]), shared=n.shared_ff)
            blocks.append(Block(attention, norm, ffn, n.eps))
        else:
            blocks.append(Block(attention, norm, parts.mlp(s, n, i, n.ff[i]), n.eps))
    return Decoder(parts.embedding(s, n), tuple(blocks), parts.head(s, n), n.n_embd, n.n_vocab)
