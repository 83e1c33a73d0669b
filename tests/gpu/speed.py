"""`python tests/gpu/speed.py FILE`: tokens a second of the CUDA executor, step against step, no sampling.

Random token ids (the worst case for a cache, the same work as llama-bench); medians with the spread. `--profile` adds
the kernels of one decode step and one prompt chunk by their time on the device.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from ftgguf.engine.cuda_compile import cache_folder
from ftgguf.engine.cuda_executor import CudaExecutor
from ftgguf.engine.devices import list_devices
from ftgguf.engine.load_cuda import load_gpu
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.nouns import PAGE, Batch

LLAMA = {"tg": 286.9, "pp512": 6567.0, "pp8192": 10949.0}
"""llama.cpp b11434 on the Qwen3-30B-A3B shape, Q4_K_M, NVIDIA H200 (docs/measurements/gpu.md)."""


def rows(tokens: np.ndarray, starts: list[int], tables: list[np.ndarray], outputs: bool) -> Batch:
    """Row i is the next token of sequence i (decode)."""
    position = np.array(starts, np.int32)
    return Batch(
        tokens.astype(np.int32),
        position,
        np.arange(len(starts), dtype=np.int32),
        np.array([t[p] for t, p in zip(tables, starts, strict=True)], np.int32),
        tuple(t[: p + 1] for t, p in zip(tables, starts, strict=True)),
        np.arange(len(starts) if outputs else 0, dtype=np.int32),
    )


def chunk(tokens: np.ndarray, start: int, table: np.ndarray, last: bool) -> Batch:
    """Consecutive rows of one sequence (prefill)."""
    position = np.arange(start, start + len(tokens), dtype=np.int32)
    outputs = np.array([len(tokens) - 1] if last else [], np.int32)
    table = table[: start + len(tokens)]
    return Batch(tokens.astype(np.int32), position, np.zeros_like(position), table[position], (table,), outputs)


class Bench:
    def __init__(self, executor: CudaExecutor, ubatch: int) -> None:
        self.executor, self.ubatch = executor, ubatch
        self.rng = np.random.default_rng(1)

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(10, self.executor.n_vocab, n).astype(np.int32)

    def table(self, sequence: int, length: int) -> np.ndarray:
        pages = -(-length // PAGE)
        return (np.arange(pages * PAGE) + sequence * pages * PAGE).astype(np.int32)

    def decode(self, count: int, steps: int, repeat: int) -> list[float]:
        """Tokens a second over all `count` sequences, `steps` steps each, from an empty context."""
        tables = [self.table(s, steps) for s in range(count)]
        found = []
        for _ in range(repeat):
            start = time.perf_counter()
            for i in range(steps):
                self.executor.forward(rows(self.tokens(count), [i] * count, tables, True))
            found.append(count * steps / (time.perf_counter() - start))
        return found

    def prefill(self, n: int, repeat: int) -> list[float]:
        """Tokens a second of a prompt of `n` tokens."""
        table = self.table(0, n)
        found = []
        for _ in range(repeat):
            tokens = self.tokens(n)
            start = time.perf_counter()
            for at in range(0, n, self.ubatch):
                part = tokens[at : at + self.ubatch]
                self.executor.forward(chunk(part, at, table, at + len(part) == n))
            torch.cuda.synchronize()
            found.append(n / (time.perf_counter() - start))
        return found


def profile(what: Callable[[], object], top: int) -> list[tuple[str, int, float]]:
    """(kernel, launches, microseconds in all) of one call, the longest first."""
    what()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        what()
        torch.cuda.synchronize()
    found = [(e.key[:60], e.count, float(e.self_device_time_total)) for e in p.key_averages()]
    return sorted((f for f in found if f[2] > 0), key=lambda f: -f[2])[:top]


def load(path: Path, options: argparse.Namespace) -> tuple[CudaExecutor, dict[str, Any], dict[str, float]]:
    config = ServerConfig()
    config = replace(
        config,
        context=replace(
            config.context, size=options.context, n_batch=options.ubatch, n_ubatch=options.ubatch,
            n_parallel=options.parallel,
        ),
        placement=replace(
            config.placement, gpu_layers=-2, debug_eager=options.eager, vram_budget=options.vram_budget, fit=False
        ),
        cpu=replace(config.cpu, threads=options.threads),
    )  # fmt: skip
    gguf = open_gguf(path)
    started = time.perf_counter()

    def no_cpu(first: int, last: int, cells: int) -> NoReturn:
        raise SystemExit("this benchmark wants every layer on the GPU")

    loaded = load_gpu(config, gguf, read_numbers(gguf), list_devices()[0], lambda stage, f: None, no_cpu)
    if isinstance(loaded, str):
        raise SystemExit(loaded)
    executor, read = loaded.gpu, time.perf_counter()
    kernels = compiled()
    executor.warm_up()
    loaded.details["kernels_compiled_by_helpers"] = kernels
    loaded.details["kernels_compiled_at_warm_up"] = compiled() - kernels
    return executor, loaded.details, {"load_s": read - started, "warm_up_s": time.perf_counter() - read}


def compiled() -> int:
    """Kernels in Triton's disk cache."""
    return sum(1 for _ in cache_folder().glob("*/*.cubin"))


def used_mib() -> int:
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    ).stdout
    return int(text.split()[0]) if text.strip() else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ubatch", type=int, default=2048)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--vram-budget", type=int)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compare", action="store_true", help="the file is the Qwen3-30B-A3B shape: print ratios")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    executor, details, seconds = load(options.file, options)
    print(json.dumps({**details, **seconds}, default=str), flush=True)
    bench = Bench(executor, options.ubatch)
    results: dict[str, list[float]] = {}
    bench.decode(1, 16, 1)
    for count in sorted({1, min(2, options.parallel), options.parallel}):
        results[f"tg x{count}"] = bench.decode(count, options.steps, options.repeat)
    for n in (64, 512, 8192):
        if n <= executor.n_cells:
            bench.prefill(n, 1)
            results[f"pp{n}"] = bench.prefill(n, options.repeat)
    for name, values in results.items():
        line = f"{name:8} {statistics.median(values):10.1f} tok/s   {min(values):.1f} to {max(values):.1f}"
        peer = LLAMA.get(name.replace(" x1", ""))
        print(line + (f"   {statistics.median(values) / peer:.2f} x {peer}" if options.compare and peer else ""))
    print(f"device memory in use {used_mib()} MiB", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"details": details, **seconds, "results": results}, default=str))
    if options.profile:
        graphs, executor.graphs.decode, executor.captures = executor.graphs.decode, {}, False
        table = bench.table(0, 8192)
        for name, batch, count in (
            ("decode x1", rows(bench.tokens(1), [127], [table], True), 16),
            ("decode x4", rows(bench.tokens(4), [127] * 4, [bench.table(i, 128) for i in range(4)], True), 10),
            (f"prompt chunk of {options.ubatch}", chunk(bench.tokens(options.ubatch), 0, table, True), 24),
            ("prompt chunk of 64", chunk(bench.tokens(64), 0, table, True), 16),
        ):
            found = profile(functools.partial(executor.forward, batch), count)
            print(f"{name}: {sum(f[2] for f in found):.0f} us on the device")
            for key, launches, us in found:
                print(f"  {us:9.1f} us {launches:5} x {us / launches:7.2f}  {key}")
        executor.graphs.decode, executor.captures = graphs, True


if __name__ == "__main__":
    main()
