"""Command line, environment and config files -> assignments to fields of ServerConfig.

Precedence, lowest first (llama.cpp's): /etc/llama.cpp/config.ini, ~/.config/llama.cpp/config.ini, environment,
command line. Within the command line the later argument wins; flags that collect (`-r`, `-l`, `-ot`, `--api-key`,
`-a` ...) collect over all sources, as llama.cpp's do.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftgguf.flags import ini
from ftgguf.flags.errors import (
    ActionRequested,
    CacheListRequested,
    CompletionRequested,
    FlagError,
    HelpRequested,
    ListDevicesRequested,
    VersionRequested,
)
from ftgguf.flags.help import (
    bash_completion,
    field_default,
    fish_completion,
    flag_help,
    help_text,
    version_text,
    zsh_completion,
)
from ftgguf.flags.pending import PENDING
from ftgguf.flags.row import Assignment, Flag
from ftgguf.flags.table import FLAGS, by_spelling
from ftgguf.flags.values import TRUE_WORDS, truth

_COMPLETIONS = {
    "completion-bash": bash_completion,
    "completion-zsh": zsh_completion,
    "completion-fish": fish_completion,
}


@dataclass(slots=True)
class Parsed:
    """What was given: `assignments` in the order they apply, and the lines to say about them."""

    assignments: list[Assignment] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def warn(self, line: str) -> None:
        """A warning, once."""
        if line not in self.warnings:
            self.warnings.append(line)

    def explain(self, line: str) -> None:
        """A reason, once."""
        if line not in self.reasons:
            self.reasons.append(line)

    def apply(self, flag: Flag, value: Any, label: str) -> None:
        """Take `value` for `flag`, given as `label`, as its tier says. ValueError where the tier is D."""
        tier, note = flag.tier_of(value), flag.note_of(value)
        if tier == "D":
            raise ValueError(note if note.startswith("the argument has been removed") else f"not supported: {note}")
        if tier == "C":
            self.warn(f"{label} has no effect: {note}")
        elif tier == "B" and note:
            self.explain(f"{label}: {note}")
        added = flag.assignments(value)
        if flag.name in PENDING and tier in "AB" and any(item.value != field_default(item.path) for item in added):
            self.warn(f"{label}: {PENDING[flag.name]}")
        self.assignments += added

    def read(self, flag: Flag, text: str, label: str) -> None:
        """Read and take the value of a flag that has one. ValueError with the words to print."""
        assert flag.parse is not None
        if any("\ud800" <= char <= "\udfff" for char in text):  # undecodable bytes of argv and environ
            raise ValueError(f"{text!r} is not UTF-8 text; rename the file, or set a UTF-8 locale")
        self.apply(flag, flag.parse(text, lambda line: self.warn(f"{label}: {line}")), label)


def parse(argv: Sequence[str], env: Mapping[str, str], config_files: Sequence[Path] | None = None) -> Parsed:
    """Parse everything; `config_files` replaces llama.cpp's two (missing ones are skipped).

    Raises FlagError, and ActionRequested for `--help` and kin.
    """
    parsed = Parsed()
    for path in ini.config_paths(env) if config_files is None else config_files:
        if path.exists():
            _apply_file(parsed, path)
    _apply_env(parsed, env)
    _CommandLine(parsed, env).run(argv)
    return parsed


def _apply_file(parsed: Parsed, path: Path) -> None:
    parsed.explain(f"using config file: {path}")
    sections, keys = ini.read_ini(path), ini.by_key()
    for name in ("*", ini.DEFAULT):
        for key, text in sections.get(name, {}).items():
            if key in ini.SKIPPED or key in ini.PRESET_KEYS:
                continue
            if key not in keys:
                parsed.warn(f"ignoring option '{key}' from {path}: not supported by this program")
                continue
            flag, positive = keys[key]
            try:
                _apply_text(parsed, flag, positive, text, f"'{key}' in {path}")
            except ValueError as error:
                raise FlagError(f"error while handling option '{key}' of config file {path}: {error}") from None


def _apply_text(parsed: Parsed, flag: Flag, positive: bool, text: str, label: str) -> None:
    """A value from a file: flags without a value take a boolean."""
    if flag.action:
        raise ValueError("this belongs on the command line")
    if flag.takes_value:
        parsed.read(flag, text, label)
    elif flag.is_switch:
        parsed.apply(flag, truth(text) == positive, label)
    elif truth(text):
        parsed.apply(flag, flag.const, label)


def _apply_env(parsed: Parsed, env: Mapping[str, str]) -> None:
    for flag in FLAGS:
        name = next((name for name in reversed(flag.env_names) if name in env), None)
        if name is None:
            continue
        try:
            if flag.is_switch:
                # LLAMA_ARG_NO_X means off whatever its value
                parsed.apply(flag, truth(env[name]) if name == flag.env else False, name)
            elif flag.takes_value:
                parsed.read(flag, env[name], name)
            elif env[name] in TRUE_WORDS:
                parsed.apply(flag, flag.const, name)
        except ValueError as error:
            raise FlagError(f'error while handling environment variable "{name}": {error}') from None


class _CommandLine:
    """One pass over the arguments."""

    def __init__(self, parsed: Parsed, env: Mapping[str, str]) -> None:
        self.parsed = parsed
        self.env = env
        self.table = by_spelling()
        self.seen: set[str] = set()
        self.later: ActionRequested | None = None

    def run(self, argv: Sequence[str]) -> None:
        """Apply every argument, then raise what `--help` or a completion flag asked for."""
        rest = iter(argv)
        for given in rest:
            spelling = given.replace("_", "-") if given.startswith("--") else given
            if spelling not in self.table:
                raise FlagError(f"error: invalid argument: {spelling}" + self._cure(given))
            flag, positive = self.table[spelling]
            self._note_repetition(flag, spelling)
            try:
                if flag.action:
                    self._act(flag)
                elif flag.takes_value:
                    self._value(flag, spelling, rest)
                else:
                    self.parsed.apply(flag, positive if flag.is_switch else flag.const, spelling)
            except ValueError as error:
                raise FlagError(self._failure(flag, spelling, str(error))) from None
        if self.later is not None:
            raise self.later

    def _value(self, flag: Flag, spelling: str, rest: Iterator[str]) -> None:
        texts = list(itertools.islice(rest, 2 if flag.hint2 else 1))
        if len(texts) < (2 if flag.hint2 else 1):
            raise ValueError("expected value for argument")
        self.parsed.read(flag, texts[0], spelling)

    def _act(self, flag: Flag) -> None:
        """llama.cpp does version, device and cache lists at once, help and completion after the whole line."""
        if flag.action == "version":
            raise VersionRequested(version_text())
        if flag.action == "list-devices":
            raise ListDevicesRequested()
        if flag.action == "cache-list":
            raise CacheListRequested()
        if flag.action == "help":
            self.later = HelpRequested(help_text())
        else:
            self.later = self.later or CompletionRequested(_COMPLETIONS[flag.action]())

    def _note_repetition(self, flag: Flag, spelling: str) -> None:
        collects = flag.mode == "append"
        if flag.name in self.seen and flag.name != "--spec-type":
            outcome = "the values are joined" if collects else "only last value will be used"
            self.parsed.warn(
                f"DEPRECATED: argument '{spelling}' specified multiple times, "
                f"use comma-separated values instead ({outcome})"
            )
        self.seen.add(flag.name)
        for name in flag.env_names:
            if name in self.env and not collects:
                self.parsed.warn(
                    f"{name} environment variable is set, but will be overwritten by command line argument {spelling}"
                )

    def _cure(self, given: str) -> str:
        """A second line for the commonest mistakes."""
        name, equals, text = given.partition("=")
        spelling = name.replace("_", "-") if name.startswith("--") else name
        if equals and spelling in self.table and self.table[spelling][0].takes_value:
            return f"\na value is the next argument: {spelling} {text}"
        match = re.fullmatch(r"(-[a-zA-Z]+)(\d+)", given)
        if match and match[1] in self.table and self.table[match[1]][0].takes_value:
            return f"\na value is the next argument: {match[1]} {match[2]}"
        shown = [spelled for spelled, (flag, _) in self.table.items() if not flag.hidden]
        close = difflib.get_close_matches(spelling, shown, n=1, cutoff=0.8) if given.startswith("--") else []
        return f"\ndid you mean {close[0]}?" if close else ""

    def _failure(self, flag: Flag, spelling: str, words: str) -> str:
        head = f'error while handling argument "{spelling}": {words}'
        if words.startswith("not supported: "):
            return head
        return f"{head}\n\nusage:\n{flag_help(flag)}\n\nto show complete usage, run with -h"
