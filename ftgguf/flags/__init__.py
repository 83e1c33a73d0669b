"""llama-server's flags as one table -> one frozen ServerConfig, resolved once, with reasons.

`parse_server(argv, env)` is the entry. Policy in plain Python, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ftgguf.flags.config import ServerConfig, decode_config, encode_config
from ftgguf.flags.errors import (
    ActionRequested,
    CacheListRequested,
    CompletionRequested,
    FlagError,
    HelpRequested,
    ListDevicesRequested,
    VersionRequested,
)
from ftgguf.flags.parse import parse
from ftgguf.flags.resolve import resolve

__all__ = [
    "ActionRequested",
    "CacheListRequested",
    "CompletionRequested",
    "FlagError",
    "HelpRequested",
    "ListDevicesRequested",
    "ServerConfig",
    "VersionRequested",
    "decode_config",
    "encode_config",
    "parse_server",
]


def parse_server(
    argv: Sequence[str], env: Mapping[str, str], config_files: Sequence[Path] | None = None
) -> ServerConfig:
    """The configuration for llama-server's command line `argv` (without the program's name) and environment `env`.

    `config_files` replaces llama.cpp's two config.ini files (tests; `()` for none). Raises FlagError, whose text is
    what to print before exit 1, and ActionRequested (`--help`, `--version` ...), whose `text` is to be printed.
    """
    return resolve(parse(argv, env, config_files))
