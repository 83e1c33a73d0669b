"""Routing traces: what decode steps were routed to, written to a file, or a recorded trace played back.

A trace is an npz file with `experts` uint8 or uint16 [tokens, layers, k], `probs` float16 of the same shape (the gate
weights) and `offsets` int64, where sessions begin, ending with the number of tokens; `ftgguf bench cache` reads it.
Rows of one step are tokens one after the other. Prompts are not in it: a cache is judged by what decode wants of it. A
session begins after a prompt, so with several at once a session is what came between two prompts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FIRST_SAVE = 256
"""Tokens after which the file is written for the first time; then at every doubling, and at the end."""


class RoutingTrace:
    """Tokens so far, and the file that they go to. No device in here: both executors write through it."""

    def __init__(self, path: Path, layers: int, k: int, experts: int) -> None:
        """Raises OSError where the file cannot be written: at start, not after an hour."""
        self.path, self.shape = path, (layers, k)
        self.dtype = np.uint8 if experts <= 256 else np.uint16
        self._experts: list[NDArray[np.integer]] = []
        self._probs: list[NDArray[np.float16]] = []
        self._offsets = [0]
        self.tokens = 0
        self._next_save = FIRST_SAVE
        self.save()

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

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What is in the file."""
        shape = (0, *self.shape)
        ends = [] if self.tokens == self._offsets[-1] else [self.tokens]
        return {
            "experts": np.concatenate([np.empty(shape, self.dtype), *self._experts]),
            "probs": np.concatenate([np.empty(shape, np.float16), *self._probs]),
            "offsets": np.array([*self._offsets, *ends], np.int64),
        }

    def save(self) -> None:
        """Write the file anew, in one step."""
        with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".tmp", delete=False) as f:
            np.savez_compressed(f, **self.arrays())  # type: ignore[arg-type]
        os.replace(f.name, self.path)


class RoutingRecorder:
    """A store's hook that writes decode steps down: one small copy a layer on the device, one to the host a step."""

    def __init__(self, trace: RoutingTrace, blocks: Sequence[int], rows: int, device: torch.device) -> None:
        """`blocks`: the MoE layers' block numbers in order; `rows`: rows of a decode step at most."""
        layers, k = trace.shape
        self.trace, self.rows = trace, rows
        self.index = {block: i for i, block in enumerate(blocks)}
        self.ids = torch.zeros(layers, rows, k, dtype=torch.int32, device=device)
        self.weights = torch.zeros(layers, rows, k, dtype=torch.float32, device=device)

    def __call__(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = ids.shape[0]
        if n <= self.rows:
            i = self.index[layer]
            self.ids[i, :n].copy_(ids)
            self.weights[i, :n].copy_(weights)
        return ids, weights

    def start(self) -> None:
        """Nothing to prepare."""

    def finish(self, rows: int, waited: bool) -> None:
        """Take a decode step's rows; a pass of more is a prompt's."""
        if rows > self.rows:
            self.trace.session()
        elif waited:
            self.trace.add(self.ids[:, :rows].cpu().numpy(), self.weights[:, :rows].cpu().numpy())

    def close(self) -> None:
        self.trace.save()


class RoutingReplay:
    """A store's hook for benchmarks: decode steps are routed as a trace's tokens were, with the router's own weights.

    The step's ids are copied before the pass, so that the pass itself has nothing more to do. Wraps at the end.
    """

    def __init__(
        self, experts: NDArray[np.integer], blocks: Sequence[int], rows: int, n_experts: int, device: torch.device
    ) -> None:
        """`experts` [tokens, layers, k]. Raises ValueError where they do not fit the model."""
        if experts.ndim != 3 or experts.shape[1] != len(blocks) or not len(experts) or experts.max() >= n_experts:
            raise ValueError(
                f"a trace of {experts.shape} with experts up to {experts.max(initial=0)} does not fit a model of "
                f"{len(blocks)} layers with {n_experts} experts"
            )
        self.experts = np.ascontiguousarray(experts.transpose(1, 0, 2), np.int32)
        self.index = {block: i for i, block in enumerate(blocks)}
        self.rows = rows
        self.at = 0
        pinned = device.type == "cuda"
        layers, _, k = self.experts.shape
        self.ids = torch.arange(k, dtype=torch.int32, device=device).expand(layers, rows, k).contiguous()
        self.staged = torch.zeros(layers, rows, k, dtype=torch.int32, pin_memory=pinned)

    def __call__(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, k = ids.shape
        if n > self.rows:
            return ids, weights
        if k != self.ids.shape[2]:
            raise ValueError(f"the trace has {self.ids.shape[2]} experts a token, the model {k}")
        return self.ids[self.index[layer], :n], weights

    def start(self) -> None:
        tokens = (self.at + np.arange(self.rows)) % self.experts.shape[1]
        self.staged.numpy()[:] = self.experts[:, tokens]
        self.ids.copy_(self.staged, non_blocking=True)

    def finish(self, rows: int, waited: bool) -> None:
        if rows <= self.rows:
            self.at = (self.at + rows) % self.experts.shape[1]

    def close(self) -> None:
        """Nothing is kept."""
