"""The bytes of a long answer, with as little work for each as Python can do.

The HTTP parser hands out the body in small pieces, each a new object. A long body of known length is read past it: from
the connection's own socket into one buffer that is used again and again.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpcore
import httpx

from ftgguf.pull.client import Failed, transport_failure

_DIRECT = 1 << 20
"""Bytes from which a body is read past the HTTP parser."""
_PIECE = 1 << 20
"""Bytes of a connection's buffer."""


def body_pieces(response: httpx.Response, stall: float) -> Iterator[bytes | memoryview]:
    """The body as it comes, not decoded; a piece is good until the next is asked for. The body may end early, which
    the caller must notice. Raises Failed, also when nothing comes for `stall` seconds.

    Reading past the parser costs the connection, which is closed after.
    """
    try:
        pieces = response.iter_raw()
        left = _direct_length(response)
        if not left:
            yield from pieces
            return
        first = next(pieces, b"")  # what the parser had read with the headers
        yield first
        left -= len(first)
        fill, buffer = _reader(response, stall), memoryview(bytearray(min(left, _PIECE)))
        while left > 0:
            n = fill(buffer[: min(left, _PIECE)])
            if n == 0:
                return
            left -= n
            yield buffer[:n]
    except httpx.TransportError as error:
        raise transport_failure(error, response.url.host) from None
    except (httpcore.TimeoutException, TimeoutError):
        raise Failed("nothing came in time (stalled)") from None
    except (httpcore.NetworkError, ConnectionError, ssl.SSLError) as error:
        raise Failed(f"the connection broke ({error or type(error).__name__})") from None


def _direct_length(response: httpx.Response) -> int:
    """The body's length if it can be read past the parser, else 0."""
    length = response.headers.get("content-length", "")
    plain = response.http_version == "HTTP/1.1" and "transfer-encoding" not in response.headers
    if "network_stream" not in response.extensions or not plain or not length.isdecimal() or len(length) > 18:
        return 0
    return int(length) if int(length) >= _DIRECT else 0


Fill = Callable[[memoryview], int]
"""Put bytes into the buffer, at least one: how many; 0 at the end of the connection."""


def _reader(response: httpx.Response, stall: float) -> Fill:
    stream: Any = response.extensions["network_stream"]
    connection = socket_of(response)
    encrypted = stream.get_extra_info("ssl_object")
    if connection is not None and encrypted is None:
        connection.settimeout(stall)
        return connection.recv_into
    if isinstance(connection, ssl.SSLSocket) and getattr(connection, "_sslobj", None) is encrypted:
        connection.settimeout(stall)
        return _records(connection, stream)

    def copied(view: memoryview) -> int:
        """TLS inside TLS (a proxy reached by https): only the stream can take it apart."""
        data = stream.read(len(view), timeout=stall)
        view[: len(data)] = data
        return len(data)

    return copied


def _records(connection: ssl.SSLSocket, stream: Any) -> Fill:
    """TLS comes in records of 16 KiB at most: as many as are there already go into one piece."""

    def fill(view: memoryview) -> int:
        n = last = connection.recv_into(view)
        with suppress(OSError):  # it shows again at the next piece; what came before it counts
            while last > 0 and n < len(view) and (connection.pending() or stream.get_extra_info("is_readable")):
                last = connection.recv_into(view[n:])
                n += last
        return n

    return fill


def socket_of(response: httpx.Response) -> socket.socket | None:
    """The connection's socket, to be read from or to be shut down from another thread."""
    stream: Any = response.extensions.get("network_stream")
    found = stream.get_extra_info("socket") if stream is not None else None
    return found if isinstance(found, socket.socket) else None
