"""Do A and B serve the same model? As far as it can be asked: no ratio is formed where they do not, or nobody knows."""

from __future__ import annotations

import os
from pathlib import Path

from ftgguf.bench import host
from ftgguf.bench.client import RequestFailed, Target
from ftgguf.bench.identity import figures
from ftgguf.bench.prompts import TEXTS
from ftgguf.bench.report import NOT_COMPARABLE, Contestant, Report
from ftgguf.proxy.ledger import say


def compare_models(report: Report, a: Target, b: Target, peer: Contestant) -> None:
    """Note what is known, and on `peer` (the one of the two that is not ours) why no ratio is formed, if none is.

    Models that differ are compared all the same, and the report and the exit status say so.
    """
    other = _differ(report, a, b)
    if other:
        peer.other_file = True
        report.trouble(NOT_COMPARABLE, f"{other}: no ratio is given")
        return
    alike, why = _known_alike(a, b)
    if not alike:
        why = peer.unlike = f"whether A and B serve the same model cannot be known, {why}"
    report.notes.append(why if alike else f"{why}: no ratio is given")


def _differ(report: Report, a: Target, b: Target) -> str:
    """How the models are known to differ; empty where they are not known to."""
    own, other = figures(a), figures(b)
    for k in own:
        if k in other and own[k] != other[k]:
            return f"the models differ: {k} is {own[k]} at A and {other[k]} at B"
    files = _file(a), _file(b)
    if files[0] is not None and files[1] is not None and not os.path.samefile(files[0], files[1]):
        if files[0].stat().st_size != files[1].stat().st_size:
            return f"the models differ: A serves {files[0]}, B serves {files[1]} of another size"
        say(f"sha256 of {files[0]} and {files[1]}")
        hashes = [host.sha256([f]) for f in files if f is not None]
        if hashes[0] != hashes[1]:
            return f"the models differ: A serves {files[0]}, B serves {files[1]} of another sha256"
    ids = _tokens(a), _tokens(b)
    if ids[0] and ids[1] and ids[0] != ids[1]:
        differ = sum(x != y for x, y in zip(*ids, strict=True))
        return f"the tokenisers differ: {differ} of {len(TEXTS)} texts have other tokens at B than at A"
    return ""


def _known_alike(a: Target, b: Target) -> tuple[bool, str]:
    """(enough is known, what they agree in or what is missing) of two that are not known to differ."""
    if _file(a) is not None and _file(b) is not None:
        return True, "A and B serve the same file"
    own, other = figures(a), figures(b)
    if not (own and other and own.keys() == other.keys()):
        silent = [name for name, found in (("A", own), ("B", other)) if not found]
        who = "neither says" if len(silent) == 2 else f"{silent[0]} does not say" if silent else "one says less of"
        return False, f"as {who} its size at /v1/models"
    if not (_tokens(a) and _tokens(b)):
        return False, "as not both say at /tokenize how they tokenise"
    agreed = f"A and B agree in {', '.join(own)} and in the tokens of {len(TEXTS)} texts"
    return True, f"{agreed}; their files cannot be read from here"


def _file(target: Target) -> Path | None:
    """The file that llama-server's /props names, if it is on this machine."""
    try:
        named = str(target.get("/props").get("model_path") or "")
    except RequestFailed:
        return None
    return Path(named) if named and Path(named).is_file() else None


def _tokens(target: Target) -> list[list[int]]:
    """The tokens of the texts; empty where the server does not tell."""
    try:
        return [target.tokenize(text) for text in TEXTS]
    except (RequestFailed, KeyError, TypeError, ValueError):
        return []
