"""What must be true of every placement, in functions that the interpreter's tests and a CUDA device's share.

Bounds: see docs/measurements/placement.md, which says what was measured and why they are what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from placement_helpers import (
    F64,
    CpuHidden,
    DownWeights,
    ForcedLayers,
    Recorded,
    Seen,
    nmse,
    rounded,
    roundings_that_differ,
)  # fmt: skip
from rounding_noise import Noise, Nudged
from store_helpers import CachedExecutor, Decoded, load_cached, rows

from ftgguf.engine.cuda_executor import CudaExecutor, _dummy
from ftgguf.engine.debug_executor import DebugExecutor, DebugSource
from ftgguf.experts.residency import Stat
from ftgguf.experts.store import CachedStore
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.kernels.formats import Activation
from ftgguf.models.config import read_numbers
from ftgguf.models.registry import family
from ftgguf.nouns import F32
from ftgguf.ops.debug import DebugCells, DebugOps

LAYER = 1e-11
"""NMSE of a MoE layer's output between two placements on one input, once what other roundings explain is taken off:
the order of float32 sums, squared. Measured: 3e-13 at most, over all types."""
PASS = 1e-10
"""The same for the layers of a whole pass, each on what the ones before made of it. Measured: 6e-13."""
SAME = 1e-6
"""NMSE of logits that nothing rounded to 8 bits has separated."""
NOISE = 2.0
"""Logits that a rounding has separated stay below the largest of the CPU executor's own changes by one unit in the last
place, times this: a score of those are compared with many more steps."""
FILL, CPU, MIXED = (65536, 1), (0, 0), (32768, 1)


@dataclass(frozen=True)
class Placing:
    """`slots` of the cache besides the ring; `split`: share of the misses that are filled (Q16), and least fills;
    `part` makes an expert shared (`experts.split.split_misses`): its gate and up on the CPU, its down on the device."""

    name: str
    slots: int
    split: tuple[int, int]
    warm: bool = False
    part: tuple[int, int] = (0, 0)

    def force(self, store: CachedStore) -> None:
        store.force_split(*self.split, self.part)

    def check(self, stats: NDArray[np.int64]) -> None:
        """The experts were where the name says, each once."""
        hits, fills, cpu = (int(stats[s]) for s in (Stat.HITS, Stat.FILLS, Stat.CPU))
        assert hits + fills + cpu == stats[Stat.EXPERTS] > 0
        assert (stats[Stat.SHARED] > 0) == (self.name == "shared")
        expected = {"hit": (True, False, False), "filled": (False, True, False), "cpu": (False, False, True)}
        if self.name in expected:
            assert (hits > 0, fills > 0, cpu > 0) == expected[self.name]
        elif self.name == "mixed 50 %":
            assert hits > 0
            assert cpu + fills > 0
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
        Placing("shared", total // 4, (40000, 1), part=(1, 40000)),
        Placing("mixed 50 %", total // 2, MIXED, warm=True),
    ]
    return {p.name: p for p in made}


@dataclass
class Bench:
    """A model, how executors of it are made, and what the resident one did: one record a token, and its logits."""

    path: Path
    device: torch.device
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
        return [[self.reference.experts(i, s).astype(np.float64) for i in range(len(s.y))] for s in self.seen]

    @classmethod
    def of(cls, path: Path, device: torch.device, tokens: Sequence[int], **options: Any) -> Bench:
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
    def placed(self, placing: Placing) -> Iterator[CachedExecutor]:
        """An executor with this placement; not warmed up yet. Checks where experts were, and closes it."""
        executor = load_cached(self.path, self.device, placing.slots, decode_rows=1, warm=placing.warm, **self.options)
        store = executor.store
        placing.force(store)
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
            executor.graphs.capture(executor.sizes, executor._decode)


# ------------------------------------------------------------------------------------------- the layers, one by one


@dataclass
class Layers:
    """NMSE over tokens and layers: `least` and `raw`, the smallest and largest of the outputs; the largest `same`, of
    those outputs whose layer rounded nothing otherwise; the largest `hidden`, of the intermediate rows before they are
    rounded; the largest `unexplained`, of the outputs after the effect of other roundings is taken off. `flips`: values
    that were rounded otherwise. `reference`: error to the float reference, of this placement and of the resident run,
    over all layers."""

    least: float = np.inf
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


def layers_under(bench: Bench, executor: CachedExecutor, steps: slice = slice(None)) -> Layers:
    """Every layer of `executor` on the inputs of the resident run's `steps`, against that run's outputs."""
    found, store = Layers(), executor.store
    forced, cpu = ForcedLayers(executor), CpuHidden(store)
    n = len(forced.blocks)
    kind = next(iter(store.specs.values())).weights.down.format.activation
    errors = np.zeros((2, 2))
    for want, exact in zip(bench.seen[steps], bench.exact[steps], strict=True):
        forced.tap.play(want.ids[None].astype(np.int64))
        got = forced.run(want.h)
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_array_equal(got.x, want.x)
        for i in range(n):
            difference = got.y[i].astype(np.float64) - want.y[i]
            energy = float((want.y[i].astype(np.float64) ** 2).sum())
            raw = float((difference**2).sum()) / energy
            hidden = hidden_of(got, i, cpu)
            other, moved = _moved(hidden, want.hidden[i], kind, bench.device)
            weighed = moved * got.weights[i][:, None].astype(np.float64)
            difference -= np.einsum("jf,jnf->n", weighed, bench.down.values[i][got.ids[i]])
            found.hidden = max(found.hidden, nmse(hidden, want.hidden[i]))
            found.raw, found.least = max(found.raw, raw), min(found.least, raw)
            found.flips += other
            found.unexplained = max(found.unexplained, float((difference**2).sum()) / energy)
            found.same = max(found.same, 0.0 if other else raw)
            for j, y in enumerate((got.y[i], want.y[i])):
                errors[j] += ((y - exact[i]) ** 2).sum(), (exact[i] ** 2).sum()
    found.reference = (errors[0, 0] / errors[0, 1], errors[1, 0] / errors[1, 1])
    return found


def hidden_of(s: Seen, layer: int, cpu: CpuHidden) -> F32:
    """All pairs' intermediate rows: the device's where the second product ran there, else the CPU's."""
    rows_: F32 = s.hidden[layer].copy()
    away = np.flatnonzero(s.slots[layer] < 0)
    rows_[away] = cpu.rows(layer, s.x[layer], s.ids[layer][away])
    return rows_


