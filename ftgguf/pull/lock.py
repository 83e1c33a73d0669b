"""One download when several ask: an exclusive lock on a file, between threads and between processes.

`flock` belongs to the open file, so two threads of one process that open it exclude each other too, and the system
releases it when a process dies.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def hold(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `path` (made if missing, removed afterwards). `waiting` is called every 0.1 s while another has it
    and may raise to give up."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            while not _try_lock(handle):
                if waiting is not None:
                    waiting()
                time.sleep(0.1)
            if _same_file(handle, path):  # else the last holder removed it: lock the new one
                break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
