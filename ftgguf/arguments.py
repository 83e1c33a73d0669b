"""How do our command lines read their arguments? argparse, with one line and status 1 for what is wrong."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

BAD_USAGE = 1
"""Exit status, as everywhere in ftgguf; argparse's own 2 means to `ftgguf bench` that the outputs differ."""


class BadValue(argparse.ArgumentTypeError, ValueError):
    """An argument's text is not what it must be; argparse shows the text of this as it is."""


def whole(text: str) -> int:
    """`text` as a whole number. Raises BadValue."""
    try:
        return int(text)
    except ValueError:
        raise BadValue(f"expected a whole number, got '{text}'") from None


def number(text: str) -> float:
    """`text` as a finite number. Raises BadValue."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadValue(f"expected a number, got '{text}'")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from `least` on, which raises BadValue."""

    def read(text: str) -> int:
        value = whole(text)
        if value < least:
            raise BadValue(f"{text} is less than {least}")
        return value

    return read


def seconds(text: str) -> float:
    """`text` as a time above 0 and below 1e6 s. Raises BadValue."""
    value = number(text)
    if not 0 < value < 1e6:
        raise BadValue(f"{text} is no number of seconds above 0")
    return value


class Parser(argparse.ArgumentParser):
    """argparse's, whose `error` is one line and ends with BAD_USAGE, and whose `int` and `float` say what they expect.
    Subcommands get the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, whole)
        self.register("type", float, number)

    def error(self, message: str) -> NoReturn:
        """Print `message` on stderr and exit."""
        self.exit(BAD_USAGE, f"{self.prog}: {message} (see `{self.prog} --help`)\n")
