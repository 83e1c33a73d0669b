"""Placement against llama.cpp's rules (as its help and reference state them) and plain sums of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ftgguf.experts.placement import (
    ALL_LAYERS,
    Machine,
    Model,
    MoeMode,
    PlacementError,
    Wishes,
    block_of,
    override_of,
    plan,
)  # fmt: skip

GB = 1 << 30
MB = 1 << 20
EXPS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True)
class T:
    name: str
    nbytes: int


@dataclass(frozen=True)
class Over:
    pattern: str
    buffer: str


def model(n_layer: int = 8, context: int = 32768) -> Model:
    """8 blocks of 100 MB dense and 1 GB of experts, 300 MB in and out; KV of 4 KB a token and block."""
    tensors = [T("token_embd.weight", 300 * MB), T("output.weight", 300 * MB), T("output_norm.weight", 0)]
    for i in range(n_layer):
        tensors += [T(f"blk.{i}.attn_q.weight", 60 * MB), T(f"blk.{i}.ffn_up_shexp.weight", 40 * MB)]
        tensors += [T(f"blk.{i}.ffn_{p}_exps.weight", n * MB) for p, n in (("gate", 300), ("up", 300), ("down", 424))]
    return Model(tensors, n_layer, context, lambda layers, tokens: layers * tokens * 4096, 200 * MB)


def cpu_layers(n: int) -> list[Over]:
    return [Over(rf"blk\.{i}{EXPS}", "CPU") for i in range(n)]


BIG = Machine(vram=40 * GB, host=64 * GB)
SMALL = Machine(vram=6 * GB, host=64 * GB)


def test_tensor_rules() -> None:
    """First match wins, search not full match; blocks, input and output by name."""
    overrides = [Over(r"blk\.1\.", "CPU"), Over("exps", "CUDA0")]
    assert override_of("blk.1.ffn_up_exps.weight", overrides) == "CPU"
    assert override_of("blk.2.ffn_up_exps.weight", overrides) == "CUDA0"
    assert override_of("blk.2.attn_q.weight", overrides) is None
    assert [block_of(n, 8) for n in ("blk.12.x", "output_norm.weight", "token_embd.weight")] == [12, 8, -1]


def test_everything_fits() -> None:
    """Auto becomes resident: no pool in host memory, the embedding stays there as in llama.cpp."""
    p = plan(model(), Wishes(), BIG)
    assert p.mode is MoeMode.RESIDENT
    assert (p.gpu_layers, p.context, p.pool, p.cache) == (9, 32768, 0, 0)
    assert p.static == tuple(range(8))
    assert p.device["token_embd.weight"] == "CPU"
    assert p.weights == 8 * 100 * MB + 300 * MB
    assert p.kv == 8 * 32768 * 4096
    assert p.host == 300 * MB


def test_larger_than_vram() -> None:
    """Auto becomes hybrid: weights, then KV, and the rest is the cache; the pool is all experts."""
    p = plan(model(), Wishes(context=16384), SMALL)
    assert p.mode is MoeMode.HYBRID
    assert p.pool == 8 * GB
    assert p.cache == 6 * GB - p.weights - 8 * 16384 * 4096 - 200 * MB
    assert p.weights + p.kv + p.workspace + p.cache == SMALL.vram
    assert p.pinned == tuple(range(8))
    assert p.preload == (5, 6, 7) if p.cache < 4 * GB else (4, 5, 6, 7)
    assert any("hybrid" in r for r in p.reasons)


def test_context_left_open_leaves_half_to_the_experts() -> None:
    """A context of 262144 would take 8 GiB of KV: cut to half of the room at most, and said so; never if asked for."""
    big = model(context=262144)
    p = plan(big, Wishes(), SMALL)
    room = SMALL.vram - p.weights - 200 * MB
    assert 0.4 * room < p.kv <= room / 2
    assert p.context % 256 == 0
    assert any("instead of the trained 262144" in r for r in p.reasons)
    with pytest.raises(PlacementError, match="lower -c or -ngl"):
        plan(big, Wishes(gpu_layers=ALL_LAYERS, context=262144), SMALL)


@pytest.mark.parametrize("ngl", [0, 1, 4, 9, 99])
def test_ngl(ngl: int) -> None:
    """-ngl N: the output, and the last N - 1 blocks, with their KV."""
    p = plan(model(), Wishes(gpu_layers=ngl, context=4096), BIG)
    blocks = [i for i in range(8) if p.device[f"blk.{i}.attn_q.weight"] == "CUDA0"]
    assert blocks == list(range(8))[8 - max(0, min(ngl, 9) - 1) :]
    assert (p.device["output.weight"] == "CUDA0") == (ngl >= 1)
    assert p.kv == len(blocks) * 4096 * 4096
    if ngl == 0:
        assert p.mode is MoeMode.CPU


def test_auto_layers_shrink_only_for_the_dense_part() -> None:
    """700 MB of VRAM hold the output, the workspace and one block: the rest is on the CPU, with a reason."""
    p = plan(model(), Wishes(context=4096), Machine(700 * MB, 64 * GB))
    assert p.gpu_layers == 2
    assert any("2 of 9 layers" in r for r in p.reasons)
    assert plan(model(), Wishes(context=4096), Machine(100 * MB, 64 * GB)).mode is MoeMode.CPU


def test_cmoe_bounds_the_load_and_not_the_cache() -> None:
    """-cmoe: nothing is loaded at start, the cache is as large; -ncmoe 5: only blocks 5 to 7 are loaded."""
    everything = [Over(EXPS, "CPU")]
    p = plan(model(), Wishes(overrides=everything), BIG)
    assert p.mode is MoeMode.HYBRID
    assert p.preload == ()
    assert p.cache == 8 * GB
    assert plan(model(), Wishes(overrides=cpu_layers(5)), BIG).preload == (5, 6, 7)


def test_cache_off_is_llama_cpp() -> None:
    """--expert-cache 0 with -ncmoe 5: experts of 3 blocks stay in VRAM, 5 are in the pool and run on the CPU. Without
    -ncmoe they do not fit: refused with the number of layers and bytes."""
    p = plan(model(), Wishes(overrides=cpu_layers(5), expert_cache=0, context=8192), SMALL)
    assert (p.static, p.cache, p.pool, p.pinned) == ((5, 6, 7), 0, 5 * GB, ())
    with pytest.raises(PlacementError, match=r"8 layers with 8,192 MiB in VRAM.*-ncmoe 4,"):
        plan(model(), Wishes(expert_cache=0, context=8192), SMALL)


def test_modes() -> None:
    """Each mode as asked, or refused with its numbers."""
    assert plan(model(), Wishes(mode=MoeMode.OFFLOAD), BIG).mode is MoeMode.OFFLOAD
    p = plan(model(), Wishes(mode=MoeMode.CPU), BIG)
    assert (p.cache, p.pool, p.static) == (0, 8 * GB, ())
    with pytest.raises(PlacementError, match="needs 8,192 MiB for experts"):
        plan(model(), Wishes(mode=MoeMode.RESIDENT, context=4096), SMALL)
    with pytest.raises(PlacementError, match="contradicts"):
        plan(model(), Wishes(mode=MoeMode.RESIDENT, overrides=cpu_layers(1)), BIG)
    with pytest.raises(PlacementError, match="needs a GPU"):
        plan(model(), Wishes(mode=MoeMode.HYBRID), Machine(0, 64 * GB))
    with pytest.raises(PlacementError, match="asks for 10,240 MiB"):
        plan(model(), Wishes(expert_cache=10 * GB), SMALL)


def test_host_memory_too_small() -> None:
    """Refused with the numbers; with --expert-disk it goes on and says so; resident needs no pool."""
    poor = replace(SMALL, host=8 * GB)
    with pytest.raises(PlacementError, match=r"8,192 MiB of them experts.*8,192 MiB are available.*--expert-disk"):
        plan(model(), Wishes(), poor)
    p = plan(model(), Wishes(expert_disk=True), poor)
    assert any("--expert-disk" in r for r in p.reasons)
    assert plan(model(), Wishes(), Machine(40 * GB, 1 * GB)).mode is MoeMode.RESIDENT


def test_partly_pinned() -> None:
    """A limit of 3.5 GB on pinned memory: three blocks can be copied, five run on the CPU, said so."""
    p = plan(model(), Wishes(pin_budget=3 * GB + 500 * MB), SMALL)
    assert p.pinned == (0, 1, 2)
    assert any("5 of 8 layers" in r for r in p.reasons)


def test_kv_in_host_memory_and_dense_model() -> None:
    """-nkvo: KV counts as host memory. A model without experts is all resident."""
    p = plan(model(), Wishes(kv_offload=False, context=8192), BIG)
    assert p.kv == 0
    assert p.host == 300 * MB + 8 * 8192 * 4096
    dense = replace(model(), tensors=[t for t in model().tensors if "exps" not in t.name])
    p = plan(dense, Wishes(), SMALL)
    assert (p.mode, p.cache, p.pool) == (MoeMode.RESIDENT, 0, 0)
