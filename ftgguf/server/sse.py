"""Server-sent events as llama-server writes them: `data: {json}` lines, comment pings while silent, exact headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

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
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
