"""The HTTP application: every route, and how exceptions become llama-server's error objects."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ftgguf import __version__
from ftgguf.pull.layers import NO_EXTRAS, Extras
from ftgguf.server import (
    anthropic,
    cache,
    chat,
    embeddings,
    infill,
    lora,
    metrics,
    native,
    ollama,
    ollama_embed,
    openai,
    rerank,
    responses,
    streams,
    ui,
    vertex,
)
from ftgguf.server.auth import Gate
from ftgguf.server.errors import NOT_FOUND, ApiError
from ftgguf.server.generation import json_response
from ftgguf.server.models import FixedModel
from ftgguf.server.ollama_blobs import add_blobs
from ftgguf.server.ollama_jobs import Manager
from ftgguf.server.ollama_store import add_management
from ftgguf.server.ollama_wire import PREFIX, error_response
from ftgguf.server.sse import Disconnected
from ftgguf.server.state import ServerState

log = logging.getLogger("ftgguf.server")

Handler = Callable[[Request], Awaitable[Response]]

GET: tuple[tuple[str, Handler], ...] = (
    ("/health", native.get_health),
    ("/v1/health", native.get_health),
    ("/metrics", metrics.get_metrics),
    ("/props", native.get_props),
    ("/models", openai.get_models),
    ("/v1/models", openai.get_models),
    ("/lora-adapters", lora.get_adapters),
    ("/slots", native.get_slots),
    ("/tools", native.disabled),
    ("/cors-proxy", native.disabled),
    ("/v1/stream", streams.get_stream),
    ("/v1/cache/status", cache.get_status),
)
POST: tuple[tuple[str, Handler], ...] = (
    ("/props", native.post_props),
    ("/completion", native.post_completion),
    ("/completions", native.post_completion),
    ("/v1/completions", openai.post_completions),
    ("/chat/completions", openai.post_chat_completions),
    ("/v1/chat/completions", openai.post_chat_completions),
    ("/chat/completions/input_tokens", chat.post_input_tokens),
    ("/v1/chat/completions/input_tokens", chat.post_input_tokens),
    ("/v1/chat/completions/control", native.post_control),
    ("/responses", responses.post_responses),
    ("/v1/responses", responses.post_responses),
    ("/responses/input_tokens", responses.post_input_tokens),
    ("/v1/responses/input_tokens", responses.post_input_tokens),
    ("/v1/messages", anthropic.post_messages),
    ("/v1/messages/count_tokens", anthropic.post_count_tokens),
    ("/infill", infill.post_infill),
    ("/v1/cache/rebuild", cache.post_rebuild),
    ("/apply-template", chat.post_apply_template),
    ("/tokenize", native.post_tokenize),
    ("/detokenize", native.post_detokenize),
    ("/embedding", embeddings.post_embedding),
    ("/embeddings", embeddings.post_embedding),
    ("/v1/embeddings", embeddings.post_openai_embeddings),
    ("/rerank", rerank.post_rerank),
    ("/reranking", rerank.post_rerank),
    ("/v1/rerank", rerank.post_rerank),
    ("/v1/reranking", rerank.post_rerank),
    ("/v1/streams/lookup", streams.post_lookup),
    ("/lora-adapters", lora.post_adapters),
    ("/slots/{id_slot}", native.post_slots),
    ("/v1/systemone", native.post_systemone),
    ("/audio/transcriptions", native.post_transcriptions),
    ("/v1/audio/transcriptions", native.post_transcriptions),
    ("/tools", native.disabled),
    ("/cors-proxy", native.disabled),
)


OLLAMA: tuple[tuple[str, Handler], ...] = (
    ("/api/chat", ollama.post_chat),
    ("/api/generate", ollama.post_generate),
    ("/api/embed", ollama_embed.post_embed),
    ("/api/embeddings", ollama_embed.post_embeddings),
)
"""Ollama's routes that a model answers; those about the store are in `ollama_store`."""


def build_app(state: ServerState, extras: Extras = NO_EXTRAS) -> ASGIApp:
    """The ASGI application of a server with one model; `extras` came with the model from a registry."""
    host = FixedModel(state)
    app = model_app(state, extras, host.names)
    prefix = state.config.http.api_prefix
    add_management(app, prefix, Manager(state.config, host))
    add_blobs(app, prefix)
    ui.add_ui(app, state.config.http)
    return Gate(app, state.config.http, state.engine)


class _Route(APIRoute):
    """Our handlers take the request and give the response: there is nothing that FastAPI has to read, check or
    convert for them, which would cost a quarter of a millisecond."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


def model_app(state: ServerState, extras: Extras, names: tuple[str, ...]) -> FastAPI:
    """The routes that one model answers; `names` are those that Ollama's API may call it by."""
    app = FastAPI(title="ftgguf", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = _Route
    app.state.server = state
    app.state.ollama = ollama.Served(names, extras)
    prefix = state.config.http.api_prefix

    def add(method: str, path: str, handler: Handler) -> None:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(prefix + path, handler, methods=methods, response_model=None, operation_id=_id(method, path))

    for path, handler in GET:
        add("GET", path, handler)
    for path, handler in (*POST, *OLLAMA):
        add("POST", path, handler)
    add("DELETE", "/v1/stream", streams.delete_stream)
    if vertex.enabled():
        if vertex.health_route():
            add("GET", vertex.health_route(), native.get_health)
        add("POST", vertex.predict_route(), vertex.predict_handler(dict(POST)))
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Whatever is raised ends as an error object of the API that was asked."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Disconnected, _gone)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)


def _id(method: str, path: str) -> str:
    return method.lower() + path.translate(str.maketrans("/-{}", "____"))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error) if is_ollama(request) else json_response(error.document(), error.code)


def is_ollama(request: Request) -> bool:
    """Whether a request is to Ollama's API, whose errors are strings."""
    return PREFIX in request.url.path


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods are the same 404 in llama-server."""
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        return json_response(NOT_FOUND, 404)
    return json_response(ApiError(str(error.detail), code=error.status_code).document(), error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    answer = native.internal(error)
    return error_response(answer) if is_ollama(request) else json_response(answer.document(), 500)
