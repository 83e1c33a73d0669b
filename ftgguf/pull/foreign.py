"""Models that other programs have on this machine already: Ollama's store and the Hugging Face cache. Read only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ftgguf.pull.digest import Digest

_SYSTEM_OLLAMA = Path("/usr/share/ollama/.ollama/models")
"""Where the Linux package's service keeps its models."""


def ollama_roots() -> list[Path]:
    """Ollama's model folders that exist: `OLLAMA_MODELS` alone if it is set, else the user's and the service's."""
    value = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    candidates = [Path(value).expanduser()] if value else [Path.home() / ".ollama" / "models", _SYSTEM_OLLAMA]
    found = []
    for path in candidates:
        with suppress(OSError):
            if (path / "blobs").is_dir() or (value and path.is_dir()):
                found.append(path.absolute())
    return found


def hub_cache() -> Path:
    """The Hugging Face cache, by llama.cpp's order of variables (it need not exist)."""
    for variable, below in (
        ("LLAMA_CACHE", ""),
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        value = os.environ.get(variable, "")
        if value:
            return Path(value).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def blob_candidates(digest: Digest, ollama: list[Path]) -> Iterator[Path]:
    """Paths where another program keeps that content, if it has it."""
    for root in ollama:
        yield root / "blobs" / digest.file_name
        yield root / "blobs" / f"sha256:{digest.hex}"  # installations of 2023
    with suppress(OSError):
        yield from hub_cache().glob(f"models--*/blobs/{digest.hex}")


def hub_snapshot(repo: str) -> dict[str, Path] | None:
    """Path in the repository -> file, of the snapshot that the cache's `main` (else its only ref) names; None if the
    repository is not in the cache. Only files whose target is there."""
    folder = hub_cache() / ("models--" + repo.replace("/", "--"))
    try:
        refs = sorted(path for path in (folder / "refs").rglob("*") if path.is_file())
    except OSError:
        return None
    refs.sort(key=lambda path: path.name != "main")
    for ref in refs:
        with suppress(OSError, UnicodeDecodeError):
            commit = ref.read_text()[:64].strip()
            root = folder / "snapshots" / commit
            if re.fullmatch(r"[0-9a-f]{40}", commit) and root.is_dir():
                return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return None


def hub_token() -> str:
    """The token that the Hub's own tools stored: `HF_TOKEN_PATH`, else `token` in HF_HOME; empty if there is none."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"), "huggingface"
    )
    path = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
    with suppress(OSError, UnicodeDecodeError):
        return path.expanduser().read_text()[:4096].strip()
    return ""
