"""Everything that happens to a request before its route: CORS, readiness, API keys, default headers.

Order and texts are llama-server's: preflight first (never authenticated), then 503 while loading, then the key.
"""

from __future__ import annotations

import hmac
import logging
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ftgguf.flags.config import HttpConfig
from ftgguf.server.errors import ApiError, unavailable
from ftgguf.server.ollama_wire import PREFIX
from ftgguf.server.wire import dumps

log = logging.getLogger("ftgguf.server")

PUBLIC = frozenset(("/health", "/v1/health", "/", "/index.html"))
UNLOGGED = frozenset(("/health", "/v1/health", "/metrics", "/slots", "/props", "/models", "/v1/models"))
"""Paths that monitors ask for again and again: no line for these."""
WHILE_LOADING = frozenset(("/", "/index.html", "/api/version", "/api/status", "/api/tags", "/api/ps", "/api/pull"))
"""Paths that need no model."""
INVALID_KEY = {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}}
LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}


class Readiness(Protocol):
    """What decides whether requests are let in: an engine client, or a front that loads models on demand."""

    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str: ...


class Gate:
    """ASGI middleware in front of the application."""

    def __init__(self, app: ASGIApp, http: HttpConfig, engine: Readiness) -> None:
        self._app = app
        self._http = http
        self._engine = engine
        self._keys = [key.encode() for key in http.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        common = [(b"server", b"llama.cpp"), *self._origin(headers.get("origin", ""))]
        unlogged = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal unlogged
            if message["type"] == "http.response.start":
                message["headers"] = [*common, *message["headers"]]
                unlogged = message["status"]
                await send(message)
                return
            status, unlogged = unlogged, 0
            streams = message.get("more_body", False)
            if status and not streams:
                self._log(scope, status)
            await send(message)
            if status and streams:  # the first token does not wait for a line
                self._log(scope, status)

        if scope["method"] == "OPTIONS":
            await _reply(send_with_headers, 200, b"", b"text/html", self._preflight())
            return
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            status, document = refusal
            if PREFIX in scope["path"]:  # Ollama's errors are strings
                document = {"error": document["error"]["message"]}
            await _reply(send_with_headers, status, dumps(document), b"application/json; charset=utf-8")
            return
        await self._app(scope, receive, send_with_headers)

    def _log(self, scope: Scope, status: int) -> None:
        """A line as llama-server's for a request that is answered; for a stream, when its first bytes are out."""
        if scope["path"].removeprefix(self._http.api_prefix) not in UNLOGGED and log.isEnabledFor(logging.INFO):
            client = scope.get("client") or ("unix socket",)
            log.info("request: %s %s %s %d", scope["method"], scope["path"], client[0], status)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, dict[str, Any]] | None:
        awake = self._engine.state in ("ready", "sleeping")
        if not awake and path.removeprefix(self._http.api_prefix) not in WHILE_LOADING:
            if self._engine.state == "failed":
                error: ApiError = unavailable(self._engine.failure)
                return 503, error.document()
            return 503, LOADING
        if self._keys and path not in PUBLIC and not self._authorised(headers):
            return 401, INVALID_KEY
        return None

    def _authorised(self, headers: Headers) -> bool:
        given = (headers.get("authorization") or headers.get("x-api-key") or "").removeprefix("Bearer ").encode()
        return any(hmac.compare_digest(given, key) for key in self._keys)

    def _origin(self, origin: str) -> list[tuple[bytes, bytes]]:
        name = b"access-control-allow-origin"
        http = self._http
        if http.cors_credentials and http.cors_origins == "*":
            return [(name, origin.encode("latin-1", "ignore"))]
        if http.cors_origins == "localhost":
            return [(name, origin.encode("latin-1", "ignore"))] if origin and _is_local(origin) else []
        if "," in http.cors_origins:
            # llama-server sends the whole list, which browsers refuse; what it means is one of these
            allowed = [entry.strip() for entry in http.cors_origins.split(",")]
            return [(name, origin.encode("latin-1", "ignore"))] if origin in allowed else []
        return [(name, http.cors_origins.encode())]

    def _preflight(self) -> list[tuple[bytes, bytes]]:
        http = self._http
        return [
            (b"access-control-allow-credentials", b"true" if http.cors_credentials else b"false"),
            (b"access-control-allow-methods", http.cors_methods.encode()),
            (b"access-control-allow-headers", http.cors_headers.encode()),
        ]


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False


async def _reply(
    send: Send, status: int, body: bytes, content_type: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    head = [*(headers or []), (b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
