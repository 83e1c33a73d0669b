"""`qwen3` (dense) and `qwen3moe` (Qwen3-30B-A3B, 235B-A22B, Coder): GQA with QK-norm."""

from __future__ import annotations

from collections.abc import Callable

from ftgguf.flags.config import ContextConfig
from ftgguf.layers.params import Block, Decoder, Mlp, Moe, RopeKind
from ftgguf.models import parts
from ftgguf.models.config import Numbers, read_rope
from ftgguf.models.source import Source


def build(s: Source, n: Numbers, context: ContextConfig) -> Decoder:
    return _decoder(s, n, context, lambda i: parts.mlp(s, n, i, n.ff[i]))


def build_moe(s: Source, n: Numbers, context: ContextConfig) -> Decoder:
    width = parts.expert_width(s, n, n.ff[0] // max(n.top_k, 1))
    return _decoder(s, n, context, lambda i: parts.softmax_moe(s, n, i, width))


def _decoder(s: Source, n: Numbers, context: ContextConfig, ffn: Callable[[int], Mlp | Moe]) -> Decoder:
    rope = read_rope(s.gguf, n, context, RopeKind.NEOX)
    blocks = []
    for i in range(n.n_layer):
        attention = parts.attention(s, n, i, rope, qk_norm="required")
        norm = s.vector(f"blk.{i}.ffn_norm.weight", n.n_embd)
        blocks.append(Block(attention, norm, ffn(i), n.eps))
    return Decoder(parts.embedding(s, n), tuple(blocks), parts.head(s, n), n.n_embd, n.n_vocab)
