"""What must be true of every placement, in functions that the interpreter's tests and a CUDA device's share.

Bounds: see docs/measurements/placement.md, which says what was measured and why they are what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from placement_helpers import (
    CpuHidden,
    DownWeights,
    F64,
    ForcedLayers,
    Recorded,
    Seen,
    nmse,
    rounded,
    roundings_that_differ,
)  # fmt: skip
from rounding_noise import Noise
from store_helpers import Decoded, load_cached, rows

from ftgguf.engine.cuda_experts import Placement as Placed
from ftgguf.engine.cuda_executor import CudaExecutor, _dummy
from ftgguf.engine.debug_executor import DebugExecutor, DebugSource
from ftgguf.experts import store as store_module
from ftgguf.experts.residency import Stat
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.kernels.formats import Activation
from ftgguf.kernels.norm import norm
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32
from ftgguf.ops.debug import DebugCells, DebugOps

LAYER = 1e-12
"""NMSE of a MoE layer's output between two placements on one input, once what other roundings explain is taken off:
the order of float32 sums, squared. Measured: 1e-13 at most, over all types."""
SAME = 1e-6
"""NMSE of logits that nothing rounded to 8 bits has separated."""
NOISE = 2.0
"""Logits that a rounding has separated stay below the largest of the CPU executor's own changes by one unit in the last
place, times this: a score of those are compared with many more steps."""
FILL, CPU, MIXED = (65536, 1), (0, 0), (32768, 1)


@dataclass(frozen=True)
class Placing:
    """`slots` of the cache besides the ring; `split`: share of the misses that are filled (Q16) and least fills."""

    name: str
    slots: int
    split: tuple[int, int]
    warm: bool = False

    def check(self, stats: NDArray[np.int64]) -> None:
        """The experts were where the name says, each once."""
        hits, fills, cpu = (int(stats[s]) for s in (Stat.HITS, Stat.FILLS, Stat.CPU))
        assert hits + fills + cpu == stats[Stat.EXPERTS] > 0
        expected = {"hit": (True, False, False), "filled": (False, True, False), "cpu": (False, False, True)}
        if self.name in expected:
            assert (hits > 0, fills > 0, cpu > 0) == expected[self.name]
        else:
            assert cpu > 0
            assert fills > 0


def placings(layers: int, experts: int, k: int) -> dict[str, Placing]:
    """Issue's list: cache of 0, 1 slot, 25 %, 50 %, all; fills of none, all, some of the misses."""
    total = layers * experts
    made = [
        Placing("hit", total, FILL, warm=True),
        Placing("filled", k, FILL),
        Placing("cpu", 0, CPU),
        Placing("one slot", 1, FILL),
        Placing("mixed 25 %", total // 4, MIXED),
        Placing("mixed 50 %", total // 2, MIXED),
    ]
    return {p.name: p for p in made}


@dataclass
class Bench:
    """A model, how executors of it are made, and what the resident one did: one record a token, and its logits."""

    path: Path
    device: Any
    options: dict[str, Any]
    tokens: list[int]
    seen: list[Seen]
    decoded: Decoded
    kv: bytes

    @cached_property
    def down(self) -> DownWeights:
        return DownWeights(self.path, len(self.seen[0].y))

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.path)

    @cached_property
    def exact(self) -> list[list[F64]]:
        """The reference's output of each step's layers, on the resident run's inputs."""
        return [
            [self.reference.experts(i, s).astype(np.float64) for i in range(len(s.y))] for s in self.seen
        ]

    @classmethod
    def of(cls, path: Path, device: Any, tokens: Sequence[int], **options: Any) -> Bench:
        made = cls(path, device, options, list(tokens), [], Decoded(*[np.zeros(0)] * 3), b"")  # type: ignore[arg-type]
        executor = load_cached(path, device, None, decode_rows=1, **options)
        recorded = Recorded(executor)
        ready(executor)
        logits = []
        for i, token in enumerate(made.tokens):
            logits.append(executor.forward(rows([token], i, [0]))[0].copy())
            made.seen.append(recorded.seen())
        ids = np.stack([s.ids for s in made.seen]).astype(np.int64)
        made.decoded = Decoded(np.stack(logits), ids, np.stack([s.weights for s in made.seen]))
        made.kv = executor.read_cells(np.arange(len(made.tokens), dtype=np.int32))
        executor.store.close()
        return made

    @contextmanager
    def placed(self, placing: Placing) -> Iterator[CudaExecutor]:
        """An executor with this placement; not warmed up yet. Checks where experts were, and closes it."""
        executor = load_cached(
            self.path, self.device, placing.slots, decode_rows=1, warm=placing.warm, **self.options
        )
        store: Any = executor.store
        store.force_split(*placing.split)
        try:
            yield executor
            placing.check(store.statistics().sum(0))
        finally:
            store.close()


def ready(executor: CudaExecutor) -> None:
    """Compile and capture the pass of one row, as `warm_up` does for all sizes."""
    if executor.captures:
        with executor._on_device():
            executor.small.fill(_dummy(1, np.zeros(1, np.int32)), 1)
            executor._decode(1)
            executor._capture_decode()


# ------------------------------------------------------------------------------------------- the layers, one by one


@dataclass
class Layers:
    """Largest NMSE over tokens and layers: `raw` of the outputs, `same` of those outputs whose layer rounded nothing
    otherwise, `hidden` of the CPU's intermediate rows before they are rounded, `unexplained` of the outputs after the
    effect of other roundings is taken off. `flips`: values that were rounded otherwise. `reference`: error to the float
    reference, of this placement and of the resident run (NMSE over all layers)."""

    raw: float = 0.0
    same: float = 0.0
    hidden: float = 0.0
    unexplained: float = 0.0
    flips: int = 0
    reference: tuple[float, float] = (0.0, 0.0)


class Reference:
    """The experts' sums by the debug executor's operators: float32, weights dequantised, nothing rounded."""

    def __init__(self, path: Path) -> None:
        gguf = open_gguf(path)
        self.model = family(gguf.architecture)(DebugSource(gguf), read_numbers(gguf), ContextConfig())

    def experts(self, layer: int, s: Seen) -> F32:
        p: Any = self.model.blocks[layer].ffn
        ops = DebugOps(rows([0], 0, [0]), DebugCells([], []))
        y: F32 = ops.experts(s.x[layer][None], s.ids[layer][None], s.weights[layer][None], p.experts)[0]
        return y

    def logits(self, tokens: Sequence[int], ids: NDArray[np.int64]) -> F32:
        """Decode logits [tokens, vocabulary], routed to `ids` [tokens, layers, k]."""
        executor = DebugExecutor(self.model, n_cells=len(tokens), max_rows=1)
        forced: list[NDArray[np.int64]] = []
        own = DebugOps.top_k
        DebugOps.top_k = lambda self, x, k: forced.pop(0)[None]  # type: ignore[method-assign, assignment]
        try:
            out = []
            for i, token in enumerate(tokens):
                forced[:] = list(ids[i])
                out.append(executor.forward(rows([token], i, [0]))[0])
            return np.stack(out)
        finally:
            DebugOps.top_k = own  # type: ignore[method-assign]


def layers_under(bench: Bench, executor: CudaExecutor, steps: int | None = None) -> Layers:
    """Every layer of `executor` on the inputs of the resident run's first `steps`, against that run's outputs."""
    found, store = Layers(), executor.store
    forced, cpu = ForcedLayers(executor), CpuHidden(store)
    n = len(forced.blocks)
    kind = next(iter(store.specs.values())).weights.down.format.activation
    errors = np.zeros((2, 2))
    for want, exact in zip(bench.seen[:steps], bench.exact[:steps], strict=True):
        forced.tap.play(want.ids[None].astype(np.int64))
        got = forced.run(want.h)
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_array_equal(got.x, want.x)
        for i in range(n):
            away = np.flatnonzero(got.on_cpu()[i])
            difference = got.y[i].astype(np.float64) - want.y[i]
            energy = float((want.y[i].astype(np.float64) ** 2).sum())
            raw = float((difference**2).sum()) / energy
            other = 0
            if len(away):
                mine, theirs = cpu.rows(i, got.x[i], got.ids[i][away]), want.hidden[i][away]
                found.hidden = max(found.hidden, nmse(mine, theirs))
                other, moved = _moved(mine, theirs, kind, bench.device)
                weighed = moved * got.weights[i][away][:, None].astype(np.float64)
                difference -= np.einsum("jf,jnf->n", weighed, bench.down.values[i][got.ids[i][away]])
            found.raw = max(found.raw, raw)
            found.flips += other
            found.unexplained = max(found.unexplained, float((difference**2).sum()) / energy)
            found.same = max(found.same, 0.0 if other else raw)
            for j, y in enumerate((got.y[i], want.y[i])):
                errors[j] += ((y - exact[i]) ** 2).sum(), (exact[i] ** 2).sum()
    found.reference = (errors[0, 0] / errors[0, 1], errors[1, 0] / errors[1, 1])
    return found


def _moved(mine: F32, theirs: F32, kind: Activation, device: Any) -> tuple[int, NDArray[np.float64]]:
    """How many values are rounded otherwise, and by how much each row changes after rounding."""
    a, b = (rounded(v, kind, device).astype(np.float64) for v in (mine, theirs))
    moved = a - b
    # float32 order alone moves a rounded value by 1e-7 of it (through its block's scale); a step is 2^-11 of it or more
    return int((np.abs(moved) > 1e-4 * np.maximum(np.abs(a), np.abs(b))).sum()), moved


def assert_layers_same(found: Layers) -> None:
    """What a placement must not change: see `Layers`."""
    assert found.hidden < LAYER
    assert found.same < LAYER
    assert found.unexplained < LAYER
    placed, resident = found.reference
    if resident > 1e-9:  # with float32 weights both errors are the order of sums
        assert abs(placed / resident - 1) < 1e-2


# ------------------------------------------------------------------------------------------------ broken on purpose


def break_slots(executor: CudaExecutor) -> None:
    """Every slot's address is its neighbour's: wrong experts."""
    store: Any = executor.store
    store.addresses.copy_(torch.roll(store.addresses, 1))


def break_fills(executor: CudaExecutor) -> None:
    """Slots keep what they had: stale experts."""
    store: Any = executor.store
    place = store.place

    def stale(*args: Any) -> Placed:
        real = store_module.kernels.fill
        store_module.kernels.fill = lambda *a: None  # type: ignore[assignment]
        try:
            placed: Placed = place(*args)
            return placed
        finally:
            store_module.kernels.fill = real

    store.place = stale


def _share(factor: float) -> Callable[[CudaExecutor], None]:
    def change(executor: CudaExecutor) -> None:
        store: Any = executor.store
        collect = store.collect
        store.collect = lambda layer, placed: collect(layer, placed).mul_(factor)

    return change


def break_rank(executor: CudaExecutor) -> None:
    """The last rank, the one with the least weight, is nowhere."""
    store: Any = executor.store
    place = store.place

    def lost(*args: Any) -> Placed:
        placed = place(*args)
        slots = placed.slots.clone()
        slots[:, -1] = -1
        return Placed(slots, placed.slot_addr, placed.ticket)

    store.place = lost


def break_bank(executor: CudaExecutor) -> None:
    """The host's experts have changed places."""
    store: Any = executor.store
    for resident in store.bank.layers.values():
        resident.view[:] = np.roll(resident.view, 1, axis=0)


BROKEN: dict[str, tuple[str, Callable[[CudaExecutor], None]]] = {
    "wrong slot": ("hit", break_slots),
    "stale slot": ("filled", break_fills),
    "an expert lost": ("hit", break_rank),
    "the CPU's experts lost": ("mixed 50 %", _share(0.0)),
    "the CPU's experts twice": ("mixed 50 %", _share(2.0)),
    "the CPU's experts exchanged": ("cpu", break_bank),
}
"""Fault -> the placement it is tried on, and what brings it about."""
FAULT = 1e-9
"""A fault moves every layer's output by more than this (NMSE), a thousand times the bound; and some layer's by 1e-3."""


def assert_fault_shows(bench: Bench, executor: CudaExecutor, fault: Callable[[CudaExecutor], None]) -> None:
    """One good step, then the fault: the next step's layers are wrong."""
    before = layers_under(bench, executor, 1)
    assert_layers_same(before)
    fault(executor)
    want = bench.seen[1]
    forced = ForcedLayers(executor)
    forced.tap.play(want.ids[None].astype(np.int64))
    got = forced.run(want.h)
    errors = [nmse(got.y[i], want.y[i]) for i in range(len(want.y))]
    assert not min(errors) <= FAULT  # not a number is wrong, too
    assert not max(errors) <= 1e-3
    with pytest.raises(AssertionError):
        assert_layers_same(layers_under(bench, executor, 2))


def jitter(executor: CudaExecutor, by: float) -> None:
    """Stretch the CPU's share by a little, as if its sums were rounded far worse: more ties are passed."""
    _share(1.0 + by)(executor)


# ----------------------------------------------------------------------------------------- steps on equal KV, and runs


@dataclass(frozen=True)
class Step:
    """One decode step on the resident run's KV. `first`: the first layer in which something was rounded otherwise (the
    number of layers: the head), None: nothing was. `before`: the largest NMSE of the MoE layers before that. `flips`:
    values rounded otherwise. `logits`: their NMSE."""

    first: int | None
    before: float
    flips: int
    logits: float


def steps_under(bench: Bench, executor: CudaExecutor) -> list[Step]:
    """Each token as a first decode step after the same prefill, routed as the resident run was."""
    recorded = Recorded(executor)
    ready(executor)
    cpu = CpuHidden(executor.store)
    cells = np.arange(len(bench.tokens), dtype=np.int32)
    kind = next(iter(executor.store.specs.values())).weights.down.format.activation
    recorded.tap.play(bench.decoded.ids)
    found = []
    for at, token in enumerate(bench.tokens):
        executor.write_cells(cells, bench.kv)
        logits = executor.forward(rows([token], at, [0]))[0]
        got, want = recorded.seen(), bench.seen[at]
        np.testing.assert_array_equal(got.ids, want.ids)
        other = [(layer, values + scales) for layer, values, scales in roundings_that_differ(got, want)]
        for i in range(len(got.y)):
            away = np.flatnonzero(got.on_cpu()[i])
            hidden = got.hidden[i].copy()
            if len(away):
                hidden[away] = cpu.rows(i, got.x[i], got.ids[i][away])
            other.append((i, _moved(hidden, want.hidden[i], kind, bench.device)[0]))
        first = min((layer for layer, count in other if count), default=None)
        until = len(got.y) if first is None else first
        before = max((nmse(got.y[i], want.y[i]) for i in range(until)), default=0.0)
        found.append(Step(first, before, sum(n for _, n in other), nmse(logits, bench.decoded.logits[at])))
    recorded.tap.play(None)
    return found


def bound_of(noise: Sequence[Noise]) -> float:
    """The NMSE that a step may show after a rounding tie."""
    kept = [n.nmse for n in noise if n.routed]
    assert len(kept) >= 3, "too few nudges kept their experts: no bound can be taken from them"
    return NOISE * max(kept)


def assert_chain(steps: Sequence[Step], bound: float) -> None:
    """Equal up to the first value that is rounded otherwise, and from there on as noisy as the CPU executor alone."""
    for i, step in enumerate(steps):
        assert step.before < SAME, f"step {i}: a layer before the first other rounding differs by {step.before:.1e}"
        if step.first is None:
            assert step.logits < SAME, f"step {i}: nothing was rounded otherwise, but logits differ by {step.logits:.1e}"
        else:
            assert step.logits < bound, f"step {i}: {step.logits:.1e} after {step.flips} other roundings, of {bound:.1e}"


# ------------------------------------------------------------------------------------------------------ ties, found


def nearest_ties(executor: CudaExecutor, tried: int, wanted: int) -> list[tuple[F32, NDArray[np.int32]]]:
    """Of `tried` random inputs a layer, the `wanted` whose experts' intermediate values come closest to a rounding tie,
    by the CPU's rows: (h [layers, n_embd], ids [layers, k]) for as many steps. For types that round to Q8_0."""
    store: Any = executor.store
    cpu, rng = CpuHidden(store), np.random.default_rng(7)
    best: list[list[tuple[float, F32, NDArray[np.int32]]]] = []
    for i, spec in enumerate(store.order):
        block = executor.model.blocks[spec.layer]
        h = rng.standard_normal((tried, executor.model.n_embd)).astype(np.float32)
        x = norm(torch.from_numpy(h).to(executor.device), block.ffn_norm, block.eps)[0].x.cpu().numpy()
        found = []
        for row in range(tried):
            ids = rng.permutation(spec.experts)[: store.top_k].astype(np.int32)
            blocks = cpu.rows(i, x[row], ids).reshape(-1, 32)
            steps = np.abs(blocks) * (np.float32(127) / np.abs(blocks).max(-1, keepdims=True))
            tie = np.abs(steps - np.floor(steps) - 0.5) / np.maximum(steps, 1e-3)
            found.append((float(tie.min()), h[row], ids))
        best.append(sorted(found, key=lambda f: f[0])[:wanted])
    return [(np.stack([b[j][1] for b in best]), np.stack([b[j][2] for b in best])) for j in range(wanted)]


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
