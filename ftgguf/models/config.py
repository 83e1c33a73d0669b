"""A model's numbers, read from GGUF metadata with llama.cpp's keys, defaults and checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ftgguf.flags.config import ContextConfig
from ftgguf.gguf.reader import GGUFFile
from ftgguf.layers.params import Rope, RopeKind, Weight


class ModelError(ValueError):
    """The file is a valid GGUF but not a model we can run: one line that names the cause and the cure."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Hyperparameters shared by the families. Per-layer ones are tuples of length `n_layer`.

    `n_layer` leaves out the prediction layers (`nextn_predict_layers`) at the end of the file.
    """

    architecture: str
    n_layer: int
    n_layer_all: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    v_dim: int
    rope_dims: int
    ff: tuple[int, ...]
    eps: float
    n_expert: int
    top_k: int
    expert_ff: int
    shared_ff: int
    n_shared: int
    dense_lead: int
    gating: int
    """0: not given."""
    weights_norm: bool
    weights_scale: float
    groups: int
    groups_used: int

    @property
    def q_width(self) -> int:
        return self.heads[0] * self.head_dim


class Keys:
    """Typed look-ups of one file's metadata; an error names the key."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.prefix = gguf.architecture + "."

    def get(self, key: str, default: Any = None, *, absolute: bool = False) -> Any:
        return self.gguf.metadata.get(key if absolute else self.prefix + key, default)

    def _need(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.gguf.path}: the file lacks the key '{self.prefix}{key}', which its models need")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 31) -> int:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ModelError(
                f"{self.gguf.path}: key '{self.prefix}{key}' is {value!r}, not an integer in {low}..{high}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.gguf.path}: key '{self.prefix}{key}' is {value!r}, not a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._need(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.gguf.path}: key '{self.prefix}{key}' is {value!r}, not true or false")
        return value

    def per_layer(self, key: str, n: int, default: int | None = None) -> tuple[int, ...]:
        """An integer for all layers, or an array with one for each (llama.cpp's `get_key_or_arr`)."""
        value = self.get(key)
        if value is None or isinstance(value, int):
            return (self.integer(key, default),) * n
        values = tuple(int(v) for v in value)
        if len(values) < n or min(values) < 0:
            raise ModelError(f"{self.gguf.path}: key '{self.prefix}{key}' holds {len(values)} values for {n} layers")
        return values[:n]


def read_numbers(gguf: GGUFFile) -> Numbers:
    """The numbers of a decoder file; raises ModelError. An architecture we do not know is refused before its keys,
    whose names and meaning would be guesses."""
    from ftgguf.models.registry import family

    family(gguf.architecture, str(gguf.path))
    keys = Keys(gguf)
    n_all = keys.integer("block_count", low=1, high=4096)
    n_layer = n_all - keys.integer("nextn_predict_layers", 0, high=n_all - 1)
    n_embd = keys.integer("embedding_length", low=1, high=1 << 20)
    heads = keys.per_layer("attention.head_count", n_layer)
    if not heads[0]:
        raise ModelError(f"{gguf.path}: key '{keys.prefix}attention.head_count' is 0")
    kv_heads = keys.per_layer("attention.head_count_kv", n_layer, heads[0])
    for h, kv in zip(heads, kv_heads, strict=True):
        if kv == 0 or h % kv:
            raise ModelError(f"{gguf.path}: {h} attention heads cannot share {kv} KV heads")
    head_dim = keys.integer("attention.key_length", n_embd // heads[0], low=1, high=1 << 16)
    experts = keys.integer("expert_count", 0, high=1 << 16)
    used = keys.per_layer("expert_used_count", n_layer, 0)
    if experts and not 0 < used[0] <= experts:
        raise ModelError(f"{gguf.path}: {used[0]} of {experts} experts used for each token is not possible")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path}: no token embedding (token_embd.weight): this is not a language model's file")
    ff = keys.per_layer("feed_forward_length", n_layer, 0)
    return Numbers(
        architecture=gguf.architecture,
        n_layer=n_layer,
        n_layer_all=n_all,
        n_embd=n_embd,
        n_vocab=embedding.shape[1],
        n_ctx_train=keys.integer("context_length", low=1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=keys.integer("attention.value_length", n_embd // heads[0], low=1, high=1 << 16),
        rope_dims=keys.integer("rope.dimension_count", head_dim, high=head_dim),
        ff=ff,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        n_expert=experts,
        top_k=used[0],
        expert_ff=keys.per_layer("expert_feed_forward_length", n_layer, 0)[0],
        shared_ff=keys.integer("expert_shared_feed_forward_length", 0),
        n_shared=keys.integer("expert_shared_count", 0),
        dense_lead=keys.integer("leading_dense_block_count", 0, high=n_layer),
        gating=keys.integer("expert_gating_func", 0, high=4),
        weights_norm=keys.flag("expert_weights_norm", False),
        weights_scale=keys.number("expert_weights_scale", 0.0),
        groups=keys.integer("expert_group_count", 0),
        groups_used=keys.integer("expert_group_used_count", 0),
    )


def read_rope(
    gguf: GGUFFile, numbers: Numbers, context: ContextConfig, kind: RopeKind, factors: Weight | None = None
) -> Rope | None:
    """The rotation of a file under the rope flags, by the rules of llama.cpp's `llama_context` constructor."""
    if numbers.rope_dims == 0:
        return None
    keys = Keys(gguf)
    kind_of_scaling = context.rope_scaling or keys.get("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    scale = context.rope_freq_scale or (1.0 / factor if factor else 1.0)
    if kind_of_scaling == "none":
        scale = 1.0
    ext = context.yarn_ext_factor if context.yarn_ext_factor >= 0 else float(kind_of_scaling == "yarn")
    attn = context.yarn_attn_factor if context.yarn_attn_factor >= 0 else 1.0
    if ext != 0:
        # ggml multiplies by 1 + 0.1 ln(1/scale) inside the rotation; llama.cpp cancels it here and applies its own
        grow = 1.0 / scale
        attn = _mscale(grow) / (1.0 + 0.1 * math.log(grow))
    return Rope(
        kind=kind,
        dims=numbers.rope_dims,
        base=context.rope_freq_base or keys.number("rope.freq_base", 10000.0),
        scale=scale,
        ctx_orig=context.yarn_orig_ctx or keys.integer("rope.scaling.original_context_length", numbers.n_ctx_train),
        ext=ext,
        attn=attn * keys.number("rope.scaling.attn_factor", 1.0),
        beta_fast=_given(context.yarn_beta_fast, keys.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_given(context.yarn_beta_slow, keys.number("rope.scaling.yarn_beta_slow", 1.0)),
        factors=factors,
    )


def _given(flag: float, model: float) -> float:
    """A flag where it is set: llama.cpp's yarn flags are -1 when they are not."""
    return flag if flag >= 0 else model


def _mscale(grow: float) -> float:
    return 1.0 if grow <= 1.0 else 0.1 * math.log(grow) + 1.0
