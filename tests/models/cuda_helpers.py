"""Loading a CUDA executor: on the device where there is one, else on CPU tensors under the Triton interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from ftgguf.engine.cuda_executor import CudaExecutor  # noqa: E402
from ftgguf.engine.cuda_experts import ResidentStore, expert_spec  # noqa: E402
from ftgguf.engine.cuda_weights import CudaSource, Reader  # noqa: E402
from ftgguf.engine.device_memory import DeviceMemory  # noqa: E402
from ftgguf.engine.survey import survey  # noqa: E402
from ftgguf.flags.config import ContextConfig  # noqa: E402
from ftgguf.gguf.reader import open_gguf  # noqa: E402
from ftgguf.layers.params import Moe  # noqa: E402
from ftgguf.models.config import read_numbers  # noqa: E402
from ftgguf.models.registry import family  # noqa: E402
from ftgguf.nouns import PAGE  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_cuda(path: Path, kv: str = "f32", n_cells: int = 256, max_rows: int = 64, **options: Any) -> CudaExecutor:
    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, ContextConfig())
    first, last = options.get("first", 0), options.get("last") or len(found.model.blocks)
    memory = DeviceMemory(DEVICE)
    source = CudaSource(gguf, memory, found, first, last)
    model = family(gguf.architecture)(source, numbers, ContextConfig())
    store = ResidentStore(memory)
    for i, block in enumerate(model.blocks):
        if first <= i < last and isinstance(block.ffn, Moe):
            store.add(expert_spec(i, block.ffn.experts))
    reader = Reader(gguf, DEVICE, 2)
    source.load(reader, lambda f: None)
    store.load(reader, lambda f: None)
    reader.close()
    options.setdefault("decode_rows", 4)
    options.setdefault("max_sequences", 4)
    return CudaExecutor(memory, model, store, n_cells=n_cells, max_rows=max_rows, kv=kv, **options)


def page_table(pages: list[int], length: int) -> np.ndarray:
    """Cells of the first `length` positions of a sequence in `pages`."""
    cells = (np.asarray(pages, np.int32)[:, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1)
    return cells[:length].astype(np.int32)
