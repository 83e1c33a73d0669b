"""The app behind real sockets: 127.0.0.1 and, as the other host of redirects, 127.0.0.2, on one port."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ftgguf.pull.client import NetOptions

from .app import FakeSource

FAST = NetOptions(segment=1 << 16, stall=0.4, backoff=0.005, connections=4)
"""For clients in tests: small segments and short pauses, so that a fault shows itself within a fraction of a second."""


@dataclass
class Running:
    """A server that runs: `host` is `127.0.0.1:port`, `other` the same server under another address."""

    source: FakeSource
    host: str
    other: str
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"


@contextmanager
def running(source: FakeSource | None = None, port: int = 0, tls: tuple[Path, Path] | None = None) -> Iterator[Running]:
    """Serve `source` (a new one by default) from a thread until the block ends; `tls`: files of key and certificate."""
    source = source or FakeSource()
    first = socket.create_server(("127.0.0.1", port), backlog=256)
    port = first.getsockname()[1]
    second = socket.create_server(("127.0.0.2", port), backlog=256)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # bodies cut on purpose are no news
    key, certificate = tls or (None, None)
    config = uvicorn.Config(
        source,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=0,
        http="h11",
        ssl_keyfile=key,
        ssl_certfile=certificate,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [first, second]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the fake registry did not start")
            time.sleep(0.01)
        scheme = "https" if tls else "http"
        source.cdn_base = f"{scheme}://127.0.0.2:{port}"
        yield Running(source, f"127.0.0.1:{port}", f"127.0.0.2:{port}", scheme)
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        first.close()
        second.close()
