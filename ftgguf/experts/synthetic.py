"""Synthetic routing: skewed, duplicate-laden ids for tests, benchmarks of the residency kernel and cache replays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def zipf_weights(experts: int, exponent: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Probabilities of `experts` experts, the i-th most popular in proportion to i^-exponent, in random order."""
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    weights = weights / weights.sum()
    shuffled: NDArray[np.float64] = rng.permutation(weights)
    return shuffled


def route(rows: int, k: int, weights: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int32]:
    """int32 [rows, k]: each row k different experts, drawn by `weights` (Gumbel top-k)."""
    gumbel = np.log(weights)[None, :] - np.log(-np.log(rng.random((rows, len(weights)))))
    ids: NDArray[np.int32] = np.argsort(-gumbel, axis=1)[:, :k].astype(np.int32)
    return ids


def trace(
    tokens: int, layers: int, experts: int, k: int, exponent: float = 0.8, stay: float = 0.5, seed: int = 0
) -> NDArray[np.uint16]:
    """uint16 [tokens, layers, k]: each layer with its own popularity, each choice kept from the last token with
    probability `stay` (real routing repeats: about 0.45 in gpt-oss-20b)."""
    rng = np.random.default_rng(seed)
    weights = [zipf_weights(experts, exponent, rng) for _ in range(layers)]
    out = np.empty((tokens, layers, k), np.uint16)
    last = [route(1, k, w, rng)[0] for w in weights]
    for t in range(tokens):
        for layer, w in enumerate(weights):
            kept = last[layer][rng.random(k) < stay]
            fresh = [e for e in route(1, min(len(w), 2 * k), w, rng)[0] if e not in kept]
            last[layer] = np.concatenate((kept, fresh))[:k].astype(np.int32)
            out[t, layer] = last[layer]
    return out
