"""Loaded by every Python process of a server under test (PYTHONPATH): faults on demand, and a GPU that is not there.

FTGGUF_TEST_FAULT=FILE: the engine looks for FILE before each pass and, where it is there, removes it and does what it
says: `fault` runs a kernel that writes to an illegal address, `full` lets torch have no more memory than it holds,
`room` takes that back. FTGGUF_TEST_HOST_MEMORY=BYTES: what the expert bank believes to be available.

FTGGUF_TEST_SIMULATE=MIB: a GPU of so much memory, simulated: the product takes the same way through its code as on a
CUDA machine, with tensors on the CPU, kernels in Triton's interpreter and allocations counted against the budget.
FTGGUF_TEST_FREE=BEFORE,AFTER: MiB that it has free before and after the context is made, as they are read while other
programs start or end.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MIB = 1 << 20
SIMULATED = int(os.environ.get("FTGGUF_TEST_SIMULATE", "0"))
FAULT = os.environ.get("FTGGUF_TEST_FAULT", "")
HOST_MEMORY = os.environ.get("FTGGUF_TEST_HOST_MEMORY", "")
FREE = [int(mib) * MIB for mib in os.environ.get("FTGGUF_TEST_FREE", "").split(",") if mib]
OVERHEAD = 736 * MIB
"""A simulated context: `engine.fit.CONTEXT`."""


def faults(executor: Any) -> None:
    """Give `CudaExecutor.run` its trap."""
    run = executor.CudaExecutor.run

    def trapped(self: Any, batch: Any, hidden: Any = None) -> Any:
        trap = Path(FAULT)
        if trap.exists():
            what = trap.read_text().strip()
            trap.unlink()
            if what == "fault":
                _fault(self, executor)
            elif what in ("full", "room"):
                _fill(self, full=what == "full")
        if getattr(self, "test_full", False) and batch.rows > 8:
            raise MemoryError(f"the GPU has no memory for {batch.rows} rows: lower -ub or raise --vram-budget")
        return run(self, batch, hidden)

    executor.CudaExecutor.run = trapped


def _fault(executor: Any, module: Any) -> None:
    """A store to address 64 by a kernel of its own; the next wait for the device reports it."""
    if executor.device.type != "cuda":
        raise module.ExecutorLost("the GPU failed (simulated); --debug-eager finds the kernel")
    from illegal_address import write

    write(executor.device)


def _fill(executor: Any, *, full: bool) -> None:
    """On a device the real limit of torch's allocator; simulated, prompts are refused as `run` would."""
    if executor.device.type != "cuda":
        executor.test_full = full
        return
    import torch

    total = torch.cuda.get_device_properties(executor.device).total_memory
    if not full:
        executor.test_held = []
        torch.cuda.set_per_process_memory_fraction(1.0, executor.device)
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(executor.device) / total, executor.device)
    executor.test_held = []
    for size in (8 * MIB, 2 * MIB, MIB // 2, MIB // 16):  # the allocator keeps small pieces apart from large ones
        try:
            while True:
                executor.test_held.append(torch.empty(size, dtype=torch.uint8, device=executor.device))
        except torch.OutOfMemoryError:
            continue


def device(devices: Any) -> None:
    """One simulated GPU in place of the driver's."""
    found = devices.Device(
        0, "Simulated GPU", (9, 0), SIMULATED * MIB, SIMULATED * MIB, (5, 16), (5, 16), 4.8e12
    )  # fmt: skip
    devices.list_devices = lambda: [found]
    devices.driver = lambda: devices.Driver((13, 0), "580.simulated")
    devices.problem = lambda device, driver: None
    devices.free_memory = lambda index: SIMULATED * MIB - OVERHEAD


def loading(load: Any) -> None:
    """`load_gpu` on CPU tensors; no helpers that compile."""
    import torch

    class Nobody:
        def __init__(self, *_: Any) -> None: ...

        def wait(self) -> str:
            return "kernels run in the interpreter"

        def complete(self) -> None: ...

        def stop(self) -> None: ...

    def claim(device: Any) -> tuple[Any, int, int]:
        from ftgguf.engine.device_memory import context_bytes

        return torch.device("cpu"), context_bytes(*FREE) if FREE else OVERHEAD, SIMULATED * MIB - OVERHEAD

    load.claim = claim
    load.Helpers = Nobody


def small(module: Any) -> None:
    """Granules and reserves for models of a few MiB. A chunk of experts is no larger than a granule: what KV needs is
    less than a budget in whole MiB leaves over, so that only the chunks show that memory went from one to the other."""
    for name, value in {
        "GRAPHS": MIB, "CHUNK_BYTES": MIB // 16, "GRANULE": MIB // 16, "SHORT_ROWS": (16,),
    }.items():  # fmt: skip
        if hasattr(module, name):
            setattr(module, name, value)


def host(bank: Any) -> None:
    """The expert bank on a machine with little memory."""
    bank.available_memory = lambda: int(HOST_MEMORY)


CHANGES: dict[str, list[Callable[[Any], None]]] = {}
if FAULT:
    CHANGES.setdefault("ftgguf.engine.cuda_executor", []).append(faults)
if HOST_MEMORY:
    CHANGES.setdefault("ftgguf.experts.bank", []).append(host)
if SIMULATED:
    os.environ["TRITON_INTERPRET"] = "1"
    CHANGES.setdefault("ftgguf.engine.devices", []).append(device)
    CHANGES.setdefault("ftgguf.engine.load_cuda", []).append(loading)
    for name in ("engine.load_cached", "experts.arena", "experts.boundary"):
        CHANGES.setdefault(f"ftgguf.{name}", []).append(small)


class _Changing(importlib.abc.Loader):
    """A module's own loader, and its changes once it has run."""

    def __init__(self, inner: Any, changes: Sequence[Callable[[Any], None]]) -> None:
        self.inner, self.changes = inner, changes

    def create_module(self, spec: Any) -> Any:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        for change in self.changes:
            change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Changing(spec.loader, CHANGES[name])
        return spec


_next = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [p for p in sys.path if Path(p).resolve() != Path(__file__).parent]
)
if _next is not None and _next.loader is not None:  # the machine's own
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
if CHANGES:
    sys.meta_path.insert(0, _Finder())
