"""Do ggml's AMX kernels work in this process? If not, keep ggml from using them.

GCC 12 and 13 drop most of the tile configuration that ggml's kernels store before `ldtilecfg` (the intrinsic names
only its first eight bytes as input), so a libllama built by them on a CPU with AMX dies with a general protection
fault in its first product with a repacked Q4_0, Q8_0 or K-quant weight: llama.cpp's default. ggml asks the kernel
for the right to use tiles when its list of extra buffer types is made, and leaves AMX out if that is refused.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_TRY = """
import sys
from compat.oracle import Oracle
Oracle(sys.argv[1], 64, 1, repack=True, avoid_amx=False).evaluate([1] * 48)
"""


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@cache
def broken() -> bool:
    """Whether libllama's repacked kernels crash here: tried on a small model in a child, only where the CPU has AMX."""
    if sys.platform != "linux" or "amx_int8" not in Path("/proc/cpuinfo").read_text().split():
        return False
    from compat.synth import make

    with tempfile.TemporaryDirectory() as folder:
        model = make("llama", Path(folder) / "probe.gguf", types="Q8_0", n_layer=1, n_expert=0)
        child = subprocess.run(
            [sys.executable, "-c", _TRY, str(model)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    if child.returncode > 0:
        raise RuntimeError(f"the trial of libllama's repacked kernels failed: {child.stderr.strip()}")
    return child.returncode < 0  # killed by a signal


@cache
def avoid_if_broken() -> bool:
    """Keep ggml in this process from AMX where it is `broken`; True if that was needed and done.

    Must come before libllama loads its first model (then the right is granted already: False). The kernel refuses
    the right while a thread has an alternate signal stack too small for the tile registers (Documentation/arch/x86/
    xstate.rst), so one is in place while ggml makes its list; the former one is restored.
    """
    if not broken():
        return False
    import llama_cpp  # noqa: F401  loads libggml-cpu, which is then found by its name

    make_list = ctypes.CDLL("libggml-cpu.so.0")._Z39ggml_backend_cpu_get_extra_buffer_typesv
    make_list.restype = ctypes.c_void_p
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 8192)
    small, former = _Stack(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 4096), _Stack()
    if libc.sigaltstack(ctypes.byref(small), ctypes.byref(former)):
        return False  # ENOMEM: the stack is too small for tiles, that is they are already allowed
    try:
        make_list()
    finally:
        libc.sigaltstack(ctypes.byref(former), None)
    return True
