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

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

_WIDTH = 64
"""Rows and columns of the probe's weights: ggml's tiles take multiples of 32."""


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def announced() -> bool:
    """Whether the processor says it has AMX for 8-bit integers."""
    return sys.platform == "linux" and "amx_int8" in Path("/proc/cpuinfo").read_text().split()


@cache
def broken() -> bool:
    """Whether libllama's repacked kernels crash here: tried on a small model in a child, only where the CPU has AMX.

    RuntimeError when the trial itself cannot be made.
    """
    if not announced():
        return False
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "probe.gguf"
        _write_probe(model)
        child = subprocess.run(
            [sys.executable, "-m", "ftgguf.bench.amx", str(model)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    if child.returncode > 0:
        raise RuntimeError(f"the trial of libllama's repacked kernels failed: {child.stderr.strip()}")
    return child.returncode < 0  # killed by a signal


def _write_probe(path: Path) -> None:
    """A one-block dense `llama` of Q8_0 weights without a vocabulary: the least that libllama loads and repacks."""
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(_WIDTH)
    writer.add_context_length(_WIDTH)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    values = np.random.default_rng(0).normal(0, 0.1, (_WIDTH, _WIDTH)).astype(np.float32)
    matrix = quantize(values, GGMLQuantizationType.Q8_0)
    for name in ("token_embd", *(f"blk.0.{n}" for n in ("attn_q", "attn_k", "attn_v", "attn_output"))):
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=GGMLQuantizationType.Q8_0)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix, raw_dtype=GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


if __name__ == "__main__":
    from ftgguf.bench.libllama import Libllama

    Libllama(sys.argv[1], _WIDTH, 1, repack=True, avoid_amx=False).append([1] * 48)
