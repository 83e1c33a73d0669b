"""The expert policies are plain Python and NumPy."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_on_the_policy_path() -> None:
    """Importing every policy module and the replay leaves torch and triton out (design: no torch on the CPU path)."""
    names = [
        "boundary",
        "control",
        "key",
        "placement",
        "prefill",
        "profile",
        "residency",
        "slots",
        "split",
        "synthetic",
    ]
    modules = [f"ftgguf.experts.{name}" for name in names] + ["ftgguf.bench.cache"]
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
