"""Experts by slot address: unlike types, missing pairs, poisoned slots, biases and scales, both regimes."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, ExpertCase
from kernel_checks import check_experts

from ftgguf.kernels.act import ACTIVATIONS
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.formats import Type
from ftgguf.kernels.gemm import expert_config
from ftgguf.kernels.group import group_pairs
from ftgguf.kernels.linear import ExpertBatch, ExpertPieces
from ftgguf.kernels.matrix import ExpertMatrix, ExpertWeights

MIXES = [
    (Type.Q4_K, Type.Q4_K, Type.Q6_K),
    (Type.Q4_K, Type.Q8_0, Type.Q5_0),
    (Type.IQ2_XS, Type.IQ3_S, Type.IQ4_XS),
    (Type.MXFP4, Type.MXFP4, Type.MXFP4),
]


def _name(mix: tuple[Type, ...]) -> str:
    return "-".join(t.name for t in mix)


@pytest.mark.parametrize("mix", MIXES, ids=_name)
@pytest.mark.parametrize("m", [1, 3])
def test_few_rows(mix: tuple[Type, Type, Type], m: int) -> None:
    """Against float64 products of the dequantised experts."""
    check_experts(ExpertCase(*mix, d=256, f=256, experts=5, seed=m), m, 2, 5, seed=m)


@pytest.mark.parametrize("mix", MIXES[:2], ids=_name)
def test_many_rows(mix: tuple[Type, Type, Type]) -> None:
    check_experts(ExpertCase(*mix, d=256, f=256, experts=5, seed=7), 20, 2, 5, seed=7)


def test_gate_and_up_in_launches_of_their_own() -> None:
    """Prompts of more than 64 rows an expert, Q4_K: the gate's product goes through float16."""
    assert expert_config(70, True, [Type.Q4_K, Type.Q4_K]).apart
    check_experts(ExpertCase(Type.Q4_K, Type.Q4_K, Type.Q4_K, d=256, f=256, experts=2, seed=3), 140, 2, 2, seed=3)


def test_a_gate_beyond_float16_is_cut_off() -> None:
    """silu of more is as good as the value itself; infinity times 0 would not be a number."""
    case = ExpertCase(Type.Q4_K, Type.Q4_K, Type.Q4_K, d=256, f=256, experts=2, seed=3)
    x = torch.full((140, 256), 3e6, device=DEVICE)
    ids = torch.tensor([[0, 1]] * 140, dtype=torch.int32, device=DEVICE)
    slots = torch.from_numpy(case.slot_of.astype("int32")).to(DEVICE)[ids.long()].contiguous()
    h = ExpertBatch(slots, ids, case.slot_addr).gate_up(x, case.weights)
    assert torch.isfinite(h).all()
    assert float(h.abs().max()) > 1e9


@pytest.mark.parametrize("m", [2, 9])
def test_bias_and_scale(m: int) -> None:
    """gpt-oss biases and per-expert scales are indexed by expert, not by slot."""
    case = ExpertCase(
        Type.MXFP4, Type.MXFP4, Type.MXFP4, d=64, f=96, experts=4, seed=9, activation="swiglu_oai", extras=True
    )
    check_experts(case, m, 3, 4, seed=9)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations(name: str) -> None:
    gate = None if name == "relu2" else Type.Q8_0
    case = ExpertCase(
        gate, Type.Q8_0, Type.Q8_0, d=64, f=64, experts=3, seed=11, activation=name, limit=2.0, limit2=3.0
    )
    check_experts(case, 1, 2, 3, seed=11)
    check_experts(case, 9, 2, 3, seed=12)


