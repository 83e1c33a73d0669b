"""Which tensors of a file a model takes, block by block, found without loading any: for budgets and plans."""

from __future__ import annotations

from dataclasses import dataclass

from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile
from ftgguf.layers.params import Decoder
from ftgguf.models.config import Numbers
from ftgguf.models.registry import family
from ftgguf.models.source import Source, Use

ALIGN = 256
"""Tensors start at multiples of this in device memory: the widest load a kernel issues is 16 bytes, and 256 keeps
rows of the 32-byte types on sector boundaries."""


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Taken:
    """One tensor, how it is read, and its block (-1: none). `info` stands for its handle in the surveyed model."""

    info: TensorInfo
    use: Use
    layer: int


class _Lister(Source):
    def __init__(self, gguf: GGUFFile) -> None:
        super().__init__(gguf)
        self.found: dict[str, Taken] = {}
        self.uses: dict[str, set[Use]] = {}

    def handle(self, info: TensorInfo, use: Use, layer: int) -> TensorInfo:
        self.found.setdefault(info.name, Taken(info, use, layer))
        self.uses.setdefault(info.name, set()).add(use)
        return info


@dataclass(frozen=True, slots=True)
class Survey:
    """A model whose handles are `TensorInfo`s, and its tensors by name."""

    model: Decoder
    tensors: dict[str, Taken]
    uses: dict[str, set[Use]]

    def of_layer(self, layer: int, *, experts: bool) -> int:
        """Bytes of block `layer`'s routed experts, or of everything else in it."""
        return sum(
            aligned(t.info.nbytes)
            for t in self.tensors.values()
            if t.layer == layer and (t.use is Use.EXPERTS) == experts
        )

    def outside(self, *, embedding: bool, head: bool) -> int:
        """Bytes of the tensors that belong to no block; a tied matrix counts once."""
        return sum(aligned(t.info.nbytes) for t in self.outside_tensors(embedding=embedding, head=head))

    def lone_embedding(self) -> Taken | None:
        """The embedding's matrix where nothing else reads it; None where the head is tied to it."""
        for name, taken in self.tensors.items():
            if self.uses[name] == {Use.EMBEDDING}:
                return taken
        return None

    def outside_tensors(self, *, embedding: bool, head: bool) -> list[Taken]:
        """Those tensors. RoPE factors and the like count with the blocks, which are never all elsewhere."""
        kept = []
        for taken in self.tensors.values():
            if taken.layer >= 0:
                continue
            uses = self.uses[taken.info.name]
            is_embedding = Use.EMBEDDING in uses
            is_head = taken.info.name.startswith("output") or (is_embedding and Use.LINEAR in uses)
            if (is_embedding and embedding) or (is_head and head) or not (is_embedding or is_head):
                kept.append(taken)
        return kept


def survey(gguf: GGUFFile, numbers: Numbers, context: ContextConfig) -> Survey:
    """List what the family of `gguf` takes. Raises ModelError as loading would."""
    lister = _Lister(gguf)
    model = family(gguf.architecture, str(gguf.path))(lister, numbers, context)
    return Survey(model, lister.found, lister.uses)
