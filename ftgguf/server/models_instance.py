"""One model of router mode: what starts it, what a started one offers, and the state it is in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import ASGIApp

from ftgguf.engine.messages import Loading
from ftgguf.server.models_catalog import Source
from ftgguf.server.models_memory import Need


class Engine(Protocol):
    """What the pool needs of an engine client."""

    state: str
    loading: Loading

    def refuse(self, reason: str = ...) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def wait_ready(self) -> Any: ...
    async def wait_progress(self) -> Loading: ...


class Prepared(Protocol):
    """A model that is ready to be started: resolved, its header read, its memory estimated."""

    @property
    def need(self) -> Need: ...
    def fits_gpu(self, free: int | None) -> bool:
        """Whether what it needs of its GPU is among `free` bytes of it (None: nobody can say how many are free)."""

    async def start(self, room: int) -> Started:
        """Start its engine, which may take `room` bytes of host memory; returns before it is ready."""


@dataclass(slots=True)
class Started:
    """A model whose engine was started."""

    engine: Engine
    app: Callable[[], ASGIApp]
    """Its application, once the engine is ready."""
    n_ctx: Callable[[], int]
    info: Callable[[], dict[str, Any]]
    granted: int
    """Bytes of host memory that it may take."""
    close: Callable[[], None]
    vram: Callable[[], int] = lambda: 0
    """Bytes of device memory that it holds."""
    limit: int = 0
    """Tokens that its context can be made to hold by loading it again."""
    state: Any = None
    gpu: Callable[[], str] = lambda: ""
    """The GPU that it holds memory of (CUDA0 ...); empty: none."""


Prepare = Callable[[Source, int, Mapping[str, int]], Awaitable[Prepared]]
"""(source, context wanted by a request or 0, bytes that loaded models hold of each GPU) -> the model, ready to be
started. Raises ApiError."""


@dataclass(eq=False)
class Instance:
    """A model of the catalog, loaded or not. `status` is llama-server's: unloaded, loading, loaded, sleeping."""

    source: Source
    keep_alive: float
    status: str = "unloaded"
    started: Started | None = None
    app: ASGIApp | None = None
    busy: int = 0
    """Requests that run on it or wait for it."""
    wanted: bool = False
    """Asked for by /models/load, without a request."""
    context: int = 0
    """The largest num_ctx that a request wanted."""
    last_used: float = field(default_factory=time.time)
    failure: str = ""
    task: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    leaving: bool = False
    """To be unloaded as soon as its requests have ended."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def ready(self) -> bool:
        return self.app is not None and self.started is not None

    @property
    def shown(self) -> str:
        """`status`, with the sleep of llama-server's sleep mode."""
        asleep = self.started is not None and self.started.engine.state == "sleeping"
        return "sleeping" if self.status == "loaded" and asleep else self.status

    def expires(self) -> float | None:
        """When it goes, in seconds since 1970; None for never."""
        if self.leaving:
            return 0.0
        return None if self.keep_alive < 0 else (time.time() if self.busy else self.last_used) + self.keep_alive
