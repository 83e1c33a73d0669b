"""The command line: `ftgguf serve | run | ...` and `ftgguf-server` (llama-server's command line as it is)."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ftgguf`."""
    raise SystemExit("ftgguf: no command is built yet")


def server_main() -> int:
    """Entry point of `ftgguf-server`."""
    return main(["serve", *sys.argv[1:]])
