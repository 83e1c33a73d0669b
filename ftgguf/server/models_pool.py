"""Models on demand: one front, one engine process for each loaded model, as many as --models-max and memory allow.

A request leases its model: the model is loaded if it must be and stays while it is leased. Loads wait in one queue,
first come first served, one at a time. To make room the least recently used idle model is unloaded, never a busy one;
where only busy ones are left, the head of the queue waits. An idle model goes after its keep-alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from ftgguf.engine.messages import Loading
from ftgguf.server.errors import ApiError, InvalidRequest, server_error, unavailable
from ftgguf.server.models_catalog import Source
from ftgguf.server.models_instance import Instance, Prepare, Prepared, Started
from ftgguf.server.models_memory import GIB, GPU_OVERHEAD, Memory, Need, shortage

log = logging.getLogger("ftgguf.server")

SETTLE_S = 0.5
"""After an unload the system may need this long to have the memory back."""
MAX_EVENTS = 1000
"""Events kept for a reader of /models/sse that does not read; the oldest go."""


class Pool:
    """All instances. Runs in one event loop."""

    def __init__(
        self, prepare: Prepare, most: int = 4, keep_alive: float = 300.0, memory: Memory | None = None
    ) -> None:
        self._prepare = prepare
        self._most = most
        self._keep_alive = keep_alive
        self.memory = memory or Memory()
        self._instances: dict[str, Instance] = {}
        self._turn = asyncio.Lock()  # fair: waiters get it in the order of their asking
        self._freed = asyncio.Event()
        self._readers: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._closed = False

    # -------------------------------------------------------------------------------------------------- looking

    def instance(self, source: Source) -> Instance:
        """The instance of a catalog's model."""
        found = self._instances.get(source.name)
        if found is None:
            found = self._instances[source.name] = Instance(source, self._keep_alive)
        elif found.status == "unloaded":
            found.source = source
        return found

    def known(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def loaded(self) -> list[Instance]:
        """Loaded and loading models, the latest used first."""
        there = [each for each in self._instances.values() if each.status != "unloaded"]
        return sorted(there, key=lambda each: (-each.busy, -each.last_used))

    # ------------------------------------------------------------------------------------------------- leasing

    @contextlib.asynccontextmanager
    async def lease(
        self, source: Source, autoload: bool = True, keep_alive: float | None = None, context: int = 0
    ) -> AsyncIterator[tuple[Instance, int]]:
        """(the model, loaded; nanoseconds that the request waited for that). Raises ApiError.

        `keep_alive`: how long the model stays afterwards, negative for ever, None as before.
        """
        instance = self.instance(source)
        if not autoload and not instance.ready:
            raise InvalidRequest("model is not loaded")
        began, waited = time.monotonic_ns(), False
        instance.busy += 1
        instance.leaving = False
        self._cancel_timer(instance)
        try:
            while not await self._usable(instance, context):
                waited = True
                await asyncio.shield(self._loading(instance))
            yield instance, time.monotonic_ns() - began if waited else 0
        finally:
            instance.busy -= 1
            instance.last_used = time.time()
            if keep_alive is not None:
                instance.keep_alive = keep_alive
            self._released(instance)

    async def _usable(self, instance: Instance, context: int) -> bool:
        """Whether the model runs as a request needs it; a model with too small a context is unloaded first."""
        if self._closed:
            raise unavailable("the server is shutting down")
        if instance.ending is not None:
            await asyncio.shield(instance.ending)
        if instance.started is None or not instance.ready:
            instance.context = max(instance.context, context)
            return False
        if instance.started.engine.state == "failed":
            await self._end(instance)
            return False
        if instance.started.engine.state == "loading":  # the engine process died and is being started again
            await instance.started.engine.wait_ready()
        wanted, n_ctx = min(context, instance.started.limit), instance.started.n_ctx()
        if wanted > max(n_ctx, instance.context) and instance.busy == 1:
            instance.context = wanted
            await self._end(instance)
            return False
        return True

    def _loading(self, instance: Instance) -> asyncio.Task[None]:
        if instance.task is None or instance.task.done():
            instance.task = asyncio.create_task(self._load(instance), name=f"load {instance.name}")
            instance.task.add_done_callback(_seen)
        return instance.task

    def load(self, source: Source) -> asyncio.Task[None]:
        """Begin to load a model that no request waits for."""
        instance = self.instance(source)
        instance.wanted = True
        if instance.status == "unloaded":
            self._set(instance, "loading")
        return self._loading(instance)

    async def _load(self, instance: Instance) -> None:
        try:
            async with self._turn:
                if instance.ending is not None:
                    await asyncio.shield(instance.ending)
                if instance.ready or self._closed or not (instance.busy or instance.wanted):
                    return
                await self._load_now(instance)
        except ApiError as error:
            instance.failure = error.message
            log.error("model %s: %s", instance.name, error.message)
            raise
        finally:
            instance.wanted = False
            if not instance.ready and instance.status == "loading":
                self._set(instance, "unloaded", exit_code=1 if instance.failure else 0)
            self._released(instance)
            self._freed.set()

    async def _load_now(self, instance: Instance) -> None:
        instance.failure = ""
        self._set(instance, "loading")
        prepared = await self._prepare(instance.source, instance.context, self._held())
        room = await self._make_room(instance, prepared)
        if room is None:
            return
        started = instance.started = await prepared.start(room)
        began = time.monotonic()
        await started.engine.start()
        try:
            while started.engine.state == "loading":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(started.engine.wait_progress(), 0.5)
                self.publish("status_change", instance.name, _progress(started.engine.loading))
            await started.engine.wait_ready()
            if prepared.need.gpu and not started.vram():  # the engine chose the CPU after all
                started.granted = max(started.granted, prepared.need.on_cpu)
        except ApiError as error:
            await self._end(instance, "loading")
            raise server_error(f"model name={instance.name} failed to load: {error.message}") from None
        except BaseException:
            await self._end(instance, "loading")
            raise
        instance.app = started.app()
        instance.last_used = time.time()
        log.info("model %s loaded in %.1f s", instance.name, time.monotonic() - began)
        self._set(instance, "loaded", info=started.info())

    # ------------------------------------------------------------------------------------------------- making room

    def _others(self, instance: Instance) -> list[Instance]:
        return [each for each in self._instances.values() if each is not instance and each.started is not None]

    def _held(self) -> dict[str, int]:
        """Bytes of each GPU that loaded models hold."""
        held: dict[str, int] = {}
        for each in self._instances.values():
            if each.started is not None and (gpu := each.started.gpu()):
                held[gpu] = held.get(gpu, 0) + each.started.vram()
        return held

    async def _make_room(self, instance: Instance, prepared: Prepared) -> int | None:
        """Bytes of host memory that the model may take, once it fits there and on its GPU; unloads idle models. None:
        nobody waits for it any more.

        Host memory and the GPU's are counted apart: only models on the GPU go for what another one needs of it (an
        expert cache takes all that is free, so there models take turns unless --vram-budget shares it out), and
        models that have nearly all of theirs on a GPU stay where others can give the host memory that is missing.
        Raises ApiError if the model will never fit.
        """
        need, unloaded_at, freed = prepared.need, 0.0, 0
        first = self._gpu_free(need)
        while True:
            self._freed.clear()
            if not (instance.busy or instance.wanted):
                return None
            others = self._others(instance)
            room = self.memory.room(sum(_granted(each) for each in others))
            full = 0 < self._most <= len(others)
            on_gpu = [each for each in others if need.gpu and each.started is not None
                      and each.started.gpu() == need.gpu]  # fmt: skip
            free = self._gpu_free(need)
            if free is not None and first is not None:  # the driver may need a moment to have it back
                free = max(free, first + freed)
            crowded = bool(on_gpu) and not prepared.fits_gpu(free)
            if not full and not crowded and need.total <= room:
                return room
            candidates = [each for each in (on_gpu if crowded else others) if each.busy == 0 and each.ending is None]
            if not full and not crowded:
                candidates = _worth_unloading(candidates, need.total - room)
            if candidates:
                victim = min(candidates, key=lambda each: each.last_used)
                why = (
                    f"{need.device / GIB:.1f} GiB of {need.gpu}" if crowded else f"{need.total / GIB:.1f} GiB of memory"
                )
                log.info("model %s is unloaded to make room for %s (%s)", victim.name, instance.name,
                         f"{self._most} models at most" if full else why)  # fmt: skip
                freed += victim.started.vram() if victim.started is not None and victim in on_gpu else 0
                await self._end(victim)
                unloaded_at = time.monotonic()
            elif others:
                await self._freed.wait()
            elif time.monotonic() - unloaded_at < SETTLE_S:
                await asyncio.sleep(0.05)
            else:
                raise unavailable(shortage(instance.name, need, room, self.memory))

    def _gpu_free(self, need: Need) -> int | None:
        return self.memory.gpu_free(need.gpu) if need.gpu else None

    # ------------------------------------------------------------------------------------------------- unloading

    def _released(self, instance: Instance) -> None:
        """A lease or a load has ended."""
        if instance.busy == 0:
            self._freed.set()
            if instance.ready and not self._closed:
                self._cancel_timer(instance)
                if instance.leaving or instance.keep_alive == 0:
                    self._end_soon(instance)
                elif instance.keep_alive > 0:
                    loop = asyncio.get_running_loop()
                    instance.timer = loop.call_later(instance.keep_alive, self._expired, instance)

    def _expired(self, instance: Instance) -> None:
        if instance.busy == 0:
            log.info("model %s was not used for %.0f s: unloaded", instance.name, instance.keep_alive)
            self._end_soon(instance)

    def _end_soon(self, instance: Instance) -> None:
        if instance.ending is None:
            instance.ending = asyncio.create_task(self._end_task(instance), name=f"unload {instance.name}")

    async def _end_task(self, instance: Instance) -> None:
        try:
            await self._end(instance)
        finally:
            instance.ending = None

    @staticmethod
    def _cancel_timer(instance: Instance) -> None:
        if instance.timer is not None:
            instance.timer.cancel()
            instance.timer = None

    async def _end(self, instance: Instance, status: str = "unloaded") -> None:
        """End the engine; the model is unloaded when this returns. `status`: what it is shown as from then on."""
        started, instance.app = instance.started, None
        self._cancel_timer(instance)
        if started is not None:
            await started.engine.stop()
            started.close()
            instance.started = None
        instance.leaving = False
        instance.keep_alive = self._keep_alive
        if instance.status != status:
            self._set(instance, status, exit_code=0)
        self._freed.set()

    async def unload(self, name: str, wait: bool = True, cut: bool = False) -> bool:
        """Unload a model once its requests have ended; False if it is not loaded. `wait`: until it is gone; `cut`:
        requests that still run after the model's stop-timeout are ended."""
        instance = self._instances.get(name)
        if instance is None or instance.status == "unloaded":
            return False
        instance.wanted = False
        if instance.ready and instance.busy == 0:
            self._end_soon(instance)
        else:
            instance.leaving = True
            instance.keep_alive = 0
            if cut:
                loop = asyncio.get_running_loop()
                loop.call_later(instance.source.stop_timeout, self._cut, instance, instance.started)
        while wait and (instance.status != "unloaded" or instance.ending is not None):
            if instance.ending is not None:
                await asyncio.shield(instance.ending)
            else:
                await asyncio.sleep(0.02)
        return True

    @staticmethod
    def _cut(instance: Instance, started: Started | None) -> None:
        if instance.leaving and started is not None and instance.started is started:
            log.warning("model %s: requests are ended, %g s after it was told to go", instance.name,
                        instance.source.stop_timeout)  # fmt: skip
            started.engine.refuse("the model was unloaded")

    def refuse(self) -> None:
        """The server is about to stop: running requests end in an error now, new ones are refused."""
        self._closed = True
        for instance in self._instances.values():
            if instance.started is not None:
                instance.started.engine.refuse()
        self._tell(None)

    async def close(self) -> None:
        """Unload everything, whatever runs."""
        self._closed = True
        for instance in self._instances.values():
            if instance.task is not None:
                instance.task.cancel()
            self._cancel_timer(instance)
        await asyncio.gather(*(self._end(each) for each in self._instances.values()), return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- telling

    def _set(self, instance: Instance, status: str, **data: Any) -> None:
        instance.status = status
        self.publish("status_change", instance.name, {"status": status, **data})

    def publish(self, event: str, model: str, data: dict[str, Any] | None = None) -> None:
        """Tell the readers of /models/sse."""
        message: dict[str, Any] = {"model": model, "event": event}
        if data is not None:
            message["data"] = data
        self._tell(message)

    def _tell(self, message: dict[str, Any] | None) -> None:
        for queue in self._readers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(message)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What is published from now on, until the server is about to stop."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(MAX_EVENTS)
        self._readers.add(queue)
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._readers.discard(queue)


def _granted(instance: Instance) -> int:
    return 0 if instance.started is None else instance.started.granted


def _worth_unloading(idle: list[Instance], missing: int) -> list[Instance]:
    """Those of `idle` that give `missing` bytes of host memory together without the ones that have next to nothing of
    it besides an engine's own; all of them where that is not enough."""
    heavy = [each for each in idle if _granted(each) > GPU_OVERHEAD]
    return heavy if sum(map(_granted, heavy)) >= missing else idle


def _progress(loading: Loading) -> dict[str, Any]:
    return {"status": "loading", "progress": {"stage": loading.stage, "value": round(loading.fraction, 4)}}


def _seen(task: asyncio.Task[None]) -> None:
    """Failures are told to those who wait; none of them may be left."""
    if not task.cancelled():
        task.exception()
