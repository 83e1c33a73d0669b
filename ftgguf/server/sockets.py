"""Listening sockets for `--host` and `--port`: IPv4, IPv6, several of them, and UNIX sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass

from ftgguf.flags.config import HttpConfig


class BindError(OSError):
    """An address cannot be listened on; the text names it and the reason."""


@dataclass(slots=True)
class Listener:
    """A bound socket and the address to tell the user."""

    socket: socket.socket
    url: str
    path: str = ""
    """The file of a UNIX socket, removed at exit."""


def bind_all(http: HttpConfig) -> list[Listener]:
    """A listener for each host. Raises `BindError`; port 0 picks a free one."""
    tcp = [host for host in http.hosts if not host.endswith(".sock")]
    if http.port == 0 and len(tcp) > 1:
        raise BindError("--port 0 is not supported with multiple TCP addresses")
    scheme = "https" if http.ssl_key_file and http.ssl_cert_file else "http"
    listeners: list[Listener] = []
    try:
        for host in http.hosts:
            if host.endswith(".sock"):
                listeners.append(_bind_unix(host))
            else:
                listeners.append(_bind_tcp(host, http, scheme, only_v6=len(tcp) > 1))
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def _bind_tcp(host: str, http: HttpConfig, scheme: str, only_v6: bool) -> Listener:
    name = host.strip("[]")
    try:
        found = socket.getaddrinfo(name or None, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BindError(f"couldn't bind HTTP server socket, hostname: {host}, port: {http.port}: {error}") from None
    reason: OSError | None = None
    # `localhost` may resolve to ::1 first on a machine that has no IPv6: take the first address that works
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if http.reuse_port and hasattr(socket, "SO_REUSEPORT"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_v6))
            sock.bind(address)
            sock.listen(1024)
        except OSError as error:
            sock.close()
            reason = error
            continue
        port = sock.getsockname()[1]
        shown = f"[{name}]" if ":" in name else name
        return Listener(sock, f"{scheme}://{shown}:{port}")
    raise BindError(f"couldn't bind HTTP server socket, hostname: {host}, port: {http.port}: {reason}")


def _bind_unix(path: str) -> Listener:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise BindError(f"couldn't bind HTTP server socket, hostname: {path}: {error}") from None
    return Listener(sock, f"unix://{path}", path)


def _remove_stale(path: str) -> None:
    """Remove the socket file of a server that is gone; one that still answers, or another kind of file, stays."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except OSError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            os.unlink(path)
    except OSError:
        pass
    finally:
        probe.close()
