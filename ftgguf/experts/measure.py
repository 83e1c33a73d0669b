"""How fast are the two paths of a miss on this machine: the link into a slot, and the CPU in place, alone and together?

Measured on the real bank with the kernels that serve: the gather from pinned memory into the ring, and the worker's
threads on scattered experts. About a second for each type of expert: a call takes 0.4 ms, and there
are some 300 of each kind.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.bench.host import cpu_name
from ftgguf.experts import profile as profiles
from ftgguf.experts.costs import PathCosts
from ftgguf.experts.prefill import Cost
from ftgguf.experts.profile import Profile, ProfileKey, TypeProfile
from ftgguf.experts.samples import Bandwidths
from ftgguf.kernels import fill as kernels
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.linear import ExpertPieces
from ftgguf.kernels.residency import StepBuffers

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore

CALL = 8
"""Experts of one call: what a decode step of one row misses at most in models with 8 of 128."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one type: rates in bytes/s and what a further row at an expert costs the CPU in seconds."""

    rates: Bandwidths
    cpu_fixed: float
    fill_fixed: float
    cpu_entry: float
    expert_bytes: int
    gpu: Cost | None = None
    """Seconds of a prompt's piece on the GPU; None without one."""


def profile_folder() -> Path:
    """Where profiles are kept: `ftgguf` in `$XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "ftgguf"


def profile_key(device: torch.device, threads: int) -> ProfileKey:
    """What a profile of this machine is true for."""
    gpu = "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = f"{properties.name} {getattr(properties, 'uuid', '')}".strip()
    return ProfileKey(gpu, cpu_name(), threads, native.ggml_version())


def stored_costs(device: torch.device, threads: int) -> PathCosts:
    """The costs of a stored profile; without one, guesses whose `source` says why."""
    loaded = profiles.load(profile_folder(), profile_key(device, threads))
    if loaded.profile is None:
        return PathCosts(source=f"guessed: {loaded.reason}")
    types = loaded.profile.types
    return PathCosts(
        rates={name: t.rates for name, t in types.items()},
        cpu_entry={name: t.cpu_entry for name, t in types.items() if t.cpu_entry},
        gpu={name: Cost(*t.gpu) for name, t in types.items() if any(t.gpu)},
        source=loaded.reason,
        measured=True,
    )


class Probe:
    """Measures on a loaded store; decode must not run meanwhile. Uses the ring, not the cache."""

    def __init__(self, store: CachedStore, seconds: float = 0.12) -> None:
        self.store, self.seconds = store, seconds
        self.rng = np.random.default_rng(0)

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(self.store.kinds))

    def measure(self, kind: str) -> Measured:
        """All figures of one type; `fill` is 0 where there is no device or no pinned layer."""
        layers = [i for i, k in enumerate(self.store.kinds) if k == kind]
        size = self.store.order[layers[0]].slot_bytes
        cpu, one = self._cpu(layers, rows=1)
        _, eight = self._cpu(layers, rows=8)
        entry = max(0.0, (eight - one) / (7 * CALL))
        pinned = [i for i in layers if self.store.reachable(i)]
        if self.store.memory.device.type != "cuda" or not pinned or not self.store.ring.capacity(size):
            return Measured(Bandwidths(0.0, cpu), one / CALL, 0.0, entry, size)
        fill, fixed = self._link(pinned)
        both = self._together(layers, pinned)
        rates = Bandwidths(fill, cpu, min(both[0], fill), min(both[1], cpu))
        return Measured(rates, one / CALL, fixed, entry, size, self._gpu(pinned[0]))

    def _repeat(self, call: Callable[[], int], until: float | None = None) -> tuple[float, float]:
        """(units per second, seconds per call) of `call` over the probe's time, after one call to warm up."""
        call()
        done = calls = 0
        started = time.perf_counter()
        end = started + self.seconds if until is None else until
        while calls < 2 or time.perf_counter() < end:
            done += call()
            calls += 1
        took = time.perf_counter() - started
        return done / took, took / calls

    def _cpu_call(self, layers: list[int], rows: int) -> Callable[[], int]:
        s = self.store
        n = min(CALL, s.state.experts)
        width = s.order[0].weights.up.k
        x = self.rng.standard_normal((rows, width)).astype(np.float32)
        weights = np.full((rows, n), 1 / n, np.float32)
        y = np.empty((rows, s.width), np.float32)
        start = (np.arange(n + 1) * rows).astype(np.int32)
        rows_of = np.concatenate([np.arange(rows) * n + i for i in range(n)]).astype(np.int32)

        def call() -> int:
            index = int(self.rng.choice(layers))
            expert = np.sort(self.rng.permutation(s.state.experts)[:n]).astype(np.int32)
            s.worker.compute(index, x, weights, expert, start, rows_of, y)
            return n * s.order[index].slot_bytes

        return call

    def _cpu(self, layers: list[int], rows: int) -> tuple[float, float]:
        return self._repeat(self._cpu_call(layers, rows))

    def _link_call(self, layers: list[int], experts: int) -> Callable[[], int]:
        s = self.store
        device = s.memory.device
        size = s.order[layers[0]].slot_bytes
        n = min(experts, s.ring.capacity(size), s.state.experts)
        out = StepBuffers.allocate(n, n, device)
        first = s.ring.buffers[0].memory.data_ptr()
        out.header[3] = n
        out.fill_dst.copy_(torch.arange(n, dtype=torch.int64) * size + first)
        stamps = torch.zeros(3, dtype=torch.int64, device=device)

        def call() -> int:
            index = int(self.rng.choice(layers))
            base = s.bank.layers[s.order[index].layer].address
            source = base + self.rng.permutation(s.state.experts)[:n].astype(np.int64) * size
            out.fill_src[:, 0].copy_(torch.from_numpy(source))
            for _ in range(8):
                kernels.fill(out, size, stamps, s.programs)
            torch.cuda.synchronize(device)
            return 8 * n * size

        return call

    def _link(self, layers: list[int]) -> tuple[float, float]:
        rate, many = self._repeat(self._link_call(layers, CALL))
        _, one = self._repeat(self._link_call(layers, 1))
        size = self.store.order[layers[0]].slot_bytes
        return rate, max(0.0, (one - (many - one) / (CALL - 1)) / 8) if size else 0.0

    def _gpu(self, index: int) -> Cost:
        """What a piece of a prompt costs: launches, weights read, rows at an expert. The pairs are sorted before."""
        s = self.store
        spec, device = s.order[index], s.memory.device
        n = min(CALL, s.ring.capacity(spec.slot_bytes), s.state.experts)
        buffer = s.ring.copy(s.bank.layers[spec.layer], spec.layer, list(range(n)))
        s.ring.use(buffer)
        k = min(s.top_k, n)

        def seconds(experts: int, rows: int) -> float:
            k_now = min(k, experts)
            drawn = np.stack([self.rng.permutation(experts)[:k_now] for _ in range(rows)])
            ids = torch.from_numpy(drawn.astype(np.int32)).to(device)
            x = torch.randn(rows, spec.weights.up.k, device=device)

            rows_in, pieces = Activations(x), ExpertPieces(ids, s.state.experts, spec.weights)

            def call() -> int:
                assert buffer.table is not None
                pieces.add(rows_in, buffer.table, buffer.addresses[spec.slot_bytes])
                torch.cuda.synchronize(device)
                return 1

            return self._repeat(call, time.perf_counter() + self.seconds / 4)[1]

        one, few, many = seconds(1, 16 * k), seconds(n, 16 * n), seconds(n, 128 * n)
        s.ring.done(buffer)
        per_entry = max(0.0, (many - few) / (112 * n * k))
        per_byte = max(0.0, few - one - per_entry * (16 * n * k - 16 * k)) / max(1, (n - 1) * spec.slot_bytes)
        return Cost(one, per_byte, per_entry)

    def _together(self, layers: list[int], pinned: list[int]) -> tuple[float, float]:
        """(link, CPU) rates while both run."""
        until = time.perf_counter() + 2 * self.seconds
        result: list[float] = []
        thread = threading.Thread(
            target=lambda: result.append(self._repeat(self._cpu_call(layers, 1), until)[0]), daemon=True
        )
        thread.start()
        link, _ = self._repeat(self._link_call(pinned, CALL), until)
        thread.join()
        return link, result[0]


def probe(store: CachedStore, seconds: float = 0.12) -> dict[str, Measured]:
    """Every type of a loaded store."""
    p = Probe(store, seconds)
    return {kind: p.measure(kind) for kind in p.kinds()}


def costs_of(measured: dict[str, Measured], source: str) -> PathCosts:
    """Measured figures as the planner and the split take them."""
    return PathCosts(
        rates={k: m.rates for k, m in measured.items()},
        cpu_entry={k: m.cpu_entry for k, m in measured.items()},
        gpu={k: m.gpu for k, m in measured.items() if m.gpu is not None},
        source=source,
        measured=True,
    )


def profile_of(measured: dict[str, Measured], key: ProfileKey) -> Profile:
    """A profile to store."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    types = {
        k: TypeProfile(
            m.rates, m.fill_fixed, m.cpu_fixed, m.expert_bytes, m.cpu_entry,
            (0.0, 0.0, 0.0) if m.gpu is None else (m.gpu.fixed, m.gpu.per_byte, m.gpu.per_entry),
        )
        for k, m in measured.items()
    }  # fmt: skip
    return Profile(key, now, types)
