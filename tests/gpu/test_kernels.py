"""Every kernel on a CUDA device: all types, all row counts where the regimes change, real sizes.

References as in tests/kernels: the gguf package's dequantisers, float64, torch.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, ExpertCase
from kernel_checks import check_attention, check_experts, check_linear

from ftgguf.kernels.attention import AttentionSpec
from ftgguf.kernels.formats import FORMATS, Type
from ftgguf.kernels.linear import linear
from ftgguf.kernels.matrix import QuantMatrix
from ftgguf.kernels.sample import prefilter

M = (*range(1, 18), 31, 32, 33, 64, 127, 128, 129, 512)


@pytest.mark.parametrize("type_", list(FORMATS), ids=lambda t: t.name)
@pytest.mark.parametrize(("n", "k"), [(200, 1024), (1000, 768)])
def test_linear(type_: Type, n: int, k: int) -> None:
    """Against float64 with the dequantised weights; outputs start as NaN."""
    for m in M:
        check_linear(type_, m, n, k, seed=m)


@pytest.mark.parametrize("type_", [t for t, f in FORMATS.items() if f.block <= 32], ids=lambda t: t.name)
def test_linear_width_2880(type_: Type) -> None:
    """gpt-oss's width is no multiple of 256."""
    for m in (1, 5, 16, 40, 200):
        check_linear(type_, m, 96, 2880, seed=m)


@pytest.mark.parametrize("type_", list(FORMATS), ids=lambda t: t.name)
def test_experts_of_one_type(type_: Type) -> None:
    k = 512
    case = ExpertCase(type_, type_, type_, d=k, f=256, experts=12, seed=1)
    for m in (1, 2, 7, 8, 9, 40, 300):
        check_experts(case, m, 4, 12, seed=m)


@pytest.mark.parametrize(
    "mix", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q8_0", "Q5_0"), ("IQ2_XS", "IQ3_S", "IQ4_XS"), ("F16", "BF16", "F32")],
    ids="-".join,
)  # fmt: skip
def test_experts_of_unlike_types(mix: tuple[str, str, str]) -> None:
    gate, up, down = (Type[t] for t in mix)
    case = ExpertCase(gate, up, down, d=256, f=768, experts=16, seed=2, extras=True)
    for m in (1, 3, 8, 17, 128):
        check_experts(case, m, 8, 16, seed=m)


SPECS = {
    "plain": AttentionSpec(0.09),
    "window": AttentionSpec(0.09, window=128),
    "chunked": AttentionSpec(0.09, window=96, kind="chunked"),
    "softcap": AttentionSpec(0.2, softcap=20.0),
    "sinks": AttentionSpec(0.09, window=200, sinks=torch.linspace(-2, 3, 16, device=DEVICE)),
}


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("spec", list(SPECS))
@pytest.mark.parametrize("size", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_attention(kind: str, spec: str, size: tuple[int, int]) -> None:
    """Several sequences in shuffled pages, unused cells NaN."""
    check_attention([700, 33, 1], [1, 2, 1], (16, 2), size, kind, SPECS[spec], decode=True)
    check_attention([300, 70], [200, 70], (16, 2), size, kind, SPECS[spec], decode=False)


def test_prefilter_of_a_vocabulary() -> None:
    """Against torch.topk and torch.logsumexp."""
    x = torch.randn(3, 151936, device=DEVICE) * 4
    for k in (1, 40, 64, 200, 1000):
        values, ids, lse = prefilter(x, k)
        assert torch.equal(values, torch.topk(x, k).values)
        assert torch.equal(x.gather(1, ids.long()), values)
        assert torch.allclose(lse, torch.logsumexp(x.double(), 1).float(), rtol=1e-6)


def test_beyond_two_gigabytes() -> None:
    """Rows past 2^31 bytes are read where they are (int64 addressing)."""
    n, k = 300_000, 8192
    w = QuantMatrix(Type.Q8_0, n, k, torch.zeros(n * (k // 32) * 34, dtype=torch.uint8, device=DEVICE))
    last = w.data.view(n, -1)[-1].view(-1, 34)
    last[:, 1] = 0x3C  # f16 one
    last[:, 2:] = 1
    for m in (1, 16):
        y = linear(torch.ones(m, k, device=DEVICE), w)
        assert y[:, :-1].abs().max().item() == 0
        assert torch.allclose(y[:, -1], torch.full((m,), float(k), device=DEVICE), rtol=1e-3)


def test_capture() -> None:
    """A captured step replays with new data: no launch depends on what the device holds."""
    case = ExpertCase(Type.Q4_K, Type.Q4_K, Type.Q6_K, d=256, f=256, experts=6, seed=3)
    from ftgguf.kernels.linear import ExpertBatch
    from ftgguf.kernels.norm import combine

    x = torch.randn(2, 256, device=DEVICE)
    ids = case.slots(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=DEVICE))
    experts = torch.zeros_like(ids)
    gate = torch.ones(2, 2, device=DEVICE)

    def step() -> torch.Tensor:
        b = ExpertBatch(ids, experts, case.slot_addr)
        return combine(b.down(b.gate_up(x, case.weights), case.weights), ids, gate)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.normal_()
    ids.copy_(case.slots(torch.tensor([[5, -1], [4, 0]], dtype=torch.int32, device=DEVICE)))
    graph.replay()
    assert torch.allclose(y, step(), rtol=1e-6, atol=1e-6)
