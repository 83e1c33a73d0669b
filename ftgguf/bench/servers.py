"""A server as a child process: started, waited for, watched for memory, ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from ftgguf.bench.child import end_group, exit_reason, started_groups
from ftgguf.bench.client import RequestFailed
from ftgguf.bench.host import smi

POLL_S = 0.25
"""Between two looks at a server's memory."""


class ServerError(RuntimeError):
    """The server did not come up, or died."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Server:
    """`command` plus `--host 127.0.0.1 --port N`, in a session of its own; its output goes to `log`.

    Raises ServerError from `__enter__` if it ends or does not answer 200 at /health within `timeout` seconds.
    """

    def __init__(self, command: list[str], log: Path, timeout: float, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self.log = log
        self._timeout = timeout
        self._env = env
        self.load_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self.memory: MemoryWatch | None = None

    def __enter__(self) -> Self:
        started = time.perf_counter()
        before = device_memory_used()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._env,
            )
        started_groups.add(self._process.pid)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        self.load_seconds = time.perf_counter() - started
        self.memory = MemoryWatch(self._process.pid, before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _wait(self) -> None:
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise ServerError(f"no answer at /health within {self._timeout:.0f} s: {self.tail()}")

    def check(self) -> None:
        """Raises ServerError if the process is gone."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"the server {exit_reason(code)}: {self.tail()}")

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Turns the failure of a request into how the process ended, if that is why."""
        try:
            yield
        except RequestFailed:
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self.check()
            raise

    def tail(self, keep: int = 6) -> str:
        """The last lines of its output."""
        lines = self.text().splitlines()
        return " | ".join(line.strip() for line in lines[-keep:] if line.strip())[-500:]

    def text(self) -> str:
        """All its output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def stop(self) -> None:
        """SIGTERM, after ten seconds SIGKILL, for the whole group. Safe to call twice."""
        if self._process is None:
            return
        try:
            if self.memory is not None:
                self.memory.stop()
            for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
                    break
        finally:  # children that outlived their parent, and all of them when a second interrupt ends the waiting
            end_group(self._process.pid)


def device_memory_used() -> int:
    """Bytes in use on all GPUs, by anybody; 0 without one."""
    return sum(int(mib) << 20 for mib in re.findall(r"^(\d+)$", smi("--query-gpu=memory.used"), re.MULTILINE))


class MemoryWatch:
    """Resident set of a process and its descendants, sampled; GPU memory of the same, asked of nvidia-smi. Bytes.

    In a container nvidia-smi may not know the processes: then what the devices hold beyond `used_before` counts.
    """

    def __init__(self, pid: int, used_before: int = 0) -> None:
        self._pid = pid
        self._used_before = used_before
        self.steady = self.peak = self.vram_peak = 0
        self.by_device = False
        """VRAM is that of the devices, since nvidia-smi names none of the processes."""
        self._gpu = shutil.which("nvidia-smi") is not None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        rounds = 0
        while True:
            self.look(gpu=rounds % 4 == 0)
            rounds += 1
            if self._end.wait(POLL_S):
                return

    def look(self, *, gpu: bool = True) -> None:
        """Take one sample."""
        try:
            parent = psutil.Process(self._pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.Error:
            return
        now = 0
        for process in family:
            with contextlib.suppress(psutil.Error):
                now += process.memory_info().rss
        if now:
            self.steady, self.peak = now, max(self.peak, now)
        if gpu and self._gpu:
            self.vram_peak = max(self.vram_peak, self._vram({p.pid for p in family}))

    def _vram(self, pids: set[int]) -> int:
        found = re.findall(r"^(\d+), *(\d+)", smi("--query-compute-apps=pid,used_memory"), re.MULTILINE)
        own = sum(int(mib) << 20 for pid, mib in found if int(pid) in pids)
        if own:
            return own
        grown = max(0, device_memory_used() - self._used_before)
        self.by_device = self.by_device or grown > 0
        return grown

    def stop(self) -> None:
        """A last sample, then no more."""
        if not self._end.is_set():
            self.look()
            self._end.set()
            self._thread.join(timeout=15)


def ours_command(flags: list[str]) -> list[str]:
    """Our server with llama-server's `flags`."""
    return [sys.executable, "-m", "ftgguf", "serve", *flags]


def xllamacpp_command(flags: list[str]) -> list[str]:
    """xllamacpp's server, behind llama-server's command line."""
    return [sys.executable, "-m", "ftgguf.bench.xllamacpp_server", *flags]
