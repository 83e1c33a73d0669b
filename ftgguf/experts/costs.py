"""What this machine's paths cost, by type of expert: from a stored profile, a probe, or cautious figures until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftgguf.experts.prefill import Cost, Costs
from ftgguf.experts.samples import Bandwidths

GUESS = Bandwidths(fill=12e9, cpu=12e9)
"""A PCIe 3 x16 link and two channels of memory: what most machines have at least."""
GPU_RATE = 400e9
"""Bytes/s at which the expert products read weights on a small card."""
GPU_ENTRY = 0.2e-6
"""Seconds of a row at an expert on a small card, in a tile of many."""
GPU_PIECE = 4e-4
"""Seconds of a piece's dozen launches, which the host queues one by one."""
BOUNCE_RATE = 4e9
"""Bytes/s at which one thread puts experts together in pinned memory."""
LOOK = 1e-4
"""Seconds from the end of the router to the host's next launch."""


@dataclass(frozen=True, slots=True)
class PathCosts:
    """`rates` by type name (bytes/s), `cpu_entry` seconds of a further row at an expert on the CPU and `gpu` a piece's
    products, by type name; `dense` seconds of a chunk's attention and the like in one layer, until it is seen; `source`
    where the figures are from."""

    rates: Mapping[str, Bandwidths] = field(default_factory=dict)
    cpu_entry: Mapping[str, float] = field(default_factory=dict)
    gpu: Mapping[str, Cost] = field(default_factory=dict)
    dense: float = 2e-4
    source: str = "guessed: run `ftgguf bench bw`"
    measured: bool = False

    def bandwidths(self, kind: str) -> Bandwidths:
        return self.rates.get(kind, GUESS)

    def cpu_row(self, kind: str, expert_bytes: int) -> float:
        """Seconds of a further row at an expert on the CPU; unless it was measured, as much as the first, which is what
        ggml's products come to: they unpack the weights for each row."""
        b = self.bandwidths(kind)
        return self.cpu_entry.get(kind, expert_bytes / b.cpu if b.cpu > 0 else float(expert_bytes))

    def of(self, kind: str, expert_bytes: int, pinned: bool = True) -> Costs:
        """The prefill planner's costs of experts of type `kind`; not `pinned` ones go by way of the host."""
        b = self.bandwidths(kind)
        link = 1 / b.fill if b.fill > 0 else 1 / GUESS.fill
        if not pinned:
            link += 1 / BOUNCE_RATE
        host = 1 / b.cpu if b.cpu > 0 else 1.0
        return Costs(
            stream=Cost(2e-5, link),
            gather=Cost(2e-5, link),
            cpu=Cost(1e-4, host, self.cpu_row(kind, expert_bytes)),
            gpu=self.gpu.get(kind, Cost(GPU_PIECE, 1 / GPU_RATE, GPU_ENTRY)),
            look=LOOK,
        )
