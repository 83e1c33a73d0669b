# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Programmatic dependent launch: a small kernel starts while the one before it ends.

Between two kernels of a captured step that depend on each other an H200 idles for about a microsecond, and a decode
step has some five hundred of them. A kernel whose launcher says `launch_pdl=overlap()` may be resident before its
predecessor is done; it must call `after_previous()` before it touches memory, which waits until everything before it
in the stream is complete and visible. A kernel that calls it and is launched otherwise loses nothing.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl  # noqa: F401  (the interpreter wants it in every module with device functions)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from .device import INTERPRET


@functools.cache
def overlap() -> bool:
    """Whether kernels are launched so: compute capability 9.0 and newer."""
    if INTERPRET.value:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


@triton.jit
def after_previous():
    """Let the next kernel come in, and wait for the one before. To be called by every program, first of all: since
    each waits, a kernel's end means that all before it have ended too."""
    if INTERPRET:
        pass
    elif cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()
