"""Which CPU weight layout is chosen: the rules of engine/layout.py; its numbers are in docs/measurements/cpu.md."""

from __future__ import annotations

import pytest

from ftgguf.engine.layout import NEVER, Layout, choose, plain_from
from ftgguf.gguf.types import TensorType

GIB = 1 << 30


@pytest.mark.parametrize(
    ("wanted", "repack", "can", "available", "expected", "reason"),
    [
        ("auto", True, True, 100 * GIB, Layout.BOTH, "repacked for decode"),
        ("auto", True, True, 10 * GIB, Layout.PLAIN, "10.0 GiB are free"),
        ("repacked", True, True, 1 * GIB, Layout.REPACKED, "--weights-layout"),
        ("both", False, True, 100 * GIB, Layout.PLAIN, "--no-repack"),
        ("both", True, False, 100 * GIB, Layout.PLAIN, "no repacked kernels"),
    ],
)
def test_choice(wanted: str, repack: bool, can: bool, available: int, expected: Layout, reason: str) -> None:
    layout, why = choose(wanted, repack=repack, can_repack=can, size=18 * GIB, available=available)
    assert layout is expected
    assert reason in why


def test_rows_from_which_the_files_layout_is_read() -> None:
    """128 experts of which 8 are used see a sixteenth of the rows; 32-element types are never read plain."""
    assert plain_from(TensorType.Q4_K, 1.0) == 16
    assert plain_from(TensorType.Q4_K, 8 / 128) == 256
    assert plain_from(TensorType.Q4_0, 1.0) == NEVER
