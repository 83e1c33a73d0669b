"""What Ollama's management routes share: the store's manager, and pulls and creations as jobs with progress."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.flags.config import ServerConfig
from ftgguf.gguf import GGUFError
from ftgguf.pull.catalog import LocalModel, find_model
from ftgguf.pull.client import NetOptions
from ftgguf.pull.commands import event_json
from ftgguf.pull.errors import Cancelled, NameResolutionError, PullError
from ftgguf.pull.session import Event, Session
from ftgguf.pull.store import Store
from ftgguf.server.errors import ApiError, InvalidRequest, server_error
from ftgguf.server.generation import json_response
from ftgguf.server.models import ModelHost
from ftgguf.server.ollama_wire import line, not_found, stream_response

log = logging.getLogger("ftgguf.server")

MAX_JOBS = 4
"""Pulls and creations at once; more wait."""
INTERVAL_S = 0.06
"""Least time between two lines about the same layer, as in Ollama."""


@dataclass
class Manager:
    """What the management routes share. Disk and network work runs in its threads, never in the event loop."""

    config: ServerConfig
    host: ModelHost
    jobs: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MAX_JOBS))
    disk: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "store"))

    def store(self) -> Store:
        return Store(self.config.model.store or None)

    async def run(self, work: Callable[[], Any]) -> Any:
        """`work()` in the disk's thread, its errors as `ApiError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.disk, work)
        except (NameResolutionError, GGUFError, OSError) as error:
            raise api_error(error) from None

    def session(self, report: Callable[[Event], None], cancelled: Callable[[], bool], insecure: bool) -> Session:
        """A session that asks no host but the listed ones."""
        model = self.config.model
        options = NetOptions(offline=model.offline, insecure=insecure)
        return Session(self.store(), options, report, model.hf_token, model.pull_hosts, cancelled)

    def find(self, name: str) -> LocalModel:
        """A model by the name in a request. Raises ApiError (404), NameResolutionError."""
        found = self.host.find(name) or find_model(self.store(), name)
        if found is None:
            raise not_found(name)
        return found


def api_error(error: BaseException) -> ApiError:
    """An error of the model store as an HTTP one; texts never hold this machine's paths (see `pull.errors`)."""
    if isinstance(error, PullError):
        kind = {404: "not_found_error", 401: "authentication_error", 403: "permission_error"}.get(error.status)
        return ApiError(str(error), kind or "server_error", error.status)
    if isinstance(error, NameResolutionError):
        return InvalidRequest(str(error))
    if isinstance(error, GGUFError):
        return server_error(error.message)
    return server_error(f"the model store cannot be used: {getattr(error, 'strerror', None) or type(error).__name__}")


def manager_of(request: Request) -> Manager:
    found: Manager = request.app.state.manager
    return found


Work = Callable[[Callable[[Event], None], Callable[[], bool]], None]
"""`work(report, cancelled)`, run in a thread."""


class Job:
    """One pull or creation: events from its thread to the event loop, the reader's leaving back to it."""

    def __init__(self, manager: Manager, work: Work) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._gone = threading.Event()
        self._last: tuple[str, float] = ("", 0.0)
        self._manager = manager
        # a daemon: what a pull has on disk is good at any moment, so leaving need not wait for it
        threading.Thread(target=self._run, args=(work,), daemon=True, name="pull").start()

    def _run(self, work: Work) -> None:
        last: dict[str, Any] = {}
        try:
            with self._manager.jobs:
                self._report(None)
                work(self._report, self._gone.is_set)
        except (NameResolutionError, GGUFError, OSError) as error:
            last = {"error": api_error(error).message, "code": api_error(error).code}
        except ApiError as error:
            last = {"error": error.message, "code": error.code}
        except Exception:
            log.exception("a pull or creation failed")
            last = {"error": "internal error: the server's log has it", "code": 500}
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if last:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, last)
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)

    def _report(self, event: Event | None) -> None:
        """Pass an event on; raises Cancelled once nobody reads."""
        if self._gone.is_set():
            raise Cancelled("cancelled")
        if event is None:
            return
        if event.status == "success":
            self._manager.host.changed()
        at = time.monotonic()
        key, before = self._last
        whole = event.completed >= event.total
        if key == event.status and at - before < INTERVAL_S and not whole:
            return
        self._last = (event.status, at)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event_json(event))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Progress objects; an error is the last one, with its HTTP status as `code`. Leaving early cancels."""
        try:
            while (event := await self._queue.get()) is not None:
                yield event
        finally:
            self._gone.set()


async def job_response(manager: Manager, work: Work, stream: bool) -> Response:
    """Progress as lines, or only the last object. An error before the first line has its HTTP status."""
    events = Job(manager, work).events()
    if not stream:
        last: dict[str, Any] = {}
        async for event in events:
            if "error" in event:
                raise ApiError(event["error"], code=event["code"])
            last = event
        return json_response(last)
    first = await anext(events)
    if "error" in first:
        raise ApiError(first["error"], code=first["code"])
    return stream_response(_lines(first, events))


async def _lines(first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    yield line(first)
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        async for event in events:
            yield line({"error": event["error"]} if "error" in event else event)
