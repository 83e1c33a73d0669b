"""The names of workloads in words, for readers who do not know llama-bench's."""

from __future__ import annotations

import re
from collections.abc import Callable

_FORMS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"pp(\d+)(?: @ d(\d+))?", lambda m: f"reading a prompt of {m[1]} tokens" + _after(m[2])),
    (r"tg(\d+)(?: @ d(\d+))?", lambda m: f"writing {m[1]} tokens" + _after(m[2])),
    (r"tg(\d+)(?: @ d(\d+))?, (first \d+|the rest)", lambda m: f"{m[3]} of {m[1]} written tokens" + _after(m[2])),
    (r"pp(\d+)\+tg(\d+)(?: @ d(\d+))?", lambda m: f"reading {m[1]} tokens, then writing {m[2]}" + _after(m[3])),
    (r"\+(\d+) on (\d+)", lambda m: f"{m[1]} new token{'s' * (m[1] != '1')} on a cached context of {m[2]}"),
    (r"(\d+) x tg(\d+)", lambda m: f"{m[1]} request{'s' * (m[1] != '1')} at once, {m[2]} tokens each"),
    (r"turns: first", lambda m: "the first turn of a session"),
    (r"turns: append", lambda m: "a turn that continues the one before"),
    (r"turns: edited", lambda m: "a turn whose history was changed"),
    (r"turns: side", lambda m: "a side request in the middle of a session"),
    (r"turns: repeat", lambda m: "a turn sent again"),
    (r"turns: decode", lambda m: "writing the answers"),
    (r"requests", lambda m: "all requests of the client"),
)


def _after(depth: str | None) -> str:
    return f" after {depth} tokens of context" if depth else ""


def in_words(workload: str) -> str:
    """What a row of that name measures; empty where the name says it."""
    for form, say in _FORMS:
        found = re.fullmatch(form, workload)
        if found is not None:
            return say(found)
    return ""
