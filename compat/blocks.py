"""What do valid random bytes of a GGUF tensor type look like?

Quants, grid indices and sub-block scales are uniform random bytes (all of them valid in every type); the floating
point scale of each block is drawn so that the dequantised values have the asked standard deviation, with the scale
different from block to block so that a kernel that takes a neighbour's scale is found out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

POOL_BLOCKS = 1 << 16
"""Blocks drawn afresh per tensor; larger tensors repeat them in other orders, which writes at the disk's speed."""

_MXFP4_CENTRE = 127
_UE4M3_MAX = 0x7E


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor type on disk: ggml's id, elements and bytes per block, and where the block's scale lies.

    `scale` and `minimum` are byte offsets of float16 fields (-1: none); `ratio` is minimum / scale that makes the
    values' mean zero; `signed` says whether ggml's quantiser may write a negative scale.
    """

    id: int
    block: int
    size: int
    scale: int = -1
    minimum: int = -1
    ratio: float = 0.0
    signed: bool = False


def _known(name: str, scale: int = -1, minimum: int = -1, ratio: float = 0.0, signed: bool = False) -> Layout:
    type_ = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    return Layout(int(type_), int(block), int(size), scale, minimum, ratio, signed)


LAYOUTS: dict[str, Layout] = {
    "F32": _known("F32"),
    "F16": _known("F16"),
    "BF16": _known("BF16"),
    "Q1_0": Layout(41, 128, 18, 0),
    "Q2_0": Layout(42, 64, 18, 0),
    "Q4_0": _known("Q4_0", 0, signed=True),
    "Q4_1": _known("Q4_1", 0, 2, -7.5),
    "Q5_0": _known("Q5_0", 0, signed=True),
    "Q5_1": _known("Q5_1", 0, 2, -15.5),
    "Q8_0": _known("Q8_0", 0),
    "Q2_K": _known("Q2_K", 80, 82, 1.5),
    "Q3_K": _known("Q3_K", 108, signed=True),
    "Q4_K": _known("Q4_K", 0, 2, 7.5),
    "Q5_K": _known("Q5_K", 0, 2, 15.5),
    "Q6_K": _known("Q6_K", 208, signed=True),
    "IQ1_S": _known("IQ1_S", 0),
    "IQ1_M": _known("IQ1_M"),
    "IQ2_XXS": _known("IQ2_XXS", 0),
    "IQ2_XS": _known("IQ2_XS", 0),
    "IQ2_S": _known("IQ2_S", 0),
    "IQ3_XXS": _known("IQ3_XXS", 0),
    "IQ3_S": _known("IQ3_S", 0),
    "IQ4_NL": _known("IQ4_NL", 0, signed=True),
    "IQ4_XS": _known("IQ4_XS", 0, signed=True),
    "TQ1_0": _known("TQ1_0", 52),
    "TQ2_0": _known("TQ2_0", 64),
    "MXFP4": _known("MXFP4"),
    "NVFP4": _known("NVFP4"),
}
"""Every weight type libllama can run on the CPU, by name."""


def layout(name: str) -> Layout:
    """The layout of type `name`; ValueError with the known names."""
    try:
        return LAYOUTS[name.upper()]
    except KeyError:
        raise ValueError(f"unknown tensor type '{name}'; known: {', '.join(LAYOUTS)}") from None


def nbytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; ValueError where a row is no whole number of blocks."""
    form = layout(name)
    if shape[-1] % form.block:
        raise ValueError(f"rows of {shape[-1]} elements cannot be {name}, whose block is {form.block}")
    return int(np.prod(shape)) // form.block * form.size


def random_tensor(name: str, shape: tuple[int, ...], std: float, rng: np.random.Generator) -> U8:
    """The bytes of a random tensor: uint8 [nbytes], values of mean about 0 and standard deviation about `std`.

    Large ones repeat a pool of blocks, turned at random; a matrix takes them in another order each time, so that no two
    of its rows are the same: twins among the head's rows would be exact ties between tokens.
    """
    form = layout(name)
    total = nbytes(name, shape) // form.size
    if form.block == 1:
        pool = _random_floats(name, min(total, POOL_BLOCKS * 32), std, rng)
    else:
        pool = random_blocks(name, min(total, POOL_BLOCKS), std, rng)
    out = np.empty((total, form.size), np.uint8)
    for start in range(0, total, len(pool)):
        n = min(len(pool), total - start)
        if start and len(shape) == 2:
            out[start : start + n] = pool[rng.permutation(len(pool))[:n]]
            continue
        cut = 0 if start == 0 else int(rng.integers(len(pool)))
        head = min(n, len(pool) - cut)
        out[start : start + head] = pool[cut : cut + head]
        out[start + head : start + n] = pool[: n - head]
    return out.reshape(-1)


