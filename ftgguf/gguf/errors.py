"""The one exception of the GGUF reader."""

from __future__ import annotations

import os
from pathlib import Path

from ftgguf.quoting import shown

__all__ = ["GGUFError", "shown"]


class GGUFError(ValueError):
    """A file that cannot be used. `str()` is one line: file, byte offset (where there is one), fault and cure.

    `offset` is absolute in `path`, in bytes; None where no single place is at fault.
    """

    def __init__(self, path: str | Path, offset: int | None, message: str) -> None:
        super().__init__(path, offset, message)
        self.path = Path(path)
        self.offset = offset
        self.message = message

    def __str__(self) -> str:
        name = os.fsencode(self.path).decode("utf-8", "backslashreplace")
        name = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
        place = "" if self.offset is None else f"at byte {self.offset}: "
        return f"{name}: {place}{self.message}"
