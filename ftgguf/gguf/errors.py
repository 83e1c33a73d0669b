"""The one exception of the GGUF reader, and how untrusted text is shown inside it."""

from __future__ import annotations

import os
from pathlib import Path

_SHOWN = 80
"""Characters of an untrusted name that an error message quotes."""


def shown(text: bytes | str) -> str:
    """Quote untrusted text for a one-line message: control characters escaped, long text cut after 80 characters."""
    if isinstance(text, bytes):
        text = text[: 4 * _SHOWN].decode("utf-8", "backslashreplace")
    cut = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut) + "'"


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
