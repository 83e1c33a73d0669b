"""How flag values are read: llama.cpp's syntax and checks, failing with its words.

Every reader has the type `Parser`: it raises ValueError with the words to print. Where llama.cpp's `std::stoi` reads
the digits at the front and drops the rest without a word (`8k` becomes 8), so do we, but we say so.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ftgguf.flags.row import Parser, Warn

INT32 = (-(2**31), 2**31 - 1)
MAX_FILE = 16 << 20
"""Bytes of a grammar, schema or template file; nothing sensible is larger."""
TRUE_WORDS = ("on", "enabled", "true", "1")
FALSE_WORDS = ("off", "disabled", "false", "0")
AUTO_WORDS = ("auto", "-1")

_INT = re.compile(r"\s*([+-]?\d+)")
_REAL = re.compile(r"\s*([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf(?:inity)?|nan))", re.IGNORECASE)


def _front(pattern: re.Pattern[str], text: str, function: str, warn: Warn) -> str:
    match = pattern.match(text)
    if match is None:
        raise ValueError(f"{function}: '{text}' is not a number")
    if text[match.end() :].strip():
        warn(f"'{text}' is read as {match[1]}: llama.cpp ignores what follows a number")
    return match[1]


def stoi(text: str, warn: Warn) -> int:
    """A 32-bit integer, as `std::stoi` reads one."""
    number = int(_front(_INT, text, "stoi", warn))
    if not INT32[0] <= number <= INT32[1]:
        raise ValueError(f"stoi: '{text}' is out of range ({INT32[0]} to {INT32[1]})")
    return number


def stof(text: str, warn: Warn) -> float:
    """A number, as `std::stof` reads one; not a NaN, which no setting can mean."""
    number = float(_front(_REAL, text, "stof", warn))
    if math.isnan(number):
        raise ValueError(f"stof: '{text}' is not a number")
    return number


def whole(low: int | None = None, high: int | None = None, words: str = "invalid value") -> Parser:
    """Integers in [low, high]; `words` is what llama.cpp says outside, `{}` in it the value."""

    def parse(text: str, warn: Warn) -> int:
        number = stoi(text, warn)
        if (low is not None and number < low) or (high is not None and number > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(
                f"{words.format(number)} (must be {limits})" if words == "invalid value" else words.format(number)
            )
        return number

    return parse


def real(low: float | None = None, words: str = "invalid value", finite: bool = False, above: bool = False) -> Parser:
    """Numbers at or above `low` (`above`: strictly), finite if asked."""

    def parse(text: str, warn: Warn) -> float:
        number = stof(text, warn)
        if finite and not math.isfinite(number):
            raise ValueError(words)
        if low is not None and (number < low or (above and number == low)):
            raise ValueError(words)
        return number

    return parse


def text(value: str, warn: Warn) -> str:
    """Any text."""
    return value


def seed(value: str, warn: Warn) -> int:
    """`std::stoul` cut to 32 bits: -1 is 4294967295, "draw one"."""
    number = int(_front(_INT, value, "stoul", warn))
    if not -(2**63) < number < 2**64:
        raise ValueError(f"stoul: '{value}' is out of range")
    return number & 0xFFFFFFFF


def choice(*allowed: str, words: str = "invalid value") -> Parser:
    """One of `allowed`; `{}` in `words` is the value."""

    def parse(value: str, warn: Warn) -> str:
        if value not in allowed:
            raise ValueError(f"{words.format(value)} (allowed: {', '.join(allowed)})")
        return value

    return parse


def truth(value: str, warn: Warn | None = None) -> bool:
    """llama.cpp's boolean words."""
    if value in TRUE_WORDS:
        return True
    if value in FALSE_WORDS:
        return False
    raise ValueError(f"invalid boolean value (use {', '.join(TRUE_WORDS)} or {', '.join(FALSE_WORDS)})")


def on_off(flag: str) -> Parser:
    """on | off, with their synonyms."""

    def parse(value: str, warn: Warn) -> bool:
        if value not in TRUE_WORDS + FALSE_WORDS:
            raise ValueError(f"error: unknown value for {flag}: '{value}' (use on or off)")
        return value in TRUE_WORDS

    return parse


