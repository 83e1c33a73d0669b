"""Replays of a routing trace through expert-cache policies: hit rates, and the time misses take on a given machine.

The shipped policies run on the very code that serves (`experts.residency`), so that a number printed here is a number
of the product. The others are yardsticks and ideas: what an oracle could reach (Belady), pools per layer, forgetting
at a session's start, and prefetching the next layer's experts into a few slots of their own.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftgguf.experts import key, residency
from ftgguf.experts.split import phi_from_bandwidths, to_q16

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """`experts` integers [tokens, layers, k]; `offsets` where sessions begin, ending with the number of tokens;
    `expert_bytes` the size of an expert, 0 where the file does not say."""

    experts: Ids
    offsets: tuple[int, ...]
    expert_bytes: float = 0.0

    @property
    def n_experts(self) -> int:
        return int(self.experts.max()) + 1


def load_trace(path: Path, tokens: int | None = None, skip: int = 0) -> Trace:
    """Read `experts` uint8 or uint16 [tokens, layers, k] and, where they are, `offsets` and `expert_bytes` from an npz.

    Raises ValueError naming what is wrong with the file.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise OSError("no zip archive" if path.exists() else "no such file")
        with np.load(path) as z:
            if "experts" not in z:
                raise ValueError(f"{path}: no array `experts`; found {', '.join(z.files) or 'nothing'}")
            experts, offsets = z["experts"], z.get("offsets")
            size = float(z["expert_bytes"]) if "expert_bytes" in z else 0.0
    except (OSError, EOFError, TypeError) as e:
        raise ValueError(f"{path}: not a readable npz file ({e})") from e
    if experts.ndim != 3 or experts.dtype.kind != "u" or 0 in experts.shape:
        raise ValueError(f"{path}: `experts` must be unsigned [tokens, layers, k], is {experts.dtype} {experts.shape}")
    end = len(experts) if tokens is None else min(len(experts), skip + tokens)
    if skip >= end:
        raise ValueError(f"{path}: has {len(experts)} tokens, fewer than the {skip} to skip")
    inside = [] if offsets is None else [int(o) - skip for o in offsets if skip < o < end]
    return Trace(experts[skip:end].astype(np.int64), (0, *inside, end - skip), size)


@dataclass(frozen=True, slots=True)
class Machine:
    """Bandwidths in bytes/s of expert data: `bp` link, `bh` CPU alone; `dram` what host memory gives to both at once
    (default: `bh`, the paper's assumption). `expert_bytes` per expert; `dense` seconds per token outside misses;
    `idle` seconds per layer in which the link has nothing to do. `phi` overrides the share that follows from these."""

    bp: float = 25e9
    bh: float = 60e9
    dram: float = 0.0
    expert_bytes: float = 13.2e6
    dense: float = 0.0
    idle: float = 25e-6
    phi: float | None = None

    def cpu_while_filling(self) -> float:
        return max(0.0, min(self.bh, (self.dram or self.bh) - self.bp))

    def share(self) -> float:
        """phi: both paths end together."""
        if self.phi is not None:
            return self.phi
        return phi_from_bandwidths(self.bp, self.bh, self.bp, self.cpu_while_filling())

    def seconds(self, fills: int, cpu: int) -> float:
        """One layer's time for its misses: the CPU is slowed while fills run, and has all of `bh` afterwards."""
        fill = fills * self.expert_bytes / self.bp
        left = cpu * self.expert_bytes - fill * self.cpu_while_filling()
        return fill + max(0.0, left) / self.bh


@dataclass(frozen=True, slots=True)
class Result:
    """Per token: `fills` over the link (prefetches too), `cpu` experts; `transfers` the sum over layers of the larger
    of the two (time where both paths are equally fast); `seconds` on the machine given. `hit` is a share, 0..1."""

    policy: str
    percent: int
    slots: int
    hit: float
    fills: float
    cpu: float
    transfers: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1 / self.seconds if self.seconds > 0 else float("inf")


