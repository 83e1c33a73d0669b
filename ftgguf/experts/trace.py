"""A routing trace being written: what decode steps were routed to. No torch in here: both executors write through it.

An npz file with `experts` uint8 or uint16 [tokens, layers, k], `probs` float16 of the same shape (the gate weights) and
`offsets` int64, where sessions begin, ending with the number of tokens, and `expert_bytes` float64, the mean size of an
expert; `ftgguf bench cache` reads it. Rows of one step
are tokens one after the other. Prompts are not in it: a cache is judged by what decode wants of it. A session begins
after a prompt, so with several requests at once a session is what came between two prompts.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftgguf.gguf.header import TensorInfo
from ftgguf.layers.params import Block, Moe
from ftgguf.models.config import ModelError

FIRST_SAVE = 256
"""Tokens after which the file is written for the first time; then at every doubling, and at the end."""


def pool_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all routed experts' matrices among a file's `tensors`, by GGUF's names for them."""
    return sum(info.nbytes for name, info in tensors.items() if name.endswith("_exps.weight"))


def open_trace(path: str, blocks: Sequence[Block], pool: int = 0) -> RoutingTrace:
    """The trace of `--record-routing` for a model's `blocks`, whose experts have `pool` bytes together (0: not known).
    Raises ModelError where there can be none."""
    routers = [b.ffn.router for b in blocks if isinstance(b.ffn, Moe)]
    if not routers:
        raise ModelError("--record-routing: this model has no routed experts")
    if len({(r.experts, r.top_k) for r in routers}) > 1:
        raise ModelError("--record-routing: this model's layers do not all choose as many of as many experts")
    try:
        return RoutingTrace(Path(path), len(routers), routers[0].top_k, routers[0].experts, pool)
    except OSError as error:
        raise ModelError(f"--record-routing {path}: {error.strerror or error}") from error


class RoutingTrace:
    """Tokens so far, and the file that they go to; written at doublings, by `save`, and when the process ends."""

    def __init__(self, path: Path, layers: int, k: int, experts: int, pool: int = 0) -> None:
        """Raises OSError where the file cannot be written: at start, not after an hour."""
        self.path, self.shape = path, (layers, k)
        self.expert_bytes = pool / (layers * experts)
        self.dtype = np.uint8 if experts <= 256 else np.uint16
        self._experts: list[NDArray[np.integer]] = []
        self._probs: list[NDArray[np.float16]] = []
        self._offsets = [0]
        self.tokens = 0
        self._next_save = FIRST_SAVE
        self._saved = -1
        self.save()
        atexit.register(self.save)

    def add(self, ids: NDArray[np.integer], weights: NDArray[np.floating]) -> None:
        """A step: ids and weights [layers, rows, k]."""
        self._experts.append(ids.transpose(1, 0, 2).astype(self.dtype))
        self._probs.append(weights.transpose(1, 0, 2).astype(np.float16))
        self.tokens += ids.shape[1]
        if self.tokens >= self._next_save:
            self._next_save = 2 * self.tokens
            self.save()

    def session(self) -> None:
        """A prompt came: what follows is another session."""
        if self._offsets[-1] != self.tokens:
            self._offsets.append(self.tokens)

    def arrays(self) -> dict[str, Any]:
        """What is in the file."""
        shape = (0, *self.shape)
        ends = [] if self.tokens == self._offsets[-1] else [self.tokens]
        return {
            "experts": np.concatenate([np.empty(shape, self.dtype), *self._experts]),
            "probs": np.concatenate([np.empty(shape, np.float16), *self._probs]),
            "offsets": np.array([*self._offsets, *ends], np.int64),
            "expert_bytes": np.float64(self.expert_bytes),
        }

    def save(self) -> None:
        """Write the file anew, in one step, if anything came since."""
        if self.tokens == self._saved:
            return
        self._saved = self.tokens
        with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".tmp", delete=False) as f:
            np.savez_compressed(f, **self.arrays())  # type: ignore[arg-type]
        os.replace(f.name, self.path)
