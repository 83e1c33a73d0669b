"""Faults put in on purpose, and rounding ties looked for: what the checks of placement must see.

Each fault is one that a cache of experts can have: a wrong slot, stale bytes, an expert lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from placement_checks import Bench, assert_layers_same, layers_under
from placement_helpers import CpuHidden, ForcedLayers
from store_helpers import CachedExecutor, load_cached

from ftgguf.engine.cuda_experts import Placement as Placed
from ftgguf.experts.bank import Resident
from ftgguf.kernels import fill as kernels
from ftgguf.kernels.norm import norm
from ftgguf.nouns import F32


def break_slots(executor: CachedExecutor) -> None:
    """Every slot's address is its neighbour's: wrong experts."""
    store = executor.store
    n = len(store.arena.addresses())
    store.addresses[:n] = torch.roll(store.addresses[:n], 1)


def break_fills(executor: CachedExecutor) -> None:
    """Slots keep what they had: stale experts."""
    store = executor.store
    place = store.place

    def stale(*args: Any) -> Placed:
        real = kernels.fill
        kernels.fill = lambda *a, **k: None  # type: ignore[assignment]
        try:
            placed: Placed = place(*args)
            return placed
        finally:
            kernels.fill = real

    store.place = stale  # type: ignore[method-assign, assignment]


def _share(factor: float) -> Callable[[CachedExecutor], None]:
    def change(executor: CachedExecutor) -> None:
        store = executor.store
        collect = store.collect

        def scaled(layer: int, placement: Placed) -> torch.Tensor | None:
            share = collect(layer, placement)
            assert share is not None
            return share.mul_(factor)

        store.collect = scaled  # type: ignore[method-assign]

    return change


def break_rank(executor: CachedExecutor) -> None:
    """The last rank, the one with the least weight, is nowhere."""
    store = executor.store
    place = store.place

    def lost(*args: Any) -> Placed:
        placed = place(*args)
        slots = placed.slots.clone()
        slots[:, -1] = -1
        return replace(placed, slots=slots, down=None if placed.down is None else slots)

    store.place = lost  # type: ignore[method-assign, assignment]


def break_bank(executor: CachedExecutor) -> None:
    """The host's experts have changed places."""
    store = executor.store
    for resident in store.bank.layers.values():
        assert isinstance(resident, Resident)
        resident.view[:] = np.roll(resident.view, 1, axis=0)


BROKEN: dict[str, tuple[str, Callable[[CachedExecutor], None]]] = {
    "wrong slot": ("hit", break_slots),
    "stale slot": ("filled", break_fills),
    "an expert lost": ("hit", break_rank),
    "the CPU's experts lost": ("mixed 25 %", _share(0.0)),
    "the CPU's experts twice": ("mixed 25 %", _share(2.0)),
    "the CPU's experts exchanged": ("cpu", break_bank),
}
"""Fault -> the placement it is tried on, and what brings it about."""
FAULT = 1e-9
"""A fault moves every layer's output by more than this (NMSE), a thousand times the bound; and some layer's by 1e-3."""


def assert_fault_shows(bench: Bench, executor: CachedExecutor, fault: Callable[[CachedExecutor], None]) -> None:
    """One good step, then the fault: the next step's layers are wrong."""
    assert_layers_same(layers_under(bench, executor, slice(0, 1)))
    fault(executor)
    found = layers_under(bench, executor, slice(1, 2))
    with pytest.raises(AssertionError):
        assert_layers_same(found)
    assert not found.least <= FAULT  # what is not a number is wrong, too
    assert not found.raw <= 1e-3


def jitter(executor: CachedExecutor, by: float) -> None:
    """Stretch the CPU's share by a little, as if its sums were rounded far worse: more ties are passed."""
    _share(1.0 + by)(executor)


def nearest_ties(executor: CachedExecutor, tried: int, wanted: int) -> list[tuple[F32, NDArray[np.int32]]]:
    """Of `tried` random inputs a layer, the `wanted` whose experts' intermediate values come closest to a rounding tie,
    by the CPU's rows: (h [layers, n_embd], ids [layers, k]) for as many steps. For types that round to Q8_0."""
    store = executor.store
    cpu, rng = CpuHidden(store), np.random.default_rng(7)

    def nearest(layer: int, x: F32, ids: list[NDArray[np.int32]], count: int) -> list[int]:
        distances = []
        for row, experts in zip(x, ids, strict=True):
            blocks = cpu.rows(layer, row, experts).reshape(-1, 32)
            steps = np.abs(blocks) * (np.float32(127) / np.abs(blocks).max(-1, keepdims=True))
            distances.append(float((np.abs(steps - np.floor(steps) - 0.5) / np.maximum(steps, 1e-3)).min()))
        return [int(i) for i in np.argsort(distances)[:count]]

    best = []
    for i, spec in enumerate(store.order):
        block = executor.model.blocks[spec.layer]
        h = rng.standard_normal((tried, executor.model.n_embd)).astype(np.float32)
        ids = [rng.permutation(spec.experts)[: store.top_k].astype(np.int32) for _ in range(tried)]
        rough = h / np.sqrt((h**2).mean(-1, keepdims=True)) * block.ffn_norm.cpu().numpy()
        some = nearest(i, rough, ids, 5 * wanted)  # the kernel's norm, to the last bit, for these only
        x = norm(torch.from_numpy(h[some]).to(executor.device), block.ffn_norm, block.eps)[0].x.cpu().numpy()
        chosen = [some[j] for j in nearest(i, x, [ids[j] for j in some], wanted)]
        best.append([(h[j], ids[j]) for j in chosen])
    return [(np.stack([b[j][0] for b in best]), np.stack([b[j][1] for b in best])) for j in range(wanted)]


def with_steps(bench: Bench, steps: Sequence[tuple[F32, NDArray[np.int32]]]) -> Bench:
    """`bench` with these inputs and routes in place of its tokens', and the resident experts' answers to them."""
    executor = load_cached(bench.path, bench.device, None, decode_rows=1, **bench.options)
    forced = ForcedLayers(executor)
    seen = []
    for h, ids in steps:
        forced.tap.play(ids[None].astype(np.int64))
        seen.append(forced.run(h))
    executor.store.close()
    return Bench(bench.path, bench.device, bench.options, [], seen, bench.decoded, b"")
