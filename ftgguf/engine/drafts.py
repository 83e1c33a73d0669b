"""Drafts from a request's own tokens (`--spec-type ngram-*`): what followed the last time the same tokens came.

The step that evaluates the next token evaluates the draft behind it as well, in rows of its own; as long as the sampler
chooses what was drafted, those rows' logits are the next ones. The text is sampled as ever, so it does not change.

The four kinds are llama.cpp's, with its sizes: `simple` takes the latest sighting and wants as many tokens behind it as
it looked up; `map-k` wants `min_hits` sightings; `map-k4v` takes the continuation that was seen most often; `mod` reads
on through its own draft, and drafts not at all below `n_min`.
"""

from __future__ import annotations

import numpy as np

from ftgguf.flags.config import SpecConfig
from ftgguf.nouns import I32

_NOTHING = np.zeros(0, np.int32)


def sightings(tokens: I32, n: int) -> I32:
    """Where the last `n` of `tokens` were seen before: the positions of the tokens right behind, ascending."""
    size = len(tokens)
    if size <= n:
        return _NOTHING
    ends = np.flatnonzero(tokens[n - 1 : size - 1] == tokens[-1]) + (n - 1)
    for back in range(1, n):
        if not len(ends):
            break
        ends = ends[tokens[ends - back] == tokens[size - 1 - back]]
    return (ends + 1).astype(np.int32)


def most_common(tokens: I32, places: I32) -> I32:
    """Those of `places` that hold the token found at most of them; of equals the latest seen."""
    found = tokens[places]
    values, counts = np.unique(found, return_counts=True)
    best = values[counts == counts.max()]
    latest = max(best.tolist(), key=lambda value: int(places[found == value][-1]))
    chosen: I32 = places[found == latest]
    return chosen


class Drafter:
    """Drafts for every sequence of one engine; keeps nothing."""

    def __init__(self, spec: SpecConfig) -> None:
        self._spec = spec
        self._maps = {
            "ngram-simple": spec.ngram_simple,
            "ngram-map-k": spec.ngram_map_k,
            "ngram-map-k4v": spec.ngram_map_k4v,
        }

    def draft(self, tokens: I32, room: int) -> I32:
        """At most `room` tokens that may follow `tokens`, int32; by the first kind that has any."""
        if room <= 0:
            return _NOTHING
        for kind in self._spec.types:
            found = self._by(kind, tokens)
            if len(found):
                return found[:room]
        return _NOTHING

    def _by(self, kind: str, tokens: I32) -> I32:
        if kind == "ngram-mod":
            return self._mod(tokens)
        sizes = self._maps[kind]
        places = sightings(tokens, sizes.size_n)
        if len(places) < sizes.min_hits or not len(places):
            return _NOTHING
        if kind == "ngram-map-k4v":
            places = most_common(tokens, places)
        found = tokens[places[-1] : places[-1] + sizes.size_m]
        return found if kind != "ngram-simple" or len(found) >= sizes.size_n else _NOTHING

    def _mod(self, tokens: I32) -> I32:
        sizes = self._spec.ngram_mod
        places = sightings(tokens, sizes.n_match)
        if not len(places):
            return _NOTHING
        behind = tokens[places[-1] :]
        found = np.resize(behind, sizes.n_max)  # reading on past the end reads the draft itself
        return found.astype(np.int32) if len(found) >= sizes.n_min else _NOTHING
