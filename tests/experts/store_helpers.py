"""An executor over a cached store, on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.engine.cuda_experts import ExpertStore, ResidentStore, expert_spec
from ftgguf.engine.cuda_weights import CudaSource, Reader
from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.engine.survey import survey
from ftgguf.experts.store import CachedStore
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.layers.params import Moe
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32, Batch

TINY: dict[str, Any] = {
    "n_layer": 2, "n_expert": 8, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_rot": 32, "n_embd": 64, "n_ff": 64,
    "n_ff_expert": 64,
}  # fmt: skip
"""Sizes of a model that the interpreter runs quickly (compat.synth.make; two of eight experts a token)."""


def rows(tokens: list[int], start: int, outputs: list[int]) -> Batch:
    """One sequence's `tokens` at cells and positions from `start` on."""
    n = len(tokens)
    at = np.arange(start, start + n, dtype=np.int32)
    table = np.arange(start + n, dtype=np.int32)
    return Batch(np.array(tokens, np.int32), at, np.zeros(n, np.int32), at, (table,), np.array(outputs, np.int32))


NEAR_TIE = 0.02
"""Gate weights (of the larger) this close may swap places when sums are rounded otherwise."""


@dataclass
class Decoded:
    """One run, token by token: logits [tokens, vocabulary], routed ids and gate weights [tokens, layers, k]."""

    logits: F32
    ids: NDArray[np.int64]
    weights: F32

    def nmse(self, want: Decoded, tokens: slice = slice(None)) -> float:
        a, b = self.logits[tokens], want.logits[tokens]
        return float(((a - b) ** 2).sum() / max(float((b**2).sum()), 1e-30))


def decoded(executor: CudaExecutor, tokens: Sequence[int], replay: Decoded | None = None) -> Decoded:
    """Decode `tokens` from an empty context; with `replay`, routed as that run was. Captured graphs hold the hook that
    they were captured with: use `hooked` before `warm_up` there."""
    store = executor.store
    tap = store.hook if isinstance(store.hook, Tap) else hooked(executor)
    tap.play(None if replay is None else replay.ids)
    logits, ids, weights = [], [], []
    for i, token in enumerate(tokens):
        logits.append(executor.forward(rows([token], i, [0]))[0].copy())
        ids.append(tap.ids[:, 0].cpu().numpy().astype(np.int64))
        weights.append(tap.weights[:, 0].cpu().numpy().copy())
    tap.play(None)
    return Decoded(np.stack(logits), np.stack(ids), np.stack(weights))


