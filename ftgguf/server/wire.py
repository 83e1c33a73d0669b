"""JSON in and out with llama-server's rules and words.

Bodies are parsed by msgspec (strict UTF-8, no NaN, no lone surrogates: as strict as llama-server's parser) and
written compactly with non-finite numbers as `null`. Type checks follow its JSON library: a boolean or a float is
accepted where an integer is asked for, null is not, and the messages are the same.
"""

from __future__ import annotations

import re
import secrets
import string
import struct
from typing import Any

import msgspec

from ftgguf.server.errors import InvalidRequest

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_F32 = struct.Struct("<f")


def dumps(value: Any) -> bytes:
    """Compact JSON, UTF-8; infinities and NaN become null as in llama-server."""
    return _encode(value)


def parse_body(body: bytes) -> Any:
    """The JSON value of a request body; raises `InvalidRequest` in llama-server's form when it is not JSON."""
    if not body.strip():
        raise InvalidRequest(
            "[json.exception.parse_error.101] parse error at line 1, column 1: attempting to parse an empty input; "
            "check that your input string or stream contains the expected JSON"
        )
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(_parse_error(body, str(error))) from None
    except RecursionError:
        raise InvalidRequest("[json.exception.parse_error.101] parse error: nesting is too deep") from None


def _parse_error(body: bytes, reason: str) -> str:
    found = re.search(r"byte (\d+)", reason)
    position = int(found.group(1)) if found else len(body)
    line = body.count(b"\n", 0, position) + 1
    column = position - (body.rfind(b"\n", 0, position) + 1) + 1
    return f"[json.exception.parse_error.101] parse error at line {line}, column {column}: syntax error - {reason}"


def type_name(value: Any) -> str:
    """The JSON type's name as llama-server writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def type_error(wanted: str, value: Any) -> str:
    return f"[json.exception.type_error.302] type must be {wanted}, but is {type_name(value)}"


class WrongType(ValueError):
    """A JSON value has the wrong type; the text is the JSON library's."""


def as_float(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise WrongType(type_error("number", value))


def as_int(value: Any, bits: int = 32) -> int:
    """An integer as C++ would convert it: floats are truncated, and the result wraps at `bits` (signed)."""
    number = as_float(value) if not isinstance(value, int) else value
    if isinstance(number, float):
        if number != number or number in (float("inf"), float("-inf")):
            raise WrongType(type_error("number", value))
        number = int(number)
    half = 1 << (bits - 1)
    return (int(number) + half) % (1 << bits) - half


def as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise WrongType(type_error("boolean", value))


def as_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise WrongType(type_error("string", value))


def as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise WrongType(type_error("array", value))


def lenient(body: dict[str, Any], key: str, default: Any) -> Any:
    """`body[key]` where it has the type of `default`, else `default` (llama-server's `json_value`)."""
    value = body.get(key)
    if value is None:
        return default
    try:
        if isinstance(default, bool):
            return as_bool(value)
        if isinstance(default, int):
            return as_int(value)
        if isinstance(default, str):
            return as_str(value)
    except WrongType:
        return default
    return value if isinstance(value, type(default)) else default


def as_object(body: Any, key: str) -> dict[str, Any]:
    """A body that must be an object holding `key` (the first field a route reads), else the library's words."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"[json.exception.type_error.304] cannot use at() with {type_name(body)}")
    if key not in body:
        raise InvalidRequest(f"[json.exception.out_of_range.403] key '{key}' not found")
    return body


def f32(value: float) -> float:
    """`value` rounded to float32, as llama-server reports its sampling settings (0.95 -> 0.949999988079071)."""
    try:
        return float(_F32.unpack(_F32.pack(value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def random_id(prefix: str = "") -> str:
    """`prefix` and 32 random letters and digits, as in llama-server's ids."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(32))
