"""From any kind of name to a local GGUF file: what a name means, where it comes from, and getting it there.

The order for a name without further marks: a file of that name, a built-in model, a model of our store, of Ollama's
store or of the Hugging Face cache, and only then the network.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ftgguf.flags.config import ModelConfig, ServerConfig
from ftgguf.gguf import open_gguf
from ftgguf.pull.client import NetOptions
from ftgguf.pull.demo import NEEDED_BYTES, DemoError, resolve_demo, resolve_stories
from ftgguf.pull.errors import NameResolutionError, NotFound, Offline, PullError, Unreachable
from ftgguf.pull.hub import local_hub, pull_hub
from ftgguf.pull.layers import NO_EXTRAS, Extras, apply_adapters, apply_params, apply_template, read_extras
from ftgguf.pull.names import (
    BlobName,
    BuiltinName,
    HubName,
    Name,
    OllamaName,
    PathName,
    UrlName,
    parse,
    parse_hub,
    parse_model_url,
)
from ftgguf.pull.progress import Bars
from ftgguf.pull.registry import pull_ollama
from ftgguf.pull.session import Event, Report, Session, silent
from ftgguf.pull.store import Entry, Store
from ftgguf.pull.web import pull_url

Progress = Callable[[str, float], None]
"""(stage, 0..1)."""


ONLY_OLLAMA = "only Ollama's API (/api/chat, /api/generate) applies it"
"""How a server's warning ends about what `run` applies as well."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model that is on this disk. `origin` says in words where it came from; `entry` is its place in a store."""

    path: Path
    name: Name
    origin: str
    entry: Entry | None = None


def resolve_model(name: str | ModelConfig | ServerConfig, progress: Progress | None = None) -> Path:
    """The GGUF file behind a name, `-m`'s argument, or a configuration; fetched if it must be.

    Raises NameResolutionError (PullError is one) or DemoError, one line each.
    """
    model = name.model if isinstance(name, ServerConfig) else name
    model = ModelConfig(path=model) if isinstance(model, str) else model
    with open_session(model, _report(progress)) as session:
        return locate(session, name_of(model)).path


def resolve_with_bar(name: str) -> Path:
    """`resolve_model` with a progress bar on stderr where that is a terminal, else lines."""
    bars = Bars()
    try:
        with open_session(ModelConfig(), bars) as session:
            return locate(session, meaning(name)).path
    finally:
        bars.close()


def resolve_config(
    config: ServerConfig, progress: Progress | None = None, report: Report | None = None
) -> ServerConfig:
    """`config` with `model.path` naming a local file, whichever of `-m`, `-hf`, `-mu` was given.

    Ids stay llama-server's: the first alias, else the Hub's repository as given, else the path; a model named by
    `-m NAME` gets its name as alias. A registry model's parameters fill fields that were left open, and its chat
    template is chosen (see `layers`). Without a model (router mode) the configuration is returned as it is.

    `progress` takes (stage, fraction); `report`, if given, the events themselves. Raises NameResolutionError,
    DemoError.
    """
    return resolve_served(config, progress, report)[0]


def resolve_served(
    config: ServerConfig, progress: Progress | None = None, report: Report | None = None
) -> tuple[ServerConfig, Extras]:
    """`resolve_config`, and the small layers that came with the model (none with a plain file)."""
    if config.router:
        return config, NO_EXTRAS
    model = config.model
    with open_session(model, report or _report(progress)) as session:
        found = locate(session, name_of(model))
        extras = read_extras(session.store, found.entry) if found.entry is not None else None
    aliases = model.aliases
    if not aliases and not model.hf_repo and isinstance(found.name, OllamaName | HubName | BuiltinName):
        aliases = (str(found.name),)
    reasons = (*config.reasons, f"model.path: {found.name} is {found.origin}")
    config = replace(config, model=replace(model, path=str(found.path), aliases=aliases), reasons=reasons)
    if extras is None:
        return config, NO_EXTRAS
    return _with_extras(config, extras, str(found.name)), extras


def _with_extras(config: ServerConfig, extras: Extras, name: str) -> ServerConfig:
    """What came with a registry model, where it has a place in the configuration; the rest is said."""
    config = apply_adapters(apply_params(config, extras.params, name), extras.adapters, name)
    if extras.template or extras.config.renderer:
        with open_gguf(config.model.path) as gguf:
            has_jinja = "tokenizer.chat_template" in gguf.metadata
        config = apply_template(config, extras, has_jinja, name)
    if extras.system or extras.messages:
        what = "a default system prompt" if extras.system else "example messages"
        note = f"{name} comes with {what}: {ONLY_OLLAMA}"
        config = replace(config, warnings=(*config.warnings, note))
    return config


def open_session(model: ModelConfig, report: Report = silent, options: NetOptions | None = None) -> Session:
    """A session by the configuration's store, token and `--offline`."""
    options = options or NetOptions(offline=model.offline)
    return Session(Store(model.store or None), options, report, model.hf_token)


def name_of(model: ModelConfig) -> Name:
    """Which model a configuration names, by llama-server's order: `-hf`, `-mu`, `-m`. Raises NameResolutionError."""
    if model.docker_repo:
        raise NameResolutionError("models from Docker Hub are not supported: use -hf user/repo:quant")
    if model.hf_repo:
        return parse_hub(model.hf_repo, model.hf_file)
    if model.hf_file:
        raise NameResolutionError("--hf-file names a file in a repository: give --hf-repo user/repo with it")
    if model.url:
        return parse_model_url(model.url)
    return meaning(model.path)


