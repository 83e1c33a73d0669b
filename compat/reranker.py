"""A synthetic embedding or reranking model: another GGUF file with a pooling type, a classification head, a template.

Qwen3-Reranker's files hold the rows of `yes` and `no` of the language model's head as `cls.output.weight`, and the
prompt as `tokenizer.chat_template.rerank` (llama.cpp's `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
"""llama.cpp's `llama_pooling_type`, the value of `<arch>.pooling_type`."""
TEMPLATE = "<|im_start|>user\nQuery: {query}\nDocument: {document}<|im_end|>\n<|im_start|>assistant\n"


def copy_with(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    pooling: str = "",
    labels: int = 0,
    template: str = "",
    names: Sequence[str] = (),
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    seed: int = 1,
) -> Path:
    """Write `source` to `path` with `<arch>.pooling_type`, a random `cls.output.weight` [labels, n_embd] in F32, the
    rerank template, and other float32 `tensors`; each where it is given. Returns `path`."""
    reader = GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    path = Path(path)
    writer = GGUFWriter(path, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if (pooling and name.endswith(".pooling_type")) or (names and name.endswith(".output_labels")):
            continue
        element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    if pooling:
        writer.add_uint32(f"{arch}.pooling_type", POOLING[pooling])
    if labels > 1 and not names:  # libllama takes one output for granted
        names = ["yes", "no", *map(str, range(2, labels))][:labels]
    if names:
        writer.add_array(f"{arch}.classifier.output_labels", list(names))
    if template:
        writer.add_string("tokenizer.chat_template.rerank", template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    n_embd = int(reader.fields[f"{arch}.embedding_length"].contents())
    added: dict[str, NDArray[Any]] = dict(tensors or {})
    if labels:
        head = np.random.default_rng(seed).standard_normal((labels, n_embd), np.float32)
        added["cls.output.weight"] = head * np.float32(n_embd**-0.5)
    for name, values in added.items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
