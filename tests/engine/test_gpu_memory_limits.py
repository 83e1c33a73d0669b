"""What happens at the edge of a GPU's memory, without one: expectations are the numbers that each test sets up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ftgguf.engine import cache_controls
from ftgguf.engine.__main__ import _line, full_device
from ftgguf.engine.controls import Controls
from ftgguf.engine.fit import MIB, budget_of
from ftgguf.engine.messages import Control, Reply
from ftgguf.engine.slot_files import fingerprint
from ftgguf.flags.config import ServerConfig


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def test_a_full_gpu_at_start_is_one_line_with_the_flags() -> None:
    """torch's text has several lines about its allocator; a failed graph capture has the cause as its context."""
    error = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation")
    assert full_device(error)
    assert _line(error).startswith("the GPU's memory is full: lower -c, -ub")
    assert "\n" not in _line(error)
    capture = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    capture.__context__ = error
    assert full_device(capture)
    assert not full_device(RuntimeError("something else"))


class Store:
    """Has what a resize of the cache needs."""

    budget = 64 * MIB

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def resize(self, size: int) -> dict[str, int]:
        self.sizes.append(size)
        return {"bytes": size}


@pytest.mark.parametrize(("absent", "most"), [(None, 100), (20 * MIB, 120)])
def test_a_resize_leaves_a_prompts_workspace_alone(absent: int | None, most: int) -> None:
    """The plan's room for experts is the bound; what absent KV cells would take is lent."""
    store = Store()
    elastic = None if absent is None else SimpleNamespace(absent_bytes=absent, resize=store.resize)
    executor = SimpleNamespace(store=store, expert_room=100 * MIB, elastic=elastic)
    with pytest.raises(ValueError, match=f"{most + 1} MiB of experts: at most {most} MiB"):
        cache_controls.answer(executor, "expert_cache_rebuild", {"size_mib": most + 1})
    assert not store.sizes
    cache_controls.answer(executor, "expert_cache_rebuild", {"size_mib": most})
    assert store.sizes == [most * MIB]


def test_slot_files_name_the_order_of_their_cells() -> None:
    """The CPU's cells and a GPU's have as many bytes in another order."""
    info = {"architecture": "llama", "n_embd": 64, "kv_types": ["f16", "f16"]}
    on_gpu = {**info, "kv_layout": "GPU from block 0 on, f16"}
    in_part = {**info, "kv_layout": "GPU from block 2 on, f16"}
    assert len({fingerprint(info), fingerprint(on_gpu), fingerprint(in_part)}) == 3


def test_a_control_without_memory_is_answered() -> None:
    """Moving a slot's cells may find no room on the device: that is said, and nothing else ends."""
    replies: list[Reply] = []

    def slots() -> Any:
        raise MemoryError("the GPU has no memory to move 1024 KV cells")

    class Engine:
        reply = replies.append

        @property
        def scheduler(self) -> Any:
            return slots()

    Controls(Engine()).handle(Control(id=3, action="slots"))  # type: ignore[arg-type]
    assert [(r.id, r.ok) for r in replies] == [(3, False)]
    assert "1024 KV cells" in replies[0].message


def test_a_budget_above_what_is_free_is_said_to_be_so() -> None:
    base = ServerConfig()
    config = replace(base, placement=replace(base.placement, vram_budget=500))
    assert budget_of(config, 600 * MIB) == (500 * MIB, "--vram-budget")
    assert budget_of(config, 400 * MIB) == (400 * MIB, "free, less than --vram-budget 500")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1000, 700, 300 + 192),  # a context of 300 MiB, and what its modules take
        (1000, 480, 520 + 192),  # measured on an H200 with driver 580
        (2000, 960, 736),  # two contexts: another server starts
        (9000, 1000, 736),  # and loads
        (1000, 950, 736),  # something else gave memory back
        (1000, 3000, 736),
        (None, 500, 736),
        (1000, None, 736),
    ],
)
def test_other_programs_do_not_count_as_our_context(before: int | None, after: int | None, expected: int) -> None:
    """What is free is a figure of the whole device: while we start, others take and give memory."""
    pytest.importorskip("torch", reason="the GPU path needs torch")
    from ftgguf.engine.device_memory import context_bytes

    found = context_bytes(None if before is None else before * MIB, None if after is None else after * MIB)
    assert found == expected * MIB


def test_a_context_is_measured_around_its_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes before CUDA is initialized; a context that is there already cannot be measured."""
    torch = pytest.importorskip("torch", reason="the GPU path needs torch")
    from ftgguf.engine import devices
    from ftgguf.engine.device_memory import context_overhead
    from ftgguf.engine.fit import CONTEXT

    steps: list[str] = []

    def free_memory(index: int) -> int:
        steps.append(f"look at {index}")
        return (1000 if len(steps) == 1 else 700) * MIB

    monkeypatch.setattr(devices, "free_memory", free_memory)
    monkeypatch.setattr(torch.cuda, "init", lambda: steps.append("init"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append("wait"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: steps.append("use"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert context_overhead(torch.device("cuda", 1)) == (300 + 192) * MIB
    assert steps == ["look at 1", "init", "use", "wait", "look at 1"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert context_overhead(torch.device("cuda", 1)) == CONTEXT


def test_many_cells_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context shift moves half a context: as much memory again is not there."""
    torch = pytest.importorskip("torch", reason="the GPU path needs torch")
    pytest.importorskip("triton", reason="the GPU path needs triton")
    from ftgguf.engine import cuda_cells
    from ftgguf.engine.device_memory import DeviceMemory

    monkeypatch.setattr(cuda_cells, "COPIED", 5)
    shape: Any = SimpleNamespace(kv_heads=2, head_dim=32, v_dim=32)
    cells = cuda_cells.CudaCells(DeviceMemory(torch.device("cpu")), [shape] * 2, 64, "f16")
    data = np.random.default_rng(0).integers(0, 256, 32 * cells.cell_bytes, np.uint8).tobytes()
    first = np.arange(32, dtype=np.int32)
    cells.write(first, data)
    cells.copy(first, (first[::-1] + 32).astype(np.int32))
    assert cells.read((first[::-1] + 32).astype(np.int32)) == data


def test_cells_move_in_smaller_parts_where_memory_is_short() -> None:
    """By definition: every cell once, in order; a part that found no room again in smaller ones."""
    torch = pytest.importorskip("torch", reason="the GPU path needs torch")
    pytest.importorskip("triton", reason="the GPU path needs triton")
    from ftgguf.engine import cuda_cells

    done: list[int] = []
    room = 70

    def move(first: int, last: int) -> None:
        if last - first > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.extend(range(first, last))

    cuda_cells.in_parts(1500, move)
    assert done == list(range(1500))
    room = 0
    with pytest.raises(MemoryError, match="lower -c"):
        cuda_cells.in_parts(3, move)
    cuda_cells.in_parts(0, move)
