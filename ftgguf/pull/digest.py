"""The one type that names content. No path of a store is made from anything else than a `Digest`.

Registries name blobs by `sha256:<64 hex>`; a string that reaches a path unchecked is a way out of the store
(CVE-2024-37032), so the type's only constructors check.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ftgguf.pull.errors import BadAnswer
from ftgguf.quoting import shown

_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Digest:
    """A SHA-256: `hex` is 64 lower-case hexadecimal digits."""

    hex: str

    def __post_init__(self) -> None:
        if not _HEX64.fullmatch(self.hex):
            raise BadAnswer(f"{shown(self.hex)} is not the hexadecimal of a sha256")

    @classmethod
    def parse(cls, text: str) -> Digest:
        """`sha256:<64 lower-case hex>` and nothing else. Raises BadAnswer."""
        kind, colon, digits = text.partition(":")
        if kind != "sha256" or not colon or not _HEX64.fullmatch(digits):
            raise BadAnswer(f"{shown(text)} is not a digest (sha256: and 64 lower-case hexadecimal digits)")
        return cls(digits)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        return cls(hashlib.sha256(data).hexdigest())

    @property
    def file_name(self) -> str:
        """The blob's name in a store, as Ollama spells it."""
        return f"sha256-{self.hex}"

    @property
    def short(self) -> str:
        """The first 12 digits, as progress lines and `list` show them."""
        return self.hex[:12]

    def __str__(self) -> str:
        return f"sha256:{self.hex}"


@dataclass(frozen=True, slots=True)
class GitOid:
    """A git blob's SHA-1, by which the Hub names files outside LFS: of `blob <size>`, a zero byte and the content."""

    hex: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{40}", self.hex):
            raise BadAnswer(f"{shown(self.hex)} is not a git object id")

    def __str__(self) -> str:
        return f"git:{self.hex}"
