"""How much memory a model will take, and whether it fits beside those that are loaded.

Two figures bound it: what the system says is available, and the machine's memory less what the loaded models were
granted. The second is needed because a mapped file's pages count as available although a model needs them all for
every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ftgguf.engine.fit import kv_bytes
from ftgguf.engine.memory import available_memory
from ftgguf.engine.survey import survey
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf import GGUFFile
from ftgguf.models.config import read_numbers

GIB = 1 << 30
OVERHEAD = 256 << 20
"""Bytes of an engine process beside weights and KV: Python, libraries, vocabulary, work buffers."""
KV_SHARE = 8
"""Without -c a model on demand gets a context whose KV is at most this part of the machine's memory."""
BOTH_LAYOUTS = 1.05
"""Of the file's size, the repacked copy that ggml keeps beside the mapped file (engine.layout)."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. `packed` is what a second copy of the weights for faster decode would take."""

    weights: int
    kv: int
    packed: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + OVERHEAD


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's figures, in bytes; replaced in tests."""

    available: Callable[[], int] = available_memory
    total: Callable[[], int] = lambda: total_memory()

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


def estimate(config: ServerConfig, gguf: GGUFFile, total: int) -> tuple[ServerConfig, Need]:
    """`config` with a context for a machine of `total` bytes if none was given, and what the model will take.

    Everything is counted as host memory, which is what a model needs that has no GPU, and more than one on a GPU does.
    Raises ModelError for a model that cannot be run.
    """
    numbers = read_numbers(gguf)
    attentions = [block.attention for block in survey(gguf, numbers, config.context).model.blocks]

    def kv(size: int) -> int:
        cells = replace(config.context, size=size).cells(numbers.n_ctx_train)
        return kv_bytes(attentions, cells, config.context.type_k, config.context.type_v)

    size = config.context.size
    if size == 0 and kv(0) > total // KV_SHARE:
        size = numbers.n_ctx_train
        while size > 4096 and kv(size) > total // KV_SHARE:
            size //= 2
        reason = (
            f"context: {size} of {numbers.n_ctx_train} tokens, whose KV takes {kv(size) / GIB:.1f} GiB "
            f"of this machine's {total / GIB:.1f}; -c gives another"
        )
        config = replace(config, context=replace(config.context, size=size), reasons=(*config.reasons, reason))
    return config, Need(gguf.size, kv(size), int(BOTH_LAYOUTS * gguf.size))


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


def shortage(name: str, need: int, room: int, memory: Memory) -> str:
    """Why a model cannot be loaded, with the numbers."""
    return (
        f"model '{name}' needs {need / GIB:.2f} GiB and {room / GIB:.2f} GiB of {memory.total() / GIB:.2f} GiB are "
        "free: take a smaller model or quantisation, or a smaller context (-c)"
    )
