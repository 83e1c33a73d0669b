"""How does a dense model become a Mixture of Experts that computes the same function?

Exact sparse upcycling (after Komatsuzaki et al. 2022, "Sparse Upcycling", with permuted copies instead of equal ones).
A gated feed-forward network sums over its hidden units, `y = sum_i down[:, i] * silu(gate[i] . x) * (up[i] . x)`, so
any permutation of the units that is applied to the rows of gate and up and the columns of down leaves the function
as it is. Each expert gets its own permutation, in whole blocks of the quantised type, so bytes are moved and never
requantised. The router is random; the architectures written here divide the chosen weights by their sum, so the
MoE's output is the dense model's up to the order of summation. Every expert's bytes differ: an engine that takes a
gate from one expert and a down from another prints garbage at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize
from numpy.typing import NDArray

ARCHITECTURES = ("llama", "granitemoe", "glm4moe")
"""Architectures that can hold the dense function exactly: no norm on Q and K, and expert weights that sum to 1."""

Progress = Callable[[float], None]
"""Called with the written fraction, 0..1."""

_UNIT = 8
"""Hidden units move in blocks of at least this many, in types without blocks."""
_WIDTH = 32
"""The hidden width is a multiple of this, so that every 32-block type can hold it."""
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32, "MXFP4": 38}
"""`general.file_type` (llama.cpp's llama_ftype) of a file whose experts have the type."""


class UpcycleError(ValueError):
    """The source cannot be upcycled exactly as asked; the message says why and what would work."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One output tensor: its name, logical shape (slowest dimension first), type and what makes its bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape) // block * size)


def upcycle(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    arch: str = "llama",
    experts: int = 8,
    used: int = 2,
    expert_type: str | None = None,
    router_scale: float = 2.0,
    seed: int = 1,
    name: str | None = None,
    chat_template: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write `target`, a MoE GGUF that computes what the dense `llama` GGUF `source` does.

    Args:
        arch: architecture of the result, one of `ARCHITECTURES`. `glm4moe` turns half of the hidden units into an
            always-on shared expert and has a sigmoid gate with a selection bias.
        experts, used: experts per layer, and how many a token is routed to.
        expert_type: GGUF type name to requantise the feed-forward weights to (`F16`, `Q8_0`, `Q4_0`, `MXFP4` ...).
            Without it their bytes are moved as they are. With it the result equals the dense model with the same
            requantised weights, and hidden units are padded with zeros to a multiple of the block where needed.
        router_scale: standard deviation of the router's logits for inputs of unit RMS.
        seed: of the permutations and the router.
        name: `general.name`; default: the source's with the kind of upcycling behind it.
        chat_template: Jinja template for a source that has none of its own, or to replace it.
        progress: called with the written fraction.

    Returns:
        `target` as a Path. It is written under a temporary name beside it and renamed, so it is whole or absent.

    Raises:
        UpcycleError: the source or the combination does not allow an exact result.
        OSError: reading or writing failed.
    """
    if arch not in ARCHITECTURES:
        raise UpcycleError(f"cannot upcycle to architecture '{arch}' exactly: choose one of {', '.join(ARCHITECTURES)}")
    if not 1 <= used <= experts:
        raise UpcycleError(f"{used} used experts of {experts}: need 1 <= used <= experts")
    target = Path(target)
    reader = GGUFReader(os.fspath(source))
    plan = _Plan(reader, arch, experts, expert_type, router_scale, seed)
    tensors = list(plan.tensors())
    partial = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        writer = GGUFWriter(partial, arch)
        _write_metadata(writer, reader, plan, used, {"name": name, "chat_template": chat_template})
        _write_tensors(writer, tensors, progress)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


class _Plan:
    """What the output holds: sizes, permutations and the list of tensors."""

    def __init__(
        self, reader: GGUFReader, arch: str, experts: int, expert_type: str | None, router_scale: float, seed: int
    ) -> None:
        self.reader, self.arch, self.experts, self.router_scale = reader, arch, experts, router_scale
        self.rng = np.random.default_rng(seed)
        source_arch = self.field("general.architecture")
        if source_arch != "llama" or "llama.expert_count" in reader.fields:
            raise UpcycleError(f"only dense 'llama' models can be upcycled, this one is '{source_arch}'")
        self.n_embd = int(self.field("llama.embedding_length"))
        self.n_head = int(self.field("llama.attention.head_count"))
        self.n_head_kv = int(self.field("llama.attention.head_count_kv", self.n_head))
        self.head_dim = int(self.field("llama.attention.key_length", self.n_embd // self.n_head))
        self.n_layer = int(self.field("llama.block_count"))
        self.n_ff_source = int(self.field("llama.feed_forward_length"))
        self.expert_type = _type_named(expert_type)
        self.down_type = self._ffn_type()
        self.unit = max(_UNIT, GGML_QUANT_SIZES[self.down_type][0])
        step = max(_WIDTH, self.unit) * (2 if self.shared else 1)
        self.n_ff = -(-self.n_ff_source // step) * step
        if self.n_ff != self.n_ff_source and self.expert_type is None and self.down_type != GGMLQuantizationType.F32:
            raise UpcycleError(
                f"{self.n_ff_source} hidden units are no multiple of {step}, as {arch} with type {self.down_type.name} "
                "needs: give expert_type to requantise with zero padding"
            )
        self.n_shared = self.n_ff // 2 if self.shared else 0
        self.n_routed = self.n_ff - self.n_shared
        if factorial(min(self.n_routed // self.unit, 12)) < experts:
            raise UpcycleError(
                f"{self.n_routed} hidden units in blocks of {self.unit} have fewer than {experts} orders, so experts "
                "would be equal: use fewer experts or a type with smaller blocks"
            )

    @property
    def shared(self) -> bool:
        return self.arch == "glm4moe"

    def field(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise UpcycleError(f"the source has no metadata key '{key}'")
        return default

    def _ffn_type(self) -> GGMLQuantizationType:
        """The type that decides the size of the blocks that move: down's, which is cut along its rows."""
        if self.expert_type is not None:
            return self.expert_type
        types = {t.tensor_type for t in self.reader.tensors if t.name.endswith("ffn_down.weight")}
        if not types:
            raise UpcycleError("the source has no ffn_down tensors: is it a dense model?")
        return max(types, key=lambda t: int(GGML_QUANT_SIZES[t][0]))

    def _orders(self) -> list[NDArray[np.intp]]:
        """One distinct order of the routed hidden units per expert, in whole blocks."""
        n = self.n_routed // self.unit
        seen: set[bytes] = set()
        orders: list[NDArray[np.intp]] = []
        while len(orders) < self.experts:
            order = self.rng.permutation(n)
            if order.tobytes() not in seen:
                seen.add(order.tobytes())
                orders.append(order)
        return orders

    def tensors(self) -> Iterator[_Tensor]:
        """All output tensors in the source's order, each layer's router before its experts."""
        orders: dict[int, list[NDArray[np.intp]]] = {}
        for tensor in self.reader.tensors:
            part = tensor.name.split(".")
            kind = part[2] if part[0] == "blk" else ""
            if kind in _FFN:
                if part[3:] != ["weight"]:
                    raise UpcycleError(f"tensor {tensor.name}: a feed-forward network with biases cannot be upcycled")
                layer = int(part[1])
                if layer not in orders:
                    orders[layer] = self._orders()
                    yield from self._router(layer)
                yield from self._experts(tensor, kind, orders[layer])
            else:
                yield self._copied(tensor, kind)

    def _copied(self, tensor: Any, kind: str) -> _Tensor:
        """A tensor outside the FFN. glm4moe calls the norm before the FFN otherwise, and rotates halves (NEOX)."""
        name, data = tensor.name, tensor.data
        if self.arch == "glm4moe":
            if kind == "ffn_norm":
                name = name.replace("ffn_norm", "post_attention_norm")
            if kind in ("attn_q", "attn_k"):
                data = _rope_pairs_to_halves(data, self.n_head if kind == "attn_q" else self.n_head_kv, self.head_dim)
        return _Tensor(name, _shape(tensor), tensor.tensor_type, lambda: data)

    def _router(self, layer: int) -> Iterator[_Tensor]:
        weight = self.rng.standard_normal((self.experts, self.n_embd)) * self.router_scale / np.sqrt(self.n_embd)
        f32 = GGMLQuantizationType.F32
        router = weight.astype(np.float32)
        yield _Tensor(f"blk.{layer}.ffn_gate_inp.weight", router.shape, f32, lambda: router)
        if self.arch == "glm4moe":
            bias = (self.rng.standard_normal(self.experts) * 0.02).astype(np.float32)
            yield _Tensor(f"blk.{layer}.exp_probs_b.bias", bias.shape, f32, lambda: bias)

    def _experts(self, tensor: Any, kind: str, orders: list[NDArray[np.intp]]) -> Iterator[_Tensor]:
        """The stacked experts of one FFN tensor, and its share of the shared expert."""
        down = kind == "ffn_down"
        type_ = self.expert_type or tensor.tensor_type

        def shape(n: int) -> tuple[int, ...]:
            return (self.n_embd, n) if down else (n, self.n_embd)

        if self.shared:
            name = tensor.name.replace(kind, f"{kind}_shexp")
            yield _Tensor(name, shape(self.n_shared), type_, lambda: self._split(tensor, down)[0])
        name = tensor.name.replace(kind, f"{kind}_exps")

        def stacked() -> NDArray[Any]:
            blocks = self._split(tensor, down)[1]
            take = [np.take(blocks, order, axis=1 if down else 0) for order in orders]
            return np.stack([t.reshape(*shape(1)[:1], -1) if down else t for t in take])

        yield _Tensor(name, (self.experts, *shape(self.n_routed)), type_, stacked)

    def _split(self, tensor: Any, down: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        """The bytes of one FFN tensor, as (shared part, routed part in blocks of hidden units).

        The routed part is uint8 [blocks, bytes] for gate and up, uint8 [n_embd, blocks, bytes] for down.
        """
        data = np.ascontiguousarray(tensor.data)
        if self.n_ff != self.n_ff_source or (self.expert_type is not None and self.expert_type != tensor.tensor_type):
            data = _padded(dequantize(data, tensor.tensor_type), self.n_ff, axis=1 if down else 0)
            data = _quantized(data, self.expert_type or GGMLQuantizationType.F32)
        raw = data.view(np.uint8)
        if down:
            raw = raw.reshape(self.n_embd, self.n_ff // self.unit, -1)
            cut = self.n_shared // self.unit
            return raw[:, :cut].reshape(self.n_embd, -1), raw[:, cut:]
        raw = raw.reshape(self.n_ff // self.unit, -1)
        return raw[: self.n_shared // self.unit], raw[self.n_shared // self.unit :]


def _write_metadata(
    writer: GGUFWriter, reader: GGUFReader, plan: _Plan, used: int, replacing: dict[str, str | None]
) -> None:
    """The source's metadata under the new architecture's prefix, and what makes it a MoE."""
    dropped = {"general.architecture", "general.name", "llama.feed_forward_length"}
    if replacing["chat_template"] is not None:
        dropped.add("tokenizer.chat_template")
        writer.add_chat_template(replacing["chat_template"])
    file_type = _FILE_TYPES.get(plan.expert_type.name) if plan.expert_type is not None else None
    if file_type is not None:
        dropped.add("general.file_type")
        writer.add_file_type(file_type)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in dropped:
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        renamed = plan.arch + key[len("llama") :] if key.startswith("llama.") else key
        writer.add_key_value(renamed, field.contents(), field.types[0], sub_type=element)
    name = replacing["name"]
    source_name = plan.field("general.name", "model")
    writer.add_name(name or f"{source_name} upcycled {plan.experts}x top-{used} ({plan.arch})")
    writer.add_expert_count(plan.experts)
    writer.add_expert_used_count(used)
    writer.add_feed_forward_length(plan.n_ff)
    if plan.arch == "granitemoe":
        writer.add_logit_scale(1.0)
    if plan.arch == "glm4moe":
        writer.add_expert_feed_forward_length(plan.n_routed)
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(0)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(True)
        writer.add_uint32("glm4moe.expert_gating_func", 2)  # sigmoid
        if "llama.attention.key_length" not in reader.fields:
            writer.add_key_length(plan.head_dim)
            writer.add_value_length(plan.head_dim)


def _write_tensors(writer: GGUFWriter, tensors: list[_Tensor], progress: Progress | None) -> None:
    """Stream the tensors, one in memory at a time."""
    for tensor in tensors:
        # A dtype other than uint8 makes the writer take the logical shape as it is.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total, written = sum(t.nbytes for t in tensors), 0
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.data())
            if data.nbytes != tensor.nbytes:
                raise UpcycleError(
                    f"tensor {tensor.name} has {data.nbytes} bytes where its shape needs {tensor.nbytes}"
                )
            writer.write_tensor_data(data)
            written += tensor.nbytes
            if progress is not None:
                progress(written / total)
    finally:
        writer.close()


def _type_named(name: str | None) -> GGMLQuantizationType | None:
    if name is None:
        return None
    try:
        return GGMLQuantizationType[name]
    except KeyError:
        raise UpcycleError(f"unknown tensor type '{name}'") from None


def _shape(tensor: Any) -> tuple[int, ...]:
    """Logical shape of a reader's tensor, slowest dimension first."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _quantized(data: NDArray[np.float32], type_: GGMLQuantizationType) -> NDArray[Any]:
    try:
        return np.ascontiguousarray(quantize(data, type_))
    except NotImplementedError:
        raise UpcycleError(
            f"no quantiser for {type_.name}: choose F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or MXFP4"
        ) from None


def _padded(data: NDArray[np.float32], size: int, axis: int) -> NDArray[np.float32]:
    """`data` with zeros behind it along `axis`; zero hidden units add nothing to the sum."""
    pad = [(0, 0), (0, 0)]
    pad[axis] = (0, size - data.shape[axis])
    return np.pad(data.astype(np.float32), pad)


def _rope_pairs_to_halves(data: NDArray[Any], n_head: int, head_dim: int) -> NDArray[Any]:
    """Reorder the rows of a Q or K projection from RoPE on neighbours (2i, 2i+1) to RoPE on halves (i, i + d/2).

    Whole rows move, so any quantisation does; Q and K move alike, so their products stay.
    """
    rows = data.reshape(n_head, head_dim // 2, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(rows).reshape(n_head * head_dim, -1)
