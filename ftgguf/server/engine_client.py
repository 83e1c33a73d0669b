"""The front's end of the engine: starts the process, speaks its protocol, restarts it when it dies.

A frame is a little-endian uint32 length and that many bytes of msgpack. The first frame to the engine is its
configuration (`flags.config.encode_config`); all others are `ftgguf.engine.messages`. The engine is started with
`Popen` and an inherited socket, never forked, and exits when the socket closes.

One engine at a time: two expert pools do not fit, so a restart waits until the old process is gone.

With `sleep_when_idle` the engine is ended while nobody needs it (llama-server's sleep mode), and started by the next
request; its counters go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from ftgguf.engine import messages as m
from ftgguf.server.errors import ApiError, server_error, unavailable
from ftgguf.server.frames import FrameLink

log = logging.getLogger("ftgguf.server")

ENGINE_COMMAND = (sys.executable, "-m", "ftgguf.engine")
EXIT_GRACE_S = 10.0
"""How long a dead or closing engine may take to leave before it is killed."""
STOPPING = "the server is shutting down"
MAX_FAILED_STARTS = 3
"""Consecutive restarts that never became ready before the client gives up; the first start of all is not repeated,
since what fails then (a flag, a file, memory) fails again."""

Reply = m.Started | m.Progress | m.Delta | m.Finished | m.Embedded


class RequestStream:
    """The messages of one HTTP request's sequences, in order of arrival; use it as `async with`.

    Leaving the block cancels what has not ended. `ended` counts the sequences that have.
    """

    def __init__(self, client: EngineClient, requests: Sequence[m.Generate]) -> None:
        self._client = client
        self._live = {request.id for request in requests}
        self._queue: deque[Reply | m.Failed] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.on_exit: Callable[[], None] | None = None
        """Called once when the block is left."""

    @property
    def running(self) -> bool:
        """True until the last sequence's end was taken by `next`."""
        return bool(self._live) or bool(self._queue)

    def push(self, message: Reply | m.Failed) -> None:
        if isinstance(message, m.Finished | m.Embedded | m.Failed):
            self._live.discard(message.id)
        self._queue.append(message)
        _wake(self._waiter)

    async def next(self, timeout: float = 0.0) -> list[Reply]:
        """Everything that has arrived: at least one message, or none after `timeout` seconds (<= 0: no limit).

        A failed sequence raises its `ApiError`. One timer and one future for each wait: this runs for every token.
        """
        if not self._queue:
            loop = asyncio.get_running_loop()
            self._waiter = waiter = loop.create_future()
            timer = loop.call_later(timeout, _wake, waiter) if timeout > 0 else None
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        batch: list[Reply] = []
        while self._queue:
            message = self._queue[0]
            if isinstance(message, m.Failed):
                if batch:
                    break
                raise ApiError(message.message, message.type, message.code, **message.extra)
            batch.append(message)
            self._queue.popleft()
        return batch

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._client.release(self._live)
        self._live = set()
        if self.on_exit is not None:
            self.on_exit()
            self.on_exit = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class EngineClient:
    """Owns one engine process. `state` is `loading`, `ready`, `sleeping`, `failed` (gave up) or `stopped`."""

    def __init__(self, config: bytes, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.config = config
        self.command = list(command)
        self.state = "loading"
        self.ready: m.Ready | None = None
        self.loading = m.Loading(stage="starting", fraction=0.0)
        self.failure = ""
        self.restarts = 0
        self._refusing = False
        self.exit_grace_s = EXIT_GRACE_S
        self.last_used = time.monotonic()
        self._carried: dict[str, float] = {}
        """Counters of the engines that were put to sleep."""
        self._wake = asyncio.Event()
        self._ids = 0
        self._streams: dict[int, RequestStream] = {}
        self._controls: dict[int, asyncio.Future[m.Reply]] = {}
        self._link: FrameLink | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    # -------------------------------------------------------------------------------------------- life cycle

    async def start(self) -> None:
        """Start the engine and its supervisor; returns at once (see `wait_ready`)."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def wait_ready(self) -> m.Ready:
        """The engine's `Ready`; raises `ApiError` when it cannot start."""
        while self.state == "loading":
            await self._wait_change()
        if self.state != "ready" or self.ready is None:
            raise unavailable(self.failure or "the engine is stopped")
        return self.ready

    @property
    def busy(self) -> bool:
        """Something is asked of the engine right now."""
        return bool(self._streams or self._controls)

    async def sleep_when_idle(self, seconds: float) -> None:
        """Put the engine to sleep whenever nothing was asked of it for `seconds`; runs until it is cancelled."""
        while True:
            left = self.last_used + seconds - time.monotonic()
            if self.state != "ready" or self.busy or left > 0:
                await asyncio.sleep(min(max(left, 0.05), 1.0))
                continue
            self._carry(await self.control("metrics", reset=False))
            if self.busy or self.state != "ready":
                continue
            log.info("idle for %g s: the model is unloaded until the next request", seconds)
            self._wake.clear()
            self._set_state("sleeping")
            if self._link is not None:
                self._link.close()

    async def awake(self) -> None:
        """Start the engine again if it sleeps and wait until it is ready; raises `ApiError` if it cannot start."""
        if self.state != "sleeping":
            return
        self._wake.set()
        while self.state == "sleeping":
            await self._wait_change()
        await self.wait_ready()

    def _carry(self, values: dict[str, float]) -> None:
        self._carried = merge_counters(self._carried, values)

    async def metrics(self) -> dict[str, float]:
        """The counters of all engines so far; a sleeping one is not woken."""
        if self.state == "sleeping":
            return dict(self._carried)
        return merge_counters(self._carried, await self.control("metrics", reset=True))

    def refuse(self, reason: str = STOPPING) -> None:
        """The engine is about to be stopped: running requests end in an error now, and new ones are refused."""
        self._refusing = True
        running = set(self._streams)
        streams = dict(self._streams)
        self.release(running)
        for id, stream in streams.items():
            error = unavailable(reason)
            stream.push(m.Failed(id=id, code=error.code, type=error.type, message=error.message))

    async def stop(self) -> None:
        """Close the socket, wait for the process to leave, kill it if it does not."""
        self.state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        await self._end_process()
        self._fail_all(STOPPING)

    async def _supervise(self) -> None:
        failed_starts = 0
        while self.state != "stopped":
            link = await self._spawn()
            started = time.monotonic()
            await link.closed
            reason = self.failure or "the engine process ended unexpectedly; it is being restarted"
            if self.state == "sleeping":
                await self._end_process()
                await self._wake.wait()
                self.last_used = time.monotonic()
                self._set_state("loading")
                continue
            was_ready = self.state == "ready"
            failed_starts = 0 if was_ready else failed_starts + 1
            self._set_state("loading")
            self._fail_all(reason)
            await self._end_process()
            if self._refusing:  # a signal to the whole process group: the engine left before us
                return
            code = self._process.returncode if self._process else None
            if self.ready is None or failed_starts >= MAX_FAILED_STARTS:
                self.failure = self.failure or start_failure(code)
                if self.ready is not None:  # else whoever waits for the first start tells it
                    log.error("engine: %s", self.failure)
                self._set_state("failed")
                return
            self.restarts += 1
            log.error("engine process ended (code %s) after %.1f s: restarting it", code, time.monotonic() - started)
            self.failure = ""
            await asyncio.sleep(min(5.0, 0.1 * 4**failed_starts) if failed_starts else 0)

    async def _spawn(self) -> FrameLink:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen([*self.command, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()])
        finally:
            theirs.close()
        self.loading = m.Loading(stage="starting", fraction=0.0)
        link = self._link = await FrameLink.open(ours, lambda payload: self._dispatch(m.decode_to_front(payload)))
        self._send_frame(self.config)
        return link

    async def _end_process(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + self.exit_grace_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                log.error("engine process %d does not leave: killing it", process.pid)
                process.kill()
                deadline = float("inf")
            await asyncio.sleep(0.02)

    # -------------------------------------------------------------------------------------------- messages

    def _dispatch(self, message: m.ToFront) -> None:
        if isinstance(message, m.Delta | m.Started | m.Progress | m.Finished | m.Embedded | m.Failed):
            stream = self._streams.get(message.id)
            if stream is not None:
                stream.push(message)
            if isinstance(message, m.Finished | m.Embedded | m.Failed):
                self._streams.pop(message.id, None)
                self.last_used = time.monotonic()
        elif isinstance(message, m.Reply):
            future = self._controls.pop(message.id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, m.Ready):
            self.ready = message
            self._set_state("ready")
        elif isinstance(message, m.Loading):
            self.loading = message
            self._notify()
        else:
            self.failure = message.message
            if self.state == "ready" and self._link is not None:
                # its last words, but with a broken GPU a process may never get through its own end
                self._link.close()

    def _set_state(self, state: str) -> None:
        if self.state != "stopped":
            self.state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self) -> None:
        await self._changed.wait()

    async def wait_progress(self) -> m.Loading:
        """The next `Loading` (or the last one again when the state changes)."""
        await self._wait_change()
        return self.loading

    def _send_frame(self, payload: bytes) -> None:
        if self._link is None:
            raise unavailable("Loading model")
        self._link.send(payload)

    def _fail_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for id, stream in streams.items():
            stream.push(m.Failed(id=id, code=500, type="server_error", message=reason))
        controls, self._controls = self._controls, {}
        for future in controls.values():
            if not future.done():
                future.set_exception(server_error(reason))

    # -------------------------------------------------------------------------------------------- requests

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def open(self, requests: Sequence[m.Generate]) -> RequestStream:
        """Send `requests`; their messages arrive in the stream. 503 while there is no engine."""
        if self._refusing:
            raise unavailable(STOPPING)
        if self.state != "ready":
            raise unavailable("Loading model" if self.state == "loading" else self.failure or "the engine is stopped")
        self.last_used = time.monotonic()
        stream = RequestStream(self, requests)
        for request in requests:
            self._streams[request.id] = stream
            self._send_frame(m.encode(replace(request, prompt=()) if request.packed else request))
        return stream

    async def generate(self, request: m.Generate) -> AsyncIterator[Reply]:
        """The messages of one sequence up to its `Finished`; a failure raises `ApiError`. Close it to cancel."""
        async with self.open([request]) as stream:
            while stream.running:
                for message in await stream.next():
                    yield message

    def release(self, ids: set[int]) -> None:
        """Cancel the sequences `ids` that have not ended."""
        for id in ids:
            if self._streams.pop(id, None) is not None and self._link is not None and self.state == "ready":
                self._send_frame(m.encode(m.Cancel(id=id)))

    async def control(self, action: str, **arguments: Any) -> Any:
        """The engine's answer to `action`; raises `ApiError` (400) with its message when it refuses."""
        await self.awake()
        if self.state != "ready":
            raise unavailable("Loading model")
        id = self.new_id()
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._controls[id] = future
        self._send_frame(m.encode(m.Control(id=id, action=action, arguments=arguments)))
        try:
            reply = await future
        finally:
            self._controls.pop(id, None)
        if not reply.ok:
            raise ApiError(reply.message)
        return reply.value


def start_failure(code: int | None) -> str:
    """Why an engine that said nothing did not start, from its exit code (negative: the signal that ended it)."""
    if code == -signal.SIGKILL:
        return (
            "the engine was killed while it loaded the model (signal 9), most often by the system for want of memory: "
            "take a smaller model or quantisation, or a smaller context (-c)"
        )
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
    return f"the engine {how} while it loaded the model; what it said last is above"


def merge_counters(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Metrics of an engine together with those of the engines before it: totals add up, the rest is what is now."""
    out = dict(now)
    for name, value in before.items():
        if name == "n_tokens_max":
            out[name] = max(value, now.get(name, 0))
        elif name.endswith("_total"):
            out[name] = value + now.get(name, 0)
    return out
