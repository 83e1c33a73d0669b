"""A front on a scripted engine, in this process's event loop, reached over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
import uvicorn

from ftgguf.chat.template import load_templates
from ftgguf.flags.config import ServerConfig
from ftgguf.server.app import build_app
from ftgguf.server.engine_client import EngineClient
from ftgguf.server.state import ServerState

FAKE = Path(__file__).with_name("fake_engine.py")
CONTROL = {"<s>": 1, "</s>": 2}


class FakeVocab:
    """Bytes as tokens: id = byte + 3; 1 is BOS, 2 is EOS."""

    n_vocab = 259
    eog_ids = frozenset((2,))
    control_texts: ClassVar[dict[bytes, int]] = {b"<s>": 1, b"</s>": 2}

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        ids = [1] if add_special else []
        parts = re.split("(<s>|</s>)", text) if parse_special else [text]
        for part in parts:
            ids += [CONTROL[part]] if parse_special and part in CONTROL else [byte + 3 for byte in part.encode()]
        return ids

    def piece(self, token: int, special: bool = False) -> bytes:
        if token < 3:
            return {1: b"<s>", 2: b"</s>"}.get(token, b"") if special else b""
        return bytes([token - 3])

    def detokenize(self, ids: Any, special: bool = True) -> bytes:
        return b"".join(self.piece(id, special) for id in ids)

    def render(self, ids: Any, remove_special: bool = False, special: bool = True) -> bytes:
        return self.detokenize(ids, special)


class Front:
    """A running front: `url`, a client, and the state for white-box looks."""

    def __init__(self, config: ServerConfig, start: dict[str, Any], template: str) -> None:
        self.config = config
        self.start = start
        self.template = template
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        if not self.ready.wait(20) or self.error:
            raise RuntimeError(f"the front did not start: {self.error}")
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
            self.ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        frame = msgspec.msgpack.encode({"start": self.start})
        engine = EngineClient(frame, command=[sys.executable, str(FAKE)])
        templates = load_templates(self.template, bos_token="<s>", eos_token="</s>", add_bos=True)
        self.state = ServerState(self.config, FakeVocab(), engine, templates)
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(self.state), host="127.0.0.1", port=0, log_level="warning", server_header=False,
                date_header=False, lifespan="off",
            )
        )  # fmt: skip
        self.server = server
        await engine.start()
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        if not self.start.get("no_wait"):
            await engine.wait_ready()
        self.ready.set()
        await task
        await engine.stop()
        self.state.close()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.http.post(path, json=body, headers=headers)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of a stream's events; `[DONE]` stays a string."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream"
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def control(self, action: str) -> Any:
        return asyncio.run_coroutine_threadsafe(self.state.engine.control(action), self.loop).result(10)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(15)


def script(**fields: Any) -> str:
    """A prompt that tells the fake engine what to do."""
    return "[[" + json.dumps(fields) + "]]"


@contextmanager
def front(template: str = "chatml", start: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Iterator[Front]:
    """`front(http={"api_keys": ("k",)})`: a front with these configuration fields."""
    config = ServerConfig()
    for name, fields in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    config = replace(config, model=replace(config.model, path=config.model.path or "/models/fake.gguf"))
    running = Front(config, start or {}, template)
    try:
        yield running
    finally:
        running.stop()
