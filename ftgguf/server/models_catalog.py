"""The models of router mode: sections of --models-preset, files of --models-dir, the store's models, the built-in ones.

Only these can be named in a request: a request's `model` is looked up here and never opened as a path or fetched.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ftgguf.flags import FlagError, parse_server
from ftgguf.flags.config import ServerConfig
from ftgguf.flags.errors import ActionRequested
from ftgguf.flags.ini import DEFAULT, read_ini, section_args
from ftgguf.gguf import GGUFError
from ftgguf.pull.catalog import LocalModel, local_models, of_file
from ftgguf.pull.errors import NameResolutionError
from ftgguf.pull.names import HubName
from ftgguf.pull.store import Store
from ftgguf.server.ollama_wire import plain_name

log = logging.getLogger("ftgguf.server")

STOP_TIMEOUT_S = 10.0
"""llama-server's `stop-timeout` where no preset gives one."""
RELOAD_S = 1.0
"""A name that is not known has the disk looked at again, this often at most."""
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")
_NAMES_MODEL = ("model", "m", "hf-repo", "hf", "hfr", "model-url", "mu", "LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO")
"""Keys of a section that say which model it is."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be loaded. `kind` is llama-server's `source`: `preset`, `models_dir`, `cache`."""

    name: str
    kind: str
    args: tuple[str, ...]
    """The server's arguments for it, without the router's own."""
    local: LocalModel | None = None
    """None for a preset whose model is not on this disk yet."""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    preset: str = ""
    """Its section, as text."""
    load_on_startup: bool = False
    stop_timeout: float = STOP_TIMEOUT_S
    """Seconds after which requests that still run, and then the engine's process, are ended when it is unloaded."""


class Catalog:
    """Read from the disk by `reload`; look-ups are cheap."""

    def __init__(self, config: ServerConfig, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._config = config
        self._argv = tuple(argv)
        self._env = dict(env)
        self._sources: dict[str, Source] = {}
        self._names: dict[str, str] = {}
        self._read_at = 0.0
        self.outdated = False
        """The store was changed since it was read."""
        self._lock = threading.Lock()

    def sources(self) -> list[Source]:
        return list(self._sources.values())

    def find(self, name: str) -> Source | None:
        """By name or alias as given, else as Ollama compares names."""
        found = self._sources.get(name) or self._sources.get(self._names.get(plain_name(name), ""))
        return found

    def stale(self) -> bool:
        """Whether the disk may be looked at again for a name that is not known."""
        return time.monotonic() - self._read_at >= RELOAD_S

    def reload(self) -> None:
        """Look at the disk. Raises FlagError for a preset file that cannot be read, NameResolutionError."""
        with self._lock:
            self.outdated = False
            found: dict[str, Source] = {}
            for model in local_models(Store(self._config.model.store or None)):
                found[model.name] = Source(model.name, "cache", ("-m", model.name), model)
            if self._config.model.models_dir:
                for name, path in models_in(Path(self._config.model.models_dir)):
                    args = ("-m", str(path.absolute()))
                    try:
                        found[name] = Source(name, "models_dir", args, of_file(path, name))
                    except (NameResolutionError, GGUFError) as error:
                        log.warning("%s: %s", path, error)
            if self._config.model.models_preset:
                self._apply_presets(found)
            self._names = _names(found)
            self._sources = found
            self._read_at = time.monotonic()

    def _apply_presets(self, found: dict[str, Source]) -> None:
        sections = read_ini(Path(self._config.model.models_preset))
        shared = {**sections.pop(DEFAULT, {}), **sections.pop("*", {})}
        common, timeout = tuple(section_args(shared)), _seconds(shared, STOP_TIMEOUT_S)
        for name, source in found.items():
            found[name] = replace(source, args=(*common, *source.args), stop_timeout=timeout)
        for name, section in sections.items():
            args = section_args(section)
            known = found.get(name)
            named = any(key in section for key in _NAMES_MODEL)
            base = known.args if known is not None and not named else (*common, *(() if named else ("-m", name)))
            found[name] = Source(
                name,
                "preset",
                (*base, *args),
                known.local if known is not None and not named else self._local(section, name),
                _listed(section.get("alias", section.get("a", ""))),
                _listed(section.get("tags", "")),
                "".join(f"{key} = {value}\n" for key, value in section.items()),
                section.get("load-on-startup", "").lower() in ("1", "true", "on", "yes", "enabled"),
                _seconds(section, timeout),
            )

    @staticmethod
    def _local(section: Mapping[str, str], name: str) -> LocalModel | None:
        path = section.get("model", section.get("m", section.get("LLAMA_ARG_MODEL", "")))
        try:
            return of_file(Path(path).expanduser(), name) if path and Path(path).expanduser().is_file() else None
        except (NameResolutionError, GGUFError):
            return None

    def config_of(self, source: Source) -> ServerConfig:
        """The configuration of a model's server: its own arguments, under those of the command line.

        Raises FlagError.
        """
        try:
            config = parse_server([*source.args, *self._argv], self._env)
        except ActionRequested as action:
            raise FlagError(f"error: --{action.action} cannot stand in a model's section") from None
        aliases = tuple(sorted({source.name, *source.aliases}, key=lambda alias: alias != source.name))
        warnings = tuple(w for w in config.warnings if not w.startswith("DEPRECATED: argument"))
        record = config.http.record
        if record:  # one file for each model
            path = Path(record)
            record = str(path.with_name(f"{path.stem}-{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)}{path.suffix}"))
        return replace(
            config,
            model=replace(config.model, aliases=aliases),
            http=replace(config.http, record=record),
            warnings=warnings,
        )


def models_in(folder: Path) -> list[tuple[str, Path]]:
    """(name, GGUF) of a models folder: its .gguf files, and one model for each folder in it; projectors left out."""
    found: list[tuple[str, Path]] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inside = [file for file in sorted(path.glob("*.gguf")) if _is_first(file)]
            if len(inside) > 1:
                log.warning("%s holds several models: %s is taken", path, inside[0].name)
            found += [(path.name, file) for file in inside[:1]]
        elif path.suffix == ".gguf" and _is_first(path):
            found.append((_SHARD.sub("", path.stem), path))
    return found


def _is_first(path: Path) -> bool:
    """Whether a file is a model's first (or only) one."""
    shard = _SHARD.search(path.stem)
    return "mmproj" not in path.name and (shard is None or int(shard[1]) == 1)


def _seconds(section: Mapping[str, str], default: float) -> float:
    """A section's `stop-timeout`. Raises FlagError."""
    text = section.get("stop-timeout", "")
    if not text:
        return default
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", text):
        raise FlagError(f"error: stop-timeout = {text} in a preset: give seconds, for example 10")
    return float(text)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _names(found: Mapping[str, Source]) -> dict[str, str]:
    """Other spellings -> name; a name wins over an alias. The Hub's host may be left out, as in llama-server's ids."""
    names: dict[str, str] = {}
    for name, source in found.items():
        names.setdefault(plain_name(name), name)
        if source.local is not None and source.local.entry is not None:
            stored = source.local.entry.name
            if isinstance(stored, HubName):
                names.setdefault(plain_name(str(stored).removeprefix("hf.co/")), name)
    for name, source in found.items():
        for alias in source.aliases:
            names.setdefault(plain_name(alias), name)
    return names
