"""The engine's messages as they come: frames out of the socket's bytes, without a task that waits for each.

A frame is a little-endian uint32 length and that many bytes. One token is one frame, so what this costs counts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

import msgspec

log = logging.getLogger("ftgguf.server")

FRAME = struct.Struct("<I")
MAX_FRAME = 1 << 30


class FrameLink(asyncio.Protocol):
    """One connection. `deliver` gets each frame's payload; it may raise msgspec.DecodeError, which ends the link."""

    def __init__(self, deliver: Callable[[memoryview], None]) -> None:
        self._deliver = deliver
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the other end is gone, or what it sent was no message."""

    @classmethod
    async def open(cls, sock: socket.socket, deliver: Callable[[memoryview], None]) -> FrameLink:
        """A link over a connected socket, which it owns from now on."""
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(deliver), sock=sock)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer) if self._complete() else b""
            if not data:
                return
            self._buffer.clear()
        try:
            used = self._frames(memoryview(data))
        except msgspec.DecodeError as error:
            log.error("engine sent a malformed message: %s", error)
            self.close()
            return
        if used < len(data):
            self._buffer += data[used:]

    def _complete(self) -> bool:
        """Whether the buffer holds a whole frame: a large one comes in many pieces."""
        if len(self._buffer) < FRAME.size:
            return False
        (length,) = FRAME.unpack_from(self._buffer)
        return bool(length > MAX_FRAME or len(self._buffer) >= FRAME.size + length)

    def _frames(self, data: memoryview) -> int:
        """Deliver the whole frames at the front of `data`; returns how many bytes they are."""
        at, end = 0, len(data)
        while end - at >= FRAME.size:
            (length,) = FRAME.unpack_from(data, at)
            if length > MAX_FRAME:
                raise msgspec.DecodeError(f"frame of {length} bytes")
            start = at + FRAME.size
            if end - start < length:
                break
            self._deliver(data[start : start + length])
            at = start + length
        return at

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, payload: bytes) -> None:
        """Queue one frame."""
        if self._transport is not None:
            self._transport.write(FRAME.pack(len(payload)) + payload)

    def close(self) -> None:
        """Close the connection; `closed` is done soon after."""
        if self._transport is not None:
            self._transport.close()
