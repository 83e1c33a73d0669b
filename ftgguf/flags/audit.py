"""Flags of tier A or B whose field nothing reads, and pending ones whose field something reads by now:
`python -m ftgguf.flags.audit` (exit 1 if there are any).

Such a flag has no effect, whatever its tier says: it belongs in `ftgguf.flags.pending` until something reads its
field. The search is by name: a file of the package that uses the group (`.http`, `HttpConfig`) and the field
(`.port`) counts as a reader, so a field that is missing here is surely unread, and one that is not probably is read.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from ftgguf.flags.config import ServerConfig
from ftgguf.flags.pending import PENDING
from ftgguf.flags.row import Flag
from ftgguf.flags.table import FLAGS

PACKAGE = Path(__file__).parents[1]
INDIRECT = {
    "context.size": ("cells",),
    "context.per_slot": ("slot_limit",),
    "context.kv_unified": ("cells", "slot_limit"),
    "placement.overrides": ("buffer_of",),
}
"""Fields that are read through a method of their group."""
INHERENT = frozenset(("context.swa_full", "context.flash_attn", "placement.split_mode", "placement.tensor_split"))
"""Fields that nothing reads because what they ask for is always so (with one GPU, and no score matrix)."""
OTHERS = frozenset(("flags", "bench"))
"""Subpackages that read fields without giving them an effect: the benchmarks hand them to a peer."""


def sources(package: Path = PACKAGE) -> list[str]:
    """The package's source texts, without those of `OTHERS`."""
    paths = [path for path in package.rglob("*.py") if not OTHERS & set(path.relative_to(package).parts)]
    return [path.read_text(encoding="utf-8") for path in paths]


def unread(texts: list[str]) -> list[str]:
    """Dotted fields without a reader in `texts`. SamplingParams travels whole, so its fields count as read."""
    missing = []
    for group in dataclasses.fields(ServerConfig):
        value = getattr(ServerConfig(), group.name)
        if not dataclasses.is_dataclass(value):
            continue
        user = re.compile(rf"\.{group.name}\b|\b{type(value).__name__}\b")
        users = [text for text in texts if user.search(text)]
        for name in (field.name for field in dataclasses.fields(value)):
            reads = re.compile(rf"\.({'|'.join((name, *INDIRECT.get(f'{group.name}.{name}', ())))})\b")
            if not any(reads.search(text) for text in users):
                missing.append(f"{group.name}.{name}")
    return missing


def idle_flags(texts: list[str]) -> list[tuple[str, Flag]]:
    """(field, row) of every A or B row that only sets unread fields and is not pending."""
    fields = unread(texts)
    found = []
    for flag in FLAGS:
        field = ".".join(flag.to.split(".")[:2])
        if flag.tier in "AB" and field in fields and field not in INHERENT and flag.name not in PENDING:
            found.append((field, flag))
    return found


def built_flags(texts: list[str]) -> list[tuple[str, Flag]]:
    """(field, row) of every pending row whose field something reads: it works by now, in part at least."""
    fields = unread(texts)
    rows = [(".".join(flag.to.split(".")[:2]), flag) for flag in FLAGS if flag.to and flag.name in PENDING]
    return [(field, flag) for field, flag in rows if field not in fields]


def main() -> None:
    """Print them."""
    texts = sources()
    idle, built = idle_flags(texts), built_flags(texts)
    for field, flag in idle:
        print(f"{field:<34} {flag.name}: nothing reads it")
    for field, flag in built:
        print(f"{field:<34} {flag.name}: pending, but something reads it")
    sys.exit(bool(idle or built))


if __name__ == "__main__":
    main()
