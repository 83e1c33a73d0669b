"""What router mode answers itself: /models with load, unload, download, delete and events; /props, /health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ftgguf import __version__
from ftgguf.pull.errors import PullError
from ftgguf.pull.names import HubName, OllamaName
from ftgguf.pull.resolve import fetch
from ftgguf.pull.session import Event
from ftgguf.server import native, streams, ui
from ftgguf.server.app import add_error_handlers
from ftgguf.server.errors import ApiError, InvalidRequest, server_error
from ftgguf.server.generation import json_response
from ftgguf.server.models_catalog import Source
from ftgguf.server.models_host import RouterHost
from ftgguf.server.models_instance import Instance
from ftgguf.server.ollama_blobs import add_blobs
from ftgguf.server.ollama_guard import check_may_change
from ftgguf.server.ollama_jobs import Job, Manager, api_error
from ftgguf.server.ollama_store import add_management, read_json, registry_name, remove
from ftgguf.server.sse import PING, EventStream, data
from ftgguf.server.state import BUILD_INFO
from ftgguf.server.wire import lenient

log = logging.getLogger("ftgguf.server")

PING_S = 30.0


class Routes:
    """The handlers; one of each front."""

    def __init__(self, host: RouterHost, manager: Manager) -> None:
        self._host = host
        self._manager = manager
        self._downloads: dict[str, asyncio.Task[None]] = {}
        self._progress: dict[str, dict[str, Any]] = {}

    # ------------------------------------------------------------------------------------------------- looking

    async def health(self, request: Request) -> Response:
        """Always ok: the front answers while models load. `loading` tells how far they are."""
        loading = [
            {"model": each.name, **_progress(each)} for each in self._host.pool.loaded() if each.status == "loading"
        ]
        return json_response({"status": "ok", **({"loading": loading} if loading else {})})

    async def props(self, request: Request) -> Response:
        config = self._manager.config
        return json_response(
            {
                "role": "router",
                "max_instances": config.model.models_max,
                "models_autoload": config.model.models_autoload,
                "model_alias": "llama-server",
                "model_path": "none",
                "default_generation_settings": {"params": None, "n_ctx": 0},
                "ui_settings": config.http.ui_config,
                "build_info": BUILD_INFO,
                "cors_proxy_enabled": False,
            }
        )

    async def models(self, request: Request) -> Response:
        if request.query_params.get("reload") or self._host.catalog.stale():
            await self._host.reload()
        await self._host.refresh()
        created = int(time.time())
        known = self._host.pool.known
        models = [instance_json(known(source.name), source, created) for source in self._host.catalog.sources()]
        models += [_downloading(name, self._progress.get(name, {}), created) for name in self._downloads]
        return json_response({"data": models, "object": "list"})

    async def lookup(self, request: Request) -> Response:
        kept = [each.started.state.sessions for each in self._host.pool.loaded() if each.started is not None]
        return json_response(streams.found_json(streams.wanted_ids(await read_json(request)), kept))

    async def events(self, request: Request) -> Response:
        return EventStream(_event_bytes(self._host.pool.events()))

    # ------------------------------------------------------------------------------------------------- changing

    async def load(self, request: Request) -> Response:
        source = await self._host.find_source(await _name(request))
        if source is None:
            raise ApiError("model is not found", "not_found_error")
        instance = self._host.pool.known(source.name)
        if instance is not None and instance.status != "unloaded" and instance.ending is None:
            raise InvalidRequest("model is already running")
        self._host.pool.load(source)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        name = await _name(request)
        source = await self._host.find_source(name)
        if source is None and name not in self._downloads:
            raise InvalidRequest("model is not found")
        if name in self._downloads:
            self._downloads[name].cancel()
        elif source is None or not await self._host.pool.unload(source.name, wait=False, cut=True):
            raise InvalidRequest("model is not running")
        return json_response({"success": True})

    async def download(self, request: Request) -> Response:
        """Begin to fetch a model of the Hub (`user/repo:quant`) or a registry; /models/sse tells how far it is."""
        check_may_change(request, self._manager.config)
        text = await _name(request)
        if not text:
            raise InvalidRequest("model must be a non-empty string")
        name = hub_or_registry(text)
        if await self._host.find_source(str(name)) is not None or text in self._downloads:
            raise InvalidRequest(f"model '{text}' already exists")
        with self._manager.session(lambda _event: None, lambda: False, False) as session:
            try:
                session.check_host(name)
            except PullError as error:
                raise api_error(error) from None
        task = asyncio.create_task(self._fetch(text, name))
        self._downloads[text] = task
        task.add_done_callback(lambda _task: self._downloads.pop(text, None))
        return json_response({"success": True})

    async def _fetch(self, text: str, name: OllamaName | HubName) -> None:
        def work(report: Callable[[Event], None], cancelled: Callable[[], bool]) -> None:
            with self._manager.session(report, cancelled, False) as session:
                fetch(session, name)

        pool, failed = self._host.pool, "cancelled"
        files = self._progress[text] = {}
        try:
            async for event in Job(self._manager, work).events():
                failed = event.get("error", "")
                if event.get("total"):
                    done = {"done": event.get("completed", 0), "total": event["total"]}
                    files[event.get("digest") or event["status"]] = done
                    pool.publish("download_progress", text, {"progress": files})
        finally:
            self._progress.pop(text, None)
            if failed:
                log.error("download of %s failed: %s", text, failed)
            pool.publish("download_failed" if failed else "download_finished", text, {})

    async def delete(self, request: Request) -> Response:
        check_may_change(request, self._manager.config)
        name = request.query_params.get("model", "")
        if not name:
            raise InvalidRequest("model must be a non-empty string")
        if name in self._downloads:
            self._downloads[name].cancel()
            return json_response({"success": True})
        source = await self._host.find_source(name)
        if source is None:
            raise server_error(f"model name={name} is not found")
        if source.local is None or source.local.entry is None or source.kind != "cache":
            raise server_error(f"model name={name} is not removable (not from cache)")
        await remove(self._manager, str(source.local.entry.name))
        self._host.pool.publish("model_remove", source.name, {})
        return json_response({"success": True})


async def _name(request: Request) -> str:
    body = await read_json(request)
    return lenient(body, "model", "") if isinstance(body, dict) else ""


def hub_or_registry(text: str) -> OllamaName | HubName:
    """`user/repo[:quant]` is the Hub's, as in llama-server; else as Ollama writes names. Raises InvalidRequest."""
    return registry_name(f"hf.co/{text}" if text.count("/") == 1 else text)