def on_off_auto(flag: str) -> Parser:
    """on | off | auto, with their synonyms; gives those three words."""

    def parse(value: str, warn: Warn) -> str:
        for words, meaning in ((TRUE_WORDS, "on"), (FALSE_WORDS, "off"), (AUTO_WORDS, "auto")):
            if value in words:
                return meaning
        raise ValueError(f"error: unknown value for {flag}: '{value}' (use on, off or auto)")

    return parse


def csv_row(value: str) -> list[str]:
    """Comma-separated fields; a field may be in double quotes, with "" for a quote (llama.cpp's `parse_csv_row`)."""
    fields, current, quoted, i = [], "", False, 0
    while i < len(value):
        char = value[i]
        if char == '"':
            if not quoted:
                quoted = not current
                current += '"' if current else ""
            elif value[i + 1 : i + 2] == '"':
                current, i = current + '"', i + 1
            else:
                quoted = False
        elif char == "," and not quoted:
            fields.append(current)
            current = ""
        else:
            current += char
        i += 1
    return [*fields, current]


def names(value: str, warn: Warn) -> tuple[str, ...]:
    """A comma list, stripped, without empty items."""
    return tuple(item for part in value.split(",") if (item := part.strip()))


def csv(value: str, warn: Warn) -> tuple[str, ...]:
    """A comma list with quoting, without empty items."""
    return tuple(item for item in csv_row(value) if item)


def hosts(value: str, warn: Warn) -> tuple[str, ...]:
    """Addresses to listen on; the brackets of `[::1]` are dropped."""
    found = tuple(item.removeprefix("[").removesuffix("]") for part in csv_row(value) if (item := part.strip()))
    if not found:
        raise ValueError("--host requires at least one address")
    return found


def read_bytes(path: str) -> bytes:
    """The file's bytes; ValueError with llama.cpp's words when it cannot be read or is larger than MAX_FILE."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ValueError(f"error: failed to open file '{path}' ({error.strerror or error})") from None
    except ValueError as error:  # a NUL in the path
        raise ValueError(f"error: failed to open file '{path}' ({error})") from None
    if len(data) > MAX_FILE:
        raise ValueError(f"error: file '{path}' is larger than {MAX_FILE >> 20} MiB")
    return data


def file_text(path: str, warn: Warn) -> str:
    """The text of a UTF-8 file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"error: file '{path}' is not UTF-8 text (byte {error.start})") from None


def key_file(path: str, warn: Warn) -> tuple[str, ...]:
    """API keys, one a line; lines that start with # are comments."""
    lines = [line.rstrip("\r") for line in file_text(path, warn).split("\n")]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        warn(f"'{path}' holds no API key: the server stays open")
    return keys


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def load_json(source: str, what: str) -> Any:
    """Parsed JSON; ValueError naming the place of the fault."""
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"parse error: {what} is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise ValueError(f"parse error: {what} is nested too deeply") from None


def json_object(value: str, warn: Warn) -> dict[str, Any]:
    """A JSON object."""
    parsed = load_json(value, "the value")
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a JSON object, got {type(parsed).__name__}")
    return parsed


def json_object_file(path: str, warn: Warn) -> dict[str, Any]:
    """A JSON object in a file."""
    parsed = load_json(file_text(path, warn), f"file '{path}'")
    if not isinstance(parsed, dict):
        raise ValueError(f"expected a JSON object in '{path}', got {type(parsed).__name__}")
    return parsed


def directory(value: str, warn: Warn) -> str:
    """An existing folder, with a trailing separator."""
    if not Path(value).is_dir():
        raise ValueError(f"not a directory: {value}")
    return value if value.endswith("/") else value + "/"


def existing_dir(value: str, warn: Warn) -> str:
    """An existing folder."""
    if not Path(value).is_dir():
        raise ValueError(f"error: '{value}' does not exist or is not a directory")
    return value


def existing_file(value: str, warn: Warn) -> str:
    """A file that can be opened."""
    read_bytes(value)
    return value


_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def duration(value: str, warn: Warn) -> float:
    """Seconds, or a number with ms, s, m, h, d."""
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"invalid duration '{value}' (seconds, or a number with ms, s, m, h or d)")
    return float(match[1]) * _UNIT[match[2]]
