"""The engine as a process: `python -m ftgguf.engine --fd N`, spoken to over its socket as the front does."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftgguf.engine import messages as m
from ftgguf.flags import encode_config, parse_server

GGUF = Path(__file__).parents[1] / "data" / "stories260K.gguf"
ROOT = Path(__file__).parents[2]


class Process:
    """An engine process and its socket."""

    def __init__(self, first: list[str] | bytes) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(60)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftgguf.engine", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self.send_raw(first if isinstance(first, bytes) else encode_config(parse_server(first, {})))

    def send_raw(self, payload: bytes) -> None:
        self.sock.sendall(struct.pack("<I", len(payload)) + payload)

    def send(self, message: Any) -> None:
        self.send_raw(m.encode(message))

    def receive(self) -> Any:
        """The next message; None at the end of the connection."""
        head = self._exactly(4)
        return None if head is None else m.decode_to_front(self._exactly(struct.unpack("<I", head)[0]) or b"")

    def _exactly(self, n: int) -> bytes | None:
        data = b""
        while len(data) < n:
            got = self.sock.recv(n - len(data))
            if not got:
                return None
            data += got
        return data

    def until(self, kind: type) -> Any:
        while True:
            message = self.receive()
            assert message is not None, "the engine went away"
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self.sock.close()
        if self.process.poll() is None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def engine_process(first: list[str] | bytes) -> Iterator[Process]:
    """`first`: command-line arguments, or the bytes of another first frame."""
    process = Process(first)
    try:
        yield process
    finally:
        process.close()


def script_file(tmp_path: Path, **fields: Any) -> str:
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"vocab": str(GGUF), "scripts": [{"text": "Once upon a time"}]} | fields))
    return f"scripted:{file}"


def test_life_of_a_request(tmp_path: Path) -> None:
    """Loading, Ready, one answer, a control, shutdown; exit code 0."""
    with engine_process(["-m", script_file(tmp_path), "-c", "1024", "-np", "2"]) as engine:
        assert isinstance(engine.receive(), m.Loading)
        ready = engine.until(m.Ready)
        assert (ready.n_ctx, ready.n_slots, ready.info["path"]) == (512, 2, str(GGUF))  # an equal share each
        engine.send(m.Generate(id=1, prompt=(1, 400, 401)))
        assert isinstance(engine.receive(), m.Started)
        text = ""
        while not isinstance(message := engine.receive(), m.Finished):
            text += message.text
        assert text.strip() == "Once upon a time"
        assert message.stop_type == "eos"
        engine.send(m.Control(id=2, action="slots"))
        assert [slot["is_processing"] for slot in engine.until(m.Reply).value] == [False, False]
        engine.send(m.Control(id=3, action="shutdown"))
        assert engine.until(m.Reply).id == 3
        assert engine.receive() is None
        assert engine.process.wait(10) == 0


def test_ends_when_the_socket_closes_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """A front that dies takes the engine with it, whether it was busy or idle."""
    model = script_file(tmp_path, scripts=[{"text": "la la la", "loop": True}], delay_ms=5)
    for busy in (True, False):
        with engine_process(["-m", model]) as engine:
            engine.until(m.Ready)
            if busy:
                engine.send(m.Generate(id=1, prompt=(1, 400)))
                engine.until(m.Delta)
            engine.sock.close()
            assert engine.process.wait(10) == 0


def test_cancel_over_the_socket(tmp_path: Path) -> None:
    """A cancelled answer stops within a step; the next request is served at once on the only slot."""
    model = script_file(tmp_path, scripts=[{"text": "la la la", "loop": True}], delay_ms=2)
    with engine_process(["-m", model, "-np", "1"]) as engine:
        engine.until(m.Ready)
        engine.send(m.Generate(id=1, prompt=(1, 400)))
        engine.send(m.Generate(id=2, prompt=(1, 400), max_tokens=3))
        engine.until(m.Delta)
        engine.send(m.Cancel(id=1))
        finished = engine.until(m.Finished)
        assert (finished.id, finished.predicted_n) == (2, 3)


def test_a_front_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    """Deltas pile up in the engine, not in its step: 3,000 steps are done while nothing is read, then all arrives."""
    model = script_file(tmp_path, scripts=[{"text": "la la la", "loop": True}])
    with engine_process(["-m", model, "-c", "8192"]) as engine:
        engine.until(m.Ready)
        engine.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        engine.send(m.Generate(id=1, prompt=(1, 400), max_tokens=3000))
        engine.send(m.Control(id=2, action="metrics"))
        time.sleep(2)
        tokens = 0
        while not isinstance(message := engine.receive(), m.Finished):
            tokens += len(message.tokens) if isinstance(message, m.Delta) else 0
        assert tokens == message.predicted_n == 3000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-m", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["-m", "scripted:/nowhere.json"], "nowhere.json"),
    ],
)
def test_cannot_start(argv: list[str], words: str) -> None:
    """One Fatal with cause, exit code 1."""
    with engine_process(argv) as engine:
        fatal = engine.until(m.Fatal)
        assert words in fatal.message
        assert "Traceback" not in fatal.message
        assert engine.process.wait(10) == 1


def test_malformed_frames_end_it(tmp_path: Path) -> None:
    """Garbage for a message is a broken front: the process ends, it does not hang."""
    with engine_process(["-m", script_file(tmp_path)]) as engine:
        engine.until(m.Ready)
        engine.send_raw(b"\xc1garbage")
        assert engine.process.wait(10) == 0
    with engine_process(b"\x93\x01\x02\x03") as engine:
        assert engine.process.wait(10) == 0


def test_signals(tmp_path: Path) -> None:
    """Ctrl-C is the front's business; SIGTERM ends the engine."""
    with engine_process(["-m", script_file(tmp_path)]) as engine:
        engine.until(m.Ready)
        engine.process.send_signal(signal.SIGINT)
        engine.send(m.Control(id=1, action="slots"))
        assert engine.until(m.Reply).ok
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0


def test_no_torch(tmp_path: Path) -> None:
    """The CPU path imports neither torch nor triton (0.2 GB and 1.6 s)."""
    code = "import sys, ftgguf.engine.__main__, ftgguf.engine.load; print({'torch', 'triton'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "set()", done.stderr


def test_real_model() -> None:
    """The stories model through the process: the same greedy text twice, the second time from the cache."""
    with engine_process(["-m", str(GGUF), "-c", "512", "-t", "1"]) as engine:
        engine.until(m.Ready)
        texts = []
        for id in (1, 2):
            sampling = m.SamplingParams(temperature=0.0, seed=1)
            engine.send(
                m.Generate(id=id, prompt=(1, 403, 407, 261, 378), max_tokens=30, sampling=sampling, stream=False)
            )
            started = engine.until(m.Started)
            assert started.cached == (0 if id == 1 else 4)
            texts.append(engine.until(m.Delta).text)
            assert engine.until(m.Finished).predicted_n == 30
        assert texts[0] == texts[1] != ""
