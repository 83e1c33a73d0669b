"""How Ollama's API writes and reads: JSON lines, RFC 3339 times, nanoseconds, durations in Go's words, plain errors."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response, StreamingResponse

from ftgguf.server.errors import ApiError, InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.wire import dumps

PREFIX = "/api/"
NDJSON = "application/x-ndjson"
VERSION = "0.31.0"
"""The Ollama release whose API this is; clients compare it with what they need."""
FOREVER = "9999-12-31T23:59:59Z"

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def line(value: Any) -> bytes:
    """One object of a stream."""
    return dumps(value) + b"\n"


def stream_response(content: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(content, media_type=NDJSON)


def error_response(error: ApiError) -> Response:
    """`{"error": "text"}`: a string, where llama-server has an object."""
    return json_response({"error": error.message}, error.code)


def now() -> str:
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, as Go's time marshals; `FOREVER` for what is beyond its years."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return FOREVER


def keep_alive_seconds(value: Any) -> float | None:
    """`keep_alive` of a request: seconds as a number, or Go's duration (`5m`, `1h30m`, `-1s`); negative means for ever.

    None: not given. Raises InvalidRequest.
    """
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        seconds = _go_duration(value.strip())
        if seconds is not None:
            return seconds
    raise InvalidRequest("keep_alive must be a number of seconds or a duration like 5m, 1h30m or -1")


def _go_duration(text: str) -> float | None:
    sign = -1.0 if text.startswith("-") else 1.0
    body = text.lstrip("+-")
    try:
        return sign * float(body)
    except ValueError:
        pass
    total, at = 0.0, 0
    for found in _PART.finditer(body):
        if found.start() != at:
            return None
        total += float(found[1]) * _UNITS[found[2]]
        at = found.end()
    return sign * total if body and at == len(body) else None


def model_name(body: Any, required: bool = True) -> str:
    """`model` of a body, or `name` as older clients say. Raises InvalidRequest where it must be there."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    name = body.get("model") or body.get("name") or ""
    if not isinstance(name, str):
        raise InvalidRequest("model must be a string")
    if required and not name.strip():
        raise InvalidRequest("model is required")
    return name.strip()


def same_name(one: str, other: str) -> bool:
    """Whether two names mean one model: case does not matter, and no tag is `latest`."""
    return plain_name(one) == plain_name(other)


def plain_name(name: str) -> str:
    """A name for comparing."""
    name = name.strip().lower().removeprefix("registry.ollama.ai/").removeprefix("library/").removesuffix(":local")
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def not_found(name: str) -> ApiError:
    return ApiError(f"model '{name}' not found", "not_found_error")
