"""What a model on a GPU counts for in router mode, planned from a file's header: against the engine's own plan and the
file's sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compat.synth import make
from ftgguf.engine.devices import Device
from ftgguf.engine.fit import MIB, parts_of
from ftgguf.engine.survey import survey
from ftgguf.flags import parse_server
from ftgguf.gguf import GGUFFile
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import read_numbers
from ftgguf.server.models_gpu import fits_beside
from ftgguf.server.models_memory import GIB, GPU_OVERHEAD, OVERHEAD, Memory, Need, estimate, shortage


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    """Three quarters of it are experts."""
    with open_gguf(make("qwen3moe", tmp_path_factory.mktemp("router") / "m.gguf", types="Q8_0", n_layer=4)) as gguf:
        yield gguf


def need_of(gguf: GGUFFile, total: int, *flags: str, free: int | None = None, held: int = 0, least: int = 0) -> Need:
    """On a GPU of `total` bytes, all of it free unless `free` says."""
    card = Device(0, "Card", (9, 0), total, total if free is None else free)
    memory = Memory(lambda: 64 * GIB, lambda: 64 * GIB, gpu=lambda placement: card if total else None)
    config = parse_server(["-m", str(gguf.path), "-np", "1", *flags], {})
    return estimate(config, gguf, memory, {"CUDA0": held}, least)[1]


def experts(gguf: GGUFFile) -> int:
    return sum(t.nbytes for t in gguf.tensors.values() if "_exps" in t.name)


def test_without_a_gpu_everything_is_host_memory(gguf: GGUFFile) -> None:
    need = need_of(gguf, 0, "-c", "512")
    assert (need.weights, need.overhead, need.gpu, need.device) == (gguf.size, OVERHEAD, "", 0)
    assert need.total == gguf.size + need.kv + OVERHEAD


def test_a_model_on_the_gpu_leaves_the_engine_alone(gguf: GGUFFile) -> None:
    """Its bytes there are those of engine.fit; what it would take on the CPU is known too."""
    need = need_of(gguf, 8 * GIB, "-c", "512")
    config = parse_server(["-m", str(gguf.path), "-np", "1", "-c", "512"], {})
    numbers = read_numbers(gguf)
    parts = parts_of(survey(gguf, numbers, config.context), 0, 512, config)
    assert (need.gpu, need.device) == ("CUDA0", parts.total)
    assert (need.weights, need.kv, need.packed, need.total) == (0, 0, 0, GPU_OVERHEAD)
    assert need.on_cpu == need_of(gguf, 0, "-c", "512").total


def test_experts_behind_a_cache_are_host_memory(gguf: GGUFFile) -> None:
    need = need_of(gguf, 8 * GIB, "-c", "512", "--moe-mode", "hybrid")
    slack = 256 * len(gguf.tensors)
    kept = experts(gguf) + gguf.tensors["token_embd.weight"].nbytes
    assert kept <= need.weights <= kept + slack
    assert 0 < need.device <= 7 * GIB


def test_blocks_on_the_cpu_are_host_memory(gguf: GGUFFile) -> None:
    """-ngl 3 is two of four blocks and the head (llama.cpp's count): the other two and the embedding stay."""
    need = need_of(gguf, 8 * GIB, "-c", "512", "-ngl", "3")
    stay = sum(t.nbytes for n, t in gguf.tensors.items() if n.startswith(("blk.0.", "blk.1.", "token_embd")))
    assert stay <= need.weights <= stay + 256 * len(gguf.tensors) + 1024
    assert need.kv * 2 == need_of(gguf, 0, "-c", "512").kv
    assert need.packed >= need.weights


def test_memory_that_others_would_give_up_counts_as_free(gguf: GGUFFile) -> None:
    """A full GPU: with what the loaded models hold of it the model is for the GPU, without for the CPU."""
    assert need_of(gguf, 8 * GIB, "-c", "512", free=0).gpu == ""
    assert need_of(gguf, 8 * GIB, "-c", "512", free=0, held=8 * GIB).gpu == "CUDA0"


def test_a_context_that_a_request_wants(gguf: GGUFFile) -> None:
    """num_ctx beyond what the plan would choose is had; -c is never changed."""
    narrow = parse_server(["-m", str(gguf.path), "-np", "1"], {})
    trained = read_numbers(gguf).n_ctx_train
    memory = Memory(lambda: 64 * GIB, lambda: 64 * GIB, gpu=lambda placement: Device(0, "C", (9, 0), 8 * GIB, 8 * GIB))
    config, _ = estimate(narrow, gguf, memory, {}, trained + 512)
    assert config.context.size == trained + 512
    fixed = parse_server(["-m", str(gguf.path), "-np", "1", "-c", "256"], {})
    assert estimate(fixed, gguf, memory, {}, 4096)[0].context.size == 256


def test_what_a_flag_asks_too_much_of_is_said(gguf: GGUFFile) -> None:
    with pytest.raises(MemoryError, match="do not fit on the GPU"):
        need_of(gguf, 700 * MIB, "-c", "512", "-ngl", "all", "-fit", "off")


def test_whether_it_fits_beside_the_others() -> None:
    """--fit-target (1 GiB) stays free; a budget bounds what is asked for; without a figure only a budget shares."""
    plain, shared = (parse_server(["-m", "x.gguf", *more], {}) for more in ([], ["--vram-budget", "4096"]))
    assert fits_beside(plain, 3 * GIB, 4 * GIB)
    assert not fits_beside(plain, 3 * GIB + 1, 4 * GIB)
    assert fits_beside(shared, 4 * GIB, 4 * GIB)
    assert not fits_beside(shared, 4 * GIB, 3 * GIB)
    assert (fits_beside(plain, 1, None), fits_beside(shared, 1, None)) == (False, True)


def test_a_shortage_tells_both_kinds_apart() -> None:
    memory = Memory(lambda: 8 * GIB, lambda: 8 * GIB)
    text = shortage("m", Need(20 * GIB, 0, overhead=0, gpu="CUDA0", device=6 * GIB), 4 * GIB, memory)
    assert "needs 20.00 GiB of host memory beside 6.00 GiB of CUDA0 and 4.00 GiB of 8.00 GiB are free" in text