def random_blocks(name: str, n: int, std: float, rng: np.random.Generator) -> U8:
    """`n` random blocks of a quantised type: uint8 [n, bytes per block]."""
    form = layout(name)
    blocks = _random_quants(name, n, rng)
    spread = rng.uniform(0.5, 1.5, n)
    if form.signed:
        spread *= rng.choice((-1.0, 1.0), n)
    _set_scale(name, blocks, std / _unit_rms(name) * spread)
    return blocks


def _random_floats(name: str, n: int, std: float, rng: np.random.Generator) -> U8:
    values = rng.standard_normal(n, np.float32) * np.float32(std)
    if name == "F16":
        return values.astype(np.float16).view(np.uint8).reshape(n, 2)
    if name == "BF16":  # round to nearest: add half a unit of the last kept bit
        return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(np.uint8).reshape(n, 2)
    return values.view(np.uint8).reshape(n, 4)


def _random_quants(name: str, n: int, rng: np.random.Generator) -> U8:
    """Random blocks whose quants are such as ggml's quantisers produce; scales are still to be set."""
    blocks = rng.integers(0, 256, (n, layout(name).size), np.uint8)
    if name == "Q8_0":
        quants = blocks[:, 2:]
        quants[quants == 0x80] = 0x81  # -128 is never written
    if name == "Q2_0":  # -1, 0, 1, 2 in proportions that make the mean zero
        pairs = rng.choice(np.arange(4, dtype=np.uint8), (n, 16, 4), p=(0.4, 0.3, 0.2, 0.1))
        blocks[:, 2:] = (pairs << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2, dtype=np.uint8)
    if name == "TQ2_0":  # three values only: pairs of bits 0, 1, 2
        pairs = rng.integers(0, 3, (n, 64, 4), np.uint8)
        blocks[:, :64] = (pairs << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2, dtype=np.uint8)
    if name == "TQ1_0":  # base 3: 5 digits a byte, the last 4 bytes 4 digits; stored as ceil(value * 256 / 3^5)
        for cut, digits in ((slice(0, 48), 5), (slice(48, 52), 4)):
            value = rng.integers(0, 3**digits, blocks[:, cut].shape, np.uint32) * 3 ** (5 - digits)
            blocks[:, cut] = (value * 256 + 242) // 243
    return blocks


def _set_scale(name: str, blocks: U8, scale: NDArray[np.float64]) -> None:
    """Write each block's scale (float64 [n]) in the type's own format."""
    if name == "MXFP4":
        exponent = np.rint(np.log2(np.abs(scale))).astype(np.int64) + _MXFP4_CENTRE
        blocks[:, 0] = np.clip(exponent, 1, 254)
    elif name == "NVFP4":
        table = _ue4m3_table()
        jitter = scale[:, None] * np.array([1.0, 0.8, 1.25, 0.9])
        blocks[:, :4] = np.clip(np.searchsorted(table, np.abs(jitter)), 1, _UE4M3_MAX)
    elif name == "IQ1_M":  # the float16's nibbles are the top nibbles of four little-endian words
        half = scale.astype(np.float16).view(np.uint16)
        words = blocks[:, 48:56].view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | (((half >> (4 * i)) & 0xF) << 12)
    else:
        form = layout(name)
        blocks[:, form.scale : form.scale + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
        if form.minimum >= 0:
            low = (scale * form.ratio).astype(np.float16)
            blocks[:, form.minimum : form.minimum + 2] = low.view(np.uint8).reshape(-1, 2)


@cache
def _unit_rms(name: str) -> float:
    """Root mean square of the values of random blocks with scale 1, by the gguf package's dequantiser."""
    if name == "Q1_0":
        return 1.0  # +-d
    if name == "Q2_0":
        return 1.0  # 0.4 (-1)^2 + 0.2 (1)^2 + 0.1 (2)^2
    blocks = _random_quants(name, 512, np.random.default_rng(0))
    _set_scale(name, blocks, np.ones(512))
    return float(np.sqrt(np.mean(np.square(dequantize(name, blocks.reshape(-1), (512, layout(name).block))))))


def dequantize(name: str, data: U8, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Float32 values of a tensor's bytes, by the gguf package; Q1_0 and Q2_0, which it lacks, by definition."""
    form = layout(name)
    raw = data.reshape(*shape[:-1], shape[-1] // form.block * form.size)
    if name in ("Q1_0", "Q2_0"):
        bits = 1 if name == "Q1_0" else 2
        blocks = raw.reshape(-1, form.size)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        quants = ((blocks[:, 2:, None] >> shifts) & ((1 << bits) - 1)).reshape(len(blocks), -1).astype(np.float32)
        values: NDArray[Any] = scale * (quants * 2 - 1 if bits == 1 else quants - 1)
        return values.reshape(shape).astype(np.float32)
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]), np.float32).reshape(shape)


@cache
def _ue4m3_table() -> NDArray[np.float64]:
    """Values of the unsigned 8-bit float codes 0..0x7E: 4 exponent bits (bias 7), 3 mantissa bits."""
    code = np.arange(_UE4M3_MAX + 1)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
