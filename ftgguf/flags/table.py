"""The flag table: every flag of llama-server (b11434) and our own, one row each.

It drives parsing, `--help`, shell completion and docs/flags.md. Rows are in `ftgguf.flags.tables`, by subject.
"""

from __future__ import annotations

from ftgguf.flags.row import Flag
from ftgguf.flags.tables import (
    adapters,
    chat,
    context,
    cpu,
    http,
    logging,
    model,
    own,
    placement,
    sampling,
    spec,
    unsupported,
)

SECTIONS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    ("Help and logging", logging.FLAGS),
    ("Model source and router", model.FLAGS),
    ("Placement and memory", placement.FLAGS),
    ("Context, KV and slots", context.FLAGS),
    ("CPU threads", cpu.FLAGS),
    ("Sampling defaults", sampling.FLAGS),
    ("Chat and reasoning", chat.FLAGS),
    ("Server and HTTP", http.FLAGS),
    ("Embeddings and adapters", adapters.FLAGS),
    ("Speculative decoding", spec.FLAGS),
    ("ftgguf", own.FLAGS),
    ("Not supported", unsupported.FLAGS),
)
"""Rows by subject, in the order of docs/flags.md."""

FLAGS: tuple[Flag, ...] = tuple(flag for _, flags in SECTIONS for flag in flags)

GROUPS: tuple[tuple[str, str], ...] = (
    ("common", "common params"),
    ("sampling", "sampling params"),
    ("speculative", "speculative params"),
    ("server", "example-specific params"),
    ("ftgguf", "ftgguf params"),
)
"""Groups of `--help`, with llama-server's headings."""


def by_spelling() -> dict[str, tuple[Flag, bool]]:
    """Every spelling -> (row, positive form?). Raises ValueError where two rows share one."""
    found: dict[str, tuple[Flag, bool]] = {}
    for flag in FLAGS:
        for spelling, positive in [*((n, True) for n in flag.names), *((n, False) for n in flag.no)]:
            if spelling in found:
                raise ValueError(f"two rows of the flag table are spelled {spelling}")
            found[spelling] = (flag, positive)
    return found
