"""How text that a stranger wrote is quoted inside a one-line message."""

from __future__ import annotations

_SHOWN = 80
"""Characters of an untrusted name that an error message quotes."""


def shown(text: bytes | str) -> str:
    """Quote untrusted text for a one-line message: control characters escaped, long text cut after 80 characters."""
    if isinstance(text, bytes):
        text = text[: 4 * _SHOWN].decode("utf-8", "backslashreplace")
    cut = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut) + "'"
