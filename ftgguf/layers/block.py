"""How a block's operators follow each other: the forward of every family, in coarse operators."""

from __future__ import annotations

from ftgguf.layers.params import Block, Decoder
from ftgguf.ops.base import Ops, Tensor


def block(ops: Ops, layer: int, h: Tensor, p: Block, *, last: bool) -> Tensor | None:
    """h + attention, then + feed-forward. `layer` counts within the segment.

    In the model's last block only the rows whose logits are wanted go on after the KV write, as in llama.cpp; where
    none are, there is no result.
    """
    a = p.attention
    q, k, v = ops.norm_qkv(h, a)
    q = ops.rope_write(layer, q, k, v, a)
    if last and ops.n_outputs == 0:
        return None
    h = ops.attention_out(ops.attend(layer, q, a), a.out, h, p.residual_scale, last)
    return ops.feed_forward(h, p.ffn_norm, p.eps, p.ffn, p.residual_scale)


def segment(ops: Ops, model: Decoder, first: int, last: int, h: Tensor | None = None) -> Tensor | None:
    """Blocks [first, last) of `model`. Block 0 starts from the batch's tokens (or embeddings in `h`); the segment that
    holds the last block returns logits [outputs, vocab] (or the rows of the final norm, `ops.wants_features`), or None
    where none are wanted, any other the hidden state [rows, n_embd]."""
    if h is None:
        h = ops.embed(model.embedding)
        if model.embedding.scale != 1.0:
            h = ops.scale(h, model.embedding.scale)
    end = len(model.blocks)
    for i in range(first, last):
        h = block(ops, i - first, h, model.blocks[i], last=i == end - 1)
    if last < end or h is None:
        return h
    return ops.features(h, model.head) if ops.wants_features else ops.head(h, model.head)
