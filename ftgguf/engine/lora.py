"""LoRA adapters: their files, checked against the model, and their matrices as ggml tensors.

The format is llama.cpp's (`convert_lora_to_gguf.py`): for a weight W [out, in] the tensors `<name>.lora_a` A [rank, in]
and `<name>.lora_b` B [out, rank], and `adapter.lora.alpha`. A product becomes W x + scale * alpha / rank * B (A x),
each step an operator of its own, so that it rounds as llama.cpp's `build_lora_mm` does. (LoRA: Hu et al. 2021, eq. 3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftgguf import _ggml_cpu as native
from ftgguf.flags.config import LoraAdapter
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile, open_gguf
from ftgguf.models.config import ModelError

EMBEDDING = "token_embd.weight"
Delta = tuple[Any, Any, float]
"""A, B and what B (A x) is multiplied by."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter that fits the model."""

    path: str
    gguf: GGUFFile
    alpha: float
    """0: B (A x) is not divided by the rank."""
    pairs: dict[str, tuple[TensorInfo, TensorInfo]]
    """Name of the model's tensor -> A, B."""
    task_name: str = ""
    prompt_prefix: str = ""


def read_adapters(given: tuple[LoraAdapter, ...], model: GGUFFile) -> tuple[Adapter, ...]:
    """The adapter files of `--lora`, in order. GGUFError for a damaged file, ModelError for one that does not fit."""
    return tuple(read_adapter(each.path, model) for each in given)


def read_adapter(path: str, model: GGUFFile) -> Adapter:
    """One adapter for `model`. Raises GGUFError and ModelError, one line each."""
    gguf = open_gguf(Path(path))
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := gguf.get(key, "", str)) != wanted:
            raise ModelError(f"{path}: not a LoRA adapter: key '{key}' must be '{wanted}', but is '{found}'")
    if gguf.architecture != model.architecture:
        raise ModelError(
            f"{path}: the adapter was made for architecture {gguf.architecture}, the model is {model.architecture}"
        )
    if "adapter.alora.invocation_tokens" in gguf.metadata:
        raise ModelError(
            f"{path}: activated LoRA (aLoRA) is not supported: only adapters that apply to every token are"
        )
    pairs = {name: _checked(path, name, pair, model) for name, pair in _paired(path, gguf).items()}
    if not pairs:
        raise ModelError(f"{path}: the adapter holds no tensors")
    return Adapter(
        path,
        gguf,
        float(gguf.get("adapter.lora.alpha", 0.0, float)),
        pairs,
        gguf.get("adapter.lora.task_name", "", str),
        gguf.get("adapter.lora.prompt_prefix", "", str),
    )


def _paired(path: str, gguf: GGUFFile) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in gguf.tensors.items():
        stem, dot, kind = name.rpartition(".")
        if dot and kind in ("lora_a", "lora_b"):
            found.setdefault(stem, {})[kind] = info
        elif not name.endswith("_norm.weight"):  # llama.cpp passes over an adapter's norms as well
            raise ModelError(f"{path}: tensor '{name}' is neither .lora_a nor .lora_b of a weight")
    for stem, pair in found.items():
        if len(pair) < 2:
            missing = "lora_b" if "lora_a" in pair else "lora_a"
            raise ModelError(f"{path}: tensor '{stem}.{missing}' is missing, its pair is there")
    return {stem: (pair["lora_a"], pair["lora_b"]) for stem, pair in found.items()}


def _checked(
    path: str, name: str, pair: tuple[TensorInfo, TensorInfo], model: GGUFFile
) -> tuple[TensorInfo, TensorInfo]:
    """The pair, if it belongs to a matrix of the model. Shapes here are ggml's: (in, out)."""
    weight = model.tensors.get(name)
    if weight is None:
        raise ModelError(f"{path}: the model has no tensor '{name}': the adapter was made for another base model")
    if "_exps." in name or len(weight.shape) > 2:
        raise ModelError(
            f"{path}: '{name}' belongs to experts, and adapters of experts are not supported: only those of attention "
            "and dense matrices are. Merge this one into the model's file (llama-export-lora)"
        )
    a, b = pair
    for info in pair:
        if len(info.shape) != 2 or not native.has_kernel(int(info.type)):
            raise ModelError(
                f"{path}: tensor '{info.name}' is no matrix of a type that ggml's CPU backend multiplies by"
            )
    if name == EMBEDDING:
        fits = weight.shape == (b.shape[1], a.shape[1]) and a.shape[0] == b.shape[0]
        if "output.weight" not in model.tensors:
            raise ModelError(f"{path}: '{name}' is the output layer of this model too, which its adapter does not fit")
    else:
        fits = weight.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0]
    if not fits:
        raise ModelError(
            f"{path}: '{name}' is {list(weight.shape)} in the model, which A {list(a.shape)} and B {list(b.shape)} do "
            "not fit: the adapter was made for another base model"
        )
    return pair


class AdapterWeights:
    """The matrices of all adapters for one CPU backend, mapped from their files."""

    def __init__(self, adapters: tuple[Adapter, ...], backend: native.Backend) -> None:
        self._adapters = adapters
        count = sum(2 * len(adapter.pairs) for adapter in adapters)
        self._weights = native.Weights(backend, count + 8)
        self._maps: list[Any] = []
        self._tensors: list[dict[str, tuple[Any, Any]]] = [self._mapped(adapter) for adapter in adapters]

    def _mapped(self, adapter: Adapter) -> dict[str, tuple[Any, Any]]:
        first = len(self._maps)
        for shard in adapter.gguf.shards:
            self._maps.append(np.frombuffer(shard.map, np.uint8))
            self._weights.map(self._maps[-1])

        def tensor(info: TensorInfo) -> Any:
            return self._weights.mapped(info.name, int(info.type), list(info.shape), first + info.shard, info.offset)

        return {name: (tensor(a), tensor(b)) for name, (a, b) in adapter.pairs.items()}

    def deltas(self, scales: tuple[float, ...]) -> dict[str, list[Delta]]:
        """What is added to the products with each tensor when the adapters have these scales. Those with 0 are left
        out, as in llama.cpp. ValueError for more scales than adapters."""
        if len(scales) > len(self._adapters):
            raise ValueError(f"{len(scales)} scales for {len(self._adapters)} LoRA adapters")
        found: dict[str, list[Delta]] = {}
        for adapter, tensors, scale in zip(self._adapters, self._tensors, scales, strict=False):
            if scale == 0.0:
                continue
            for name, (a, b) in tensors.items():
                factor = np.float32(scale)
                if adapter.alpha:
                    factor = factor * np.float32(adapter.alpha) / np.float32(b.ne(0))
                found.setdefault(name, []).append((a, b, float(factor)))
        return found
