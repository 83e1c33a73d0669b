"""Server-sent events as llama-server writes them: `data: {json}` lines, comment pings while silent, exact headers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ftgguf.server.wire import dumps

T = TypeVar("T")

PING = b":\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """One unnamed event."""
    return b"data: " + dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One named event (Anthropic, Responses)."""
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of ready-made bytes with llama-server's headers; pings come from the content, not from a timer.

    The content is closed as soon as the client is gone, so that its sequence is cancelled then.
    """

    def __init__(self, content: AsyncIterator[bytes]) -> None:
        super().__init__(content)
        self.raw_headers = [(b"x-accel-buffering", b"no"), (b"content-type", b"text/event-stream")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette's own does the same with a task group, whose making costs half a millisecond before the first
        byte."""
        with contextlib.suppress(Disconnected):
            await until_gone(receive, self.stream_response(send))

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.body_iterator:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            close = getattr(self.body_iterator, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Disconnected(Exception):
    """The client left before it was answered."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """`work`'s result; cancels it and raises `Disconnected` as soon as the client is gone."""
    return await until_gone(request.receive, work)


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """`work`'s result, awaited in this task; cancels it and raises `Disconnected` when `receive` says that the client
    is gone. Not for a request whose body is still to be read."""
    task = asyncio.current_task()
    assert task is not None
    watched, gone, others = True, False, task.cancelling()

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal gone
        if watched:
            gone = True
            task.cancel()

    watcher = asyncio.ensure_future(_wait_disconnect(receive))
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == others + 1:
            raise Disconnected from None
        raise
    finally:
        watched = False
        watcher.cancel()
        if gone:
            task.uncancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
