"""The host bank against the file's own bytes, with real and refused pinning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compat.synth import make
from ftgguf.experts import bank as banks
from ftgguf.experts.bank import Bank, BankError, LayerLayout, LimitedPinner
from ftgguf.gguf.reader import GGUFFile, open_gguf

LAYERS = 3


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    path = tmp_path_factory.mktemp("bank") / "m.gguf"
    return open_gguf(make("qwen3moe", Path(path), types="Q4_K", n_layer=LAYERS, n_ff=256))


def layouts(gguf: GGUFFile) -> dict[int, LayerLayout]:
    """Gate, up and down of each layer, one after the other at multiples of 16, slots at multiples of 256."""
    result = {}
    for layer in range(LAYERS):
        end, parts = 0, []
        for p in ("gate", "up", "down"):
            info = gguf.tensors[f"blk.{layer}.ffn_{p}_exps.weight"]
            parts.append((info, end))
            end += -(-info.nbytes // info.shape[2] // 16) * 16
        result[layer] = LayerLayout(info.shape[2], -(-end // 256) * 256, tuple(parts))
    return result


@pytest.mark.parametrize("block", [10_000, 200_000, 8 << 20])
def test_the_bytes_are_the_files(gguf: GGUFFile, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Blocks below an expert's part, of some parts, and of all; the oracle is the reader's mapping of the file."""
    monkeypatch.setattr(banks, "BLOCK", block)
    bank = Bank(gguf, layouts(gguf), threads=3)
    seen: list[float] = []
    bank.load(seen.append)
    for layer, layout in layouts(gguf).items():
        resident = bank.layers[layer]
        assert resident.address == resident.view.ctypes.data
        assert resident.address % 256 == 0
        for info, offset in layout.parts:
            want = np.frombuffer(gguf.shards[info.shard].map, np.uint8, info.nbytes, info.offset)
            each = info.nbytes // layout.experts
            got = resident.view[:, offset : offset + each]
            np.testing.assert_array_equal(got, want.reshape(layout.experts, each))
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert "GB read" in bank.report.line()


def test_pieces_hold_whole_layers_and_pinning_stops_at_the_limit(
    gguf: GGUFFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_layer = layouts(gguf)[0].experts * layouts(gguf)[0].slot_bytes
    monkeypatch.setattr(banks, "PIECE", one_layer + 8192)
    bank = Bank(gguf, layouts(gguf))
    bank.load()
    pinner = LimitedPinner(2 * one_layer + 3 * 8192)
    bank.pin(pinner)
    assert bank.pinned == {0: True, 1: True, 2: False}
    for address, size in pinner.held.items():
        assert address % 4096 == 0
        assert size % 4096 == 0
    for layer in (0, 1):
        r = bank.layers[layer]
        inside = [a <= r.address and r.address + r.view.nbytes <= a + n for a, n in pinner.held.items()]
        assert sum(inside) == 1
    assert "1 of 3 layers run on the CPU" in bank.report.line()
    bank.close()
    assert not pinner.held
    assert bank.pinned == {0: False, 1: False, 2: False}


def test_nothing_pinned_says_why(gguf: GGUFFile) -> None:
    bank = Bank(gguf, layouts(gguf))
    bank.load()
    bank.pin(LimitedPinner(0))
    assert not any(bank.pinned.values())
    assert "limit of 0 pinned bytes" in bank.report.line()


def test_a_pool_larger_than_memory_is_refused(gguf: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banks, "available_memory", lambda: 1000)
    with pytest.raises(BankError, match="--expert-disk"):
        Bank(gguf, layouts(gguf))
