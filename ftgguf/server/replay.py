"""Streams that outlive their connection (llama-server's `X-Conversation-Id`); the routes are in `streams.py`.

A streamed request with that header goes on when its client leaves; its bytes are kept (the last 4 MiB, for 300 s
after the end) and can be read again from any offset. `DELETE /v1/stream` stops it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

MAX_BYTES = 4 << 20
KEEP_S = 300.0


class Session:
    """The bytes of one stream. `dropped` counts those that were pushed out at the front."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.started_at = int(time.time())
        self.completed_at = 0
        self.dropped = 0
        self._data = bytearray()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended = 0.0

    @property
    def total(self) -> int:
        return self.dropped + len(self._data)

    @property
    def done(self) -> bool:
        return self.completed_at > 0

    @property
    def expired(self) -> bool:
        return self.done and time.monotonic() - self._ended > KEEP_S

    def run(self, content: AsyncIterator[bytes]) -> None:
        """Consume `content` to its end, whoever listens."""
        self._task = asyncio.create_task(self._consume(content), name=f"stream {self.id}")

    async def _consume(self, content: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in content:
                self._data += chunk
                surplus = len(self._data) - MAX_BYTES
                if surplus > 0:
                    del self._data[:surplus]
                    self.dropped += surplus
                self._notify()
        finally:
            self.completed_at, self._ended = int(time.time()), time.monotonic()
            self._notify()
            close = getattr(content, "aclose", None)
            if close is not None:
                await close()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, offset: int) -> AsyncIterator[bytes]:
        """The bytes from `offset` on, as they come, to the end of the stream."""
        while True:
            offset = max(offset, self.dropped)
            if offset < self.total:
                chunk = bytes(self._data[offset - self.dropped :])
                offset += len(chunk)
                yield chunk
            elif self.done:
                return
            else:
                await self._changed.wait()


class Sessions:
    """The sessions of one front, by conversation id."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, id: str, content: AsyncIterator[bytes]) -> Session:
        """A new session for `id`; one that is there already is stopped."""
        self.remove(id)
        self._sessions = {key: session for key, session in self._sessions.items() if not session.expired}
        session = self._sessions[id] = Session(id)
        session.run(content)
        return session

    def get(self, id: str) -> Session | None:
        session = self._sessions.get(id)
        return None if session is None or session.expired else session

    def remove(self, id: str) -> None:
        session = self._sessions.pop(id, None)
        if session is not None:
            session.cancel()

    def matching(self, id: str) -> list[Session]:
        """The session of `id` and those of its variants `id::model`."""
        return [
            session
            for key, session in self._sessions.items()
            if not session.expired and (key == id or key.startswith(id + "::"))
        ]

    def close(self) -> None:
        for id in list(self._sessions):
            self.remove(id)
