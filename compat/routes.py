"""Values of a synthetic model whose routing no rounding changes.

A router with random weights has experts within rounding of each other at one token in twenty; two engines that round
otherwise then take another expert, and a comparison of their answers measures that. Trained routers are decided more
clearly. Here each token belongs to a class that has a direction of its own in the embedding, and each layer's router
has experts of its own for each class: `make("qwen3moe", path, values=decided_routes(...))`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EMBEDDING = 2.0
"""Of an embedding's elements, root mean square. Eight layers add vectors of about the same length in all: the answer
depends on every expert, the class is still the largest part of what the last router sees."""
LOGIT = 4.0
"""Of a chosen expert where nothing has been added to the embedding; the others are near 0. Weights of the chosen ones
are then softmaxed noise around equal."""
OWN = 0.5
"""Part of a token's embedding that is its own and not of its class."""
HEAD = 0.5
"""The last norm's weight: random heads give logits so far apart that 8-bit rounding moves them by tenths."""


def decided_routes(
    n_layer: int, n_expert: int, n_expert_used: int, n_embd: int, n_vocab: int, seed: int = 1
) -> dict[str, NDArray[np.float32]]:
    """`token_embd.weight` [n_vocab, n_embd], each block's `ffn_gate_inp.weight` [n_expert, n_embd] and
    `output_norm.weight` [n_embd], float32.

    Every expert is some class's choice as long as the classes (3/4 n_embd, or the vocabulary if that is less) times
    `n_expert_used` are several times `n_expert`.
    """
    rng = np.random.default_rng(seed)
    n_class = min(n_vocab, 3 * n_embd // 4)
    basis = np.linalg.qr(rng.standard_normal((n_embd, n_embd)))[0].T  # rows are orthonormal
    classes = np.concatenate([np.arange(n_class), rng.integers(0, n_class, n_vocab - n_class)])
    own = rng.standard_normal((n_vocab, n_embd - n_class)) @ basis[n_class:]
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    directions = np.sqrt(1 - OWN**2) * basis[classes] + OWN * own
    values = {"token_embd.weight": EMBEDDING * n_embd**0.5 * directions, "output_norm.weight": np.full(n_embd, HEAD)}
    for layer in range(n_layer):
        router = np.zeros((n_expert, n_embd))
        order = np.concatenate([rng.permutation(n_expert) for _ in range(-(-n_class * n_expert_used // n_expert) + 1)])
        at = 0
        for direction in basis[:n_class]:
            chosen: list[int] = []
            while len(chosen) < n_expert_used:  # the next ones of the order that are not chosen already
                if order[at % len(order)] not in chosen:
                    chosen.append(int(order[at % len(order)]))
                at += 1
            router[chosen] += direction
        values[f"blk.{layer}.ffn_gate_inp.weight"] = LOGIT * n_embd**-0.5 * router
    return {name: value.astype(np.float32) for name, value in values.items()}
