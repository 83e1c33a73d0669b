"""How far one unit in the last place moves a model's logits on the CPU executor: the yardstick of placement tests.

Placement has no part in this: the same executor, the same file, the same KV, the same token; one float32 weight of the
first layer's norm is the next number. The norm's output goes nowhere but into products that round their input to 8
bits, so logits stay equal to the last bit until a value passes a rounding tie. The two neighbours between which that
happens are found by bisection, and what they give differs by one rounding and by what that does to later ones.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from store_helpers import rows

from ftgguf import _ggml_cpu as native
from ftgguf.engine.ggml_executor import GgmlExecutor
from ftgguf.engine.ggml_weights import GgmlSource
from ftgguf.engine.layout import Layout
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32

NAME = "blk.0.attn_norm.weight"


@dataclass(frozen=True)
class Noise:
    """One nudge: `nmse` of the logits, `change`: the largest change of a logit. `routed`: to the same experts."""

    nmse: float
    change: float
    routed: bool


def on_cpu(path: Path, n_cells: int = 256) -> GgmlExecutor:
    """The CPU executor on one thread, float32 KV."""
    gguf = open_gguf(path)
    source = GgmlSource(gguf, native.Backend(1), Layout.PLAIN)
    model = family(gguf.architecture)(source, read_numbers(gguf), ContextConfig())
    return GgmlExecutor(
        source, model, n_cells=n_cells, max_rows=16, threads=1, threads_batch=1, type_k="f32", type_v="f32"
    )


class _Routes:
    """A routing trace that keeps the last step only."""

    ids: Any = None

    def add(self, ids: Any, weights: Any) -> None:
        self.ids = np.sort(ids, -1).copy()


class Nudged:
    """A CPU executor over a copy of `path` in which values of `NAME` can be replaced: the file is mapped."""

    def __init__(self, path: Path, folder: Path, n_cells: int) -> None:
        self.copy = folder / f"nudged-{path.name}"
        shutil.copy(path, self.copy)
        info = open_gguf(self.copy).tensors[NAME]
        self.at, self.count = info.offset, info.n_elements
        self.file = os.open(self.copy, os.O_RDWR)
        self.values = np.frombuffer(os.pread(self.file, info.nbytes, self.at), np.float32)
        self.executor = on_cpu(self.copy, n_cells)
        self.routes: Any = _Routes()
        self.executor.trace = self.routes

    def put(self, index: int, value: np.float32) -> None:
        os.pwrite(self.file, np.float32(value).tobytes(), self.at + 4 * index)

    def step(self, token: int, position: int) -> F32:
        logits: F32 = self.executor.forward(rows([token], position, [0]))[0].copy()
        return logits

    def tie(self, token: int, position: int, index: int) -> Noise | None:
        """The two neighbours of the weight between which this token's logits change; None where a change of 2 % does
        not move them (the value is rounded to 0, or is the largest of its block)."""
        was = self.values[index]
        bits = [int(np.float32(v).view(np.int32)) for v in (was, was * np.float32(1.02))]
        first = self.step(token, position)
        try:
            self.put(index, np.int32(bits[1]).view(np.float32))
            if (self.step(token, position) == first).all():
                return None
            low, high = bits
            while high - low > 1:
                middle = (low + high) // 2
                self.put(index, np.int32(middle).view(np.float32))
                if (self.step(token, position) == first).all():
                    low = middle
                else:
                    high = middle
            self.put(index, np.int32(low).view(np.float32))
            before, routes = self.step(token, position), self.routes.ids
            self.put(index, np.int32(high).view(np.float32))
            after, routes2 = self.step(token, position), self.routes.ids
        finally:
            self.put(index, was)
            self.step(token, position)  # its cell holds what the file says again
        a, b = before.astype(np.float64), after.astype(np.float64)
        error = float(((a - b) ** 2).sum() / (a**2).sum())
        return Noise(error, float(np.abs(a - b).max()), bool((routes == routes2).all()))

    def noise(self, tokens: list[int], count: int, seed: int = 0) -> list[Noise]:
        """`count` nudges, each at another token and weight, with the KV of the tokens before."""
        rng = np.random.default_rng(seed)
        for i, token in enumerate(tokens):
            self.step(token, i)
        found: list[Noise] = []
        for _ in range(20 * count):
            at, index = int(rng.integers(len(tokens))), int(rng.integers(self.count))
            noise = self.tie(tokens[at], at, index)
            if noise is not None:
                found.append(noise)
            if len(found) == count:
                break
        return found

    def close(self) -> None:
        os.close(self.file)
        self.copy.unlink()
