"""A random LoRA adapter for a GGUF model, in the format of llama.cpp's `convert_lora_to_gguf.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

ATTENTION = ("blk.*.attn_q.weight", "blk.*.attn_k.weight", "blk.*.attn_v.weight", "blk.*.attn_output.weight")
DENSE = ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight", "blk.*.ffn_down.weight")


def make_adapter(
    model: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tensors: Iterable[str] = (*ATTENTION, *DENSE),
    rank: int = 8,
    alpha: float = 16.0,
    strength: float = 0.5,
    seed: int = 1,
    type_: str = "F32",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write an adapter for those tensors of `model` that match `tensors` (patterns of names); returns `path`.

    A is [rank, in] and B [out, rank], of `type_`. alpha / rank * B A has about `strength` times the standard deviation
    1 / sqrt(in) of a usual weight. `metadata` adds string keys or replaces those written here. ValueError where no
    tensor matches.
    """
    reader = GGUFReader(model)
    rng = np.random.default_rng(seed)
    keys: dict[str, Any] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        **(metadata or {}),
    }
    arch = keys.pop("general.architecture", None) or str(reader.fields["general.architecture"].contents())
    path = Path(path)
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    factor = alpha / rank if alpha else 1.0
    kind = GGMLQuantizationType[type_]
    found = 0
    for tensor in reader.tensors:
        if not any(fnmatchcase(tensor.name, pattern) for pattern in tensors):
            continue
        found += 1
        shape = tuple(int(n) for n in reversed(tensor.shape))
        *experts, out, inputs = shape
        a = rng.standard_normal((*experts, rank, inputs), np.float32) * np.float32(inputs**-0.5)
        b = rng.standard_normal((*experts, out, rank), np.float32) * np.float32(strength * rank**-0.5 / factor)
        if tensor.name == "token_embd.weight":  # looked up, so that the parts change places and B is not transposed
            a, b = b, np.ascontiguousarray(a.T)
        for suffix, values in ((".lora_a", a), (".lora_b", b)):
            writer.add_tensor(tensor.name + suffix, quants.quantize(values, kind), raw_dtype=kind)
    if not found:
        writer.close()
        raise ValueError(f"no tensor of {model} matches {list(tensors)}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
