"""What a download does to the disk: hashing, writing at an offset, flushing, and knowing when there is no room."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftgguf.pull.digest import Digest, GitOid
from ftgguf.pull.errors import BadAnswer, NoSpace, PullError
from ftgguf.pull.sizes import human

SPACE_MARGIN = 64 << 20
"""Bytes that stay free on the disk."""


class Hasher:
    """sha256, and git's SHA-1 where the source names the content by it."""

    def __init__(self, check: Digest | GitOid | None, size: int | None, label: str) -> None:
        self._sha256 = hashlib.sha256()
        self._git: Any = None
        self._size = 0
        if isinstance(check, GitOid):
            if size is None:
                raise BadAnswer(f"{label}: the source does not say its size")
            self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        self._size += len(data)

    def result(self) -> tuple[Digest, str, int]:
        return Digest(self._sha256.hexdigest()), self._git.hexdigest() if self._git else "", self._size


def flush(handle: int) -> None:
    """Start on the file's dirty pages; a failure shows again, and is reported, at the fsync in the end."""
    with suppress(OSError):
        os.fdatasync(handle)


def write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    """All of `data` at offset `at`. OSError when the disk is full."""
    view = memoryview(data)
    while view:
        n = os.pwrite(handle, view, at)
        view, at = view[n:], at + n


def disk_error(error: OSError, label: str) -> PullError:
    """A failed write, in words without a path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"{label}: the disk is full; what came is kept: free some space and pull again, or use --store DIR"
        )
    return PullError(f"{label}: cannot write to the model store: {error.strerror or error}; --store DIR names another")


def check_space(folder: Path, needed: int, label: str) -> None:
    """Raise NoSpace unless `needed` bytes and a margin are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPACE_MARGIN:
        left = human(max(0, free - SPACE_MARGIN))
        raise NoSpace(
            f"{label}: {human(needed)} to write and only {left} free beside a reserve of {human(SPACE_MARGIN)}: free "
            "some space, or use --store DIR on another disk"
        )
