"""Inputs and references for the kernel tests, shared by the interpreter tests and the tests on a CUDA device.

References: the gguf package's NumPy dequantisers (Q1_0 and Q2_0, which it lacks: written here from ggml's block
definitions), products in float64, and ggml's CPU backend itself through ctypes where it is installed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from ftgguf.kernels.activations import Activations
from ftgguf.kernels.formats import FORMATS, Activation, Format, Type
from ftgguf.kernels.matrix import ExpertMatrix, ExpertWeights, QuantMatrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
TUNED = (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q8_0, Type.Q4_0, Type.MXFP4, Type.IQ4_XS)

_HALVES = {  # byte offsets of f16 scales in a block
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,), Type.Q2_K: (80, 82),
    Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,), Type.IQ3_XXS: (0,), Type.IQ3_S: (0,), Type.IQ1_S: (0,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,), Type.TQ2_0: (64,), Type.Q1_0: (0,), Type.Q2_0: (0,),
}  # fmt: skip


def random_bytes(type_: Type, n: int, k: int, rng: np.random.Generator) -> U8:
    """Rows [n, row bytes] of arbitrary quants with scales of either sign and moderate size."""
    f = FORMATS[type_]
    if type_ in (Type.F32, Type.F16, Type.BF16):
        w = rng.standard_normal((n, k)).astype(np.float32)
        return gguf.quants.quantize(w, gguf.GGMLQuantizationType(type_.value)).view(np.uint8).reshape(n, -1)
    raw = rng.integers(0, 256, (n * k // f.block, f.size), dtype=np.uint8)
    for at in _HALVES.get(type_, ()):
        scale = (rng.uniform(0.002, 0.02, len(raw)) * rng.choice([-1, 1], len(raw))).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if type_ == Type.MXFP4:
        raw[:, 0] = rng.integers(116, 128, len(raw))
    if type_ == Type.NVFP4:
        raw[:, :4] = rng.integers(0, 0x38, (len(raw), 4))
    if type_ == Type.IQ1_M:  # its f16 scale is spread over the high nibbles of four words
        raw[:, 55] = (raw[:, 55] & 0x0F) | 0x20
    return raw.reshape(n, -1)


def dequantized(type_: Type, raw: U8) -> F64:
    """The rows in float64."""
    if type_ == Type.Q1_0:  # f16 d, 16 bytes of signs
        b = raw.reshape(raw.shape[0], -1, 18)
        d = b[..., :2].copy().view(np.float16).astype(np.float64)
        bits = np.unpackbits(b[..., 2:], axis=-1, bitorder="little").astype(np.float64)
        return (d * (2 * bits - 1)).reshape(raw.shape[0], -1)
    if type_ == Type.Q2_0:  # f16 d, 16 bytes of two-bit values minus one
        b = raw.reshape(raw.shape[0], -1, 18)
        d = b[..., :2].copy().view(np.float16).astype(np.float64)
        q = (b[..., 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        return (d * (q.reshape(*q.shape[:2], 64).astype(np.float64) - 1)).reshape(raw.shape[0], -1)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_.value)).astype(np.float64)


def to_device(raw: NDArray[np.generic]) -> torch.Tensor:
    """A flat uint8 tensor at a 16-byte aligned address."""
    flat = torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(-1).copy())
    room = torch.empty(flat.numel() + 16, dtype=torch.uint8, device=DEVICE)
    at = -room.data_ptr() % 16
    out = room[at : at + flat.numel()]
    out.copy_(flat)
    return out


def matrix(type_: Type, n: int, k: int, rng: np.random.Generator) -> tuple[QuantMatrix, U8]:
    raw = random_bytes(type_, n, k, rng)
    return QuantMatrix(type_, n, k, to_device(raw)), raw


def rows(m: int, k: int, seed: int) -> torch.Tensor:
    """Activations with a few large values, as real ones have."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g)
    x[:, :: max(1, k // 5)] *= 8
    return x.to(DEVICE)


def nmse(y: torch.Tensor | NDArray[np.generic], ref: NDArray[np.generic]) -> float:
    """Squared error over squared reference; infinite if anything is not finite."""
    a = (y.float().cpu().numpy() if isinstance(y, torch.Tensor) else y).astype(np.float64)
    assert a.shape == ref.shape, (a.shape, ref.shape)
    if not np.isfinite(a).all():
        return float("inf")
    return float(((a - ref) ** 2).sum() / max(1e-30, (ref.astype(np.float64) ** 2).sum()))


def bounds(f: Format, m: int) -> float:
    """NMSE allowed against the product of dequantised weights with the rounded (few rows) or plain activations.

    Few rows: float32 sums only, but ggml's Q8_1 rounds the block sum to f16. Many rows: bfloat16 operands.
    """
    if m <= 8:
        return 1e-7 if f.activation == Activation.Q8_1 else 1e-11
    return {Type.F32: 1e-10, Type.F16: 1e-6}.get(f.type, 5e-5)


def product(x: Activations, f: Format, weights: F64, few: bool) -> F64:
    """x W^T in float64, with the activations that the regime sees."""
    a = x.rounded(f.activation) if few else x.x
    return a.double().cpu().numpy() @ weights.T


# ---------------------------------------------------------------------------------- ggml's activation quantisers


def q8_reference(x: NDArray[np.float32], kind: Activation) -> tuple[NDArray[np.int8], F64, F64]:
    """(q, d, sums) of float32 rows, written from ggml's `quantize_row_q8_K_ref` and x86 `quantize_row_q8_0/_1`."""
    block = 256 if kind == Activation.Q8_K else 32
    b = x.reshape(-1, block).astype(np.float32)
    amax = np.abs(b).max(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == Activation.Q8_K:
            big = b[np.arange(len(b)), np.abs(b).argmax(1)]
            inverse = np.where(amax > 0, np.float32(-127) / big, np.float32(0)).astype(np.float32)
            q = np.minimum(np.rint(b * inverse[:, None]), 127)
            d = np.where(amax > 0, np.float32(1) / inverse, np.float32(0)).astype(np.float64)
            return q.astype(np.int8), d, q.reshape(-1, 16).sum(1)
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0)).astype(np.float32)
        full = (amax / np.float32(127)).astype(np.float32)
        q = np.rint(b * inverse[:, None])
        sums = q.sum(1)
        if kind == Activation.Q8_1:
            sums = (full * sums.astype(np.float32)).astype(np.float16)
        return q.astype(np.int8), full.astype(np.float16).astype(np.float64), sums.astype(np.float64)


class _Traits(ctypes.Structure):
    _fields_ = (
        ("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )  # fmt: skip


@functools.cache
def ggml_cpu() -> ctypes.CDLL | None:
    """ggml's CPU backend from llama-cpp-python, or None where it is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    found = sorted((Path(llama_cpp.__file__).parent / "lib").glob("libggml-cpu*.so"))
    if not found:
        return None
    lib = ctypes.CDLL(str(found[0]))
    lib.ggml_cpu_init()
    lib.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_Traits)
    return lib


def ggml_quantize(x: NDArray[np.float32], ggml_type: int, size: int) -> U8:
    """Rows quantised by ggml's CPU backend to `ggml_type`, `size` bytes in all."""
    lib = ggml_cpu()
    assert lib is not None
    out = np.zeros(size, np.uint8)
    f = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    f(lib.ggml_get_type_traits_cpu(ggml_type).contents.from_float)(x.ctypes.data, out.ctypes.data, x.size)
    return out


def ggml_product(x: NDArray[np.float32], type_: Type, raw: U8) -> NDArray[np.float32]:
    """x W^T by ggml's CPU backend: activations to `vec_dot_type`, then `vec_dot` row by row."""
    lib = ggml_cpu()
    assert lib is not None
    t = lib.ggml_get_type_traits_cpu(type_.value).contents
    sizes = {0: 4, 1: 2, 30: 2, 8: 34 / 32, 9: 36 / 32, 15: 292 / 256}
    k = x.shape[1]
    dot = ctypes.CFUNCTYPE(
        None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        ctypes.c_size_t, ctypes.c_int,
    )(t.vec_dot)  # fmt: skip
    out = np.zeros((x.shape[0], raw.shape[0]), np.float32)
    for i, row in enumerate(x):
        row = np.ascontiguousarray(row)
        q = row.view(np.uint8) if t.vec_dot_type == 0 else ggml_quantize(
            row, t.vec_dot_type, int(k * sizes[t.vec_dot_type]))  # fmt: skip
        for j in range(raw.shape[0]):
            dot(k, out[i, j : j + 1].ctypes.data, 0, raw[j].ctypes.data, 0, q.ctypes.data, 0, 1)
    return out


# ------------------------------------------------------------------------------------------------------- experts


class ExpertCase:
    """Experts in slots of an arena whose unused bytes, and whole unused slots, are 0xFF (NaN in every float format)."""

    def __init__(
        self, gate: Type | None, up: Type, down: Type, d: int, f: int, experts: int, seed: int, *,
        activation: str = "silu", extras: bool = False, limit: float = 0.0, limit2: float = 0.0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.raw: dict[str, list[U8]] = {
            name: [random_bytes(t, n, k, rng) for _ in range(experts)]
            for name, t, n, k in (("gate", gate, f, d), ("up", up, f, d), ("down", down, d, f))
            if t is not None
        }
        offset, offsets = 0, {}
        for name, raws in self.raw.items():
            offsets[name] = offset
            offset += -(-raws[0].size // 16) * 16
        stride = offset + 32
        arena = np.full(stride * (experts + 2), 0xFF, np.uint8)
        self.slot_of = rng.permutation(experts + 2)[:experts]
        for e in range(experts):
            for name, raws in self.raw.items():
                at = int(self.slot_of[e]) * stride + offsets[name]
                arena[at : at + raws[e].size] = raws[e].reshape(-1)
        self.arena = to_device(arena)
        self.slot_addr = torch.arange(experts + 2, device=DEVICE) * stride + self.arena.data_ptr()
        self.extra: dict[str, dict[str, F64]] = {"bias": {}, "scale": {}}

        def make(name: str, t: Type, n: int, k: int) -> ExpertMatrix:
            if not extras:
                return ExpertMatrix(t, n, k, offsets[name])
            bias, scale = rng.standard_normal((experts, n)), rng.uniform(0.5, 2, experts)
            self.extra["bias"][name], self.extra["scale"][name] = bias, scale
            tensors = [torch.from_numpy(a.astype(np.float32)).to(DEVICE) for a in (bias, scale)]
            return ExpertMatrix(t, n, k, offsets[name], *tensors)

        self.weights = ExpertWeights(
            None if gate is None else make("gate", gate, f, d), make("up", up, f, d), make("down", down, d, f),
            activation, limit, limit2,
        )  # fmt: skip

    def slots(self, experts: torch.Tensor) -> torch.Tensor:
        table = torch.from_numpy(self.slot_of.astype(np.int32)).to(experts.device)
        return torch.where(experts >= 0, table[experts.clamp(min=0).long()], -1).int()

    def product(self, name: str, expert: int, x: F64) -> F64:
        m: ExpertMatrix = getattr(self.weights, name)
        y: F64 = x @ dequantized(m.type, self.raw[name][expert]).T
        if m.scale is not None:
            y = y * self.extra["scale"][name][expert]
        if m.bias is not None:
            y = y + self.extra["bias"][name][expert]
        return y


def activation_reference(name: str, g: F64, u: F64, limit: float, limit2: float) -> F64:
    """The formulas of llama-server's documentation table of expert activations, in float64."""

    def sig(v: F64) -> F64:
        return np.asarray(1 / (1 + np.exp(-np.clip(v, -700, 700))))

    if name == "silu":
        return g * sig(g) * u
    if name == "silu_clamp":
        c = np.minimum(g, limit)
        return c * sig(c) * np.clip(u, -limit, limit)
    if name == "silu_clamp_after":
        return np.minimum(g * sig(g), limit) * np.clip(u, -limit, limit)
    if name == "swiglu_oai":
        c = np.minimum(g, 7)
        return c * sig(1.702 * c) * (np.clip(u, -7, 7) + 1)
    if name == "gelu":
        return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    if name == "relu2":
        return np.maximum(u, 0) ** 2
    if name == "relu":
        return np.maximum(g, 0) * u
    return limit * np.tanh(g / limit) * sig(g) * limit2 * np.tanh(u / limit2)
