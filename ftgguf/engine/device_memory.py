"""What the engine holds on a device, by purpose, and the budget it never exceeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MIB = 1 << 20
CONTEXT_BYTES = 640 * MIB
"""A CUDA context with the modules of some hundred kernels, where nothing has been measured yet (an H200 with driver
580 took 520 MiB before the first kernel)."""
PLAUSIBLE = (64 * MIB, CONTEXT_BYTES)
"""What a context takes. The figure is a difference of what is free on the whole device: more than any context was seen
to take is another program that starts at the same time, whose memory would be missing from the budget."""


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
        return CONTEXT_BYTES
    from ftgguf.engine.devices import free_memory

    before = free_memory(device.index or 0)
    torch.cuda.init()
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    after = free_memory(device.index or 0)
    if before is None or after is None:
        return CONTEXT_BYTES
    taken = before - after
    if not PLAUSIBLE[0] <= taken <= PLAUSIBLE[1]:  # another program took or gave memory meanwhile
        return CONTEXT_BYTES
    # modules of the kernels are loaded later: 96 MiB cover those of one file's types
    return taken + 96 * MIB
