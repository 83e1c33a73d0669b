"""What parsing a command line can end in besides a configuration."""

from __future__ import annotations


class FlagError(Exception):
    """A flag, environment variable or config file cannot be used; `str` is what to print (to stderr, exit 1)."""


class ActionRequested(Exception):
    """A flag that asks for something else than serving. `text` is to be printed (to stdout, exit 0); it is empty
    where the action needs more than the flag table (`cache-list`, `list-devices`)."""

    action = ""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text


class HelpRequested(ActionRequested):
    """`--help`."""

    action = "help"


class VersionRequested(ActionRequested):
    """`--version`. llama-server prints it to stderr."""

    action = "version"


class CompletionRequested(ActionRequested):
    """`--completion-bash` and kin."""

    action = "completion"


class CacheListRequested(ActionRequested):
    """`--cache-list`: the caller lists the models on disk."""

    action = "cache-list"


class ListDevicesRequested(ActionRequested):
    """`--list-devices`: the caller lists the GPUs."""

    action = "list-devices"
