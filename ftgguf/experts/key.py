"""The number by which the expert cache evicts: decayed frequency in log form, in integers.

An expert's decayed frequency at step t is the sum of 2^((t_i - t) / h) over its uses t_i, with half-life h in steps.
Its logarithm needs no decay: `key = log2(sum 2^(t_i / h))` changes only when the expert is used, by
`key = log2(2^key + 2^(t / h))`, and `key - t / h` is the logarithm of the decayed frequency now. Keys are int32 in
units of 1/4096 and the addition is a table look-up, so that NumPy, Triton on a GPU and Triton's interpreter agree bit
for bit, which floats would not.

Each expert has two keys, half-lives 2 and 32 steps, and the score is the logarithm of `8 * fast + slow`: a recent use
says much about the next few tokens and little later, which no single half-life fits. Two further terms come from the
order of the layers, which a decode step visits cyclically: a layer that this step has not reached yet was last seen
one step earlier than those behind, so its age is counted on its own clock; and the sooner a layer's turn comes, the
more its expert is worth (`phase`, falling linearly over one round). Measured in docs/measurements/cache.md: fewer
misses than one half-life of 16, and than LRU, at every cache size.

Keys grow with the clock and are moved back (`rebase`) at a safe point, about every 2^18 steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]

ONE = 4096
"""One unit of log2 in fixed point."""
NONE = -(1 << 30)
"""The key of an expert that was never used."""
TABLE_SHIFT = 6
TABLE_SIZE = 1024
REBASE_LIMIT = 1 << 29
"""Keys are moved back before the clock's own key passes this, so that no difference leaves int32."""

TABLE: NDArray[np.int32] = np.floor(
    ONE * np.log2(1 + np.exp2(-(np.arange(TABLE_SIZE) + 0.5) * (1 << TABLE_SHIFT) / ONE)) + 0.5
).astype(np.int32)
"""`log2(1 + 2^-d)` in 1/4096, at the middle of steps of d = 1/64; zero from d = 13.5 on. int32 [1024]."""
TABLE.setflags(write=False)


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """How the key grows and how a score is made of it. All in 1/4096 of a unit of log2.

    `fast_step`, `slow_step`: what one step adds to the clock's key (4096 / half-life). `fast_weight`: what the fast
    key counts more. `phase`: what an expert is worth more whose layer comes next, against the layer just done.
    `lru` uses neither: the key is the number of the layer step of the last use.
    """

    name: str
    fast_step: int
    slow_step: int
    fast_weight: int
    phase: int
    lru: bool = False

    def phase_step(self, layers: int) -> int:
        """The share of `phase` that one layer of distance costs."""
        return (self.phase + layers // 2) // layers

    def clock_limit(self, layers: int) -> int:
        """Clock value at which keys must have been rebased."""
        return REBASE_LIMIT // (layers if self.lru else max(self.fast_step, self.slow_step))


DECAY = KeyPolicy("decay", fast_step=ONE // 2, slow_step=ONE // 32, fast_weight=3 * ONE, phase=ONE * 2 // 5)
"""The shipped policy: half-lives 2 and 32, weights 8 and 1."""
DECAY16 = KeyPolicy("decay16", fast_step=ONE // 16, slow_step=ONE // 16, fast_weight=0, phase=0)
"""One half-life of 16 steps (with the layers' own clocks); a yardstick for `ftgguf bench cache`."""
LRU = KeyPolicy("lru", fast_step=0, slow_step=0, fast_weight=0, phase=0, lru=True)
"""Least recently used over all layers, the policy of arXiv 2608.16157."""
POLICIES = {p.name: p for p in (DECAY, DECAY16, LRU)}


def policy(name: str) -> KeyPolicy:
    """The policy called `name`. Raises ValueError naming the choices."""
    if name not in POLICIES:
        raise ValueError(f"unknown expert policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def log2_add(a: Ints, b: Ints | int) -> Ints:
    """`log2(2^a + 2^b)` in 1/4096, elementwise, to within 0.005; exact integers, the same everywhere."""
    distance = np.abs(a - b) >> TABLE_SHIFT
    result: Ints = np.maximum(a, b) + TABLE[np.minimum(distance, TABLE_SIZE - 1)]
    return result


def touch(p: KeyPolicy, fast: Ints, slow: Ints, clock: int, layer: int, layers: int) -> tuple[Ints, Ints]:
    """Keys (int32, any shape) of experts of `layer` after a use at step `clock`."""
    if p.lru:
        stamp = np.full_like(fast, clock * layers + layer)
        return stamp, stamp
    return log2_add(fast, clock * p.fast_step), log2_add(slow, clock * p.slow_step)


def score(p: KeyPolicy, fast: Ints, slow: Ints, owner: Ints | int, clock: int, layer: int, layers: int) -> Ints:
    """What an expert of layer `owner` is worth while `layer` runs in step `clock`: the smallest score goes."""
    if p.lru:
        return fast
    owner = np.asarray(owner, np.int32)
    ahead = (owner > layer).astype(np.int32)
    seen = clock - ahead
    distance = owner - (layer + 1) + layers * (1 - ahead)
    mixed = log2_add(fast - seen * p.fast_step + p.fast_weight, slow - seen * p.slow_step)
    result: Ints = mixed + (layers - distance) * p.phase_step(layers)
    return result


def rebase(p: KeyPolicy, keys: NDArray[np.int32], clock: int, layers: int) -> int:
    """Move `keys` (int32 [2, layers, experts], in place) back by `clock` steps; returns the new clock, 1.

    Scores are unchanged, except that a key that would fall below `NONE` stays there. Call between steps.
    """
    steps = clock - 1
    moved = (layers * steps,) * 2 if p.lru else (p.fast_step * steps, p.slow_step * steps)
    for plane, by in zip(keys, moved, strict=True):
        plane[:] = np.where(plane == NONE, NONE, np.maximum(plane.astype(np.int64) - by, NONE))
    return 1
