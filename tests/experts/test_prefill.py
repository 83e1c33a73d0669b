"""Choices per layer against the arithmetic of the methods and a simulation of the ring's two buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ftgguf.experts import prefill
from ftgguf.experts.prefill import Cost, Costs, Layer, Mode, UnionEstimate

# Qwen3.6-35B-A3B Q4_K_M over a 25 GB/s link, 63 GB/s of host memory: the example of peers' short suffixes.
COSTS = Costs(
    stream=Cost(20e-6, 1 / 25.1e9),
    gather=Cost(10e-6, 1 / 23e9),
    cpu=Cost(30e-6, 1 / 38e9, 3e-6),
    gpu=Cost(20e-6, 1 / 1e12),
)
LAYER = Layer(experts=256, k=8, expert_bytes=1_870_000, resident=102, dense=100e-6, costs=COSTS)


def modes(rows: int, layer: Layer = LAYER, ring: int = 64, layers: int = 40) -> list[Mode]:
    return [c.mode for c in prefill.plan_chunk([layer] * layers, rows, UnionEstimate(), ring)]


def test_expected_union() -> None:
    """Against a simulation of uniform routing, and the published table: 16 tokens of 8 in 256 touch 40 %."""
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(16) for e in rng.choice(256, 8, replace=False)}) for _ in range(300)]
    assert prefill.expected_union(256, 8, 16) == pytest.approx(np.mean(drawn), rel=0.02)
    assert prefill.expected_union(256, 8, 16) / 256 == pytest.approx(0.40, abs=0.01)


def test_long_chunks_stream_and_short_ones_share() -> None:
    """8192 rows: the union is everything, streaming ahead wins. 1 to 4 rows: few bytes, the CPU takes a part."""
    assert set(modes(8192)[1:]) == {Mode.STREAM}
    assert set(modes(2)) <= {Mode.SHARE, Mode.CPU}
    assert set(modes(4)) == {Mode.SHARE}


def test_choice_is_the_least_of_its_alternatives() -> None:
    """For many chunk sizes; and a 16-row chunk is several times faster than streaming the pool whole."""
    for rows in (1, 2, 8, 16, 64, 200, 1000, 8192):
        for c in prefill.plan_chunk([LAYER] * 4, rows, UnionEstimate(), 64):
            assert c.seconds == min(c.alternatives.values())
    short = sum(c.seconds for c in prefill.plan_chunk([LAYER] * 40, 16, UnionEstimate(), 64))
    whole = 40 * COSTS.stream.seconds(256 * LAYER.expert_bytes)
    assert whole / short > 4


H200 = Layer(
    experts=128, k=8, expert_bytes=2_830_000, resident=48, dense=1e-3,
    costs=Costs(
        stream=Cost(2e-5, 1 / 46e9), gather=Cost(2e-5, 1 / 46e9), cpu=Cost(5e-5, 1 / 45e9, 27e-6),
        gpu=Cost(4e-4, 1 / 1.5e12, 4e-8), look=1e-4,
    ),
)  # fmt: skip
"""The Qwen3-30B-A3B shape on an H200 (docs/measurements/offload.md), 27 us for a further row on the CPU."""


def test_a_dense_chunk_streams_on_a_measured_machine() -> None:
    """2048 rows touch every expert: nothing is gained by looking at the routing first, and the copies begin earlier. 64
    rows share: the CPU needs 2.8 times as long for an expert, so it is worth a quarter of the time. A ring of 16 slots,
    far below two layers, streams too."""
    assert set(modes(2048, H200, 96, 12)) == {Mode.STREAM}
    assert set(modes(2048, H200, 16, 12)) == {Mode.STREAM}
    brief = replace(H200, dense=2e-4)
    assert set(modes(64, brief, 96, 12)) == {Mode.SHARE}
    short = prefill.plan_chunk([brief] * 12, 64, UnionEstimate(), 96)[5]
    long = prefill.plan_chunk([H200] * 12, 2048, UnionEstimate(), 96)[5]
    assert short.alternatives[Mode.GATHER] / short.seconds > 1.2
    assert long.alternatives[Mode.GATHER] > long.seconds


def simulate(layers: int, copies: list[float], products: list[float], here: float, dense: float) -> float:
    """Seconds of `layers` layers whose copies run ahead as far as two buffers allow: the ring, event by event."""
    link = gpu = 0.0
    free = [0.0, 0.0]  # when a buffer's last product was done
    turn = 0
    for _ in range(layers):
        gpu += dense
        gpu += here
        for copy, product in zip(copies, products, strict=True):
            link = max(link, free[turn]) + copy
            gpu = max(gpu, link) + product
            free[turn] = gpu
            turn = 1 - turn
    return gpu


def test_streaming_is_predicted_as_the_ring_does_it() -> None:
    """Within 15 % of the simulation: bound by the link, and bound by the products."""
    for entry in (4e-8, 8e-7):
        gpu = replace(H200.costs.gpu, per_entry=entry)
        layer = replace(H200, costs=replace(H200.costs, gpu=gpu, cpu=Cost(5e-5, 1 / 45e9, 1e-3)))
        absent, piece, each = 80, 20, 2048 * 8 / 128
        sizes = [min(piece, absent - at) for at in range(0, absent, piece)]
        c = layer.costs
        copies = [c.stream.fixed / len(sizes) + n * layer.expert_bytes * c.stream.per_byte for n in sizes]
        products = [c.gpu.seconds(n * layer.expert_bytes, n * each) for n in sizes]
        here = c.gpu.seconds(48 * layer.expert_bytes, 48 * each)
        want = simulate(12, copies, products, here, layer.dense)
        got = prefill.plan_chunk([layer] * 12, 2048, UnionEstimate(), 2 * piece)
        assert {choice.mode for choice in got} == {Mode.STREAM}
        assert sum(choice.seconds + layer.dense for choice in got) == pytest.approx(want, rel=0.15)


def test_slow_cpu_is_not_asked() -> None:
    slow = replace(LAYER, costs=replace(COSTS, cpu=Cost(20e-3, 1 / 1e9)))
    assert set(modes(16, slow)) == {Mode.GATHER}


def test_all_resident_and_unpinned() -> None:
    """Nothing missing: nothing moves. Not pinned, or no slot at all: the CPU."""
    assert set(modes(16, replace(LAYER, resident=256))) == {Mode.RESIDENT}
    assert set(modes(16, replace(LAYER, on_cpu=True))) == {Mode.CPU}
    assert set(modes(8192, ring=0)) == {Mode.CPU}


def test_cpu_share_against_brute_force() -> None:
    """The split by number over all splits, CPU taking the experts with the fewest rows."""
    entries = sorted([1.0, 1, 2, 2, 3, 9, 30])
    q, seconds = prefill.cpu_share(7, entries, LAYER)
    size = LAYER.expert_bytes
    copies = [COSTS.gather.seconds(g * size) for g in range(8)]
    every = {g: max(copies[g], COSTS.cpu.seconds((7 - g) * size, sum(entries[: 7 - g]))) for g in range(8)}
    assert seconds == pytest.approx(min(every.values()))
    assert every[q] == pytest.approx(seconds)


def test_union_is_learned() -> None:
    """Real routing touches fewer experts than uniform: the estimate follows what was counted, and sizes nearby."""
    unions = UnionEstimate()
    assert unions.union(128, 8, 32) == pytest.approx(prefill.expected_union(128, 8, 32))
    for _ in range(30):
        unions.observe(128, 8, 32, 50)
    assert unions.union(128, 8, 32) == pytest.approx(50, rel=0.01)
    share = 50 / prefill.expected_union(128, 8, 32)
    assert unions.union(128, 8, 64) == pytest.approx(share * prefill.expected_union(128, 8, 64))
