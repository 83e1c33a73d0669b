"""Which layout CPU weights are kept in: as in the file, repacked for ggml's interleaved kernels, or both.

Repacking is not always the better choice, although llama.cpp always makes it: on two cores with AVX-512 VNNI
repacked Q4_K decodes 1.27 times as fast and prefills 1.6 to 2.4 times as slow as the file's layout, while Q4_0 and
MXFP4 win everywhere (docs/measurements/cpu.md).
"""

from __future__ import annotations

from enum import Enum

from ftgguf.gguf.types import TensorType

NEVER = 1 << 30

PLAIN_FROM_ROWS = {TensorType.Q4_K: 16, TensorType.Q5_K: 16, TensorType.Q2_K: 16, TensorType.Q6_K: 16}
"""Rows for each weight from which the file's layout is the faster one. K-quants have blocked kernels for plain
weights (measured for Q4_K: 405 against 641 GFLOP/s at 32 rows, 14 against 11 GB/s at 4); the 32-element types have
none."""


class Layout(Enum):
    PLAIN = "plain"
    REPACKED = "repacked"
    BOTH = "both"


def plain_from(kind: TensorType, fraction: float) -> int:
    """Rows of a batch from which a weight that sees `fraction` of them is read in the file's layout."""
    rows = PLAIN_FROM_ROWS.get(kind)
    return NEVER if rows is None else max(2, round(rows / fraction))


NO_KERNELS = "this processor has no repacked kernels"
NO_TYPES = "ggml has no repacked kernels for this file's types here"
"""Why the two layouts are one and the same, for us and for llama.cpp."""


def choose(wanted: str, *, repack: bool, can_repack: bool, size: int, available: int) -> tuple[Layout, str]:
    """The layout for weights of `size` bytes with `available` bytes of memory, and the reason as one line.

    `wanted` is `--weights-layout` (`auto`, `plain`, `repacked`, `both`), `repack` llama.cpp's `--no-repack` switch.
    """
    if not can_repack:
        return Layout.PLAIN, NO_KERNELS
    if not repack:
        return Layout.PLAIN, "--no-repack"
    if wanted != "auto":
        return Layout(wanted), "--weights-layout"
    need = int(2 * size * 1.05) + (1 << 30)
    if available >= need:
        return Layout.BOTH, "repacked for decode, the file's for prefill where that is faster"
    return Layout.PLAIN, f"both layouts need {need / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"
