"""The host bank: the experts' bytes, exactly as in the file, in memory that the GPU can read.

Each expert's parts (gate, up, down) lie together as in a slot of the GPU's cache, so that a fill is one stretch and a
run of experts one copy; within a part nothing is changed.
Anonymous memory with huge pages advised and interleaved over NUMA nodes, filled by several threads in large blocks,
the file's pages dropped from the page cache as they go, then registered with the driver in pieces. No torch in here:
`pin` is whatever registers memory (`ftgguf.experts.pinning.cuda_pinner`, a fake in tests, or None without a device).
Where pinning is refused or capped, the layers not covered stay readable for the CPU only, and the plan says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ftgguf.engine.memory import available_memory
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile

U8 = NDArray[np.uint8]
Progress = Callable[[float], None]

BLOCK = 8 << 20
"""Bytes one thread reads at a time."""
PIECE = 256 << 20
"""Bytes registered at once: some drivers refuse one registration of many gigabytes. No layer lies in two pieces."""
MAX_VECTOR = 512
"""Stretches in one preadv (the system's limit is 1024)."""
HUGE = 2 << 20
HEADROOM = 1.10
"""The resident set may be a tenth more than the bank."""

_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_INTERLEAVE = 3


class BankError(MemoryError):
    """The pool does not fit into host memory; the message has the numbers."""


class Pinner(Protocol):
    """Registers host memory for the GPU."""

    def register(self, address: int, nbytes: int) -> str:
        """ "" when the range is pinned, else why not."""

    def unregister(self, address: int) -> None: ...


class LimitedPinner:
    """A pinner that refuses beyond `limit` bytes in all: for tests of the partly pinned plan (`--pin-limit`), with
    `inner` None nothing is really registered."""

    def __init__(self, limit: int, inner: Pinner | None = None) -> None:
        self.limit, self.inner = limit, inner
        self.held: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> str:
        if sum(self.held.values()) + nbytes > self.limit:
            return f"the limit of {self.limit} pinned bytes is reached"
        refusal = "" if self.inner is None else self.inner.register(address, nbytes)
        if not refusal:
            self.held[address] = nbytes
        return refusal

    def unregister(self, address: int) -> None:
        if self.held.pop(address, 0) and self.inner is not None:
            self.inner.unregister(address)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """A layer's expert tensors with their offsets in an expert's `slot_bytes` (a multiple of 256)."""

    experts: int
    slot_bytes: int
    parts: tuple[tuple[TensorInfo, int], ...]


@dataclass(frozen=True, slots=True)
class Resident:
    """A layer in the bank: expert e is `view[e]`, uint8 [slot_bytes], at `address + e * layout.slot_bytes`."""

    layout: LayerLayout
    address: int
    view: U8

    def at(self, offset: int) -> tuple[int, int]:
        """Where the bytes at `offset` of expert 0 lie, and the distance to the next expert's."""
        return self.address + offset, self.layout.slot_bytes

    def read(self, experts: Sequence[int], out: U8) -> None:
        """Copy `experts` to `out`, uint8 [len(experts), slot_bytes]."""
        np.take(self.view, list(experts), axis=0, out=out)


@dataclass(frozen=True, slots=True)
class _Job:
    """Read part `part` of experts [first, last) of a layer: one stretch of the file, several of the bank."""

    layer: int
    part: int
    first: int
    last: int


@dataclass(slots=True)
class BankReport:
    """What start-up prints."""

    bytes: int = 0
    pinned: int = 0
    huge: int = 0
    """Bytes on huge pages."""
    read_seconds: float = 0.0
    pin_seconds: float = 0.0
    numa_nodes: int = 1
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        gb = self.bytes / 1e9
        rate = self.bytes / max(self.read_seconds, 1e-9) / 1e9
        text = f"expert bank: {gb:.2f} GB"
        if self.read_seconds:
            text += f" read in {self.read_seconds:.1f} s ({rate:.1f} GB/s)"
        if self.pinned or self.pin_seconds:
            text += f", {self.pinned / 1e9:.2f} GB pinned in {self.pin_seconds:.1f} s"
        if self.read_seconds:
            share = self.huge / max(self.bytes, 1)
            text += ", no huge pages (the CPU reads slower)" if share < 0.01 else f", {min(share, 1):.0%} on huge pages"
        if self.numa_nodes > 1:
            text += f", interleaved over {self.numa_nodes} NUMA nodes"
        return "; ".join([text, *self.notes])


class Bank:
    """The experts of some layers, in the order asked for. `pinned[layer]`: whether the GPU can read them all."""

    def __init__(self, gguf: GGUFFile, layers: dict[int, LayerLayout], threads: int = 8) -> None:
        """Takes the memory; `load` fills it. Raises BankError if the host has too little."""
        self.gguf = gguf
        self.threads = max(1, threads)
        self.report = BankReport()
        self.layers: dict[int, Resident] = {}
        self.pinned: dict[int, bool] = dict.fromkeys(layers, False)
        self._pieces: list[tuple[int, int, list[int]]] = []
        self._registered: list[tuple[int, Pinner]] = []
        offsets, total = self._plan(layers)
        self.report.bytes = sum(i.nbytes for layout in layers.values() for i, _ in layout.parts)
        free = available_memory()
        if total * HEADROOM > free:
            raise BankError(
                f"the experts need {total / 1e9:.1f} GB of host memory and {free / 1e9:.1f} GB are free: use a smaller "
                "quantisation, put more layers wholly on the GPU, or read them from the file with --expert-disk"
            )
        # Private: shared anonymous memory has no huge pages unless the system allows them for files in memory, too (it
        # seldom does), and a thread reads 13 GB/s from huge pages, 8 from small ones.
        kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._map = mmap.mmap(-1, max(total, 1) + HUGE, **kind)
        raw = np.frombuffer(self._map, np.uint8)
        skip = -int(raw.ctypes.data) % HUGE
        self.memory: U8 = raw[skip : skip + max(total, 1)]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            self._map.madvise(mmap.MADV_DONTFORK)  # a child that copies pinned pages on write breaks the pinning
        self._interleave()
        base = int(self.memory.ctypes.data)
        self._pieces = [(base + start, size, layers_in) for start, size, layers_in in self._pieces]
        for layer, layout in layers.items():
            at, size = offsets[layer], layout.experts * layout.slot_bytes
            view = self.memory[at : at + size].reshape(layout.experts, layout.slot_bytes)
            self.layers[layer] = Resident(layout, base + at, view)

    def _plan(self, layers: dict[int, LayerLayout]) -> tuple[dict[int, int], int]:
        """Offsets of the layers, multiples of 256, and the whole size. Pieces begin at pages, with a layer's start."""
        offsets: dict[int, int] = {}
        end = start = 0
        inside: list[int] = []
        for layer, layout in layers.items():
            size = layout.experts * layout.slot_bytes
            if inside and end - start + size > PIECE:
                end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
                self._pieces.append((start, end - start, inside))
                start, inside = end, []
            offsets[layer] = end
            end += size
            inside.append(layer)
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if inside:
            self._pieces.append((start, end - start, inside))
        return offsets, end

    def _interleave(self) -> None:
        """Spread the pages over the NUMA nodes, where there are several: threads of all of them read the bank."""
        nodes = numa_nodes()
        number = _SYS_MBIND.get(os.uname().machine)
        if len(nodes) < 2 or number is None:
            return
        mask = ctypes.c_ulong(sum(1 << n for n in nodes))
        address = int(self.memory.ctypes.data)
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.syscall(
            number, ctypes.c_void_p(address), ctypes.c_ulong(len(self.memory)), _MPOL_INTERLEAVE, ctypes.byref(mask),
            ctypes.c_ulong(64), 0,
        )  # fmt: skip
        if code == 0:
            self.report.numa_nodes = len(nodes)
        else:
            self.report.notes.append(f"not interleaved over NUMA nodes: {os.strerror(ctypes.get_errno())}")

    def load(self, progress: Progress = lambda f: None) -> None:
        """Read every tensor. Raises OSError when the file ends early."""
        started = time.monotonic()
        files = [os.open(shard.path, os.O_RDONLY) for shard in self.gguf.shards]
        jobs = [job for layer in self.layers for job in self._jobs(layer)]
        jobs.sort(key=self._place_in_file)
        done = 0
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                for n in pool.map(lambda job: self._read(files, job), jobs):
                    done += n
                    progress(done / max(self.report.bytes, 1))
        finally:
            for fd in files:
                os.close(fd)
        self.report.read_seconds = time.monotonic() - started
        self.report.huge = huge_bytes(int(self.memory.ctypes.data))

    def _jobs(self, layer: int) -> list[_Job]:
        layout = self.layers[layer].layout
        jobs = []
        for part, (info, _) in enumerate(layout.parts):
            step = max(1, min(MAX_VECTOR, BLOCK // (info.nbytes // layout.experts)))
            jobs += [_Job(layer, part, e, min(e + step, layout.experts)) for e in range(0, layout.experts, step)]
        return jobs

    def _place_in_file(self, job: _Job) -> tuple[int, int]:
        layout = self.layers[job.layer].layout
        info = layout.parts[job.part][0]
        return info.shard, info.offset + job.first * (info.nbytes // layout.experts)

    def _read(self, files: list[int], job: _Job) -> int:
        r = self.layers[job.layer]
        info, offset = r.layout.parts[job.part]
        each = info.nbytes // r.layout.experts
        shard, start = self._place_in_file(job)
        fd, size = files[shard], each * (job.last - job.first)
        done = 0
        while done < size:
            e, inside = divmod(done, each)
            targets = [r.view[job.first + e, offset + inside : offset + each]]
            targets += [r.view[i, offset : offset + each] for i in range(job.first + e + 1, job.last)]
            got = os.preadv(fd, targets, start + done)  # type: ignore[arg-type]
            if got <= 0:
                raise OSError(f"{self.gguf.shards[shard].path}: the file ended inside tensor '{info.name}'")
            done += got
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)
        return size

    def pin(self, pinner: Pinner) -> None:
        """Register the pieces in the order of the layers until one is refused; later layers stay unpinned."""
        started = time.monotonic()
        for address, size, layers in self._pieces:
            refusal = pinner.register(address, size)
            if refusal:
                left = [layer for layer, ok in self.pinned.items() if not ok]
                self.report.notes.append(
                    f"pinned {self.report.pinned / 1e9:.2f} of {self.report.bytes / 1e9:.2f} GB ({refusal}): the "
                    f"missing experts of {len(left)} of {len(self.pinned)} layers run on the CPU. Cure: raise "
                    "`ulimit -l`, the container's memory limit or --pin-limit"
                )
                break
            self._registered.append((address, pinner))
            self.report.pinned += size
            for layer in layers:
                self.pinned[layer] = True
        self.report.pin_seconds = time.monotonic() - started

    def close(self) -> None:
        """Unregister; the memory goes with its last view."""
        for address, pinner in self._registered:
            pinner.unregister(address)
        self._registered = []
        self.pinned = dict.fromkeys(self.pinned, False)


def huge_bytes(address: int) -> int:
    """Bytes on huge pages of the mapping that `address` lies in; 0 where the system does not say."""
    inside = False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                first = line.split(maxsplit=1)[0]
                if not first.endswith(":"):
                    start, _, end = first.partition("-")
                    inside = int(start, 16) <= address < int(end, 16)
                elif inside and first == "AnonHugePages:":
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def numa_nodes() -> list[int]:
    """Numbers of the nodes that have memory."""
    try:
        text = Path("/sys/devices/system/node/has_memory").read_text().strip()
    except OSError:
        return [0]
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes
