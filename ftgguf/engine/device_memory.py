"""What the engine holds on a device, by purpose, and the budget it never exceeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftgguf.engine.fit import CONTEXT

MIB = 1 << 20
MODULES = 192 * MIB
"""What the kernels of one file's types and the nodes of captured graphs take outside of the allocator, once the context
has been measured: 134 MiB with 12 layers and seven graphs on an H200 (96 were counted, and 4096 became 4134)."""
LEAST = 64 * MIB
"""No context is smaller."""


def context_bytes(before: int | None, after: int | None) -> int:
    """Bytes of a context with its modules, by what is free on the device before and after it was made; CONTEXT where
    that says nothing.

    Both figures are of the whole device, so a program that starts at the same time is in their difference. Plans count
    with CONTEXT, which no context was seen to exceed: what is above is the other program's, and would be missing from a
    budget that the same start holds alone. (What the driver says of each process would be exact, but inside a container
    it names processes by numbers that are not theirs there.)
    """
    if before is None or after is None or before - after < LEAST:  # below: another program gave memory back
        return CONTEXT
    return min(before - after + MODULES, CONTEXT)


class DeviceMemory:
    """Allocations on `device`, counted. `budget` bytes are for everything, `overhead` (the CUDA context and what the
    driver keeps) included; None: whatever the device has.

    A CPU device simulates one: the numbers are the same, the overhead is as given.
    """

    def __init__(self, device: torch.device, budget: int | None = None, overhead: int = 0) -> None:
        self.device = device
        self.budget = budget
        self.overhead = overhead
        self.held: dict[str, int] = {}

    @property
    def used(self) -> int:
        """Bytes of all purposes and the overhead."""
        return self.overhead + sum(self.held.values())

    @property
    def left(self) -> int | None:
        """Bytes that may still be taken; None without a budget."""
        return None if self.budget is None else self.budget - self.used

    def reserve(self, purpose: str, nbytes: int) -> None:
        """Count `nbytes` that somebody else allocates. Raises MemoryError with the numbers when they do not fit."""
        if self.left is not None and nbytes > self.left:
            raise MemoryError(self._refusal(purpose, nbytes))
        self.held[purpose] = self.held.get(purpose, 0) + nbytes

    def tensor(self, purpose: str, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False) -> torch.Tensor:
        """A tensor of `shape`; raises MemoryError when the budget or the device has no room for it."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        self.reserve(purpose, size)
        make = torch.zeros if zero else torch.empty
        try:
            return make(tuple(shape), dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            self.held[purpose] -= size
            raise MemoryError(self._refusal(purpose, size)) from error

    def _refusal(self, purpose: str, nbytes: int) -> str:
        held = ", ".join(f"{name} {size / MIB:.0f}" for name, size in self.held.items()) or "nothing yet"
        left = (
            "the device is full" if self.left is None else f"{max(self.left, 0) / MIB:.0f} MiB of the budget are left"
        )
        return (
            f"no room on the GPU for {purpose}: {nbytes / MIB:.0f} MiB needed, {left} (held in MiB: {held}; CUDA "
            f"itself {self.overhead / MIB:.0f}). Lower -ngl, -c or -ub, use -ctk/-ctv q8_0, or raise --vram-budget"
        )

    def limit_allocator(self) -> None:
        """Make torch's allocator refuse what the budget does not hold, temporaries of a pass included."""
        if self.budget is None or self.device.type != "cuda":
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, max(0.0, (self.budget - self.overhead) / total)), self.device
        )


def context_overhead(device: torch.device) -> int:
    """Bytes that are gone from the device although torch has allocated nothing: this process's CUDA context, measured
    as what creating it took. Call before anything else uses the device in this process."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_initialized():
        return CONTEXT
    from ftgguf.engine.devices import free_memory

    before = free_memory(device.index or 0)
    torch.cuda.init()
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    return context_bytes(before, free_memory(device.index or 0))
