"""What it costs a layer to ask the CPU and to hear from it: message, doorbell and wait, in a captured graph.

`python -m ftgguf.bench.residency` prints it. The CPU's work is an expert of 32 hidden rows; its own time is taken off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]
from ftgguf.experts.mailbox import Mailbox
from ftgguf.gguf.types import TensorType
from ftgguf.kernels import fill as kernels
from ftgguf.kernels.residency import StepBuffers

WIDTH, HIDDEN, TOP_K = 2048, 32, 8
Q8_0_ROW = {WIDTH: WIDTH // 32 * 34, HIDDEN: HIDDEN // 32 * 34}


@dataclass(frozen=True, slots=True)
class Signal:
    """Microseconds a layer: the two kernels where the CPU has nothing to do, where it has, and its own work."""

    kernels: float
    asked: float
    work: float

    @property
    def cost(self) -> float:
        """Of asking: what a layer takes longer, less the CPU's work."""
        return self.asked - self.kernels - self.work


class Layers:
    """`count` layers that ask the CPU for one expert of one row each, or for none."""

    def __init__(self, device: torch.device, cpus: list[int], count: int) -> None:
        self.count = count
        sizes = [HIDDEN * Q8_0_ROW[WIDTH], HIDDEN * Q8_0_ROW[WIDTH], WIDTH * Q8_0_ROW[HIDDEN]]
        self.weights = np.zeros(sum(sizes) + 4096, np.uint8)
        address, kind = int(self.weights.ctypes.data), int(TensorType.Q8_0)
        self.worker = native.ExpertWorker(cpus)
        up, down = HIDDEN * Q8_0_ROW[WIDTH], 2 * HIDDEN * Q8_0_ROW[WIDTH]
        make = native.ExpertMatrix.make
        for layer in range(count):
            self.worker.add_layer(
                layer, 1, "silu", make(kind, address, 0, HIDDEN, WIDTH), make(kind, address + up, 0, HIDDEN, WIDTH),
                make(kind, address + down, 0, WIDTH, HIDDEN),
            )  # fmt: skip
        self.mail = Mailbox(self.worker, device, rows=1, k=TOP_K, width=WIDTH, hidden=HIDDEN, layers=count)
        self.buffers = StepBuffers.allocate(TOP_K, 128, device)
        self.x = torch.ones(1, WIDTH, device=device)
        self.gates = torch.ones(1, TOP_K, device=device)
        self.share = torch.zeros(1, WIDTH, device=device)
        self.stamps = torch.zeros(3, dtype=torch.int64, device=device)

    def ask(self, experts: int) -> None:
        """What the layers' decision says: 0 or 1 experts for the CPU."""
        head = torch.zeros(16, dtype=torch.int32)
        head[4] = head[5] = experts
        self.buffers.header.copy_(head)
        self.buffers.cpu_start.copy_(torch.tensor([0, *[experts] * TOP_K], dtype=torch.int32))

    def run(self) -> None:
        """Queue all layers."""
        for layer in range(self.count):
            kernels.publish(self.mail.addresses, self.mail.ticket, self.buffers, layer, self.x, self.gates)
            kernels.collect(self.mail.addresses, self.mail.ticket, self.buffers, layer, self.share, self.stamps)

    def work(self) -> tuple[int, float]:
        """Jobs that the CPU has done, and their seconds."""
        done = self.mail.doorbell.statistics()
        return sum(s[0] for s in done), sum(s[4] for s in done) * 1e-9

    def close(self) -> None:
        self.mail.close()


def measure(cpus: list[int], count: int = 48, replays: int = 30) -> Signal:
    """Medians over `replays` of a captured graph of `count` layers. Needs CUDA."""
    device = torch.device("cuda")
    layers = Layers(device, cpus, count)
    try:
        layers.ask(0)
        layers.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers.run()
        alone = _us(graph.replay, replays) / count
        layers.ask(1)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        jobs, seconds = layers.work()
        asked = _us(graph.replay, replays) / count
        jobs, seconds = layers.work()[0] - jobs, layers.work()[1] - seconds
        return Signal(alone, asked, seconds / max(1, jobs) * 1e6)
    finally:
        layers.close()


def _us(replay: Callable[[], None], replays: int) -> float:
    taken: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken)
