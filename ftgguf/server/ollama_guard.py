"""Who may change what is on the disk over HTTP: pull, create, copy, delete.

`--allow-pull auto` lets in clients of this machine while no API key is set; `on` everybody that the key lets in; `off`
nobody. Whatever the setting, a web page of another origin is refused: a browser on this machine sends its requests
from this machine, so without this check any site could fill the disk or delete models. The same holds for names that
were made to point here (DNS rebinding): the Host header must be an address or a local name.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from ftgguf.flags.config import ServerConfig
from ftgguf.server.errors import ApiError

LOCAL_SCHEMES = ("app", "file", "tauri", "vscode-webview", "vscode-file")
"""Origins of desktop applications, as Ollama allows them."""
_FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip", "via")


def forbidden(message: str) -> ApiError:
    return ApiError(message, "permission_error")


def check_may_change(request: Request, config: ServerConfig) -> None:
    """Raise a 403 `ApiError` unless this client may change the model store."""
    allow = config.model.allow_pull
    if allow == "off":
        raise forbidden("pulling and deleting over HTTP is off (--allow-pull off)")
    if allow == "auto" and config.http.api_keys:
        raise forbidden("pulling and deleting over HTTP is off while an API key is set: start with --allow-pull on")
    if allow == "auto" and not from_this_machine(request):
        raise forbidden("only clients of this machine may pull and delete: start with --allow-pull on")
    if allow == "auto" and not local_name(request.headers.get("host", "")):
        raise forbidden("pulling and deleting wants this machine's address or a local name in the Host header")
    origin = request.headers.get("origin", "")
    listed = [each.strip() for each in config.http.cors_origins.split(",")]
    if origin and not local_origin(origin) and origin not in listed:
        raise forbidden(f"a page of {origin[:80]} may not pull and delete: --cors-origins can list it")


def from_this_machine(request: Request) -> bool:
    """Loopback or a UNIX socket, and not through a proxy, which would hide where a client is."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    return request.client is None or is_loopback(request.client.host)


def is_loopback(host: str) -> bool:
    if not host:  # a UNIX socket
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def local_name(host: str) -> bool:
    """Whether a Host header is an address, `localhost`, or a name that only a local network has."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in ("", "localhost") or name.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def local_origin(origin: str) -> bool:
    """Whether an Origin is this machine or a desktop application."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme in LOCAL_SCHEMES:
        return True
    return parts.scheme in ("http", "https") and (host == "localhost" or (bool(host) and is_loopback(host)))
