"""`glm4moe` (GLM-4.5 to 4.7): sigmoid routing with a selection bias, a shared expert, dense first blocks."""

from __future__ import annotations

from ftgguf.flags.config import ContextConfig
from ftgguf.layers.params import Block, Decoder, Gating, Mlp, Moe, RopeKind
from ftgguf.models import parts
from ftgguf.models.config import Keys, ModelError, Numbers, read_rope
from ftgguf.models.source import Source


def build(s: Source, n: Numbers, context: ContextConfig) -> Decoder:
    if Keys(s.gguf).get("rope.dimension_sections") is not None:
        raise ModelError(f"{s.gguf.path}: multi-section RoPE (the vision variant of glm4moe) is not supported")
    rope = read_rope(s.gguf, n, context, RopeKind.NEOX)
    width = parts.expert_width(s, n, 0)
    blocks = []
    for i in range(n.n_layer):
        attention = parts.attention(s, n, i, rope, qk_norm="optional")
        norm = s.vector(f"blk.{i}.post_attention_norm.weight", n.n_embd)
        ffn: Mlp | Moe
        if i < n.dense_lead:
            ffn = parts.mlp(s, n, i, n.ff[i])
        else:
            routed = parts.router(
                s, n, i, gating=parts.gating_of(n, Gating.SIGMOID), normalise=n.weights_norm, bias=True
            )
            shared = parts.mlp(s, n, i, width * n.n_shared, "_shexp") if n.n_shared else None
            ffn = Moe(routed, parts.experts(s, n, i, width), shared)
        blocks.append(Block(attention, norm, ffn, n.eps))
    notes: tuple[str, ...] = ()
    if n.n_layer_all > n.n_layer:
        notes = (f"{n.n_layer_all - n.n_layer} prediction layer(s) of the file are not used",)
    return Decoder(parts.embedding(s, n), tuple(blocks), parts.head(s, n), n.n_embd, n.n_vocab, notes)
