"""Where a family's weights come from: names and shapes are checked here, handles are made by the executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile
from ftgguf.layers.params import Linear, Weight
from ftgguf.models.config import ModelError


class Use(Enum):
    """How a tensor is read, which decides its layout."""

    VECTOR = "vector"
    """Norms, biases, scales: added or multiplied as they are."""
    LINEAR = "linear"
    EXPERTS = "experts"
    EMBEDDING = "embedding"


class Source(ABC):
    """Hands out weights of one file by name. Shapes are row-major: [out, in], [experts, out, in]."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.taken: set[str] = set()

    @abstractmethod
    def handle(self, info: TensorInfo, use: Use, layer: int) -> Weight:
        """The executor's handle of a tensor that passed the checks. `layer` -1: belongs to no block."""

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def take(self, name: str, shape: tuple[int, ...], use: Use) -> Weight:
        """The tensor `name`; raises ModelError if it is missing or has another shape."""
        info = self.gguf.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.gguf.path}: missing tensor '{name}'")
        found = tuple(reversed(info.shape))
        if found != shape and not (found == (1, *shape) or (1, *found) == shape):
            raise ModelError(f"{self.gguf.path}: tensor '{name}' has shape {list(found)}, expected {list(shape)}")
        self.taken.add(name)
        return self.handle(info, use, _layer_of(name))

    def vector(self, name: str, *shape: int) -> Weight:
        return self.take(name, shape, Use.VECTOR)

    def maybe_vector(self, name: str, *shape: int) -> Weight | None:
        return self.take(name, shape, Use.VECTOR) if self.has(name) else None

    def linear(self, stem: str, out: int, inputs: int) -> Linear:
        """`stem`.weight [out, in] with its optional bias and scale."""
        return Linear(
            weight=self.take(stem + ".weight", (out, inputs), Use.LINEAR),
            bias=self.maybe_vector(stem + ".bias", out),
            scale=self.maybe_vector(stem + ".scale", 1),
        )

    def maybe_linear(self, stem: str, out: int, inputs: int) -> Linear | None:
        return self.linear(stem, out, inputs) if self.has(stem + ".weight") else None

    def experts(self, stem: str, experts: int, out: int, inputs: int) -> Linear:
        """`stem`.weight [experts, out, in] with optional bias [experts, out] and scale [experts]."""
        return Linear(
            weight=self.take(stem + ".weight", (experts, out, inputs), Use.EXPERTS),
            bias=self.maybe_vector(stem + ".bias", experts, out),
            scale=self.maybe_vector(stem + ".scale", experts),
        )

    def maybe_experts(self, stem: str, experts: int, out: int, inputs: int) -> Linear | None:
        return self.experts(stem, experts, out, inputs) if self.has(stem + ".weight") else None

    def left_over(self) -> list[str]:
        """Tensors of the file that no part of the model took."""
        return [name for name in self.gguf.tensors if name not in self.taken]


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() else -1
