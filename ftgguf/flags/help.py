"""`--help` in llama-server's shape, `--version`, and shell completion: all from the table."""

from __future__ import annotations

import dataclasses
import platform
import sys
import textwrap
from typing import Any

import msgspec

from ftgguf import __version__
from ftgguf.flags.config import ServerConfig
from ftgguf.flags.pending import PENDING
from ftgguf.flags.row import Flag
from ftgguf.flags.table import FLAGS, GROUPS

PEER = "b11434"
"""The llama-server build whose flags and API this is."""
_INDENT = 40
_WIDTH = 70
_TIER_WORDS = {"C": "no effect here", "D": "not supported"}


def field_default(path: str) -> Any:
    """The default of a dotted field of ServerConfig; KeyError where there is no such field."""
    at: Any = ServerConfig()
    for name in path.split("."):
        if isinstance(at, dict):
            return at.get(name)
        known = at.__struct_fields__ if isinstance(at, msgspec.Struct) else {f.name for f in dataclasses.fields(at)}
        if name not in known:
            raise KeyError(path)
        at = getattr(at, name)
    return at


def default_text(flag: Flag) -> str:
    """The default as shown to people; "" where there is nothing to say."""
    if flag.shown is not None:
        return flag.shown
    if flag.action or not flag.to or flag.to.startswith("legacy."):
        return ""
    default = field_default(flag.to)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return (";" if flag.to == "sampling.samplers" else ",").join(str(item) for item in default) or "none"
    return "none" if default in ("", None) else str(default)


def one_line(flag: Flag) -> str:
    """Help of the flag with its tier (C, D) and default."""
    words = "not built yet" if flag.name in PENDING else _TIER_WORDS.get(flag.tier, "")
    default = "" if flag.tier in ("C", "D") else default_text(flag)
    remarks = [part for part in (words, f"default: {default}" if default else "") if part]
    return f"{flag.help} ({'; '.join(remarks)})" if remarks else flag.help


def flag_help(flag: Flag) -> str:
    """The flag's entry in `--help`."""
    names = [*flag.names, *flag.no]
    head = names[0] if len(names) == 1 else f"{names[0] + ', ':<7}" + ", ".join(names[1:])
    head = " ".join(part for part in (head, flag.hint, flag.hint2) if part)
    lines = textwrap.wrap(one_line(flag), _WIDTH)
    if flag.env:
        lines.append(f"(env: {flag.env})")
    first = f"{head:<{_INDENT}}{lines[0]}" if len(head) <= _INDENT - 3 else f"{head}\n{'':<{_INDENT}}{lines[0]}"
    return "\n".join([first, *(f"{'':<{_INDENT}}{line}" for line in lines[1:])])


def help_text() -> str:
    """All of `--help`, without a newline at its end."""
    parts = []
    for group, heading in GROUPS:
        entries = [flag_help(flag) for flag in FLAGS if flag.group == group and not flag.hidden]
        parts.append(f"----- {heading} -----\n\n" + "\n".join(entries))
    return "\n\n\n".join(parts)


def version_text() -> str:
    """`--version`: llama-server's two lines, with what this is."""
    system = f"{platform.system()} {platform.machine()}"
    return (
        f"version: {__version__} (ftgguf, in place of llama-server {PEER})\n"
        f"running on Python {sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} for {system}"
    )


def _spellings() -> list[str]:
    return [name for flag in FLAGS if not flag.hidden and flag.tier != "D" for name in (*flag.names, *flag.no)]


def bash_completion() -> str:
    """A script to source in bash."""
    lines = [
        "_ftgguf_completions() {",
        "    local cur prev opts",
        "    COMPREPLY=()",
        '    cur="${COMP_WORDS[COMP_CWORD]}"',
        '    prev="${COMP_WORDS[COMP_CWORD-1]}"',
        "",
        f'    opts="{" ".join(_spellings())}"',
        "",
        '    case "$prev" in',
    ]
    for flag in FLAGS:
        if flag.completes and flag.tier != "D":
            lines += [
                f"        {'|'.join(flag.names)})",
                f'            COMPREPLY=( $(compgen -f -X \'!{flag.completes}\' -- "$cur") $(compgen -d -- "$cur") )',
                "            return 0",
                "            ;;",
            ]
    lines += [
        "        *)",
        '            COMPREPLY=( $(compgen -W "${opts}" -- "$cur") )',
        "            return 0",
        "            ;;",
        "    esac",
        "}",
        "",
        "complete -F _ftgguf_completions ftgguf-server",
    ]
    return "\n".join(lines)


def _quote(text: str) -> str:
    return text.replace("'", "'\\''")


def zsh_completion() -> str:
    """A script to source in zsh (after compinit)."""
    lines = ["#compdef ftgguf-server", "_ftgguf_server() {", "    _arguments \\"]
    for flag in FLAGS:
        if flag.hidden or flag.tier == "D":
            continue
        words = flag.help.replace("\\", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
        files = f'_files -g "{flag.completes}"' if flag.completes else ""
        argument = f":{flag.name.lstrip('-')}:{files}" if flag.takes_value else ""
        for name in (*flag.names, *flag.no):
            lines.append(f"        '{_quote(f'{name}[{words}]{argument}')}' \\")
    return "\n".join([*lines, "        '*:: :'", "}", "compdef _ftgguf_server ftgguf-server"])


def fish_completion() -> str:
    """A script to source in fish."""
    lines = []
    for flag in FLAGS:
        if flag.hidden or flag.tier == "D":
            continue
        for name in (*flag.names, *flag.no):
            kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
            value = (" -r" if flag.completes else " -x") if flag.takes_value else " -f"
            words = flag.help.replace("\\", "\\\\").replace("'", "\\'")
            lines.append(f"complete -c ftgguf-server {kind} {name.lstrip('-')}{value} -d '{words}'")
    return "\n".join(lines)