@pytest.mark.parametrize(
    ("rows", "k", "slots", "bm"),
    [(5, 2, 6, 2), (1, 1, 1, 16), (9, 8, 128, 16), (70, 4, 5, 16), (300, 2, 1, 32), (40, 8, 300, 64)],
)
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_group_pairs(rows: int, k: int, slots: int, bm: int, missing: float) -> None:
    """Each pair with a slot is in exactly one tile, of its own slot, and a slot's tiles are full but for its last; the
    number of tiles depends on shapes only. By definition."""
    make = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, slots, (rows, k), generator=make, dtype=torch.int32)
    ids[torch.rand(rows, k, generator=make) < missing] = -1
    g = group_pairs(ids.to(DEVICE), slots, bm)
    pairs, flat = rows * k, ids.reshape(-1)
    assert g.tile.shape == (min(pairs, pairs // bm + min(slots, pairs)), 3)
    seen: list[int] = []
    sizes: dict[int, list[int]] = {}
    for slot, start, count in g.tile.tolist():
        if slot >= 0:
            found = g.order[start : start + count].tolist()
            assert all(flat[p] == slot for p in found)
            seen += found
            sizes.setdefault(slot, []).append(count)
        else:
            assert (slot, start, count) == (-1, 0, 0)
    assert sorted(seen) == torch.nonzero(flat >= 0).reshape(-1).tolist()
    for found in sizes.values():
        assert all(n == bm for n in found[:-1])
        assert 1 <= found[-1] <= bm


@pytest.mark.parametrize("mix", [(Type.MXFP4,) * 3, (Type.F16,) * 3, (Type.F32, Type.F32, Type.Q8_0)], ids=_name)
@pytest.mark.parametrize("m", [2, 9, 40])
def test_pieces_are_the_whole(mix: tuple[Type, Type, Type], m: int) -> None:
    """Experts in three pieces, each with places of its own: to the bit what all of them at once give, whose values the
    tests above hold against float64. An expert that never comes leaves its pairs' rows as they were."""
    experts, k = 5, 2
    case = ExpertCase(*mix, d=64, f=96, experts=experts, seed=m, activation="swiglu_oai", extras=True)
    make = torch.Generator().manual_seed(m)
    ids = torch.stack([torch.randperm(experts, generator=make)[:k] for _ in range(m)]).int().to(DEVICE)
    x = torch.randn(m, 64, generator=make).to(DEVICE)
    slot_of = torch.from_numpy(case.slot_of).long().to(DEVICE)
    whole = ExpertBatch(ids, ids, case.slot_addr[slot_of])
    want = whole.down(whole.gate_up(x, case.weights), case.weights)
    pieces = ExpertPieces(ids, experts, case.weights)
    pieces.parts.fill_(float("nan"))
    never = int(ids[0, 0])
    a, b, c, d = (e for e in (3, 0, 4, 1, 2) if e != never)
    for part in ([a], [b, c], [d]):
        table = torch.full((experts,), -1, dtype=torch.int32, device=DEVICE)
        table[part] = torch.arange(len(part), dtype=torch.int32, device=DEVICE)
        pieces.add(Activations(x), table, case.slot_addr[slot_of[part]])
    here = ids.reshape(-1) != never
    assert torch.equal(pieces.parts[here], want[here])
    assert pieces.parts[~here].isnan().all()


def test_nothing_is_here() -> None:
    """All experts elsewhere: no program touches memory, and the sum is zero."""
    case = ExpertCase(Type.Q8_0, Type.Q8_0, Type.Q8_0, d=64, f=64, experts=3, seed=1)
    ids = torch.full((2, 2), -1, dtype=torch.int32, device=DEVICE)
    batch = ExpertBatch(ids, ids.clamp(min=0), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    x = torch.randn(2, 64, device=DEVICE)
    batch.down(batch.gate_up(x, case.weights), case.weights)


def test_shapes_are_checked() -> None:
    a = ExpertMatrix(Type.Q8_0, 64, 32, 0)
    with pytest.raises(ValueError, match="gate and up columns"):
        ExpertWeights(ExpertMatrix(Type.Q8_0, 64, 64, 0), a, ExpertMatrix(Type.Q8_0, 32, 64, 0))
    with pytest.raises(ValueError, match="multiple of 16"):
        ExpertMatrix(Type.Q8_0, 64, 32, 8)
