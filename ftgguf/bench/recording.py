"""Recording real sessions for `ftgguf bench trace`: one JSON line a request, secrets masked.

The front opens a `Recorder` for `--record FILE` and, for each chat or completion request, calls `begin` when the body
is parsed and `Entry.end` when the answer is complete. Text stays: prompts are what a trace is for. What looks like a
secret does not, nor do headers, images and audio.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MASK = "[masked]"

_PATTERNS = tuple(
    re.compile(p)
    for p in (
        r"\b(?:sk|pk|rk|hf|ghp|gho|ghu|ghs|glpat|xox[abprs]|AKIA|ASIA|AIza)[-_]?[A-Za-z0-9_\-]{16,}",
        r"\bgithub_pat_[A-Za-z0-9_]{20,}",
        r"\bey[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{5,}",  # a JSON web token
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"(?i)\b(?:bearer|basic)\s+[A-Za-z0-9+/=_\-.]{16,}",
        r"(?i)(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",  # user:password in a URL
    )
)
_ASSIGNMENT = re.compile(
    r"""(?ix) ( \b [\w.-]* (?:password|passwd|secret|token|api[_-]?key|access[_-]?key|credential) [\w.-]* ["']? \s*
    (?: => | [:=] ) \s* ["']? ) ( [^\s"',;}]{6,} )"""
)
_SECRET_KEYS = re.compile(r"(?i)^(authorization|api[_-]?key|.*(password|secret|access_token|private_key))$")
_BINARY_KEYS = ("image_url", "input_audio", "file_data", "images", "audio")


def mask_text(text: str) -> str:
    """`text` with tokens, keys, passwords and private keys replaced by MASK."""
    for pattern in _PATTERNS:
        text = pattern.sub(MASK, text)
    return _ASSIGNMENT.sub(lambda m: m[1] + MASK, text)


def mask(value: Any) -> Any:
    """A JSON value with every string masked, secret fields replaced and binary parts dropped."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, list):
        return [mask(v) for v in value]
    if isinstance(value, dict):
        return {k: _field(str(k), v) for k, v in value.items()}
    return value


def _field(key: str, value: Any) -> Any:
    if _SECRET_KEYS.match(key) and isinstance(value, str):
        return MASK
    if key in _BINARY_KEYS:
        return MASK
    return mask(value)


_KEY_FLAGS = ("--peer-key", "--a-key", "--b-key", "--api-key", "--hf-token", "-hft")


def command_line(words: Sequence[str]) -> str:
    """A command for a report that others read: quoted for a shell, without the keys in it."""
    shown: list[str] = []
    for word in words:
        flag, equals, _ = word.partition("=")
        if shown and shown[-1] in _KEY_FLAGS:
            word = MASK
        elif equals and flag in _KEY_FLAGS:
            word = f"{flag}={MASK}"
        shown.append(word)
    return mask_text(shlex.join(shown))


class Recorder:
    """Appends to `path`; one for a server's life. Thread-safe. OSError if the file cannot be opened."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._file_lock = threading.Lock()
        self._started = time.monotonic()

    def begin(self, path: str, body: dict[str, Any]) -> Entry:
        """A request to `path` with its parsed JSON body has come in."""
        return Entry(self, path, body, time.monotonic() - self._started)

    def write(self, entry: dict[str, Any]) -> None:
        """One line, masked, flushed: a server that dies loses nothing."""
        line = json.dumps(mask(entry), ensure_ascii=False, separators=(",", ":"))
        with self._file_lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Entry:
    """One request being answered."""

    def __init__(self, recorder: Recorder, path: str, body: dict[str, Any], at: float) -> None:
        self._recorder = recorder
        self._entry: dict[str, Any] = {"at": round(at, 3), "path": path, "body": body}

    def end(self, *, prompt_n: int, cached_n: int, predicted_n: int, ttft_ms: float, total_ms: float) -> None:
        """The answer is complete, or was broken off: token counts and the server's own times."""
        numbers = {"prompt_n": prompt_n, "cached_n": cached_n, "predicted_n": predicted_n}
        times = {"ttft_ms": round(ttft_ms, 3), "total_ms": round(total_ms, 3)}
        self._recorder.write(self._entry | numbers | times)
