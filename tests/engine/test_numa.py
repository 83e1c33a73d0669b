"""`--numa` reaches ggml, and says so where it changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftgguf.engine.numa import STRATEGIES, count_nodes, set_numa

CODE = """
import ctypes, sys
from ftgguf.engine.numa import count_nodes, set_numa
changed = set_numa(sys.argv[1])
library = ctypes.CDLL("libggml-cpu.so.0")
library.ggml_is_numa.restype = ctypes.c_bool
assert changed == library.ggml_is_numa() == (count_nodes() > 1)
set_numa(sys.argv[1])
"""


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_ggml_is_asked_once(strategy: str) -> None:
    """ggml itself complains of a second call, so the first one arrived (its `ggml_numa_init`)."""
    done = subprocess.run([sys.executable, "-c", CODE, strategy], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if count_nodes():
        assert "already initialized" in done.stderr


def test_off_asks_for_nothing() -> None:
    assert set_numa("off") is False


def test_nodes_are_counted_up_to_the_first_gap(tmp_path: Path) -> None:
    assert count_nodes(tmp_path) == 0
    for name in ("node0", "node1", "node3"):
        (tmp_path / name).mkdir()
    assert count_nodes(tmp_path) == 2
