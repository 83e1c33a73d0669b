"""One row of the flag table, and short constructors for the kinds of rows.

A row says everything about a flag: its spellings, environment name, how its value is read, which field of
`ServerConfig` it sets, and its tier:

- A: same effect as in llama-server.
- B: accepted; `note` says in one line what it does here.
- C: accepted, no effect; `note` says why. Warned about once.
- D: refused; `note` says what to use instead. A D row may have a parser and a field all the same: it is ready to be
  promoted by changing its tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Warn = Callable[[str], None]
Parser = Callable[[str, Warn], Any]
"""Reads a value; raises ValueError with the words to print; calls `Warn` for what is odd but accepted."""
Tier = Literal["A", "B", "C", "D"]
Group = Literal["common", "sampling", "speculative", "server", "ftgguf"]
Mode = Literal["set", "append"]


class Assignment(NamedTuple):
    """`path` is a dotted field of ServerConfig (or a key below a dict field); `append` extends a tuple."""

    path: str
    value: Any
    mode: Mode = "set"


class _Unset:
    """Takes a key out of a dict field again."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. Exactly one of `to`, `expand`, `action` says what it does (none for C, and for D without a field)."""

    names: tuple[str, ...]
    help: str
    to: str = ""
    expand: Callable[[Any], tuple[Assignment, ...]] | None = None
    action: str = ""
    mode: Mode = "set"
    no: tuple[str, ...] = ()
    env: str | None = None
    parse: Parser | None = None
    hint: str = ""
    hint2: str = ""
    """A second value (`--control-vector-layer-range START END`)."""
    const: Any = True
    """What a flag without a value sets."""
    tier: Tier = "A"
    note: str | Callable[[Any], str] = ""
    """For B, C and D; a callable gets the value and may return "" (nothing to say: the value is as in tier A)."""
    tier_off: Tier | None = None
    """Tier of the negated form, where it differs."""
    note_off: str = ""
    refuse: Callable[[Any], str] | None = None
    """Tier D for some values only: returns what to use instead, or ""."""
    group: Group = "common"
    shown: str | None = None
    """The default as help prints it; None: taken from the field."""
    completes: str = ""
    """A file pattern for shell completion, such as `*.gguf`."""
    hidden: bool = False
    """Not in --help (spellings llama-server dropped)."""

    @property
    def name(self) -> str:
        """The canonical spelling: the first long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    @property
    def takes_value(self) -> bool:
        return bool(self.hint)

    @property
    def is_switch(self) -> bool:
        """Has a negated form."""
        return bool(self.no)

    @property
    def env_names(self) -> tuple[str, ...]:
        """Environment names: `LLAMA_ARG_X`, and `LLAMA_ARG_NO_X` where there is a negated form."""
        if self.env is None:
            return ()
        negated = self.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
        return (self.env, negated) if self.no and negated != self.env else (self.env,)

    def assignments(self, value: Any) -> tuple[Assignment, ...]:
        """What `value` sets."""
        if self.expand is not None:
            return self.expand(value)
        return (Assignment(self.to, value, self.mode),) if self.to else ()

    def tier_of(self, value: Any) -> Tier:
        """The tier of the flag with this value."""
        if self.refuse is not None and self.refuse(value):
            return "D"
        if value is False and self.is_switch and self.tier_off is not None:
            return self.tier_off
        if self.tier == "D" and value is False and self.is_switch:
            return "A"  # asks for what is the case anyway
        return self.tier

    def note_of(self, value: Any) -> str:
        """The line that goes with `tier_of(value)`."""
        if self.refuse is not None and (words := self.refuse(value)):
            return words
        if value is False and self.is_switch and (self.tier_off is not None or self.tier == "D"):
            return self.note_off
        return self.note(value) if callable(self.note) else self.note


def void(*names: str, help: str, **kw: Any) -> Flag:
    """A flag without a value: given or not."""
    return Flag(names=names, help=help, **kw)


def switch(*names: str, no: tuple[str, ...], help: str, **kw: Any) -> Flag:
    """A flag with a negated form."""
    return Flag(names=names, no=no, help=help, **kw)


def value(*names: str, hint: str, parse: Parser, help: str, **kw: Any) -> Flag:
    """A flag whose value is the next argument."""
    return Flag(names=names, hint=hint, parse=parse, help=help, **kw)


def grouped(group: Group, *flags: Flag) -> tuple[Flag, ...]:
    """`flags` in one group of the help text."""
    return tuple(replace(flag, group=group) for flag in flags)
