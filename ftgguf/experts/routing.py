"""Routing traces on the GPU's path: a store's hooks that write one (experts/trace.py), or play a recorded one back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ftgguf.experts.trace import RoutingTrace


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
