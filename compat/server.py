"""Our own server as a process, started like any user starts it: `our_server(model, flags)` next to `peer_server`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


class ServerError(RuntimeError):
    """The server did not start; the message ends with what it printed."""


@contextmanager
def our_server(
    model: str | os.PathLike[str] | None,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Iterator[str]:
    """Run `ftgguf serve -m model` with llama-server flags `args` on a free port; yields its first address.

    Without a model it is a router: requests name what is to be loaded.

    Raises:
        ServerError: it ended before it was ready, or was not ready within `timeout_s` seconds.
    """
    command = [sys.executable, "-m", "ftgguf", "serve", *([] if model is None else ["-m", os.fspath(model)])]
    if "--port" not in args:
        command += ["--port", "0"]
    process = subprocess.Popen(
        [*command, *args],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Talk to it"):
                break
        else:
            raise ServerError(f"the server ended with code {process.wait()} before it was ready: {''.join(lines)}")
        timer.cancel()
        # The pipe must not fill up: whatever the server prints later is read and dropped.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        found = re.search(r"address +(\S+)", "".join(lines))
        assert found is not None, lines
        yield found.group(1)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
