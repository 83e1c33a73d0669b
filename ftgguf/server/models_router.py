"""Router mode's front: requests go to the application of the model that they name; the rest is answered here.

The body of a request is read once to find `model`, then handed on unchanged. llama-server's router proxies to child
servers; here every model has its engine process, and all share this one front.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ftgguf.flags.config import ServerConfig
from ftgguf.server import app as single
from ftgguf.server.anthropic import error_document
from ftgguf.server.errors import ApiError, InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.models_host import RouterHost
from ftgguf.server.ollama import LOAD_NS, ROUTED, load_answer
from ftgguf.server.ollama_requests import is_empty, wanted_context
from ftgguf.server.ollama_wire import PREFIX, error_response, keep_alive_seconds, model_name, not_found
from ftgguf.server.sse import Disconnected
from ftgguf.server.state import MAX_BODY
from ftgguf.server.wire import parse_body

log = logging.getLogger("ftgguf.server")

T = TypeVar("T")

OWN = frozenset(("/health", "/v1/health", "/models", "/v1/models", "/tools", "/cors-proxy"))
"""Paths of the single-model tables that the router answers itself, whatever they name."""
STREAMS = frozenset(("/v1/stream", "/v1/streams/lookup"))


class _Named(msgspec.Struct):
    """The only field of a body that matters here; the others are skipped unread."""

    model: Any = None


def _error(path: str, error: ApiError) -> Response:
    """In the shape of the API that was asked."""
    if path.startswith(PREFIX):
        return error_response(error)
    anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return json_response(error_document(error) if anthropic else error.document(), error.code)


class Router:
    """ASGI: dispatches to the models' applications."""

    def __init__(self, outer: FastAPI, host: RouterHost, config: ServerConfig) -> None:
        self._outer = outer
        self._host = host
        self._config = config
        self._prefix = config.http.api_prefix
        self._routes = [
            (method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path)))
            for method, table in (("GET", single.GET), ("POST", (*single.POST, *single.OLLAMA)))
            for path, _ in table
            if path not in OWN and path not in STREAMS
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] != "http" or not path.startswith(self._prefix):
            await self._outer(scope, receive, send)
            return
        path = path.removeprefix(self._prefix)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if path == "/v1/stream" and await self._stream(scope, receive, send, query.get("conv_id", [""])[0]):
            return
        forwarded = any(method == known and pattern.fullmatch(path) for known, pattern in self._routes)
        if not forwarded or (path == "/props" and method == "GET" and not query.get("model")):
            await self._outer(scope, receive, send)
            return
        try:
            await self._forward(scope, receive, send, path, method, query)
        except ApiError as error:
            response = _error(path, error)
            await response(scope, receive, send)
        except Disconnected:
            pass

    async def _forward(
        self, scope: Scope, receive: Receive, send: Send, path: str, method: str, query: dict[str, list[str]]
    ) -> None:
        body = b"" if method == "GET" else await _read(receive)
        keep_alive, context = None, 0
        named = query.get("model", [""])[0]
        if path.startswith(PREFIX):
            parsed = parse_body(body)
            named, keep_alive, context = model_name(parsed), keep_alive_seconds(parsed.get("keep_alive")), 0
            context = wanted_context(parsed)
            chat = path == "/api/chat"
            if path in ("/api/chat", "/api/generate") and keep_alive == 0 and is_empty(parsed, chat):
                await self._unload(scope, receive, send, named, chat)
                return
        elif method == "POST":
            named = _model_of(body) or named
        if not named:
            raise InvalidRequest("model name is missing from the request")
        source = await self._host.find_source(named)
        if source is None:
            raise not_found(named) if path.startswith(PREFIX) else InvalidRequest(f"model '{named}' not found")
        wanted = query.get("autoload", [""])[0]
        autoload = self._config.model.models_autoload if not wanted else wanted in ("true", "1")
        stack = self._host.pool.lease(source, autoload, keep_alive, context)
        instance, load_ns = await _unless_gone(receive, stack.__aenter__())
        try:
            inner = dict(scope) | {ROUTED: instance.name, LOAD_NS: load_ns}
            assert instance.app is not None
            await instance.app(inner, _replayed(body, receive), send)
        finally:
            await stack.__aexit__(None, None, None)

    async def _stream(self, scope: Scope, receive: Receive, send: Send, conversation: str) -> bool:
        """A stream to be read again or stopped belongs to the model that keeps it; False if none does."""
        for instance in self._host.pool.loaded():
            if instance.ready and instance.started is not None and instance.started.state.sessions.get(conversation):
                async with self._host.pool.lease(instance.source) as (leased, _):
                    assert leased.app is not None
                    await leased.app(scope, receive, send)
                return True
        return False

    async def _unload(self, scope: Scope, receive: Receive, send: Send, name: str, chat: bool) -> None:
        """An empty request with keep_alive 0."""
        source = await self._host.find_source(name)
        if source is None:
            raise not_found(name)
        await self._host.pool.unload(source.name, wait=False)
        await load_answer(name, chat, "unload")(scope, receive, send)


def _model_of(body: bytes) -> str:
    """`model` of a JSON body, empty where it is not a text; InvalidRequest where the body is no JSON."""
    try:
        found = msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parse_body(body)  # says what is wrong; an array, say, is JSON and has no model
        return ""
    return found if isinstance(found, str) else ""


async def _read(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY:
            raise ApiError(f"request body is larger than {MAX_BODY} bytes", code=413)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once more, then what really comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """`work`'s result; cancels it and raises `Disconnected` when the client leaves. The body must have been read."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