def _moved(mine: F32, theirs: F32, kind: Activation, device: torch.device) -> tuple[int, NDArray[np.float64]]:
    """How many values are rounded otherwise, and by how much each row changes after rounding."""
    a, b = (rounded(v, kind, device).astype(np.float64) for v in (mine, theirs))
    moved = a - b
    # float32 order alone moves a rounded value by 1e-7 of it (through its block's scale); a step is 2^-11 of it or more
    return int((np.abs(moved) > 1e-4 * np.maximum(np.abs(a), np.abs(b))).sum()), moved


def assert_layers_same(found: Layers, reference: float = 1e-2) -> None:
    """What a placement must not change: see `Layers`. At a tie both roundings are as far from the float reference, so
    that error stays the same, too, to `reference` of it."""
    assert found.hidden < LAYER
    assert found.same < LAYER
    assert found.unexplained < LAYER
    placed, resident = found.reference
    if resident > 1e-9:  # with float32 weights both errors are the order of sums
        assert abs(placed / resident - 1) < reference


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


def steps_under(bench: Bench, executor: CachedExecutor) -> list[Step]:
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
            other.append((i, _moved(hidden_of(got, i, cpu), want.hidden[i], kind, bench.device)[0]))
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
        assert step.before < SAME, f"step {i}: a layer before the first other rounding is off by {step.before:.1e}"
        assert step.logits < (SAME if step.first is None else bound), f"step {i}: {step}, bound {bound:.1e}"


# ------------------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class Text:
    """A greedy text of the CPU executor, its logits along it, and how far one unit in the last place moves a logit."""

    tokens: list[int]
    logits: F32
    noise: float

    @classmethod
    def of(cls, path: Path, folder: Path, n: int, nudges: int = 24) -> Text:
        nudged = Nudged(path, folder, 512)
        try:
            tokens = nudged.greedy(1, n)
            noise = max(r.change for r in nudged.runs(tokens, nudges))
            logits = np.stack([nudged.step(token, i) for i, token in enumerate(tokens)])
        finally:
            nudged.close()
        return cls(tokens, logits, noise)


def along(executor: CudaExecutor, tokens: Sequence[int]) -> F32:
    """Logits [tokens, vocabulary] of a run on its own KV and its own routes."""
    return np.stack([executor.forward(rows([t], i, [0]))[0].copy() for i, t in enumerate(tokens)])


def assert_says_the_same(got: F32, want: F32, noise: float) -> None:
    """The same next token wherever no two logits could change places by twice the noise; that is most of a text."""
    top = np.sort(want, -1)
    decided = top[:, -1] - top[:, -2] > 2 * NOISE * noise
    assert decided.mean() > 0.5
    np.testing.assert_array_equal(got.argmax(-1)[decided], want.argmax(-1)[decided])
