"""Which files of a repository are meant? llama.cpp's rules for `-hf user/repo[:quant]`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from ftgguf.pull.errors import NotFound

_SIDE = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""In a file's name: not a model of its own but a projector, a draft, a table."""
_DEFAULTS = ("Q4_K_M", "Q8_0")
_SHARD = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_QUANT = re.compile(
    r"(?:^|[.-])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32))(?=[.-])", re.IGNORECASE
)


def is_model(path: str) -> bool:
    """Whether the file can be a model, by its name."""
    name = path.rsplit("/", 1)[-1].lower()
    return name.endswith(".gguf") and not any(word in name for word in _SIDE)


def choose(paths: Iterable[str], quant: str, what: str) -> list[str]:
    """The files of the model: one, or all shards of one in order.

    With a `quant`, the first model file, in the order given, whose path has it before a `.` or `-`, whatever the
    case; without, Q4_K_M, then Q8_0, then the first. Raises NotFound, naming what there is.
    """
    models = [path for path in paths if is_model(path)]
    if not models:
        raise NotFound(f"{what} has no GGUF model: look for a repository whose name ends in -GGUF")
    for tag in (quant,) if quant else _DEFAULTS:
        pattern = re.compile(re.escape(tag) + "[.-]", re.IGNORECASE)
        found = next((path for path in models if pattern.search(path)), None)
        if found is not None:
            return shards_of(found, models, what)
    if quant:
        known = sorted({match[1] for path in models if (match := _QUANT.search(path.rsplit("/", 1)[-1]))})
        near = difflib.get_close_matches(quant.upper(), known, 4, 0.5)
        names = ", ".join(known or [path.rsplit("/", 1)[-1] for path in models][:20])
        hint = f" (near it: {', '.join(near)})" if near else ""
        raise NotFound(f"{what} has no file for '{quant}'{hint}; it has {names}")
    return shards_of(models[0], models, what)


def choose_file(paths: Iterable[str], file: str, what: str) -> list[str]:
    """The file of that path, or of that name if it is in one folder only; of a split model all shards."""
    everything = list(paths)
    found = [path for path in everything if path == file] or [
        path for path in everything if path.rsplit("/", 1)[-1] == file
    ]
    if len(found) != 1:
        models = [path for path in everything if path.endswith(".gguf")]
        near = difflib.get_close_matches(file, models, 4, 0.4) or models[:8]
        problem = "has no file" if not found else "has several files"
        raise NotFound(f"{what} {problem} '{file}'; it has {', '.join(near) or 'no .gguf at all'}")
    return shards_of(found[0], everything, what)


def shards_of(path: str, paths: Iterable[str], what: str) -> list[str]:
    """`path`, or all shards of the split model it belongs to. Raises NotFound if one is missing."""
    found = _SHARD.fullmatch(path)
    if found is None:
        return [path]
    count, there = int(found["count"]), set(paths)
    if not 0 < count <= 1000:
        raise NotFound(f"{what}: a model in {count} parts cannot be")
    shards = [f"{found['prefix']}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]
    missing = [shard.rsplit("/", 1)[-1] for shard in shards if shard not in there]
    if missing:
        raise NotFound(f"{what} lacks {len(missing)} of the {count} parts of this model: {', '.join(missing[:8])}")
    return shards
