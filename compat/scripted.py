"""A model file that says exactly what a test tells it to, in every engine that runs GGUF.

For exact tests of streaming, stop strings, thinking and tool calls, against us and against llama-server alike. The
model is a chain: each piece of the script is a token of its own whose embedding is a unit vector, attention and
experts add nothing to the residual, and the output matrix maps each unit vector to the next piece with a logit so
large that any sampler takes it. Every token outside the script starts it from the beginning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compat.synth import make
from compat.vocab import SPECIALS, with_pieces

_LOGIT = 60.0
_END = b"<|im_end|>"


def make_scripted(
    path: str | os.PathLike[str], script: str | bytes | Sequence[bytes], *, arch: str = "llama", n_expert: int = 4
) -> list[bytes]:
    """Write a model to `path` that answers every prompt with `script` and then ends.

    Args:
        script: the answer. Text is cut into pieces of a few bytes, in the middle of a character too, with the marked
            tokens of `vocab.SPECIALS` whole; or the pieces themselves, all different. A marked token may occur once.
        arch, n_expert: `llama` or another architecture of `families.FAMILIES` with a residual stream; experts are
            random and their output is multiplied by zero.

    Returns:
        The pieces, one per generated token.

    Raises:
        ValueError: the script cannot be cut into different pieces.
    """
    pieces = cut(script) if isinstance(script, str | bytes) else list(script)
    chain = [*pieces, _END]
    vocab, ids = with_pieces(chain)
    n_embd = -(-len(chain) // 32) * 32
    embedding = np.zeros((vocab.size, n_embd), np.float32)
    embedding[:, 0] = 1.0
    output = np.zeros_like(embedding)
    for i, token in enumerate(ids):
        output[token, i] = _LOGIT / np.sqrt(n_embd)  # RMS norm scales the unit vector by sqrt(n_embd)
        if i + 1 < len(ids):
            embedding[token] = np.eye(n_embd, dtype=np.float32)[i + 1]
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    values = {
        "token_embd.weight": embedding,
        "output.weight": output,
        "output_norm.weight": one,
        "blk.0.attn_output.weight": zero,
        "blk.0.ffn_down.weight" if not n_expert else "blk.0.ffn_down_exps.weight": zero,
    }
    sizes: dict[str, Any] = {"n_head": 1, "n_head_kv": 1, "head_dim": 32, "n_rot": 32, "n_ff": 32, "n_ff_expert": 32}
    make(
        arch,
        Path(path),
        types="F32",
        vocab=vocab,
        values=values,
        name="scripted",
        n_layer=1,
        n_embd=n_embd,
        n_expert=n_expert,
        n_expert_used=min(2, n_expert),
        **sizes,
    )
    return pieces


def cut(script: str | bytes) -> list[bytes]:
    """Cut a script into different pieces of 3 bytes or a few more; marked tokens are pieces of their own."""
    rest = script.encode() if isinstance(script, str) else script
    marked = [name.encode() for name, _ in SPECIALS]
    pieces: list[bytes] = []
    while rest:
        special = next((m for m in marked if rest.startswith(m)), None)
        if special is not None:
            pieces.append(special)
            rest = rest[len(special) :]
            continue
        stop = min((at for m in marked if (at := rest.find(m)) >= 0), default=len(rest))
        size = min(3, stop)
        while size < stop and (rest[:size] in pieces or _ordinary(rest[:size])):
            size += 1
        if stop - size < 3:  # no tail too short to be different
            size = stop
        pieces.append(rest[:size])
        rest = rest[size:]
    repeated = {p for p in pieces if pieces.count(p) > 1 or _ordinary(p)}
    if repeated:
        raise ValueError(f"the script cannot be cut into different pieces that are no ordinary tokens: {repeated}")
    return pieces


def _ordinary(piece: bytes) -> bool:
    """Whether text may be tokenised to `piece`, so that a prompt could end in it."""
    try:
        with_pieces([piece])
    except ValueError:
        return True
    return False
