"""Products of every tensor type, in the regimes of few and many rows, with and without extras."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, TUNED, dequantized, ggml_cpu, ggml_product, matrix, nmse, product, rows
from kernel_checks import check_linear

from ftgguf.kernels.activations import Activations
from ftgguf.kernels.formats import FORMATS, Type
from ftgguf.kernels.gemm import TileConfig, gemm
from ftgguf.kernels.gemv import gemv
from ftgguf.kernels.linear import linear, linear_many
from ftgguf.kernels.matrix import QuantMatrix

TYPES = list(FORMATS)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_one_row(type_: Type) -> None:
    """Against the dequantised weights in float64; N is not a multiple of the tile, K spans blocks."""
    check_linear(type_, 1, 5, 512)


@pytest.mark.parametrize("type_", TUNED, ids=lambda t: t.name)
def test_three_rows_of_a_width_that_is_no_power_of_two(type_: Type) -> None:
    check_linear(type_, 3, 6, 768)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_tile(type_: Type) -> None:
    """Against the dequantised weights in float64: rows and columns past the tiles, and K split over two programs."""
    rng = np.random.default_rng(1)
    n, k, m = 18, 512, 9
    w, raw = matrix(type_, n, k, rng)
    x = Activations(rows(m, k, 1))
    out = torch.full((m, n), float("nan"), device=DEVICE)
    gemm(x, w, out=out, config=TileConfig(16, 16, 128, 4, 1, split=2))
    limit = {Type.F32: 1e-10, Type.F16: 1e-6}.get(type_, 5e-5)
    assert nmse(out, product(x, FORMATS[type_], dequantized(type_, raw), False)) <= limit


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_agrees_with_ggml(type_: Type) -> None:
    """Same products as ggml's CPU backend: only the order of float32 sums (and of F16 ones inside ggml) differs."""
    if ggml_cpu() is None:
        pytest.skip("llama-cpp-python is not installed")
    rng = np.random.default_rng(2)
    w, raw = matrix(type_, 4, 512, rng)
    x = rows(2, 512, 2)
    y = linear(x, w)
    assert nmse(y, ggml_product(x.cpu().numpy(), type_, raw).astype(np.float64)) <= 1e-9


def test_three_matrices_in_one_launch() -> None:
    """Query, key and value of unlike types and sizes with bias and residual equal the separate products."""
    rng = np.random.default_rng(3)
    ws = [matrix(t, n, 512, rng)[0] for t, n in ((Type.Q4_K, 9), (Type.Q6_K, 4), (Type.IQ4_XS, 3))]
    x = rows(2, 512, 3)
    bias = [torch.randn(w.n, device=DEVICE) for w in ws]
    for y, w, b in zip(linear_many(x, ws, bias), ws, bias, strict=True):
        assert torch.allclose(y, linear(x, w) + b, rtol=1e-6, atol=1e-5)
    residual = torch.randn(2, 9, device=DEVICE)
    assert torch.allclose(
        linear(x, ws[0], bias=bias[0], residual=residual), linear(x, ws[0]) + bias[0] + residual, rtol=1e-6, atol=1e-5
    )


def test_scale_of_a_matrix() -> None:
    """The `.scale` of an NVFP4 file multiplies the product, before the bias, in both regimes."""
    rng = np.random.default_rng(4)
    plain, _ = matrix(Type.NVFP4, 6, 128, rng)
    scale = torch.tensor([0.25], device=DEVICE)
    w = QuantMatrix(plain.type, plain.n, plain.k, plain.data, 0, scale)
    bias = torch.randn(6, device=DEVICE)
    for m in (2, 9):
        x = rows(m, 128, m)
        assert torch.allclose(linear(x, w, bias=bias), linear(x, plain) * 0.25 + bias, rtol=1e-5, atol=1e-5)


def test_interface_errors() -> None:
    """Misuse is refused with what was wrong."""
    w = QuantMatrix(Type.Q8_0, 2, 64, torch.zeros(136, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        linear(torch.zeros(1, 32), w)
    with pytest.raises(ValueError, match="not a multiple of the block"):
        QuantMatrix(Type.Q4_K, 1, 128, torch.zeros(1000, dtype=torch.uint8))
    with pytest.raises(ValueError, match="needs 144 bytes"):
        QuantMatrix(Type.Q4_K, 1, 256, torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 to 8 rows"):
        gemv(Activations(torch.zeros(9, 64)), [w])
