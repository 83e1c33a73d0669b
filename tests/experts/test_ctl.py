"""`ftgguf ctl cache` against a socket that answers as the server does, with a real store behind it (the interpreter
on a tiny model)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from store_helpers import TINY, CachedExecutor, load_cached, rows  # noqa: E402

from compat.synth import make  # noqa: E402
from ftgguf import cli, ctl  # noqa: E402
from ftgguf.engine import cache_controls  # noqa: E402
from ftgguf.experts import arena  # noqa: E402
from ftgguf.experts.store import CachedStore  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Handler(BaseHTTPRequestHandler):
    executor: CachedExecutor

    def do_GET(self) -> None:
        experts = cache_controls.answer(self.executor, "expert_cache_status", {})
        self._send(200, {"experts": experts, "kv": {"n_cells": 1}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self._send(200, cache_controls.answer(self.executor, "expert_cache_rebuild", body))
        except ValueError as error:
            self._send(400, {"error": {"code": 400, "message": str(error), "type": "invalid_request_error"}})

    def _send(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, CachedStore]]:
    path: Path = make("qwen3moe", tmp_path_factory.mktemp("ctl") / "m.gguf", types="Q8_0", **TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "CHUNK_BYTES", 1)
        Handler.executor = load_cached(path, DEVICE, 12, ring_slots=78)
        Handler.executor.forward(rows([5], 0, [0]))
        http = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield str(http.server_port), Handler.executor.store
        http.shutdown()
        http.server_close()
        Handler.executor.store.close()


def run(server: tuple[str, CachedStore], *args: str) -> int:
    return cli.main(["ctl", "--host", "127.0.0.1", "--port", server[0], "cache", *args])


def test_status(server: tuple[str, CachedStore], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "status") == 0
    text = capsys.readouterr().out
    assert "12 in" in text
    assert "4 experts wanted" in text
    assert "phi" in text
    assert run(server, "status", "--json") == 0
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert experts["experts"]["wanted"] == 4
    for name in ("fill", "cpu", "split", "fallbacks", "prefill", "bank", "costs"):
        assert name in experts
    assert {"bytes", "bytes_per_second"} <= experts["fill"].keys()


def test_resize_and_rebuild(server: tuple[str, CachedStore], capsys: pytest.CaptureFixture[str]) -> None:
    """The ring takes 1 MiB, so with 1 MiB in all nothing is left for slots, and one more holds all 16 experts."""
    store = server[1]
    assert 2 * store.ring.half <= ctl.MIB
    store.device_state.store(store.state)
    assert run(server, "rebuild") == 0
    assert "12 slots" in capsys.readouterr().out
    assert run(server, "resize", "2") == 0
    assert capsys.readouterr().out.startswith("16 slots")
    assert run(server, "resize", "0") == 1
    assert "ring" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["--host", "127.0.0.1:9", "cache", "status"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert (
        ctl.main(["--port", "1", "cache", "status", "--host", "127.0.0.1", "--port", "9"]) == 1
    )  # the later one counts
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert ctl.main(["--host", "127.0.0.1:9", "cache", "rebuild"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ctl.main(["cache", "resize", "much"])