def meaning(text: str) -> Name:
    """What `text` means on this machine: a file of that name comes before every other meaning."""
    path = Path(text).expanduser()
    try:
        if path.is_file():
            return PathName(text)
        is_folder = path.is_dir()
    except (OSError, ValueError):  # too long for a path, or a zero byte
        is_folder = False
    name = parse(text)
    inside = sorted(file.name for file in path.glob("*.gguf")) if is_folder else []
    if inside or (is_folder and isinstance(name, PathName)):
        there = ", ".join(inside[:8]) + (", ..." if len(inside) > 8 else "") if inside else "there is none"
        raise NameResolutionError(
            f"{text} is a folder: give the .gguf file (of a split model any shard) in it: {there}"
        )
    return name


def locate(session: Session, name: Name) -> Resolved:
    """The file behind a name; from the network only what is nowhere on this disk. Raises PullError, DemoError."""
    if isinstance(name, PathName):
        path = Path(name.path).expanduser()
        if not path.is_file():
            raise NotFound(f"{name}: no such file (the built-in models are 'demo' and 'stories')")
        return Resolved(path, name, "a file")
    if isinstance(name, BuiltinName):
        return Resolved(_builtin(name.name, session.report, session.options.offline), name, "built in")
    if isinstance(name, BlobName):
        found = session.store.find_blob(name.digest)
        if found is None:
            raise NotFound(f"{name} is not on this disk, and content without a name cannot be fetched: give the name")
        return Resolved(found, name, "a blob on this disk")
    return _stored(session, name) or _fetched(session, name)


def _stored(session: Session, name: OllamaName | HubName | UrlName) -> Resolved | None:
    """The model if a store or cache on this disk has it whole."""
    entry = session.store.get(name.stored if isinstance(name, UrlName) else name)
    if entry is not None:
        try:
            path = session.store.model_path(entry)
            owner = "the model store" if entry.owner == "ftgguf" else "Ollama's store"
            return Resolved(path, name, f"in {owner}", entry)
        except NotFound:
            session.say(f"{name} is on this disk in part: fetching what is missing")
    if isinstance(name, HubName):
        path_in_cache = local_hub(name, first_choice_only=True)
        if path_in_cache is not None:
            return Resolved(path_in_cache, name, "in the Hugging Face cache")
    return None


def _fetched(session: Session, name: OllamaName | HubName | UrlName) -> Resolved:
    try:
        entry = fetch(session, name)
    except (Offline, Unreachable) as error:
        cached = local_hub(name, first_choice_only=False) if isinstance(name, HubName) else None
        if cached is not None:
            session.say(f"{error}; using {cached.name} of the Hugging Face cache")
            return Resolved(cached, name, "in the Hugging Face cache")
        if isinstance(error, Offline):
            raise Offline(f"{name} is not on this disk, and --offline forbids fetching it{_others(session)}") from None
        raise type(error)(f"{name} is not on this disk, and {error}") from None
    return Resolved(session.store.model_path(entry), name, "pulled", entry)


def fetch(session: Session, name: OllamaName | HubName | UrlName) -> Entry:
    """Pull `name`, or what is missing or newer of it, whether or not it is on this disk. Raises PullError."""
    if isinstance(name, OllamaName):
        return pull_ollama(session, name)
    return pull_hub(session, name) if isinstance(name, HubName) else pull_url(session, name)


def _others(session: Session) -> str:
    names = [str(entry.name) for entry in session.store.entries()[:8]]
    return f"; there are {', '.join(names)}" if names else ""


def _builtin(name: str, report: Report, offline: bool) -> Path:
    if name == "stories":
        return resolve_stories()
    sizes = {"download": 92_900_000, "unpack": 98_000_000, "upcycle": 248_000_000}

    def progress(stage: str, fraction: float) -> None:
        total = sizes.get(stage, NEEDED_BYTES)
        report(Event(f"{stage} demo", "", total, int(total * fraction)))

    return resolve_demo(progress, offline=offline)


def _report(progress: Progress | None) -> Report:
    if progress is None:
        return silent

    def report(event: Event) -> None:
        progress(event.status, min(1.0, event.completed / event.total) if event.total else 0.0)

    return report


def served_with_bar(config: ServerConfig) -> tuple[ServerConfig, Extras]:
    """`resolve_served` with a progress bar on stderr."""
    bars = Bars(sys.stderr)
    try:
        return resolve_served(config, report=bars)
    finally:
        bars.close()


def config_with_bar(config: ServerConfig) -> ServerConfig:
    """`resolve_config` with a progress bar on stderr."""
    return served_with_bar(config)[0]


__all__ = [
    "ONLY_OLLAMA",
    "DemoError",
    "NameResolutionError",
    "PullError",
    "Resolved",
    "config_with_bar",
    "fetch",
    "locate",
    "meaning",
    "name_of",
    "open_session",
    "resolve_config",
    "resolve_model",
    "resolve_served",
    "resolve_with_bar",
    "served_with_bar",
]
