"""Decode and prefill speed of the cached store on a real shape: `offload_speed.py FILE [SLOT_SHARE ...]`.

For each share of the experts that fits: tok/s with the split, fill-all and all-CPU; seconds for 64 and 2048 new tokens;
and what a miss costs, in parts: the paths alone by number of experts, the layers by number of misses, prompts' layers
as predicted and as measured. `--replay FILE.npz` routes decode as a recorded trace does (`serve --record-routing`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "experts"))
from store_helpers import CachedExecutor, load_cached

from ftgguf.bench.replay import load_trace
from ftgguf.engine.cuda_compile import Helpers, Job
from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.engine.survey import survey
from ftgguf.experts.cpu_worker import cpu_threads
from ftgguf.experts.measure import Probe, costs_of, probe
from ftgguf.experts.pinning import cuda_pinner
from ftgguf.experts.routing import RoutingReplay
from ftgguf.experts.status import start_line
from ftgguf.experts.store import CachedStore
from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.kernels import fill as kernels
from ftgguf.kernels.residency import residency_step
from ftgguf.models.config import read_numbers
from ftgguf.nouns import Batch

DEVICE = torch.device("cuda", 0)


def rows(tokens: Sequence[int] | np.ndarray, start: int, outputs: list[int]) -> Batch:
    n = len(tokens)
    at = np.arange(start, start + n, dtype=np.int32)
    table = np.arange(start + n, dtype=np.int32)
    return Batch(np.asarray(tokens, np.int32), at, np.zeros(n, np.int32), at, (table,), np.array(outputs, np.int32))


def decode(
    executor: CudaExecutor, steps: int, start: int, rng: np.random.Generator, after: Callable[[], None]
) -> float:
    """tok/s; `after` is called after each step, outside of the time."""
    tokens = rng.integers(3, executor.n_vocab, steps)
    took = 0.0
    for i, t in enumerate(tokens):
        begin = time.perf_counter()
        executor.forward(rows([t], start + i, [0]))
        took += time.perf_counter() - begin
        after()
    return steps / took


class Layers:
    """Every layer of every step by its number of misses: how long its fills, its CPU experts and the wait took."""

    def __init__(self, store: CachedStore) -> None:
        self.store = store
        self.lines: list[np.ndarray] = []
        self.before = self._served()

    def _served(self) -> np.ndarray:
        return np.array(self.store.mail.doorbell.statistics(), np.int64)

    def __call__(self) -> None:
        now = self._served()
        cpu = (now - self.before)[:, 4]
        self.before = now
        end = self.store.mail.trace[:, 7]
        whole = np.diff(end, prepend=end[0])  # from the layer before's end to its own
        self.lines.append(np.column_stack([self.store.mail.trace, cpu, whole])[1:])

    def show(self, name: str) -> None:
        t = np.concatenate(self.lines)
        total = t.sum(0) / len(self.lines)  # of all layers but the first
        us = total / 1e3
        print(f"  {name}, a step: hits {total[0]:.1f} misses {total[1]:.1f} fills {total[2]:.1f} cpu {total[3]:.1f}")
        print(f"    us: fills {us[5]:.0f}, products {us[4] - us[5]:.0f}, wait {us[6]:.0f}; CPU busy {us[16]:.0f}")
        for m in np.unique(t[:, 1]):
            some = t[t[:, 1] == m]
            f, c = some[:, 2].mean(), some[:, 3].mean()
            us = some[:, [5, 4, 16, 6]].mean(0) / 1e3
            whole = np.median(some[:, 17]) / 1e3
            besides = np.median(some[:, 17] - some[:, 4] - some[:, 6]) / 1e3
            mean = some[:, 17].mean() / 1e3
            print(
                f"    {m} misses ({len(some)} layers): {f:.1f} filled in {us[0]:.0f} us (with products {us[1]:.0f}), "
                f"{c:.1f} on the CPU in {us[2]:.0f}, waited {us[3]:.1f}; "
                f"the layer {whole:.0f} (mean {mean:.0f}), besides {besides:.0f}"
            )


class Host:
    """What the host does in a decode step, in us: until the graph is launched, the launch, the wait, and after it."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.marks: list[list[float]] = []
        self.now: list[float] = []
        store, graph = executor.store, executor.graphs.decode[1]
        start, finish, wait = store.start, store.finish, executor._wait

        def mark() -> None:
            self.now.append(time.perf_counter())

        def started(*args: Any) -> None:
            self.now = []
            mark()
            start(*args)

        def waited() -> None:
            mark()
            wait()
            mark()

        def finished(*args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            mark()
            self.marks.append(self.now)

        class Graph:
            def replay(self) -> None:
                mark()
                graph.replay()
                mark()

        executor.graphs.decode[1] = Graph()

        def undo() -> None:
            store.start, store.finish, executor._wait = start, finish, wait  # type: ignore[method-assign]
            executor.graphs.decode[1] = graph

        store.start, store.finish, executor._wait = started, finished, waited  # type: ignore[method-assign, assignment]
        self.undo = undo

    def show(self) -> None:
        parts = np.diff(np.array([m for m in self.marks if len(m) == 6]), axis=1) * 1e6
        names = ("inputs", "launch", "queue the copy", "wait", "finish")
        print("    host, us (mean, median): " + ", ".join(
            f"{n} {v.mean():.0f} {np.median(v):.0f}" for n, v in zip(names, parts.T, strict=True)
        ))  # fmt: skip


def line(counts: list[int], seconds: list[float]) -> str:
    b, a = np.polyfit(counts, seconds, 1)
    each = ", ".join(f"{n}: {1e6 * s:.0f}" for n, s in zip(counts, seconds, strict=True))
    return f"{each} us; {1e6 * a:.0f} us + {1e6 * b:.1f} an expert"


def paths(store: CachedStore) -> None:
    """Both paths by number of experts in a call: the CPU's job, and the gather (of eight in a row, with launches)."""
    p, counts = Probe(store, 0.1), [1, 2, 4, 8]
    layers = list(range(store.state.layers))
    cpu, link = [], []
    for n in counts:
        import ftgguf.experts.measure as measure

        measure.CALL = n
        cpu.append(p._repeat(p._cpu_call(layers, 1))[1])
        link.append(p._repeat(p._link_call(layers, n))[1] / 8)
        measure.CALL = 8
    print(f"  CPU job   {line(counts, cpu)}\n  gather    {line(counts, link)}")


def small_kernels(store: CachedStore) -> None:
    """us of a layer's decision, message and collection where everything hits, and of the decision with misses, from a
    captured graph with one for each layer. The cache's state is put back."""
    store.device_state.store(store.state)
    layers, k = store.state.layers, store.top_k
    resident = [np.flatnonzero(store.state.slot_of[i] >= 0)[:k] for i in range(layers)]
    absent = [np.flatnonzero(store.state.slot_of[i, : store.state.experts] < 0)[:k] for i in range(layers)]
    weights = torch.full((1, k), 1 / k, device=DEVICE)
    x = torch.zeros(1, store.width, device=DEVICE)

    def timed(body: Callable[[int], None]) -> float:
        for i in range(layers):
            body(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(layers):
                body(i)
        times = []
        for _ in range(20):
            store.device_state.load(store.state)
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / layers)
        return float(np.median(times))

    def ids(found: list[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.resize(f, k).astype(np.int32))[None].to(DEVICE) for f in found]

    if min(len(f) for f in resident) and min(len(f) for f in absent):
        hit, miss = ids(resident), ids(absent)
        store.force_split(65536, 1)

        def whole(i: int) -> None:
            residency_step(store.device_state, i, hit[i], store.buffers, int(i == 0))
            kernels.publish(store.mail.addresses, store.mail.ticket, store.buffers, i, x, weights)
            kernels.fill(store.buffers, store.order[i].slot_bytes, store.stamps, store.programs)
            kernels.collect(store.mail.addresses, store.mail.ticket, store.buffers, i, store.share[:1], store.stamps)

        alone = timed(lambda i: residency_step(store.device_state, i, hit[i], store.buffers, int(i == 0)))
        filling = timed(lambda i: residency_step(store.device_state, i, miss[i], store.buffers, int(i == 0)))
        every = timed(whole)
        print(f"  small kernels, us a layer where everything hits: residency {alone:.1f}, all four {every:.1f}")
        print(f"    residency with all {k} missing {filling:.1f}")
    store.splits.release()
    store.device_state.load(store.state)


def prompts(executor: CachedExecutor, rng: np.random.Generator) -> None:
    store = executor.store
    for n in (64, 64, 2048, 2048):
        before = dict(store.prefill.counts)
        begin = time.perf_counter()
        executor.forward(rows(rng.integers(3, executor.n_vocab, n), 0, [n - 1]))
        took = time.perf_counter() - begin
        modes = {m: c - before[m] for m, c in store.prefill.counts.items() if c > before[m]}
        print(f"  {n} new tokens: {took:.3f} s {modes}", flush=True)
    for mode, t in store.prefill.times.status().items():
        each = {k: 1e3 * v / t["layers"] for k, v in t.items() if k != "layers"}
        print(f"    {mode}: {each['predicted_seconds']:.2f} ms a layer predicted, {each['seconds']:.2f} measured")
    dense = store.prefill.times._dense.items()
    print("    between experts: " + ", ".join(f"up to {1 << b} rows {1e3 * s:.2f} ms" for b, s in dense))


def profile(executor: CudaExecutor, rng: np.random.Generator, steps: int = 8) -> None:
    """Kernels of a decode step by their time, from CUPTI."""
    batches = [rows([int(t)], i, [0]) for i, t in enumerate(rng.integers(3, executor.n_vocab, steps + 1))]
    executor.forward(batches[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for batch in batches[1:]:
            executor.forward(batch)
    found = sorted(p.key_averages(), key=lambda e: -e.self_device_time_total)
    for e in found[:18]:
        print(f"    {e.key[:60]:<60} {e.count / steps:7.1f} x {e.self_device_time_total / e.count:7.2f} us = "
              f"{e.self_device_time_total / steps:8.1f} us")  # fmt: skip


def measure_share(
    path: Path, share: float, threads: int, trace: np.ndarray | None, steps: int, parts: set[str]
) -> None:
    rng, numbers = np.random.default_rng(0), read_numbers(open_gguf(path))
    slots = int(share * numbers.n_expert * numbers.n_layer)
    began = time.perf_counter()
    executor = load_cached(
        path, DEVICE, slots, ring_slots=96 if trace is None else 32, decode_rows=1, n_cells=4096, max_rows=2048,
        kv="f16", pinner=cuda_pinner(DEVICE), cpus=cpu_threads(threads),
    )  # fmt: skip
    store = executor.store
    measured = probe(store)
    store.costs = costs_of(measured, "probed")
    for kind, m in measured.items():
        gb = {name: round(v / 1e9, 1) for name, v in asdict(m.rates).items()}
        print(kind, gb, f"{m.cpu_entry * 1e6:.1f} us/row, GPU {m.gpu}")
    from ftgguf.experts.control import SplitController

    store.controller = SplitController({kind: m.rates for kind, m in measured.items()})
    if trace is not None:
        blocks = sorted(store.specs)
        store.hook = RoutingReplay(trace[:, : len(blocks)], blocks, 1, numbers.n_expert, DEVICE)
    executor.warm_up()
    ready = time.perf_counter() - began
    print(f"share {share}: {slots} slots, ready in {ready:.1f} s; {start_line(store)}", flush=True)
    print(f"  {threads} threads asked for")
    if "paths" in parts:
        paths(store)
    if "small" in parts:
        small_kernels(store)
    store.splits.write()
    decode(executor, 64 if trace is None else 512, 0, rng, lambda: None)
    layers, before = Layers(store), store.statistics().sum(0)
    print(f"  split   {decode(executor, steps, 0, rng, layers):8.1f} tok/s; {store.controller.reason}", flush=True)
    counted = store.statistics().sum(0) - before
    print(f"    hit rate {counted[3] / counted[2]:.3f}; {store.controller.status()}")
    layers.show("split")
    host = Host(executor)
    print(f"    again, the host watched: {decode(executor, steps, 0, rng, lambda: None):.1f} tok/s")
    host.show()
    host.undo()
    if "profile" in parts:
        profile(executor, rng)
    for name, split in (("fill", (65536, 1)), ("cpu", (0, 0))) if "arms" in parts else ():
        store.force_split(*split)
        decode(executor, 8, 0, rng, lambda: None)
        layers = Layers(store)
        print(f"  {name:<7} {decode(executor, steps // 2, 0, rng, layers):8.1f} tok/s", flush=True)
        layers.show(name)
    store.splits.release()
    if "prompts" in parts:
        prompts(executor, rng)
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("shares", type=float, nargs="*", default=[0.11, 0.37])
    parser.add_argument("--threads", type=int, nargs="*", default=[15])
    parser.add_argument("--parts", nargs="*", default=["paths", "small", "arms", "prompts"], help="or profile")
    parser.add_argument("--replay", type=Path, help="npz: experts [tokens, layers, k]")
    parser.add_argument("--steps", type=int, default=200)
    a = parser.parse_args()
    trace = None if a.replay is None else load_trace(a.replay, 4000).experts
    gguf = open_gguf(a.file)
    major, minor = torch.cuda.get_device_capability(DEVICE)
    job = Job(str(a.file), 10 * major + minor, 0, n_cells=4096, max_rows=2048, decode_rows=1, kv="f16")
    print(Helpers(job, survey(gguf, read_numbers(gguf), ContextConfig())).wait(), flush=True)
    for share in a.shares:
        for threads in a.threads:
            measure_share(a.file, share, threads, trace, a.steps, set(a.parts))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
