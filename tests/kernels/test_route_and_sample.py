"""The router, the embedding look-up and the sampling prefilter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, dequantized, matrix, rows

from ftgguf.kernels.formats import FORMATS, Type
from ftgguf.kernels.router import route
from ftgguf.kernels.rows import dequantize, get_rows
from ftgguf.kernels.sample import prefilter


def route_reference(
    x: np.ndarray, k: int, gating: str, bias: np.ndarray | None, groups: int, used: int, norm: bool, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """llama.cpp's build_moe_ffn, one row at a time, in float64."""
    ids, weights = [], []
    for r in x.astype(np.float64):
        if gating == "softmax":
            p = np.exp(r - r.max())
            p /= p.sum()
        else:
            p = {"sigmoid": 1 / (1 + np.exp(-r)), "sqrt_softplus": np.sqrt(np.log1p(np.exp(r)))}.get(gating, r)
        s = p + (0 if bias is None else bias)
        if groups > 1:
            g = s.reshape(groups, -1)
            best = np.argsort(-np.sort(g, 1)[:, -2:].sum(1), kind="stable")[:used]
            s = np.where(np.isin(np.arange(groups), best)[:, None], g, -np.inf).reshape(-1)
        top = np.argsort(-s, kind="stable")[:k]
        w = p[top]
        if gating == "softmax_weight":
            w = np.exp(w - w.max())
            w /= w.sum()
        if norm:
            w = w / max(w.sum(), 6.103515625e-5)
        ids.append(top)
        weights.append(w * scale)
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_weight", "sqrt_softplus"])
@pytest.mark.parametrize("groups", [1, 4])
def test_route(gating: str, groups: int) -> None:
    """Selection bias changes who is chosen, never the weights."""
    x = rows(4, 24, 1) * 0.3
    bias = rows(1, 24, 2)[0] * 0.2
    ids, w = route(x, 3, gating=gating, bias=bias, groups=groups, groups_used=2, normalise=True, scale=2.5)
    want_ids, want = route_reference(x.cpu().numpy(), 3, gating, bias.double().cpu().numpy(), groups, 2, True, 2.5)
    assert np.array_equal(ids.cpu().numpy(), want_ids)
    assert np.allclose(w.cpu().numpy(), want, rtol=1e-5)


def test_route_ties_and_clamp() -> None:
    """Equal scores go to the lowest index, no expert twice; the norm's divisor is clamped at 6.1e-5."""
    ids, w = route(torch.zeros(1, 10, device=DEVICE), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert torch.allclose(w, torch.full((1, 4), 0.1, device=DEVICE))
    _, w = route(torch.full((1, 4), -40.0, device=DEVICE), 2, gating="sigmoid", normalise=True)
    assert w.sum().item() < 1e-6
    ids, _ = route(torch.tensor([[float("-inf")] * 3 + [1.0]], device=DEVICE), 3, gating="softmax_weight")
    assert sorted(ids[0].tolist()) == sorted(set(ids[0].tolist()))
    with pytest.raises(ValueError, match="cannot choose"):
        route(torch.zeros(1, 4), 5)
    with pytest.raises(ValueError, match="unknown gating"):
        route(torch.zeros(1, 4), 1, gating="none")


@pytest.mark.parametrize("type_", list(FORMATS), ids=lambda t: t.name)
def test_get_rows(type_: Type) -> None:
    """Embedding rows against the gguf package's dequantisers; ids outside the table read its edge, not other memory."""
    w, raw = matrix(type_, 5, 256, np.random.default_rng(3))
    ids = torch.tensor([4, 0, 4, 99], dtype=torch.int32, device=DEVICE)
    y = get_rows(w, ids).double().cpu().numpy()
    assert np.allclose(y, dequantized(type_, raw)[[4, 0, 4, 4]], rtol=2e-6, atol=1e-9)


def test_dequantize() -> None:
    w, raw = matrix(Type.Q6_K, 3, 512, np.random.default_rng(4))
    assert np.allclose(dequantize(w, torch.float32).cpu().numpy(), dequantized(Type.Q6_K, raw), rtol=2e-6)


@pytest.mark.parametrize(("v", "k"), [(100, 7), (700, 20)])
def test_prefilter(v: int, k: int) -> None:
    """Against torch.topk and torch.logsumexp, with ties, negative zero and minus infinity."""
    x = rows(2, v, 5)
    x[0, 10], x[0, 20], x[0, 30] = 50.0, 50.0, 60.0
    x[1, : v // 2] = float("-inf")
    values, ids, lse = prefilter(x, k)
    assert torch.equal(values, torch.topk(x, k).values)
    assert ids[0, :3].tolist() == [30, 10, 20]
    assert torch.equal(x.gather(1, ids.long()), values)
    assert all(len(set(r)) == k for r in ids.tolist())
    assert torch.allclose(lse, torch.logsumexp(x.double(), 1).float(), rtol=1e-6)
    with pytest.raises(ValueError, match="k must be"):
        prefilter(x, 0)
