"""Descriptions of weights on the device: a plain matrix, and the three matrices of the experts in slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dequant_iq import grid_table
from .formats import Format, Type, format_of


def check_rows(name: str, t: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """ValueError unless `t` is a contiguous `dtype` tensor of `shape`."""
    if t.dtype != dtype or tuple(t.shape) != shape or not t.is_contiguous():
        raise ValueError(f"{name}: want contiguous {dtype} {list(shape)}, got {t.dtype} {list(t.shape)}")


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A weight matrix of `n` rows (outputs) and `k` columns exactly as the file holds it.

    `data` is uint8 and keeps the memory alive; the matrix starts `offset` bytes into it, at an address that is a
    multiple of 16. `scale` (float32 [1] or None) multiplies every product (the `.scale` tensors of NVFP4 files).
    """

    type: Type
    n: int
    k: int
    data: torch.Tensor
    offset: int = 0
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        size = self.n * self.format.row_bytes(self.k)
        if self.data.dtype != torch.uint8 or not self.data.is_contiguous():
            raise ValueError("QuantMatrix.data must be a contiguous uint8 tensor")
        if self.offset < 0 or self.offset + size > self.data.numel():
            raise ValueError(f"{self.type.name} [{self.n}, {self.k}] needs {size} bytes at offset {self.offset}, but "
                             f"the buffer has {self.data.numel()}")  # fmt: skip
        if self.address % 16:
            raise ValueError(f"a matrix must start at a multiple of 16 bytes, not at {self.address:#x}")

    @property
    def format(self) -> Format:
        return format_of(self.type)

    @property
    def address(self) -> int:
        """Device address in bytes."""
        return int(self.data.data_ptr()) + self.offset

    @property
    def grid(self) -> torch.Tensor:
        return grid_table(self.type, self.data.device)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One of the matrices in an expert's slot: `n` x `k` of `type`, `offset` bytes from the slot's address.

    `bias` float32 [experts, n] and `scale` float32 [experts] are indexed by expert, not by slot.
    """

    type: Type
    n: int
    k: int
    offset: int
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.offset % 16:
            raise ValueError(f"an expert matrix must start at a multiple of 16 bytes in its slot, not at {self.offset}")
        self.format.row_bytes(self.k)

    @property
    def format(self) -> Format:
        return format_of(self.type)

    @property
    def size(self) -> int:
        return self.n * self.format.row_bytes(self.k)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer. `gate` is None where the model has no gate (relu2 of nemotron_h_moe)."""

    gate: ExpertMatrix | None
    up: ExpertMatrix
    down: ExpertMatrix
    activation: str = "silu"
    """A key of act.ACTIVATIONS."""
    limit: float = 0.0
    """Clamp of the clamped variants; beta of situ."""
    limit2: float = 0.0
    """Lambda of situ."""

    def __post_init__(self) -> None:
        pairs = [("up and down", self.up.n, self.down.k)]
        if self.gate is not None:
            pairs += [("gate and up rows", self.gate.n, self.up.n), ("gate and up columns", self.gate.k, self.up.k)]
        for what, a, b in pairs:
            if a != b:
                raise ValueError(f"expert shapes do not fit: {what} are {a} and {b}")
