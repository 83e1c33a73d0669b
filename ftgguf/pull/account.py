"""Signing token requests with the key that Ollama keeps on this machine (Ed25519, OpenSSH format, no passphrase).

The signature scheme is RFC 8032's, written from its section 5.1 in plain integers: one signature a pull needs neither
speed nor a dependency, and the only secret it touches stays on the machine that made it.
"""

from __future__ import annotations

import hashlib
import struct
from base64 import b64decode, b64encode
from pathlib import Path

from ftgguf.pull.errors import PullError

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_BASE_Y = 4 * pow(5, -1, _P) % _P

Point = tuple[int, int, int, int]
"""Extended coordinates (X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z."""


def key_path() -> Path:
    return Path.home() / ".ollama" / "id_ed25519"


def sign(method: str, url: str) -> str | None:
    """The `Authorization` of a token request: `<public key>:<signature>`; None where there is no key.

    What is signed: method, address and the base64 of the hexadecimal sha256 of the (empty) body, comma-separated.
    """
    try:
        text = key_path().read_text()
    except (OSError, UnicodeDecodeError):
        return None
    seed, public_blob = read_key(text)
    empty = b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()
    signature = ed25519_sign(seed, f"{method},{url},{empty}".encode())
    return f"{b64encode(public_blob).decode()}:{b64encode(signature).decode()}"


def read_key(text: str) -> tuple[bytes, bytes]:
    """(32-byte seed, public key in SSH's wire format) of an unencrypted OpenSSH private key. Raises PullError."""
    try:
        lines = [line.strip() for line in text.strip().splitlines()]
        if lines[0] != "-----BEGIN OPENSSH PRIVATE KEY-----" or lines[-1] != "-----END OPENSSH PRIVATE KEY-----":
            raise ValueError
        data = b64decode("".join(lines[1:-1]), validate=True)
        magic = b"openssh-key-v1\0"
        cipher, rest = _field(data.removeprefix(magic))
        if not data.startswith(magic) or cipher != b"none":
            raise ValueError
        _, rest = _field(rest)
        _, rest = _field(rest)
        public, rest = _field(rest[4:])
        private, _ = _field(rest)
        kind, rest = _field(private[8:])
        _, rest = _field(rest)
        secret, _ = _field(rest)
    except (ValueError, IndexError, struct.error):
        raise PullError("~/.ollama/id_ed25519 is not an unencrypted OpenSSH key: 'ollama signin' makes one") from None
    if kind != b"ssh-ed25519" or len(secret) != 64:
        raise PullError("~/.ollama/id_ed25519 is not an Ed25519 key: 'ollama signin' makes one")
    return secret[:32], public


def _field(data: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from(">I", data)
    if length > len(data) - 4:
        raise ValueError
    return data[4 : 4 + length], data[4 + length :]


def _add(a: Point, b: Point) -> Point:
    """RFC 8032, 5.1.4."""
    e1, e2 = (a[1] - a[0]) * (b[1] - b[0]) % _P, (a[1] + a[0]) * (b[1] + b[0]) % _P
    t, z = 2 * a[3] * b[3] * _D % _P, 2 * a[2] * b[2] % _P
    e, f, g, h = e2 - e1, z - t, z + t, e2 + e1
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _base() -> Point:
    """The base point: y = 4/5, x even (RFC 8032, 5.1.3 for the root)."""
    x2 = (_BASE_Y * _BASE_Y - 1) * pow(_D * _BASE_Y * _BASE_Y + 1, -1, _P) % _P
    x = pow(x2, (_P + 3) // 8, _P)
    if (x * x - x2) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    x = _P - x if x & 1 else x
    return x, _BASE_Y, 1, x * _BASE_Y % _P


def _times(scalar: int) -> bytes:
    """The encoding of `scalar` times the base point."""
    result: Point = (0, 1, 1, 0)
    power = _base()
    while scalar:
        if scalar & 1:
            result = _add(result, power)
        power = _add(power, power)
        scalar >>= 1
    inverse = pow(result[2], -1, _P)
    x, y = result[0] * inverse % _P, result[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha512(data).digest(), "little") % _L


def ed25519_sign(seed: bytes, message: bytes) -> bytes:
    """RFC 8032, 5.1.6: the 64-byte signature of `message` under the 32-byte `seed`."""
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    nonce = _hash(digest[32:] + message)
    commitment = _times(nonce)
    challenge = _hash(commitment + _times(scalar) + message)
    return commitment + ((nonce + challenge * scalar) % _L).to_bytes(32, "little")
