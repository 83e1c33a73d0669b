"""`--check-tensors`: are there NaNs or infinities in the weights? With ggml's own check, before anything is loaded.

llama.cpp checks the same values (`ggml_validate_row_data`: floats, and the scales of blocks) while it loads.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ftgguf.gguf.errors import GGUFError, shown
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile

log = logging.getLogger("ftgguf.engine")

PIECE = 32 << 20
"""Bytes checked in one call, in whole blocks, so that progress moves and threads share a large tensor."""
SHOWN = 8
"""Bad tensors named in the error; the log has them all."""

Check = Callable[[int, NDArray[np.uint8]], bool]


def _ggml_check() -> Check:
    """`check(type, bytes)`: whether ggml finds the values valid. Releases the GIL."""
    import llama_cpp  # noqa: F401  loads libggml-base, which is then found by its name

    function = ctypes.CDLL("libggml-base.so.0").ggml_validate_row_data
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_bool
    return lambda kind, data: bool(function(kind, data.ctypes.data, data.nbytes))


def pieces(gguf: GGUFFile) -> Iterator[tuple[TensorInfo, int, int]]:
    """(tensor, first byte, last byte + 1) of every piece, in the file's order."""
    for tensor in sorted(gguf.tensors.values(), key=lambda each: (each.shard, each.offset)):
        step = max(1, PIECE // tensor.type.block_bytes) * tensor.type.block_bytes
        for start in range(0, tensor.nbytes, step):
            yield tensor, start, min(start + step, tensor.nbytes)


def check_tensors(gguf: GGUFFile, progress: Callable[[str, float], None]) -> None:
    """Look at every weight of `gguf`. GGUFError that names the tensors with invalid values."""
    check = _ggml_check()
    work = list(pieces(gguf))
    total, done = max(gguf.size, 1), 0
    bad: dict[str, int] = {}
    progress("checking tensors", 0.0)

    def valid(piece: tuple[TensorInfo, int, int]) -> bool:
        tensor, start, end = piece
        return check(tensor.type.value, gguf.data(tensor.name)[start:end])

    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        for (tensor, start, end), good in zip(work, pool.map(valid, work), strict=True):
            done += end - start
            if not good:
                bad.setdefault(tensor.name, tensor.offset + start)
            progress("checking tensors", done / total)
    if bad:
        for name, offset in bad.items():
            log.error("tensor %s: NaN, infinity or an invalid scale at or after offset %d", shown(name), offset)
        names = ", ".join(map(shown, list(bad)[:SHOWN])) + (f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        raise GGUFError(
            gguf.path, next(iter(bad.values())), f"found tensors with invalid data: {names}; get the file again"
        )