class _Sum:
    def __init__(self) -> None:
        self.hits = self.fills = self.cpu = self.transfers = 0
        self.seconds = 0.0

    def add(self, hits: int, fills: int, cpu: int, machine: Machine, prefetched: int = 0) -> None:
        took = machine.seconds(fills, cpu)
        slack = machine.idle + took - fills * machine.expert_bytes / machine.bp
        self.hits += hits
        self.fills += fills + prefetched
        self.cpu += cpu
        self.transfers += max(fills + prefetched, cpu)
        self.seconds += took + max(0.0, prefetched * machine.expert_bytes / machine.bp - slack)

    def result(self, policy: str, percent: int, slots: int, trace: Trace, machine: Machine) -> Result:
        tokens = len(trace.experts)
        return Result(
            policy, percent, slots, self.hits / trace.experts.size, self.fills / tokens, self.cpu / tokens,
            self.transfers / tokens, machine.dense + self.seconds / tokens,
        )  # fmt: skip


def _cache(
    trace: Trace, slots: int, policy: key.KeyPolicy, phi: float, per_layer: bool, window: int
) -> residency.Residency:
    layers = trace.experts.shape[1]
    if per_layer:
        counts = [slots // layers + (i < slots % layers) for i in range(layers)]
        state = residency.create(layers, trace.n_experts, counts, list(range(layers)), policy=policy, window=window)
    else:
        state = residency.create(layers, trace.n_experts, [slots], policy=policy, window=window)
    state.split[:] = (to_q16(phi), 1)
    return state


def _served(
    trace: Trace, slots: int, machine: Machine, policy: key.KeyPolicy,
    fill_all: bool = False, per_layer: bool = False, forget: bool = False, window: int = residency.WINDOW,
) -> _Sum:  # fmt: skip
    """The product's own step. `forget` drops the keys (not the slots) where a session begins."""
    state = _cache(trace, slots, policy, 1.0 if fill_all else machine.share(), per_layer, window)
    starts = set(trace.offsets[1:-1]) if forget else set()
    total = _Sum()
    for t, token in enumerate(trace.experts):
        if t in starts:
            state.key[:] = key.NONE
        if residency.needs_rebase(state):
            residency.rebase(state)
        for layer, ids in enumerate(token):
            step = residency.step(state, layer, ids[None], int(layer == 0))
            total.add(step.hits, len(step.fill_expert), len(step.cpu_expert), machine)
    return total


PREFETCH_SLOTS = 2
PREFETCH_ODDS = 0.4
"""Prefetch only what is at least as likely as this: a transfer in vain delays the fills of two layers."""


def _prefetching(trace: Trace, slots: int, machine: Machine, policy: key.KeyPolicy) -> _Sum:
    """The shipped policy on all but two slots, which take the likeliest absent experts of the next layer.

    Likelihood: how often each followed this layer's experts, and the last token's of its own layer, learned as it
    goes. An expert that was prefetched costs nothing when its layer runs, wherever the step would have put it.
    """
    layers = trace.experts.shape[1]
    n, own = trace.n_experts, min(PREFETCH_SLOTS, max(0, slots - 1))
    state = _cache(trace, slots - own, policy, machine.share(), False, residency.WINDOW)
    after_layer = np.full((layers, n, n), 1 / n, np.float32)
    after_token = np.full((layers, n, n), 1 / n, np.float32)
    seen = np.ones((layers, n), np.float32)
    last = np.zeros((layers, trace.experts.shape[2]), np.int64)
    total, ahead = _Sum(), np.empty(0, np.int64)
    for t, token in enumerate(trace.experts):
        for layer, ids in enumerate(token):
            here, ahead = ahead, np.empty(0, np.int64)
            step = residency.step(state, layer, ids[None], int(layer == 0))
            free_fills = int(np.isin(step.fill_expert, here).sum())
            free_cpu = int(np.isin(step.cpu_expert, here).sum())
            if layer + 1 < layers and own:
                following = last[layer + 1]
                odds = (after_layer[layer, ids] / seen[layer, ids, None]).sum(0)
                odds += (after_token[layer + 1, following] / seen[layer + 1, following, None]).sum(0)
                odds[state.slot_of[layer + 1, :n] >= 0] = -1.0
                ahead = np.argsort(-odds, kind="stable")[:own]
                ahead = ahead[odds[ahead] >= PREFETCH_ODDS * 2 * len(ids)]
            fills, cpu = len(step.fill_expert) - free_fills, len(step.cpu_expert) - free_cpu
            total.add(step.hits + free_fills + free_cpu, fills, cpu, machine, len(ahead))
            if layer:
                after_layer[layer - 1][np.ix_(token[layer - 1], ids)] += 1
            if t:
                after_token[layer][np.ix_(last[layer], ids)] += 1
            seen[layer, ids] += 1
            last[layer] = ids
    return total


def _belady(trace: Trace, slots: int, machine: Machine) -> _Sum:
    """The best any policy could do that fills every miss: evict what is used again last (L. A. Belady, 1966)."""
    tokens, layers, _ = trace.experts.shape
    n = trace.n_experts
    never = tokens * layers + 1
    upcoming = np.full(layers * n, never)
    following = np.empty(trace.experts.shape, np.int64)
    for t in range(tokens - 1, -1, -1):
        for layer in range(layers):
            ids = layer * n + trace.experts[t, layer]
            following[t, layer] = upcoming[ids]
            upcoming[ids] = t * layers + layer
    next_use = np.full(layers * n, -1)  # of cached experts
    count, total = 0, _Sum()
    for t in range(tokens):
        for layer in range(layers):
            ids = layer * n + trace.experts[t, layer]
            missing = ids[next_use[ids] < 0]
            total.add(len(ids) - len(missing), len(missing), 0, machine)
            next_use[ids] = following[t, layer]
            count += len(missing)
            while count > slots:  # may throw out what was just used: a fill that is not kept
                next_use[int(np.argmax(next_use))] = -1
                count -= 1
    return total


@dataclass(frozen=True, slots=True)
class Policy:
    """A column of the report."""

    name: str
    what: str
    run: Callable[[Trace, int, Machine], _Sum]
    shipped: bool = False


def _policy(name: str, what: str, p: key.KeyPolicy, shipped: bool = False, **how: Any) -> Policy:
    return Policy(name, what, lambda trace, slots, machine: _served(trace, slots, machine, p, **how), shipped)


PARTS = replace(key.DECAY, name="no-phase", phase=0)
POLICIES = {
    p.name: p
    for p in (
        _policy("lru-fill", "least recently used over all layers, every miss filled", key.LRU, fill_all=True),
        _policy("lru", "least recently used over all layers", key.LRU),
        _policy("lru-layer", "least recently used, a pool for each layer", key.LRU, per_layer=True),
        _policy("decay16", "one decayed frequency, half-life 16 tokens", key.DECAY16),
        _policy("decay", "the default: half-lives 2 and 32, layers' own clocks and order", key.DECAY, shipped=True),
        _policy("decay-fill", "the default key, every miss filled", key.DECAY, fill_all=True),
        _policy("no-phase", "the default key without the order of layers", PARTS),
        _policy("decay-layer", "the default key, a pool for each layer", key.DECAY, per_layer=True),
        _policy("window-64", "the default, its victims chosen among 64 slots at a time", key.DECAY, window=64),
        _policy("decay-forget", "the default key, forgotten at each session's start", key.DECAY, forget=True),
        Policy(
            "prefetch", f"the default key, {PREFETCH_SLOTS} slots of their own for the next layer's likeliest",
            lambda trace, slots, machine: _prefetching(trace, slots, machine, key.DECAY),
        ),
        Policy("belady", "the best possible with every miss filled (knows the future)", _belady),
    )
}  # fmt: skip


def replay(trace: Trace, policy: str, percent: int, machine: Machine) -> Result:
    """Replay `trace` through `policy` with a cache of `percent` % of all experts. Raises ValueError for bad names."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: choose from {', '.join(POLICIES)}")
    if not 0 <= percent <= 100:
        raise ValueError(f"cache size {percent} % is not within 0..100")
    slots = trace.experts.shape[1] * trace.n_experts * percent // 100
    total = POLICIES[policy].run(trace, slots, machine)
    return total.result(policy, percent, slots, trace, machine)
