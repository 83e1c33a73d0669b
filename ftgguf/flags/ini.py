"""llama.cpp's config files: sections of `key = value`, keys being flag names without dashes or environment names.

The format is llama.cpp's (`common/preset.cpp`): `;` and `#` start a comment anywhere outside a key, lines before the
first header belong to section `default`, a header seen again starts its section afresh. `config.ini` takes its
settings from `[*]`, then `[default]`; other sections are models of router mode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ftgguf.flags.errors import FlagError
from ftgguf.flags.row import Flag
from ftgguf.flags.table import FLAGS, by_spelling
from ftgguf.flags.values import FALSE_WORDS, MAX_FILE

DEFAULT = "default"
PRESET_KEYS = ("load-on-startup", "stop-timeout", "dedup-cache-models")
"""Keys of a model's section that are no flags; `ftgguf.flags.parse` skips them, the router reads them."""
SKIPPED = ("version",)
"""Reserved by llama.cpp."""

_HEADER = re.compile(r"\[[ \t]*([^\]]+?)[ \t]*\][ \t]*(?:[;#].*)?")
_ENTRY = re.compile(r"([a-zA-Z_][a-zA-Z0-9_.-]*)[ \t]*=[ \t]*([^;#]*?)[ \t]*(?:[;#].*)?")
_EMPTY = re.compile(r"[ \t]*(?:[;#].*)?")


def config_paths(env: Mapping[str, str]) -> tuple[Path, ...]:
    """The system's and the user's config.ini, in the order they apply."""
    paths = [Path("/etc/llama.cpp/config.ini")]
    home = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    if home:
        paths.append(Path(home) / "llama.cpp" / "config.ini")
    return tuple(paths)


def parse_ini(text: str, name: str) -> dict[str, dict[str, str]]:
    """Sections of an INI text, in file order. Raises FlagError naming `name` and the line that is not one."""
    sections: dict[str, dict[str, str]] = {}
    current = DEFAULT
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        if header := _HEADER.fullmatch(line):
            current = header[1]
            sections[current] = {}
        elif entry := _ENTRY.fullmatch(line):
            sections.setdefault(current, {})[entry[1]] = entry[2]
        elif not _EMPTY.fullmatch(line):
            raise FlagError(
                f"error: failed to parse server config file: {name} (line {number}: expected [section] or key = value)"
            )
    return sections


def read_ini(path: Path) -> dict[str, dict[str, str]]:
    """Sections of an INI file. Raises FlagError when it cannot be read or parsed."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise FlagError(f"error: config file {path} is larger than {MAX_FILE >> 20} MiB")
        return parse_ini(data.decode("utf-8"), str(path))
    except OSError as error:
        raise FlagError(f"error: failed to open server preset file: {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise FlagError(
            f"error: failed to parse server config file: {path} (byte {error.start} is not UTF-8)"
        ) from None


def by_key() -> dict[str, tuple[Flag, bool]]:
    """Every key of a config file -> (row, positive form?)."""
    keys: dict[str, tuple[Flag, bool]] = {}
    for flag in FLAGS:
        for position, name in enumerate(flag.env_names):
            keys[name] = (flag, position == 0)
    for spelling, found in by_spelling().items():
        keys[spelling.lstrip("-")] = found
    return keys


def section_args(section: Mapping[str, str]) -> list[str]:
    """A model's section as command-line arguments, for the server that is started for it.

    Raises FlagError for an unknown key. `PRESET_KEYS` and `version` are left out.
    """
    keys, args = by_key(), []
    for key, value in section.items():
        if key in PRESET_KEYS or key in SKIPPED:
            continue
        if key not in keys:
            raise FlagError(f"error: option '{key}' not recognized in preset")
        flag, positive = keys[key]
        if flag.takes_value:
            args += [flag.name, value]
            continue
        on = (value not in FALSE_WORDS) == positive
        if flag.is_switch:
            args.append(flag.name if on else flag.no[-1])
        elif on:
            args.append(flag.name)
    return args
