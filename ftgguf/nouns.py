"""The nouns that every part of the engine shares: small frozen dataclasses, no behaviour beyond arithmetic.

A *row* is one token at one position of one sequence; a *batch* is rows, not sequences, so that chunked prefill,
parallel decode, speculation and embeddings are one case. A *cell* holds the K and V of one row in every layer; a
*page* is `PAGE` consecutive cells, the unit of allocation. An *expert* is one (layer, index) with its gate, up and
down bytes; a *slot* is a place in VRAM that can hold one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE = 32
"""Cells in a page. 32 rows of f16 KV keep a page's copy under 10 us in the models that people run (docs/design.md,
section 6), and a prompt wastes half a page (16 cells) on average."""

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


class ExpertId(NamedTuple):
    """One routed expert: `layer` is the block's number, `expert` its number within the block."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the VRAM arena: `address` is an absolute device address (bytes), `size_class` the class it serves."""

    index: int
    address: int
    size_class: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Recurrent state after `length` tokens of a prefix, kept on a radix-tree node; `size` in bytes."""

    length: int
    size: int
    tier: str
    """`vram`, `ram` or `disk`."""
    handle: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one forward pass.

    `token`, `position`, `sequence`, `cell` are int32 [rows]; `sequence[i]` indexes `tables`. `tables[s]` is int32
    [length of s after this pass]: the cell of each position of sequence s, so row i attends to
    `tables[sequence[i]][: position[i] + 1]`. `outputs` is int32 [n]: the rows whose logits are wanted, ascending.
    `embedding` (float32 [rows, n_embd]) replaces token look-up where it is given. With `features` the outputs are the
    rows of the final norm (float32 [n, n_embd]) instead of logits. `adapters`: the scale of each loaded LoRA adapter,
    empty where none is in use; one batch has one set of them.
    """

    token: I32
    position: I32
    sequence: I32
    cell: I32
    tables: tuple[I32, ...]
    outputs: I32
    embedding: F32 | None = None
    features: bool = False
    adapters: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.token)


@dataclass(slots=True)
class Timings:
    """Wall-clock milliseconds and token counts of one request, as llama-server reports them."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front needs to know about the loaded model; all sizes in bytes."""

    path: str
    name: str
    architecture: str
    file_type: str
    n_params: int
    size: int
    n_vocab: int
    n_embd: int
    n_layer: int
    n_ctx_train: int
    n_expert: int = 0
    n_expert_used: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
