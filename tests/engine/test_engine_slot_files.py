"""Slot save, restore and erase: contents, and every way a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_support import ask, check_idle, generate, make_engine, naive_answer, run_all

from ftgguf.engine.engine import Engine
from ftgguf.engine.messages import Control, Reply

PROMPT = [5, 6, 7] * 40


def control(engine: Engine, action: str, **arguments: Any) -> Reply:
    engine.control(Control(id=99, action=action, arguments=arguments))
    return run_all(engine).replies[99]


def saved(tmp_path: Path, name: str = "a") -> tuple[Path, dict[str, Any]]:
    engine, _ = make_engine()
    engine.info = {"name": name}
    ask(engine, generate(1, PROMPT, max_tokens=5, id_slot=1))
    path = tmp_path / "slot.bin"
    reply = control(engine, "slot_save", id_slot=1, filename="slot.bin", path=str(path))
    assert reply.ok, reply.message
    return path, reply.value


def fresh(name: str = "a", **config: Any) -> Engine:
    engine, _ = make_engine(**config)
    engine.info = {"name": name}
    return engine


def test_round_trip_into_another_engine(tmp_path: Path) -> None:
    """What a slot held is reused after a restart, and the answers are those of a run from scratch."""
    path, value = saved(tmp_path)
    assert value["n_saved"] == 124
    assert value["n_written"] == path.stat().st_size
    assert (value["id_slot"], value["filename"]) == (1, "slot.bin")
    assert value["timings"]["save_ms"] > 0
    engine = fresh()
    reply = control(engine, "slot_restore", id_slot=0, filename="slot.bin", path=str(path))
    assert reply.ok, reply.message
    assert reply.value["n_restored"] == 124
    assert reply.value["n_read"] == value["n_written"]
    prompt = PROMPT[:100] + [9] * 10
    request = generate(2, prompt, max_tokens=20, id_slot=0)
    answer = ask(engine, request)
    assert answer.started is not None
    assert answer.started.cached == 100
    assert answer.tokens == naive_answer(request, 4096)[0]
    check_idle(engine)


def test_erase(tmp_path: Path) -> None:
    """After an erase the prompt is evaluated whole again (llama-server's own test asserts it)."""
    engine = fresh()
    for id in (1, 2):
        answer = ask(engine, generate(id, PROMPT, max_tokens=1, id_slot=1))
        assert answer.started is not None
        assert answer.started.cached == 0
        reply = control(engine, "slot_erase", id_slot=1)
        assert reply.value == {"id_slot": 1, "n_erased": 120}


def test_busy_slot_waits(tmp_path: Path) -> None:
    """A save of a busy slot is answered when the slot is idle."""
    engine = fresh()
    engine.submit(generate(1, PROMPT, max_tokens=10, id_slot=1))
    engine.step()
    path = tmp_path / "late.bin"
    engine.control(
        Control(id=99, action="slot_save", arguments={"id_slot": 1, "filename": "late.bin", "path": str(path)})
    )
    assert not path.exists()
    kinds = []
    while engine.has_work:
        kinds += [type(message).__name__ for message in engine.step()]
    assert kinds[-2:] == ["Finished", "Reply"] or kinds[-2:] == ["Reply", "Finished"]
    assert path.exists()


@pytest.mark.parametrize("id_slot", [-1, 4, "x", None])
def test_invalid_slot(id_slot: object) -> None:
    """llama-server's words."""
    reply = control(fresh(), "slot_erase", id_slot=id_slot)
    assert (reply.ok, reply.message) == (False, "Invalid slot ID")


def test_unknown_action() -> None:
    """A front newer than the engine gets an answer, not silence."""
    reply = control(fresh(), "dance")
    assert not reply.ok
    assert "dance" in reply.message


def test_refuses_other_models_and_damage(tmp_path: Path) -> None:
    """Another model, another magic, version, a cut at any place, a flipped bit, a context too small: each a reason."""
    path, _ = saved(tmp_path)
    data = path.read_bytes()

    def restore(engine: Engine, content: bytes) -> str:
        path.write_bytes(content)
        reply = control(engine, "slot_restore", id_slot=0, path=str(path), filename="slot.bin")
        check_idle(engine)
        assert not reply.ok
        assert reply.message.startswith("Unable to restore slot: slot.bin: ")
        answer = ask(engine, generate(1, PROMPT, max_tokens=1))
        assert answer.started is not None
        assert answer.started.cached == 0
        engine.scheduler.forget_slot(engine.scheduler.slots[answer.started.slot])
        return reply.message

    assert "another model" in restore(fresh("b"), data)
    assert "do not fit" in restore(fresh(n_ctx=122), data)
    engine = fresh()
    assert "not a slot file" in restore(engine, b"GGUF" + data[4:])
    assert "version 9" in restore(engine, data[:8] + b"\x09" + data[9:])
    for cut in (0, 10, 20, 100, len(data) // 2, len(data) - 2):
        assert "cut off" in restore(engine, data[:cut]) or cut == len(data) - 2
    flipped = bytearray(data)
    flipped[-40] ^= 1
    assert "checksum" in restore(engine, bytes(flipped))
    missing = control(engine, "slot_restore", id_slot=0, path=str(tmp_path / "none"), filename="none")
    assert "No such file" in missing.message


def test_no_room_is_said(tmp_path: Path) -> None:
    """Running requests hold every page: the restore is refused, they are not harmed."""
    path, _ = saved(tmp_path)
    engine = fresh(n_cells=256, n_ctx=256)
    request = generate(1, [5] * 180, max_tokens=40, id_slot=1)
    engine.submit(request)
    for _ in range(5):
        messages = engine.step()
        assert messages is not None
    engine.control(Control(id=99, action="slot_restore", arguments={"id_slot": 0, "path": str(path), "filename": "s"}))
    replies = [message for message in engine.step() if isinstance(message, Reply)]
    assert not replies[0].ok
    assert "room" in replies[0].message
