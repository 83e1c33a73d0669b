"""Which models a front serves: the interface that Ollama's management routes see, and the front of one fixed model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftgguf.gguf import GGUFError
from ftgguf.pull.catalog import LocalModel, find_model, of_file
from ftgguf.pull.errors import NameResolutionError
from ftgguf.pull.store import Store
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.ollama_wire import same_name
from ftgguf.server.state import ServerState


@dataclass(frozen=True, slots=True)
class Running:
    """A loaded model. Sizes in bytes; `expires` seconds since 1970, None for never."""

    name: str
    model: LocalModel | None
    size: int
    size_vram: int
    context: int
    expires: float | None


class ModelHost(Protocol):
    """What a front has loaded and can load."""

    def running(self) -> list[Running]:
        """Loaded models, the latest used first."""

    def own(self) -> list[LocalModel]:
        """Models that are served beside those of the stores."""

    def find(self, name: str) -> LocalModel | None:
        """One of `own` by its name."""

    async def unload(self, name: str) -> bool:
        """Unload a model once its requests have ended; False if it is not loaded. Raises ApiError if it must stay."""

    def changed(self) -> None:
        """The model store has changed; called from any thread."""


def running_model(name: str, model: LocalModel | None, state: ServerState, expires: float | None) -> Running:
    """`Running` from what the engine told when it was ready."""
    info = state.info
    kv = int(info.get("kv_bytes", 0))
    size = int(info.get("size", 0)) + kv
    on_gpu = sum(info.get("vram", {}).values())
    return Running(name, model, max(size, on_gpu), on_gpu, state.n_ctx, expires)


class FixedModel:
    """The host of a server that was started with one model."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        path = state.config.model.path
        self.names = tuple(dict.fromkeys((state.name, *state.config.model.aliases, Path(path).stem)))
        """Its id, its aliases, and the file's name without folder and suffix."""
        self._model = _local(state)

    def running(self) -> list[Running]:
        if self._state.engine.state != "ready":
            return []
        return [running_model(self._state.name, self._model, self._state, None)]

    def own(self) -> list[LocalModel]:
        return [self._model] if self._model is not None else []

    def find(self, name: str) -> LocalModel | None:
        return self._model if any(same_name(name, own) for own in self.names) else None

    async def unload(self, name: str) -> bool:
        if not any(same_name(name, own) for own in self.names):
            return False
        raise InvalidRequest(f"{name} is what this server was started with: end the server first")

    def changed(self) -> None:
        pass


def _local(state: ServerState) -> LocalModel | None:
    """The model as the store has it, with what came with it, if it is from there; else its file. None for a script."""
    path, store = Path(state.config.model.path), Store(state.config.model.store or None)
    with contextlib.suppress(NameResolutionError, OSError):
        found = find_model(store, state.name)
        if found is not None and found.path(store) == path:
            return found
    with contextlib.suppress(NameResolutionError, GGUFError):
        return of_file(path, state.name)
    return None
