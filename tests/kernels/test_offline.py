"""Kernels compile for real GPUs without one, and the machine code avoids a known fault of the assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import re, sys, torch
from ftgguf.kernels.offline import compile_only
compile_only(int(sys.argv[1]))
from ftgguf.kernels import gemv as g
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.formats import FORMATS, Type
from ftgguf.kernels.gemm import gemm
from ftgguf.kernels.matrix import QuantMatrix
for name in sys.argv[2:]:
    t = Type[name]
    n, k = 2000, 768
    w = QuantMatrix(t, n, k, torch.zeros(n * FORMATS[t].row_bytes(k), dtype=torch.uint8))
    g.gemv(Activations(torch.zeros(1, k)), [w])
    gemm(Activations(torch.zeros(16, k)), w)
from ftgguf.kernels.gemm import _gemm
count = 0
for function in (g._gemv, _gemm):
    for kernel in function.device_caches[0][0].values():
        count += 1
        for line in re.findall(r"add[.\\w]*16x2[^;]*;", kernel.asm["ptx"]):
            print(kernel.metadata.name, line)
print(count, "kernels")
"""


def compile_types(capability: int, names: list[str]) -> str:
    """Output of a process that compiles both products of each type: a line per packed addition, then a count."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(capability), *names], capture_output=True, text=True, env=env
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


def test_no_packed_additions() -> None:
    """ptxas 12.8 drops the constant of some `add.s16x2` (device.wide); IQ1_M and TQ1_0 were wrong on an H200 by it."""
    assert compile_types(90, ["IQ1_M", "TQ1_0"]) == "4 kernels"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_every_type_compiles(capability: int) -> None:
    """Ampere, Ada, Hopper and consumer Blackwell; the same fault is looked for in every type."""
    from ftgguf.kernels.formats import FORMATS

    names = [t.name for t in FORMATS]
    assert compile_types(capability, names) == f"{2 * len(names)} kernels"
