"""The engine's end of the socketpair: frames in by a thread, frames out without ever waiting for the reader.

A frame is a little-endian uint32 length and that many bytes of msgpack (`engine.messages`); the first one from the
front holds the resolved configuration.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable

import msgspec

from ftgguf.engine import messages as m
from ftgguf.flags import ServerConfig, decode_config

log = logging.getLogger("ftgguf.engine")

FRAME = struct.Struct("<I")
MAX_FRAME = 1 << 30
LEAVE_S = 5.0
"""A step in progress may take this long after the front has gone; then the process ends where it stands."""
RETRY_S = 0.005
"""How often an idle engine tries again to send what a slow front did not take."""


class LinkClosed(Exception):
    """The front has closed the socket, or sent something that is no message."""


class Link:
    """`receive` and `send` belong to the engine's thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.SimpleQueue[tuple[float, m.ToEngine | LinkClosed]] = queue.SimpleQueue()
        self.at = 0.0
        """When the message that `receive` returned last arrived, in seconds of `time.monotonic`: perhaps long before,
        during a step."""
        self._backlog = bytearray()
        self._loaded = threading.Event()

    # -------------------------------------------------------------------------------------------- in

    def configuration(self) -> ServerConfig:
        """The first frame: `flags.encode_config` of the resolved configuration. Starts the reading thread."""
        try:
            config = decode_config(self._frame())
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise LinkClosed(f"the first frame is not a configuration: {error}") from None
        threading.Thread(target=self._read, name="link", daemon=True).start()
        return config

    def loaded(self) -> None:
        """From now on a closed socket is reported by `receive`; before, it ends the process at once."""
        self._loaded.set()

    def receive(self, wait: bool, seconds: float = 0.0) -> m.ToEngine | None:
        """The next message; None when there is none and `wait` is false, or none in `seconds`. Raises LinkClosed."""
        while True:
            try:
                if not wait:
                    self.at, message = self._inbox.get(timeout=seconds) if seconds > 0 else self._inbox.get_nowait()
                elif self._backlog:
                    self.at, message = self._inbox.get(timeout=RETRY_S)
                else:
                    self.at, message = self._inbox.get()
            except queue.Empty:
                if not wait:
                    return None
                self._flush()
                continue
            if isinstance(message, LinkClosed):
                raise message
            return message

    def put_back(self, message: m.ToEngine) -> None:
        """Have `receive` return `message` (again). For any thread."""
        self._inbox.put((time.monotonic(), message))

    def _read(self) -> None:
        try:
            while True:
                message = m.decode_to_engine(self._frame())
                self._inbox.put((time.monotonic(), message))
        except LinkClosed as error:
            closed = error
        except msgspec.DecodeError as error:
            closed = LinkClosed(f"malformed message: {error}")
            log.error("the front sent a malformed message: %s", error)
        except OSError as error:
            closed = LinkClosed(str(error))
        if not self._loaded.is_set():
            os._exit(1)
        self._inbox.put((time.monotonic(), closed))
        timer = threading.Timer(LEAVE_S, os._exit, args=(1,))
        timer.daemon = True
        timer.start()

    def _frame(self) -> bytes:
        (length,) = FRAME.unpack(self._exactly(FRAME.size))
        if length > MAX_FRAME:
            raise LinkClosed(f"a frame of {length} bytes")
        return self._exactly(length)

    def _exactly(self, n: int) -> bytes:
        data = bytearray(n)
        view, have = memoryview(data), 0
        while have < n:
            got = self._sock.recv_into(view[have:])
            if got == 0:
                raise LinkClosed("the front has closed the connection")
            have += got
        return bytes(data)

    # -------------------------------------------------------------------------------------------- out

    def send(self, messages: Iterable[m.ToFront]) -> None:
        """Queue `messages` and send what the socket takes now."""
        for message in messages:
            payload = m.encode(message)
            self._backlog += FRAME.pack(len(payload))
            self._backlog += payload
        if self._backlog:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._backlog:
                sent = self._sock.send(self._backlog, socket.MSG_DONTWAIT)
                del self._backlog[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkClosed(str(error)) from None

    def finish(self, messages: Iterable[m.ToFront]) -> None:
        """Send `messages` and all that is left, waiting up to LEAVE_S for the front to take it."""
        try:
            self.send(messages)
            self._sock.settimeout(LEAVE_S)
            self._sock.sendall(self._backlog)
        except (OSError, LinkClosed):
            log.error("the front did not take the engine's last messages")
        self._backlog.clear()


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends (Linux). A closed socket does so too, but
    not while a step hangs."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
