"""From a catalog's model to a started engine: what happens between a request's name and the pool's `Started`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.types import ASGIApp

from ftgguf.chat.template import ChatTemplateError
from ftgguf.flags import FlagError
from ftgguf.flags.config import ServerConfig
from ftgguf.gguf import GGUFError, GGUFFile
from ftgguf.models.config import ModelError
from ftgguf.pull.demo import DemoError
from ftgguf.pull.errors import NameResolutionError
from ftgguf.pull.layers import Extras
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.pull.resolve import resolve_served
from ftgguf.server.app import model_app
from ftgguf.server.errors import server_error
from ftgguf.server.models_catalog import Catalog, Source
from ftgguf.server.models_gpu import fits_beside
from ftgguf.server.models_instance import Started
from ftgguf.server.models_memory import Memory, Need, estimate, with_layout
from ftgguf.server.process import make_state
from ftgguf.server.startup import no_gpu, template_text
from ftgguf.server.state import ServerState

log = logging.getLogger("ftgguf.server")

T = TypeVar("T")


class Loader:
    """Resolves, reads headers, loads vocabularies; all of it in one thread, so that the front stays responsive."""

    def __init__(self, catalog: Catalog, memory: Memory) -> None:
        self._catalog = catalog
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, "load")

    async def run(self, name: str, work: Callable[[], T]) -> T:
        """`work()` in the thread; what is wrong with the model becomes an `ApiError` with one line."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except GGUFError as error:
            reason = error.message
        except (
            *(FlagError, NameResolutionError, DemoError, ModelError, ChatTemplateError, ValueError, OSError),
            MemoryError,
        ) as error:
            reason = str(error).removeprefix("error: ")
        raise server_error(f"model name={name} failed to load: {reason}")

    async def prepare(self, source: Source, context: int, held: Mapping[str, int]) -> LoadPlan:
        """See models_instance.Prepare."""
        return await self.run(source.name, lambda: self._prepare(source, context, held))

    def _prepare(self, source: Source, context: int, held: Mapping[str, int]) -> LoadPlan:
        config = self._catalog.config_of(source)
        if source.kind != "preset":  # what a request names is on this disk; the network is the administrator's to allow
            config = replace(config, model=replace(config.model, offline=True))
        config, extras = resolve_served(config)
        gguf = open_model(config.model.path, {o.key: o.value for o in config.model.override_kv})
        try:
            fixed = "context.size" in config.given
            slots = 1 if config.context.kv_unified else config.context.n_parallel
            config, need = estimate(config, gguf, self._memory, held, 0 if fixed else context * slots)
            limit = 0 if fixed else int(gguf.arch("context_length", 0))
        except BaseException:
            gguf.close()
            raise
        for warning in config.warnings:
            log.warning("model %s: %s", source.name, warning)
        for reason in config.reasons:
            log.debug("model %s: %s", source.name, reason)
        return LoadPlan(self, source, config, extras, gguf, need, limit)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class LoadPlan:
    """A model whose header was read."""

    loader: Loader
    source: Source
    config: ServerConfig
    extras: Extras
    gguf: GGUFFile
    need: Need
    limit: int
    """Tokens that a request may have the context grow to; 0 where -c fixed it."""

    def fits_gpu(self, free: int | None) -> bool:
        """See models_instance.Prepared."""
        return fits_beside(self.config, self.need.device, free)

    async def start(self, room: int) -> Started:
        """Load the vocabulary and start the engine's process."""
        config, granted = with_layout(self.config, self.need, room)
        state = await self.loader.run(self.source.name, lambda: make_state(config, self.gguf))
        state.engine.exit_grace_s = self.source.stop_timeout
        names = (self.source.name, *self.source.aliases)
        sleeper: list[asyncio.Task[None]] = []

        def app() -> ASGIApp:
            template = template_text(config, state.templates)
            log.info("model %s: %s, chat template: %s", self.source.name, state.info.get("device", ""), template)
            if missing := no_gpu(config, state.info):
                log.warning("model %s: %s", self.source.name, missing)
            idle = config.http.sleep_idle_seconds
            if idle > 0:
                sleeper.append(asyncio.create_task(state.engine.sleep_when_idle(idle)))
            return model_app(state, self.extras, names)

        def vram() -> int:
            return sum(state.info.get("vram", {}).values())

        def close() -> None:
            for task in sleeper:
                task.cancel()
            state.close()
            with contextlib.suppress(BufferError):
                self.gguf.close()

        def gpu() -> str:
            return str(state.info.get("device", "")) if vram() else ""

        return Started(
            state.engine, app, lambda: state.n_ctx, lambda: info(state), granted, close, vram, self.limit, state, gpu
        )


def info(state: ServerState) -> dict[str, object]:
    """What /models adds for a loaded model: llama-server's `meta`."""
    told = state.info
    names = {"n_vocab": "n_vocab", "n_ctx_train": "n_ctx_train", "n_embd": "n_embd", "n_params": "n_params"}
    meta: dict[str, object] = {key: told.get(name, 0) for key, name in names.items()}
    meta |= {"n_ctx": state.n_ctx, "size": told.get("size", 0), "ftype": told.get("file_type", "")}
    return {"meta": meta}