class Tap:
    """A store's hook that keeps a step's routing, and replaces the ids where told to; the same launches either way."""

    def __init__(self, executor: CudaExecutor) -> None:
        store = executor.store
        self.index = {block: i for i, block in enumerate(sorted(store.specs))}
        k = next(b.ffn.router.top_k for b in executor.model.blocks if isinstance(b.ffn, Moe))
        shape = (len(self.index), executor.sizes[-1], k)
        self.rows = shape[1]
        self.ids = torch.zeros(shape, dtype=torch.int32, device=executor.device)
        self.weights = torch.zeros(shape, dtype=torch.float32, device=executor.device)
        self.forced = torch.zeros(shape, dtype=torch.int32, device=executor.device)
        self.forces = torch.zeros(1, dtype=torch.bool, device=executor.device)
        self.trace: NDArray[np.int64] | None = None
        self.at = 0

    def play(self, trace: NDArray[np.int64] | None) -> None:
        """ids [tokens, layers, k] for the steps to come, or None: the router's own."""
        self.trace, self.at = trace, 0
        self.forces.fill_(trace is not None)

    def __call__(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = ids.shape[0]
        if n > self.rows:
            return ids, weights
        i = self.index[layer]
        ids = torch.where(self.forces, self.forced[i, :n], ids)
        self.ids[i, :n].copy_(ids)
        self.weights[i, :n].copy_(weights)
        return ids, weights

    def start(self) -> None:
        if self.trace is not None:
            self.forced[:, 0].copy_(torch.from_numpy(self.trace[self.at].astype(np.int32)))
            self.at += 1

    def finish(self, rows: int, waited: bool) -> None: ...

    def close(self) -> None: ...


def hooked(executor: CudaExecutor) -> Tap:
    """Give the executor's store a `Tap`; before `warm_up`, which captures."""
    tap = Tap(executor)
    executor.store.hook = tap
    return tap


def judge(got: Decoded, want: Decoded, same: float = 1e-6) -> str:
    """What is wrong with `got`; empty where it differs from `want` by rounding only.

    Up to the first token with other experts, logits agree to `same`. There the routers must have been undecided: the
    experts that swapped places have nearly the same gate weight. A race or a wrong expert does not wait for a tie.
    """
    differs = (np.sort(got.ids, -1) != np.sort(want.ids, -1)).any(-1)
    tokens = np.flatnonzero(differs.any(-1))
    end = int(tokens[0]) if len(tokens) else len(got.ids)
    if end and (error := got.nmse(want, slice(0, end))) >= same:
        return f"the same experts, but NMSE {error:.1e} over the first {end} tokens"
    if end == len(got.ids):
        return ""
    layer = int(np.flatnonzero(differs[end])[0])
    a, b = got.ids[end, layer], want.ids[end, layer]
    gained, lost = (float(w[~np.isin(x, y)].max()) for x, y, w in (
        (a, b, got.weights[end, layer]), (b, a, want.weights[end, layer])
    ))  # fmt: skip
    if abs(gained - lost) > NEAR_TIE * max(gained, lost):
        return f"token {end}, layer {layer}: weight {gained:.4f} in place of {lost:.4f}, which is no tie"
    return ""


class CachedExecutor(CudaExecutor):
    """What `load_cached` makes where there is a cache: the type of its store says so."""

    store: CachedStore


@overload
def load_cached(path: Path, device: torch.device, slots: int, **options: Any) -> CachedExecutor: ...


@overload
def load_cached(path: Path, device: torch.device, slots: int | None, **options: Any) -> CudaExecutor: ...


def load_cached(
    path: Path, device: torch.device, slots: int | None, *, ring_slots: int = 4, decode_rows: int = 4,
    n_cells: int = 256, max_rows: int = 64, kv: str = "f32", eager: bool = False, budget: int | None = None,
    start_cells: int | None = None, short_rows: tuple[int, ...] = (), **options: Any,
) -> CudaExecutor:  # fmt: skip
    """`slots`: slots of the cache besides a ring of `ring_slots`; None: every expert resident."""
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, ContextConfig())
    memory = DeviceMemory(device, budget)
    on_host = None if slots is None else found.lone_embedding()
    source = CudaSource(gguf, memory, found, 0, len(found.model.blocks), on_host)
    model = family(gguf.architecture)(source, numbers, ContextConfig())
    specs = [expert_spec(i, b.ffn.experts) for i, b in enumerate(model.blocks) if isinstance(b.ffn, Moe)]
    store: ExpertStore = ResidentStore(memory)
    if slots is not None:
        size = max(spec.slot_bytes for spec in specs)
        store = CachedStore(
            memory,
            budget=(slots + ring_slots) * size,
            ring_bytes=ring_slots * size,
            top_k=numbers.top_k,
            decode_rows=decode_rows,
            short_rows=max(short_rows, default=0),
            **({"cpus": [-1, -1]} | options),
        )
    for spec in specs:
        store.add(spec)
    reader = Reader(gguf, device, 2)
    source.load(reader, lambda f: None)
    store.load(reader, lambda f: None)
    reader.close()
    made = CudaExecutor if slots is None else CachedExecutor
    return made(
        memory, model, store, n_cells=n_cells, max_rows=max_rows, kv=kv, decode_rows=decode_rows, max_sequences=4,
        eager=eager, start_cells=start_cells, short_rows=short_rows,
    )  # fmt: skip
