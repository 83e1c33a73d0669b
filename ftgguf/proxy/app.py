"""The proxy itself: bytes from the client to A and back as they come, and the same request to B beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ftgguf.bench.report import Contestant
from ftgguf.proxy.ledger import Asked, Ledger, say
from ftgguf.proxy.meter import Meter

MEASURED = (
    *("/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions"),
    *("/v1/messages", "/v1/responses", "/responses", "/api/chat", "/api/generate", "/infill"),
)
"""Paths of requests that generate; everything else goes to A alone."""
_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
_HOP |= {"upgrade", "host", "content-length", "accept-encoding"}
_KEYS = {"authorization", "x-api-key", "cookie"}
GONE = "the client went away"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(frozen=True, slots=True)
class Side:
    """A server. `api_key`, where given, replaces the client's credentials; B never gets A's otherwise."""

    url: str
    contestant: Contestant
    api_key: str = ""
    keeps_credentials: bool = False

    def headers(self, given: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The client's headers for this server."""
        kept = [(k, v) for k, v in given if k.lower() not in _HOP]
        if not self.keeps_credentials or self.api_key:
            kept = [(k, v) for k, v in kept if k.lower() not in _KEYS]
        # the meter reads along, so nobody compresses
        kept.append(("accept-encoding", "identity"))
        return kept + ([("authorization", f"Bearer {self.api_key}")] if self.api_key else [])


@dataclass(slots=True)
class Proxy:
    """`mode`: `mirror` (A answers, B gets the same) or `split` (conversations are dealt out, each has one side).

    `at_once`: mirror while A answers; otherwise after it, in order, so that two servers on one machine do not share it.
    `changed` is called after each measured answer.
    """

    a: Side
    b: Side
    ledger: Ledger
    mode: str = "mirror"
    at_once: bool = False
    timeout: float = 600.0
    changed: Callable[[], None] = lambda: None
    in_flight: int = 0
    """Measured answers under way, of A and of B."""
    client: httpx.AsyncClient = field(init=False)
    _queue: asyncio.Queue[tuple[Asked, str, list[tuple[str, str]], bytes]] = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ledger.mirrored = self.mode == "mirror"

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(routes=[Route("/{path:path}", self._handle, methods=METHODS)], lifespan=self._life)

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(timeout=httpx.Timeout(self.timeout, connect=10), limits=limits)
        self._queue = asyncio.Queue()
        mirror = asyncio.create_task(self._mirror())
        try:
            yield
        finally:
            mirror.cancel()
            for task in list(self._tasks):
                task.cancel()
            await self.client.aclose()

    async def _handle(self, request: Request) -> Response:
        body = await request.body()
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in request.headers.raw]
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        document = _parsed(body) if request.method == "POST" and request.url.path in MEASURED else None
        if document is None:
            return await self._pass(self.a, request.method, target, headers, body, None)
        asked = self.ledger.ask(document, time.perf_counter())
        side = self.b if self.mode == "split" and asked.conversation.side == self.b.contestant.name else self.a
        if self.mode == "mirror" and self.at_once:
            self._spawn(self._ask_b(asked, target, headers, body))
        return await self._pass(side, request.method, target, headers, body, asked)

    async def _pass(
        self, side: Side, method: str, target: str, headers: list[tuple[str, str]], body: bytes, asked: Asked | None
    ) -> Response:
        """Answer from `side`, untouched; metered where `asked`."""
        started = time.perf_counter()
        meter = Meter()
        self.in_flight += asked is not None

        def done(error: str = "", status: int = 0) -> None:
            if asked is not None:
                self.in_flight -= 1
                meter.end(time.perf_counter() - started)
                took = time.perf_counter() - started
                if error == GONE:
                    self.ledger.left(asked, took)
                    return self.changed()
                self.ledger.answered(asked, side.contestant, meter, took, error, started, status)
                if self.mode == "mirror" and not self.at_once:
                    self._queue.put_nowait((asked, target, headers, body))
                self.changed()

        outgoing = self.client.build_request(method, side.url + target, headers=side.headers(headers), content=body)
        try:
            reply = await self.client.send(outgoing, stream=True)
        except httpx.HTTPError as error:
            done(_why(error))
            message = f"{side.contestant.name} at {side.url} does not answer: {_why(error)}"
            return JSONResponse({"error": {"code": 502, "message": message, "type": "proxy_error"}}, 502)

        async def stream() -> AsyncIterator[bytes]:
            error = GONE
            try:
                async for data in reply.aiter_raw():
                    if asked is not None:
                        meter.feed(data, time.perf_counter() - started)
                    yield data
                error = "" if reply.status_code == 200 else meter.error or f"status {reply.status_code}"
            except httpx.HTTPError as broken:
                error = _why(broken)
                raise
            finally:
                done(error, reply.status_code)
                await reply.aclose()

        answer = StreamingResponse(stream(), reply.status_code)
        answer.raw_headers = [(k, v) for k, v in reply.headers.raw if k.lower().decode("latin-1") not in _DROPPED]
        return answer

    # ---------------------------------------------------------------------------------------------------- mirroring

    async def _mirror(self) -> None:
        """B's queue: one request after the other."""
        while True:
            await self._ask_b(*await self._queue.get())

    async def _ask_b(self, asked: Asked, target: str, headers: list[tuple[str, str]], body: bytes) -> None:
        """The same request to B; its answer is measured and dropped."""
        started = time.perf_counter()
        meter, error, status = Meter(), "", 0
        self.in_flight += 1
        outgoing = self.client.build_request("POST", self.b.url + target, headers=self.b.headers(headers), content=body)
        try:
            reply = await self.client.send(outgoing, stream=True)
            try:
                async for data in reply.aiter_raw():
                    meter.feed(data, time.perf_counter() - started)
                    if time.perf_counter() - started > self.timeout:
                        raise httpx.ReadTimeout("it hangs")
            finally:
                await reply.aclose()
            status = reply.status_code
            if status != 200:
                error = meter.error or f"status {status}"
        except httpx.HTTPError as broken:
            error = _why(broken)
        finally:
            self.in_flight -= 1
        meter.end(time.perf_counter() - started)
        took = time.perf_counter() - started
        self.ledger.answered(asked, self.b.contestant, meter, took, error, started, status)
        self.changed()
        waiting = self._queue.qsize()
        if waiting and waiting % 10 == 0:
            say(f"{waiting} requests wait for {self.b.contestant.name}")

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_DROPPED = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _why(error: BaseException) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time: it hangs"
    return str(error) or type(error).__name__
