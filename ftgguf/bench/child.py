"""The parent's end of a worker process: requests with a time limit, and what to say when it dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from ftgguf.cli import OPENMP_SPINS

started_groups: set[int] = set()
"""Process groups that this command started and has not ended."""


def end_group(pid: int) -> None:
    """SIGKILL for a process group. Safe to call twice."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    started_groups.discard(pid)


def end_leftovers() -> None:
    """End what an interrupt in the middle of an orderly end, or of a start, has left running."""
    for pid in list(started_groups):
        end_group(pid)


class ChildError(RuntimeError):
    """The worker failed, died or hung; the text says which."""


class Tail:
    """Reads a pipe to its end and keeps the last lines."""

    def __init__(self, pipe: IO[bytes], keep: int = 12) -> None:
        self._keep = keep
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._lines = [*self._lines[-self._keep + 1 :], line.decode(errors="replace").rstrip()]

    def text(self) -> str:
        """The last lines, once the pipe is closed or after two seconds."""
        self._thread.join(timeout=2)
        return " | ".join(line for line in self._lines if line)


def peer_environment() -> dict[str, str]:
    """The environment for a peer: without the OpenMP setting that our own command line made (`cli._calm_openmp`)."""
    env = dict(os.environ)
    if env.get("GOMP_SPINCOUNT") == OPENMP_SPINS:
        del env["GOMP_SPINCOUNT"]
    return env


def heard(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A peer's program in a process group of its own (`end_group` ends it), what it says in one pipe. Raises OSError
    where it cannot be run."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=peer_environment(),
    )
    started_groups.add(process.pid)
    return process


def openmp_note(*, ours: bool) -> str:
    """How this side's OpenMP threads wait at barriers: it decides speeds on a machine that is not quiet."""
    env = os.environ if ours else peer_environment()
    found = [f"{name}={env[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in env]
    return "OpenMP waiting: " + (" ".join(found) or "its default")


class Child:
    """`python -m ftgguf.bench.worker` in a process group of its own. `ours`: with our own OpenMP setting."""

    def __init__(self, timeout: float, *, ours: bool = True) -> None:
        self._timeout = timeout
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ftgguf.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if ours else peer_environment(),
            # not in the terminal's group: Ctrl-C is the parent's to handle, which keeps what was measured
            start_new_session=True,
        )
        started_groups.add(self._process.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._tail = Tail(self._process.stderr)
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._lines.put(line)
        self._lines.put(None)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The worker's answer. Raises ChildError; after a death or a hang the child is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            self.end()
            raise ChildError(f"no answer to '{do}' within {self._timeout:.0f} s: killed") from None
        except OSError:
            line = None
        if line is None:
            raise ChildError(self._epitaph(do))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def _epitaph(self, do: str) -> str:
        code = self._process.wait()
        said = self._tail.text()
        how = exit_reason(code)
        return f"it {how} during '{do}'" + (f": {said[-400:]}" if said else "")

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Kill it. Safe to call twice."""
        end_group(self._process.pid)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def exit_reason(code: int) -> str:
    """A process's exit code in words; a kill by the kernel's out-of-memory killer is the likeliest SIGKILL."""
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
