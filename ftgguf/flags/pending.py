"""Flags whose effect is not built yet: accepted, and said so once. Take a row out when its effect works.

The tier in the table is what the flag will be; this list keeps the promise honest until then.
"""

from __future__ import annotations

_SPECULATION = "speculation is not built yet; the text is the same, without the speed-up"

PENDING: dict[str, str] = {
    "--spec-type": _SPECULATION,
    "--spec-default": _SPECULATION,
}
"""Canonical spelling (`Flag.name`) -> what happens until it is built."""
