"""Activation quantisers bit for bit, and the fused ones against them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, activation_reference, ggml_cpu, ggml_quantize, nmse, q8_reference, rows

from ftgguf.kernels.act import ACTIVATIONS, glu
from ftgguf.kernels.activations import quantize
from ftgguf.kernels.formats import Activation
from ftgguf.kernels.norm import norm

KINDS = (Activation.Q8_0, Activation.Q8_1, Activation.Q8_K)


def hard_rows() -> torch.Tensor:
    """Rows with zero blocks, ties of magnitude and of rounding, tiny and huge values."""
    x = rows(3, 512, 5).cpu()
    x[0, :256] = 0
    x[1, 3], x[1, 77] = -9.0, 9.0
    x[1, :256].clamp_(-9, 9)
    x[2, :32] = torch.arange(32) * 0.5 - 8
    x[2, 32:64] *= 1e-30
    x[2, 64:96] *= 1e6
    return x.to(DEVICE)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_quantise_bit_for_bit(kind: Activation) -> None:
    """Against a NumPy transcription of ggml's formulas."""
    x = hard_rows()
    p = quantize(x, kind)
    q, d, s = q8_reference(x.cpu().numpy(), kind)
    assert np.array_equal(p.q.cpu().numpy().reshape(-1), q.reshape(-1))
    got_d = p.d if kind == Activation.Q8_K else p.d[..., 0]
    got_s = p.s.view(-1, 4)[:, [0, 2, 1, 3]] if kind == Activation.Q8_K else p.d[..., 1]
    assert np.array_equal(got_d.cpu().numpy().reshape(-1).astype(np.float64), d)
    assert np.array_equal(got_s.cpu().numpy().reshape(-1).astype(np.float64), s)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_reference_is_ggml(kind: Activation) -> None:
    """The transcription itself against ggml's CPU backend, byte for byte (x86: its other backends round otherwise)."""
    if ggml_cpu() is None:
        pytest.skip("llama-cpp-python is not installed")
    x = hard_rows().cpu().numpy()
    q, d, s = q8_reference(x, kind)
    code, size = {Activation.Q8_0: (8, 34), Activation.Q8_1: (9, 36), Activation.Q8_K: (15, 292)}[kind]
    block = 256 if kind == Activation.Q8_K else 32
    raw = ggml_quantize(x, code, x.size // block * size).reshape(-1, size)
    if kind == Activation.Q8_K:
        assert np.array_equal(raw[:, :4].copy().view(np.float32)[:, 0], d.astype(np.float32))
        assert np.array_equal(raw[:, 4:260].view(np.int8), q.reshape(-1, 256))
        nonzero = d != 0  # ggml leaves the sums of zero blocks as they were
        sums = raw[:, 260:].copy().view(np.int16)
        assert np.array_equal(sums[nonzero], s.reshape(-1, 16)[nonzero])
    else:
        assert np.array_equal(raw[:, :2].copy().view(np.float16)[:, 0], d.astype(np.float16))
        assert np.array_equal(raw[:, size - 32 :].view(np.int8), q)
        if kind == Activation.Q8_1:
            assert np.array_equal(raw[:, 2:4].copy().view(np.float16)[:, 0], s.astype(np.float16))


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_glu(name: str) -> None:
    """Every activation against its formula in float64, with its fused quantisation equal to the separate one."""
    g, u = rows(2, 256, 6), rows(2, 256, 7)
    y = glu(g, u, name, limit=2.0, limit2=3.0, quantize_to=Activation.Q8_K)
    want = activation_reference(name, g.double().cpu().numpy(), u.double().cpu().numpy(), 2.0, 3.0)
    assert nmse(y.x, want) <= 1e-11
    again = quantize(y.x, Activation.Q8_K)
    assert torch.equal(y.planes(Activation.Q8_K).q, again.q)


@pytest.mark.parametrize("centre", [False, True])
def test_norm(centre: bool) -> None:
    """RMS and layer norm against float64, the sum for the residual stream, and planes equal to separate quantising."""
    x, add, weight, bias = rows(2, 768, 8), rows(2, 768, 9), rows(1, 768, 10)[0], rows(1, 768, 11)[0]
    y, total = norm(x, weight, 1e-6, add=add, bias=bias, centre=centre, kinds=(Activation.Q8_K, Activation.Q8_0))
    t = (x + add).double()
    assert torch.equal(total, x + add)
    c = t - t.mean(1, keepdim=True) if centre else t
    want = c / torch.sqrt((c * c).mean(1, keepdim=True) + 1e-6) * weight.double() + bias.double()
    assert nmse(y.x, want.cpu().numpy()) <= 1e-12
    for kind in (Activation.Q8_K, Activation.Q8_0):
        again = quantize(y.x, kind)
        assert torch.equal(y.planes(kind).q, again.q)
        assert torch.equal(y.planes(kind).d, again.d)


def test_norm_without_weight_or_sum() -> None:
    x = rows(2, 96, 12)
    y, total = norm(x, None, 1e-5)
    assert total is x
    want = x.double() / torch.sqrt((x.double() ** 2).mean(1, keepdim=True) + 1e-5)
    assert nmse(y.x, want.cpu().numpy()) <= 1e-12


def test_norm_after_experts() -> None:
    """The experts' sum joins the residual inside the norm; a pair without a slot counts nothing, even if NaN."""
    x, parts, gates = rows(2, 256, 13), rows(4, 256, 14), rows(2, 2, 15)
    ids = torch.tensor([[3, -1], [0, 5]], dtype=torch.int32, device=DEVICE)
    parts[1] = float("nan")
    y, total = norm(x, None, 1e-5, experts=(parts, ids, gates))
    want = x.double().clone()
    for p in (0, 2, 3):
        want[p // 2] += gates[p // 2, p % 2].double() * parts[p].double()
    assert nmse(total, want.cpu().numpy()) <= 1e-12
    assert torch.equal(y.x, norm(total, None, 1e-5)[0].x)
