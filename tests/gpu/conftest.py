"""These tests need a CUDA device; without one they are collected and skipped, so that the skip is seen.

FTGGUF_SHARD=i/n runs every n-th test from the i-th: several processes compile and test side by side.
FTGGUF_TEST_REPORT=FILE: what each test said, as it happens (gpu_report.py).
FTGGUF_SIMULATE=1 runs the servers' tests without a device, on a simulated one (serve_helpers).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "kernels"), str(Path(__file__).parent)]
import gpu_report  # noqa: E402  (beside this file)

torch = pytest.importorskip("torch", reason="the kernels need torch")
if not torch.cuda.is_available():  # importing the kernels without a device needs the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

SIMULATED = os.environ.get("FTGGUF_SIMULATE", "") not in ("", "0")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests that share a server (pytest-xdist --dist loadgroup)")
    gpu_report.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips without a device; tests that want it for themselves come last, or workers would wait for each other."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and not (SIMULATED and item.path.name.startswith("test_serve")):
                item.add_marker(pytest.mark.skip(reason="no CUDA device (torch.cuda.is_available() is false)"))
    items.sort(key=lambda item: any(m.args == ("alone",) for m in item.iter_markers("xdist_group")))
    shard = os.environ.get("FTGGUF_SHARD")
    if shard:
        index, count = map(int, shard.split("/"))
        items[:] = items[index::count]
