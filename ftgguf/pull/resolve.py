"""Which file does a model's name mean? `demo`, `stories`, or a path; and the progress bar while it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ftgguf.pull.demo import DemoError, resolve_demo, resolve_stories

Progress = Callable[[str, float], None]


class NameResolutionError(ValueError):
    """The name means nothing here: one line with the cause and the cure."""


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The GGUF file behind `name`. A file of that name in the working folder comes before the built-in names.

    Raises NameResolutionError, or DemoError when the demo model cannot be made.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise NameResolutionError(f"{name} is a folder: give the .gguf file (of a split model any shard) in it")
    if name == "stories":
        return resolve_stories()
    if name == "demo":
        return resolve_demo(progress)
    raise NameResolutionError(f"{name}: no such file (the built-in models are 'demo' and 'stories')")


def resolve_with_bar(name: str) -> Path:
    """`resolve_model` with a progress bar on stderr where that is a terminal, else a line for each stage."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(stage: str, fraction: float) -> None:
            if stage not in seen:
                seen.add(stage)
                print(f"{name}: {stage} ...", file=sys.stderr, flush=True)

        return resolve_model(name, line)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def bar(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)  # type: ignore[arg-type]

        return resolve_model(name, bar)


__all__ = ["DemoError", "NameResolutionError", "resolve_model", "resolve_with_bar"]
