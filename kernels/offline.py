# mypy: allow-untyped-defs
"""Compile kernels without a device, to fill Triton's disk cache from helper processes.

In a process that calls `compile_only`, every launch becomes a compilation for the given GPU and nothing runs, so a
worker can go through the launchers with CPU tensors of the right shapes while the main process reads the file. The
keys of the disk cache do not depend on the device's index or memory, so the main process then finds every kernel.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class _OfflineDriver:
    """What Triton's compiler asks of a driver: the target and a device number."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(capability: int) -> None:
    """Turn this process's launches into compilations for compute capability `capability` (90 for 9.0). For good: a
    process that has called this cannot run kernels."""
    triton.runtime.driver.set_active(_OfflineDriver(capability))
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_instead
