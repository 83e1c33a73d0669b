"""Figures and the names of workloads in words, for readers who do not know llama-bench's."""

from __future__ import annotations

import re
from collections.abc import Callable

from ftgguf.bench.stats import Ratio

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


def value_in_words(x: float) -> str:
    """A speed or a time with three or four figures."""
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"


def interval_in_words(low: float, high: float) -> str:
    """`[1.25, 1.29]`. An end must not look like 1 where it decides on which side of 1 all lies."""
    low_end, high_end = (f"{x:.3f}" if f"{x:.2f}" == "1.00" and x != 1 else f"{x:.2f}" for x in (low, high))
    return f"[{low_end}, {high_end}]"


def ratio_in_words(ratio: Ratio) -> str:
    """`1.27 [1.25, 1.29] better`; no verdict where the interval holds 1, and why where samples are too few."""
    if ratio.verdict == "too few":
        return f"{ratio.value:.2f} (too few {ratio.unit})"
    text = f"{ratio.value:.2f} {interval_in_words(ratio.low, ratio.high)}"
    return text if ratio.verdict == "even" else f"{text} {ratio.verdict}"
