"""Cost of the residency kernel on this GPU: microseconds a layer step at 2k, 8k and 32k slots, in a captured graph.

Needs CUDA and torch. `python -m ftgguf.bench.residency` prints the table, and what asking the CPU costs
(bench/signalling.py); `measure()` returns the table.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ftgguf.bench import signalling
from ftgguf.engine import cores
from ftgguf.experts import residency
from ftgguf.kernels.residency import DeviceResidency, StepBuffers, residency_step

SLOTS = (2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Row:
    """`misses` is the mean number a launch had, all filled; `us` the median time of one launch in a replayed graph."""

    slots: int
    experts: int
    rows: int
    k: int
    window: int
    num_warps: int
    misses: float
    us: float


def one(
    slots: int, experts: int = 256, rows: int = 1, k: int = 8, want_hits: bool = False,
    window: int = residency.WINDOW, num_warps: int = 4, launches: int = 64, replays: int = 30,
) -> Row:  # fmt: skip
    """Time `launches` launches over as many layers as give twice `slots` experts, uniform ids (or all resident)."""
    device = torch.device("cuda")
    layers = min(max(2, 2 * slots // experts), (1 << 20) // residency.pad_experts(experts) - 1)
    state = DeviceResidency.of(residency.create(layers, experts, [slots], window=window), device)
    out = StepBuffers.allocate(rows * k, experts, device)
    rng = np.random.default_rng(0)
    chosen = [np.stack([rng.permutation(experts)[:k] for _ in range(rows)]) for _ in range(launches)]
    ids = [torch.tensor(c, dtype=torch.int32, device=device) for c in chosen]
    at = [0 if want_hits else int(rng.integers(layers)) for _ in range(launches)]
    if want_hits:
        ids = [ids[0]] * launches

    def run() -> None:
        for i in range(launches):
            residency_step(state, at[i], ids[i], out, int(i == 0), num_warps=num_warps)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    full = residency.create(layers, experts, [slots], window=window)
    _occupy(full, rng)
    times, before = [], 0
    for _ in range(replays):
        state.load(full)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
        before = int(state.arrays["stats"][:, residency.Stat.MISSES].sum())
    return Row(slots, experts, rows, k, window, num_warps, before / launches, float(np.median(times)))


def _occupy(state: residency.Residency, rng: np.random.Generator) -> None:
    """Fill every slot with some expert of an even flat id order, keys at random: a warm cache."""
    flat = np.arange(state.layers * state.e_pad).reshape(state.layers, state.e_pad)[:, : state.experts].reshape(-1)
    chosen = rng.permutation(flat)[: len(state.owner_of)]
    state.owner_of[: len(chosen)] = chosen
    state.slot_of.reshape(-1)[chosen] = np.arange(len(chosen))
    state.clock[:] = 1000
    state.key[0] = 1000 * state.policy.fast_step - rng.integers(0, 1 << 16, state.key[0].shape)
    state.key[1] = 1000 * state.policy.slow_step - rng.integers(0, 1 << 14, state.key[1].shape)


def measure() -> list[Row]:
    """The report's table: hits only and about half misses, batch 1, 4 and 16, and other windows at 8k slots."""
    rows = [one(s, want_hits=True) for s in SLOTS] + [one(s) for s in SLOTS]
    rows += [one(8192, rows=r) for r in (4, 16, 64)]
    rows += [one(8192, window=w) for w in (256, 2048, 4096)]
    return rows + [one(8192, num_warps=w) for w in (1, 2, 8)]


def main() -> None:
    """Print both."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for row in measure():
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in asdict(row).items()))
    claimed = cores.claim(max(1, len(os.sched_getaffinity(0)) - 1))
    s = signalling.measure(claimed.cpus)
    print(
        f"asking the CPU ({len(claimed.cpus)} threads): {s.cost:.1f} us a layer beyond its work of {s.work:.1f}; "
        f"the two kernels alone {s.kernels:.1f}, in all {s.asked:.1f}"
    )


if __name__ == "__main__":
    main()
