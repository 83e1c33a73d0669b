"""The whole GPU path on tiny models: under the Triton interpreter, or on a CUDA device where there is one.

Prefill is checked against libllama on the same file (compat.oracle), decode against the CPU executor, which equals
libllama to the bit (test_against_libllama.py) and computes the same integer products.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compat.oracle import Oracle, kld, nmse

from .cuda_helpers import load_cuda
from .helpers import load, rows, some_tokens, step_by_step

FAMILIES = ["qwen3moe", "qwen3", "llama", "granitemoe", "glm4moe"]


@pytest.mark.parametrize("arch", FAMILIES)
def test_families(synthetic: Callable[..., Path], arch: str) -> None:
    path = synthetic(arch, "Q4_K", n_layer=1)
    cuda, cpu = load_cuda(path), load(path, kv="f32", n_cells=256, max_rows=64)
    oracle = Oracle(path, n_ctx=256, n_threads=1, repack=False)
    tokens = some_tokens(cpu, 20)
    got = cuda.forward(rows(tokens, 0, range(20))).copy()
    want = oracle.prefill_logits(tokens)
    oracle.close()
    print(arch, "prefill", kld(want, got), nmse(got, want))
    steps = np.stack([cuda.forward(rows([t], i, [0]))[0].copy() for i, t in enumerate(tokens[:6])])
    print(arch, "decode", nmse(steps, step_by_step(cpu, tokens[:6])))
