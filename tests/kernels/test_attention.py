"""Paged attention against float64, the rotation and the norms against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, nmse, rows
from kernel_checks import check_attention, fill_cache

from ftgguf.kernels.activations import quantize
from ftgguf.kernels.attention import AttentionSpec, attention_decode
from ftgguf.kernels.formats import Activation
from ftgguf.kernels.rope import Rope, qk_norm_rope_write, rope_frequencies

SPECS = {
    "plain": AttentionSpec(0.125),
    "window": AttentionSpec(0.125, window=20),
    "chunked": AttentionSpec(0.125, window=32, kind="chunked"),
    "softcap": AttentionSpec(0.3, softcap=5.0),
    "sinks": AttentionSpec(0.125, window=40, sinks=torch.tensor([1.0, -2.0, 3.0, 0.5], device=DEVICE)),
}


@pytest.mark.parametrize("spec", list(SPECS))
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_masks(spec: str, decode: bool) -> None:
    """Grouped heads over shuffled pages; unused cells are NaN."""
    check_attention([70, 33], [2, 1], (4, 2), (64, 64), "f16", SPECS[spec], decode=decode)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
def test_cache_types(kind: str, decode: bool) -> None:
    check_attention([40], [1 if decode else 18], (2, 1), (64, 32), kind, SPECS["plain"], decode=decode)


@pytest.mark.parametrize(("hd", "hv"), [(80, 80), (192, 128), (256, 256)])
def test_head_sizes(hd: int, hv: int) -> None:
    check_attention([35], [1], (2, 2), (hd, hv), "f16", SPECS["plain"], decode=True)
    check_attention([35], [3], (2, 2), (hd, hv), "f16", SPECS["plain"], decode=False)


@pytest.mark.parametrize(("kind", "hv"), [(Activation.Q8_0, 64), (Activation.Q8_K, 128), (Activation.Q8_K, 80)])
def test_output_quantised_for_the_next_product(kind: Activation, hv: int) -> None:
    """The planes that the merge writes (or, for odd head sizes, leaves to be computed) equal separate quantising."""
    cache, table, _, _ = fill_cache([40], 2, (64, hv), "f16", 5)
    heads = 16 if hv == 80 else 4
    q = rows(2, heads * 64, 6).view(2, heads, 64)
    at = torch.tensor([39, 20], dtype=torch.int32, device=DEVICE)
    y = attention_decode(q, cache, table, at * 0, at, SPECS["plain"], quantize_to=kind)
    again = quantize(y.x, kind)
    for a, b in zip((y.planes(kind).q, y.planes(kind).d, y.planes(kind).s), (again.q, again.d, again.s), strict=True):
        assert torch.equal(a, b)


def test_q8_cache_is_ggml_q8() -> None:
    """The quantised cache holds what ggml's Q8_0 would: the keys come back within half a step."""
    _, _, keys, _ = fill_cache([3], 1, (64, 64), "q8_0", 4)
    x = rows(3, 64, 4).double().cpu().numpy().reshape(3, 1, 64)
    step = np.abs(x.reshape(3, 2, 32)).max(-1).repeat(32, -1).reshape(3, 1, 64) / 127
    assert (np.abs(keys[0] - x) <= 0.52 * step).all()


def rope_reference(x: np.ndarray, position: np.ndarray, freq: np.ndarray, neox: bool, mag: float) -> np.ndarray:
    """ggml's rope on [M, H, D] in float64: pairs (2i, 2i + 1), or (i, i + rot / 2) for neox."""
    out = x.copy()
    half = len(freq)
    a, b = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    angle = (position[:, None] * freq)[:, None, :]
    c, s = np.cos(angle) * mag, np.sin(angle) * mag
    out[..., a] = x[..., a] * c - x[..., b] * s
    out[..., b] = x[..., a] * s + x[..., b] * c
    return out


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_rope(neox: bool, normed: bool) -> None:
    """Queries with norm and partial rotation, from strided rows."""
    freq, mag = rope_frequencies(32, 10000.0, scale=0.25, ext_factor=1.0, n_ctx_orig=64)
    rope = Rope(torch.tensor(freq, device=DEVICE), neox, mag)
    both = rows(3, 3 * 48, 1)
    q = both[:, : 2 * 48]
    position = torch.tensor([0, 5, 117], dtype=torch.int32, device=DEVICE)
    weight = rows(1, 48, 2)[0] if normed else None
    y = qk_norm_rope_write(
        q, None, None, rope, position, heads=(2, 1), head_size=(48, 48), q_weight=weight, q_scale=0.5
    )
    x = q.double().cpu().numpy().reshape(3, 2, 48)
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight.double().cpu().numpy()
    f32 = np.array(freq, np.float32).astype(np.float64)
    want = rope_reference(x, position.cpu().numpy(), f32, neox, mag) * 0.5
    assert nmse(y, want) <= 1e-10


def test_rope_sections() -> None:
    """Multi-section RoPE: each pair turns by its own axis's position."""
    freq = rope_frequencies(8, 100.0)[0]
    axis = torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=DEVICE)
    rope = Rope(torch.tensor(freq, device=DEVICE), True, 1.0, axis)
    position = torch.tensor([[1, 2], [5, 6], [9, 3]], dtype=torch.int32, device=DEVICE)
    q = rows(2, 8, 3)
    y = qk_norm_rope_write(q, None, None, rope, position, heads=(1, 1), head_size=(8, 8))
    p = position.cpu().numpy()
    for m in range(2):
        turn = np.array(freq) * np.array([p[a, m] for a in axis.tolist()])
        want = rope_reference(q[m : m + 1].double().cpu().numpy().reshape(1, 1, 8), np.ones(1), turn, True, 1.0)
        assert nmse(y[m : m + 1], want) <= 1e-10


def test_rope_frequencies() -> None:
    """Plain, linear, file factors; YaRN leaves the fastest pair and scales the slowest (ggml's rope_yarn)."""
    plain, mag = rope_frequencies(64, 1e4)
    assert mag == 1.0
    assert plain[1] == pytest.approx(1e4 ** (-2 / 64))
    assert rope_frequencies(64, 1e4, scale=0.5)[0][3] == pytest.approx(plain[3] / 2)
    assert rope_frequencies(64, 1e4, factors=[4.0] * 32)[0][3] == pytest.approx(plain[3] / 4)
    yarn, mag = rope_frequencies(64, 1e4, scale=0.25, ext_factor=1.0, n_ctx_orig=4096)
    assert yarn[0] == pytest.approx(plain[0])
    assert yarn[-1] == pytest.approx(plain[-1] / 4)
    assert mag == pytest.approx(1 + 0.1 * np.log(4))
