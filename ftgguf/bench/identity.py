"""Does a server that somebody else started serve the same file? As far as it can be asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ftgguf.bench import host
from ftgguf.bench.client import RequestFailed, Target

_FIGURES = {"n_params": "parameters", "size": "bytes of tensors", "n_vocab": "tokens of vocabulary"}
_BLOB = re.compile(r"^FROM\s+(.*?sha256[-:]([0-9a-f]{64}))\s*$", re.MULTILINE)


def figures(target: Target) -> dict[str, int]:
    """What llama-server's /v1/models says about its model: counts by name, none where it says nothing."""
    try:
        listed = target.get("/v1/models").get("data") or [{}]
    except RequestFailed:
        return {}
    meta: dict[str, Any] = (listed[0] or {}).get("meta") or {}
    return {k: int(meta[k]) for k in _FIGURES if isinstance(meta.get(k), int)}


def differs(target: Target, ours: dict[str, int], file: Path, sha256: str) -> tuple[bool, str]:
    """(it is another file, what is known in words). `ours` are the figures of our side, `sha256` that of `file`."""
    if target.dialect == "ollama":
        return _ollama(target, sha256)
    path = _path(target)
    if path is not None:
        if os.path.samefile(path, file):
            return False, f"it serves the same file, {path}"
        theirs = host.sha256([path])
        return theirs != sha256, f"it serves {path}, sha256 {theirs}"
    found = figures(target)
    known = [k for k in _FIGURES if k in found and k in ours]
    for k in known:
        if found[k] != ours[k]:
            return True, f"it serves another file: {found[k]} {_FIGURES[k]}, ours has {ours[k]}"
    if known:
        agree = ", ".join(_FIGURES[k] for k in known)
        return False, f"its file cannot be read from here; it agrees with ours in {agree}"
    return False, "which file it serves cannot be known: equal outputs are the only evidence"


def _path(target: Target) -> Path | None:
    """The file that llama-server's /props names, if it is on this machine."""
    try:
        named = str(target.get("/props").get("model_path") or "")
    except RequestFailed:
        return None
    path = Path(named)
    return path if named and path.is_file() else None


def _ollama(target: Target, sha256: str) -> tuple[bool, str]:
    """Ollama keeps a model's file under its sha256 and names it in the Modelfile."""
    shown = target.post("/api/show", {"model": target.model})
    found = _BLOB.search(str(shown.get("modelfile", "")))
    if found is None:
        return False, "which file it serves cannot be known: its Modelfile names no blob"
    return found[2] != sha256, f"its model {target.model} is the blob sha256 {found[2]}"