def _progress(instance: Instance) -> dict[str, Any]:
    if instance.started is None:
        return {"stage": "waiting", "progress": 0.0}
    loading = instance.started.engine.loading
    return {"stage": loading.stage, "progress": round(loading.fraction, 4)}


def instance_json(instance: Instance | None, source: Source, created: int) -> dict[str, Any]:
    """One element of GET /models."""
    status: dict[str, Any] = {"value": instance.shown if instance else "unloaded", "args": list(source.args)}
    if source.preset:
        status["preset"] = f"[{source.name}]\n{source.preset}"
    if instance is not None and instance.failure:
        status |= {"failed": True, "exit_code": 1, "message": instance.failure}
    if instance is not None and instance.status == "loading":
        status["progress"] = _progress(instance)
    out: dict[str, Any] = {
        "id": source.name,
        "aliases": list(source.aliases),
        "tags": list(source.tags),
        "object": "model",
        "owned_by": "llamacpp",
        "created": created,
        "status": status,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "source": source.kind,
        "can_remove": source.kind == "cache" and source.local is not None and source.local.entry is not None,
    }
    if instance is not None and instance.ready and instance.started is not None:
        out |= instance.started.info()
    return out


def _downloading(name: str, files: dict[str, Any], created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "owned_by": "llamacpp",
        "created": created,
        "status": {"value": "downloading", "args": []},
        "progress": files,
        "source": "cache",
        "can_remove": True,
    }


async def _event_bytes(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Events, and a comment every half minute, so that a reader who left is noticed."""
    waiting: asyncio.Future[dict[str, Any]] | None = None
    yield PING
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
            done, _ = await asyncio.wait({waiting}, timeout=PING_S)
            if done:
                finished, waiting = waiting, None
                try:
                    message = finished.result()
                except StopAsyncIteration:
                    return
                yield data(message)
            else:
                yield PING
    finally:
        if waiting is not None:
            waiting.cancel()


def outer_app(host: RouterHost, manager: Manager) -> FastAPI:
    """The application of everything that needs no model."""
    app = FastAPI(title="ftgguf", version=__version__, docs_url=None, redoc_url=None)
    http, routes = manager.config.http, Routes(host, manager)
    handlers: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
        ("GET", "/health", routes.health),
        ("GET", "/v1/health", routes.health),
        ("GET", "/props", routes.props),
        ("GET", "/models", routes.models),
        ("GET", "/v1/models", routes.models),
        ("GET", "/models/sse", routes.events),
        ("POST", "/models", routes.download),
        ("DELETE", "/models", routes.delete),
        ("POST", "/models/load", routes.load),
        ("POST", "/models/unload", routes.unload),
        ("POST", "/v1/streams/lookup", routes.lookup),
        ("GET", "/v1/stream", _no_stream),
        ("DELETE", "/v1/stream", _no_stream),
        *((method, path, native.disabled) for method in ("GET", "POST") for path in ("/tools", "/cors-proxy")),
    )
    for method, path, handler in handlers:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        id = method.lower() + path.replace("/", "_")
        app.add_api_route(http.api_prefix + path, handler, methods=methods, response_model=None, operation_id=id)
    add_management(app, http.api_prefix, manager)
    add_blobs(app, http.api_prefix)
    ui.add_ui(app, http)
    add_error_handlers(app)
    return app


async def _no_stream(request: Request) -> Response:
    """No loaded model keeps this conversation."""
    if not request.query_params.get("conv_id"):
        raise InvalidRequest("Missing conversation id in path")
    if request.method == "DELETE":
        return Response(status_code=204)
    raise ApiError("Stream not found or expired", "not_found_error")
