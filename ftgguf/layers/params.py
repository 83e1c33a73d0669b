"""What a layer is made of: weights (opaque handles of one executor) and numbers, as frozen dataclasses.

A family file builds these once from a GGUF; `ops` computes on them. Shapes are row-major: an activation is
[rows, features], a weight [out, in] (ggml prints the same with the dimensions reversed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Weight = Any
"""An executor's handle of one tensor in the file."""


class Gating(Enum):
    """How router logits become weights (`expert_gating_func` of GGUF files)."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_AFTER_TOP_K = 3
    SQRT_SOFTPLUS = 4


class RopeKind(Enum):
    """Which elements a rotation pairs: neighbours (`NORM`), or the two halves of the head (`NEOX`)."""

    NORM = 0
    NEOX = 2


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T * scale + bias. `scale` is NVFP4's second-level factor, a float32 [1] (or [experts])."""

    weight: Weight
    bias: Weight | None = None
    scale: Weight | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding with llama.cpp's YaRN parameters (`ggml_rope_ext`). `factors` float32 [dims / 2] divides the
    frequencies where it is given (Llama 3)."""

    kind: RopeKind
    dims: int
    base: float
    scale: float = 1.0
    ctx_orig: int = 0
    ext: float = 0.0
    attn: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: Weight | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of one layer, its norm in front included.

    `fused` replaces q, k, v where the file holds `attn_qkv`. `window` > 0 limits a row to the last `window`
    positions, its own included. `sinks` float32 [heads]. `softcap` 0 is off.
    """

    norm: Weight
    out: Linear
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    eps: float
    q: Linear | None = None
    k: Linear | None = None
    v: Linear | None = None
    fused: Linear | None = None
    rope: Rope | None = None
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    sinks: Weight | None = None
    softcap: float = 0.0
    window: int = 0


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated feed-forward: down(act(gate(x)) * up(x)). `gate` None: down(act(up(x)))."""

    up: Linear
    down: Linear
    gate: Linear | None = None
    activation: str = "silu"
    """`silu`, `gelu`, `relu`, `relu_sqr`."""


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a row visits, and with what weight; the order of operations is llama.cpp's `build_moe_ffn`.

    `selection_bias` float32 [experts] is added for the choice only; weights come from the unbiased probabilities.
    """

    gate: Linear
    experts: int
    top_k: int
    gating: Gating = Gating.SOFTMAX
    selection_bias: Weight | None = None
    groups: int = 1
    groups_used: int = 1
    normalise: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one block: weights [experts, out, in]. `gate_up` holds gate rows first, then up rows.

    `activation`: `silu`, `gelu`, `relu`, `relu_sqr`, `swiglu_oai`.
    """

    down: Linear
    gate: Linear | None = None
    up: Linear | None = None
    gate_up: Linear | None = None
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts, and an always-on shared expert with or without a sigmoid gate."""

    router: Router
    experts: Experts
    shared: Mlp | None = None
    shared_gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block: h += attention(norm(h)); h += ffn(norm(h)), both scaled by `residual_scale`."""

    attention: Attention
    ffn_norm: Weight
    ffn: Mlp | Moe
    eps: float
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token look-up: weight [vocab, n_embd], multiplied by `scale`."""

    weight: Weight
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Head:
    """Final norm and projection to logits, multiplied by `scale`; `softcap` > 0: c tanh(x / c)."""

    norm: Weight
    out: Linear
    eps: float
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model. `blocks` may be run in segments, each by its own executor."""

    embedding: Embedding
    blocks: tuple[Block, ...]
    head: Head
    n_embd: int
    n_vocab: int
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What the file holds and the model leaves unused (prediction layers), for the log."""
