"""How much memory a model will take, and whether it fits beside those that are loaded: host memory here, and apart
from it the GPU's (`models_gpu`).

Two figures bound host memory: what the system says is available, and the machine's memory less what the loaded models
were granted. The second is needed because a mapped file's pages count as available although a model needs them all for
every token. A model on a GPU is granted what it leaves in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ftgguf.engine import devices
from ftgguf.engine.fit import kv_bytes
from ftgguf.engine.memory import available_memory
from ftgguf.engine.survey import survey
from ftgguf.flags.config import PlacementConfig, ServerConfig
from ftgguf.gguf import GGUFFile
from ftgguf.models.config import read_numbers
from ftgguf.server.models_gpu import OnGpu, plan_on_gpu

GIB = 1 << 30
OVERHEAD = 256 << 20
"""Bytes of an engine process beside weights and KV: Python, libraries, vocabulary, work buffers."""
GPU_OVERHEAD = 1536 << 20
"""The same with a CUDA context and its libraries."""
KV_SHARE = 8
"""Without -c a model on demand gets a context whose KV is at most this part of the machine's memory."""
BOTH_LAYOUTS = 1.05
"""Of the file's size, the repacked copy that ggml keeps beside the mapped file (engine.layout)."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of host memory, and of the GPU. `packed` is what a second copy of the host's weights, for faster decode,
    would take."""

    weights: int
    kv: int
    packed: int = 0
    overhead: int = OVERHEAD
    gpu: str = ""
    """The GPU that it is planned for (CUDA0 ...); empty: none."""
    device: int = 0
    """Bytes of that GPU."""
    on_cpu: int = 0
    """Of a model for a GPU: the host memory it would take if its engine chose the CPU after all."""

    @property
    def total(self) -> int:
        """Of host memory."""
        return self.weights + self.kv + self.overhead


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's figures, in bytes; replaced in tests."""

    available: Callable[[], int] = available_memory
    total: Callable[[], int] = lambda: total_memory()
    gpu: Callable[[PlacementConfig], devices.Device | None] = lambda placement: devices.choose(placement)[0]
    """The GPU that an engine would use. Raises DeviceError as it would."""
    gpu_free: Callable[[str], int | None] = lambda name: devices.free_memory(int(name.removeprefix("CUDA")))
    """Free bytes of a GPU by its name; None where nobody can say."""

    def room(self, granted: int) -> int:
        """What another model may take beside models that were granted `granted` bytes."""
        return max(0, min(self.available(), self.total() - granted))


def total_memory() -> int:
    """The machine's memory, or the control group's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def estimate(
    config: ServerConfig,
    gguf: GGUFFile,
    memory: Memory,
    held: Mapping[str, int] | None = None,
    least: int = 0,
) -> tuple[ServerConfig, Need]:
    """`config` with a context that suits the machine if none was given, and what the model will take.

    `held`: bytes of each GPU that loaded models hold and would give up. `least`: tokens that the context is to have,
    where -c does not fix it. Raises ModelError for a model that cannot be run, DeviceError and MemoryError as its
    engine would.
    """
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, config.context)
    attentions = [block.attention for block in found.model.blocks]
    device = memory.gpu(config.placement)
    if device is not None:
        placed = plan_on_gpu(config, found, numbers, device, (held or {}).get(device.id, 0))
        if placed is not None and placed.cells < least and "context.size" not in config.given:
            config = replace(config, context=replace(config.context, size=least))
            placed = plan_on_gpu(config, found, numbers, device, (held or {}).get(device.id, 0))
        if placed is not None:
            return config, _beside_gpu(placed, gguf.size)

    def kv(size: int) -> int:
        cells = replace(config.context, size=size).cells(numbers.n_ctx_train)
        return kv_bytes(attentions, cells, config.context.type_k, config.context.type_v)

    size, total = config.context.size, memory.total()
    if size == 0 and kv(0) > total // KV_SHARE:
        size = numbers.n_ctx_train
        while size > 4096 and kv(size) > total // KV_SHARE:
            size //= 2
        size = max(size, least)
        reason = (
            f"context: {size} of {numbers.n_ctx_train} tokens, whose KV takes {kv(size) / GIB:.1f} GiB "
            f"of this machine's {total / GIB:.1f}; -c gives another"
        )
        config = replace(config, context=replace(config.context, size=size), reasons=(*config.reasons, reason))
    return config, Need(gguf.size, kv(size), int(BOTH_LAYOUTS * gguf.size))


def _beside_gpu(placed: OnGpu, size: int) -> Need:
    """What a model of `size` bytes on a GPU needs."""
    return Need(
        placed.host_weights,
        placed.host_kv,
        int(BOTH_LAYOUTS * placed.repacked),
        GPU_OVERHEAD,
        placed.gpu,
        placed.device,
        size + placed.kv + OVERHEAD,
    )


def with_layout(config: ServerConfig, need: Need, room: int) -> tuple[ServerConfig, int]:
    """`config` and the bytes to grant: the second copy of the weights only where `room` holds it too.

    The engine decides by what is available, which counts the mapped weights of other models as free.
    """
    placement = config.placement
    if placement.weights_layout in ("both", "repacked"):
        return config, need.total + (need.packed if placement.weights_layout == "both" else 0)
    if placement.weights_layout == "plain" or not placement.repack:
        return config, need.total
    if room >= need.total + need.packed + GIB:
        return config, need.total + need.packed
    return replace(config, placement=replace(placement, weights_layout="plain")), need.total


def shortage(name: str, need: Need, room: int, memory: Memory) -> str:
    """Why a model cannot be loaded, with the numbers."""
    beside = f" of host memory beside {need.device / GIB:.2f} GiB of {need.gpu}" if need.gpu else ""
    return (
        f"model '{name}' needs {need.total / GIB:.2f} GiB{beside} and {room / GIB:.2f} GiB of "
        f"{memory.total() / GIB:.2f} GiB are free: take a smaller model or quantisation, or a smaller context (-c)"
    )
