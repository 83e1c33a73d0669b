"""Ollama's management routes: /api/tags, show, ps, pull, delete, copy, create, blobs, version, status, HEAD /."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ftgguf.pull.catalog import builtin_models, local_models
from ftgguf.pull.create import create
from ftgguf.pull.errors import NameResolutionError, PullError
from ftgguf.pull.modelfile import Modelfile
from ftgguf.pull.names import BlobName, BuiltinName, HubName, OllamaName, StoredName, parse
from ftgguf.pull.resolve import fetch
from ftgguf.pull.session import Event
from ftgguf.pull.show import describe_local, show_json, tag_json
from ftgguf.pull.store import Store, stored_name
from ftgguf.server.errors import ApiError, InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.models import Running
from ftgguf.server.ollama_guard import check_may_change
from ftgguf.server.ollama_jobs import Manager, api_error, job_response, manager_of
from ftgguf.server.ollama_wire import FOREVER, VERSION, model_name, not_found, timestamp
from ftgguf.server.wire import lenient, parse_body

log = logging.getLogger("ftgguf.server")

MAX_BODY = 16 << 20


async def read_json(request: Request) -> Any:
    """The body of a management request, small ones only."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ApiError(f"request body is larger than {MAX_BODY} bytes", code=413)
    return parse_body(body)


# ------------------------------------------------------------------------------------------------------- reading


async def get_tags(request: Request) -> Response:
    manager = manager_of(request)

    def work() -> list[dict[str, Any]]:
        store = manager.store()
        models = {model.name: model for model in (*manager.host.own(), *local_models(store))}
        return [tag_json(store, model) for model in models.values()]

    return json_response({"models": await manager.run(work)})


async def post_show(request: Request) -> Response:
    manager, body = manager_of(request), await read_json(request)
    name, verbose = model_name(body), lenient(body, "verbose", False)

    def work() -> dict[str, Any]:
        store = manager.store()
        return show_json(describe_local(store, manager.find(name), verbose))

    return json_response(await manager.run(work))


async def get_ps(request: Request) -> Response:
    manager = manager_of(request)
    running = manager.host.running()

    def work() -> list[dict[str, Any]]:
        store = manager.store()
        return [ps_json(store, model) for model in running]

    return json_response({"models": await manager.run(work)})


def ps_json(store: Store, running: Running) -> dict[str, Any]:
    """One element of /api/ps' `models`."""
    told = tag_json(store, running.model) if running.model is not None else {"name": running.name}
    told.pop("modified_at", None)
    expires = FOREVER if running.expires is None else timestamp(running.expires)
    return told | {
        "name": running.name,
        "model": running.name,
        "size": running.size,
        "size_vram": running.size_vram,
        "context_length": running.context,
        "expires_at": expires,
    }


async def get_version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def get_status(request: Request) -> Response:
    """There are no remote models here."""
    return json_response({"cloud": {"disabled": True, "source": "ftgguf"}})


async def head_root(request: Request) -> Response:
    return PlainTextResponse("Ollama is running")


# ------------------------------------------------------------------------------------------------------ changing


async def post_pull(request: Request) -> Response:
    manager = manager_of(request)
    check_may_change(request, manager.config)
    body = await read_json(request)
    name = registry_name(model_name(body))
    insecure = lenient(body, "insecure", False)

    def work(report: Callable[[Event], None], cancelled: Callable[[], bool]) -> None:
        with manager.session(report, cancelled, insecure) as session:
            session.check_host(name)
            fetch(session, name)

    with manager.session(lambda _event: None, lambda: False, insecure) as probe:
        try:
            probe.check_host(name)
        except PullError as error:
            raise api_error(error) from None
    return await job_response(manager, work, lenient(body, "stream", True))


def registry_name(text: str) -> OllamaName | HubName:
    """A name that may be pulled over HTTP: of a registry or the Hub, never a path or an address. Raises ApiError."""
    try:
        name = parse(text)
    except NameResolutionError as error:
        raise InvalidRequest(str(error)) from None
    if not isinstance(name, OllamaName | HubName):
        raise InvalidRequest(f"'{text[:200]}' is not the name of a model in a registry, for example qwen3:30b")
    return name


def target_name(text: Any) -> StoredName:
    """The name of something in our store. Raises NameResolutionError, InvalidRequest."""
    if not isinstance(text, str) or not text:
        raise InvalidRequest("a model's name is missing")
    return stored_name(text)


async def post_copy(request: Request) -> Response:
    manager = manager_of(request)
    check_may_change(request, manager.config)
    body = await read_json(request)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")

    def work() -> None:
        store = manager.store()
        source = store.get(target_name(body.get("source")))
        if source is None:
            raise not_found(str(body.get("source")))
        store.copy(source, target_name(body.get("destination")))

    await manager.run(work)
    manager.host.changed()
    return Response(status_code=200)


async def delete_model(request: Request) -> Response:
    """`DELETE /api/delete`: unloads the model first."""
    manager = manager_of(request)
    check_may_change(request, manager.config)
    name = model_name(await read_json(request))
    await remove(manager, name)
    return Response(status_code=200)


async def remove(manager: Manager, name: str) -> None:
    """Delete a model of our store, unloaded first. Raises ApiError."""

    def known() -> StoredName:
        served = manager.host.find(name)
        if served is not None and served.entry is None:
            raise InvalidRequest(
                f"'{name}' is a file that this server was pointed to, not a pulled model: remove the file"
            )
        target = target_name(name)
        if manager.store().get(target) is None:
            raise not_found(name)
        return target

    target = await manager.run(known)
    await manager.host.unload(name)
    await manager.run(lambda: manager.store().delete(target))
    manager.host.changed()


async def post_create(request: Request) -> Response:
    """From another model's name, or from blobs that were sent before; never from a path of this machine."""
    manager = manager_of(request)
    check_may_change(request, manager.config)
    body = await read_json(request)
    name = model_name(body)
    target, modelfile = creation(body, name)
    source = modelfile.source

    def work(report: Callable[[Event], None], cancelled: Callable[[], bool]) -> None:
        with manager.session(report, cancelled, False) as session:
            name = parse(source)
            if isinstance(name, OllamaName | HubName) and session.store.get(name) is None:
                session.check_host(name)
            create(session, target, modelfile, None)

    return await job_response(manager, work, lenient(body, "stream", True))


def creation(body: dict[str, Any], name: str) -> tuple[StoredName, Modelfile]:
    """The body of /api/create as a Modelfile. Raises ApiError."""
    try:
        target = stored_name(name)
    except NameResolutionError as error:
        raise InvalidRequest(str(error)) from None
    files = body.get("files")
    source = body.get("from") or ""
    if isinstance(files, dict) and files:
        if len(files) > 1:
            raise InvalidRequest("files: one .gguf file can be given here; use ftgguf create for split models")
        source = next(iter(files.values()))
    if not isinstance(source, str) or not source:
        raise InvalidRequest("from (a model's name) or files (a name and the digest of a blob) must be given")
    for unsupported in ("quantize", "modelfile"):
        if body.get(unsupported):
            raise InvalidRequest(f"{unsupported} is not supported here")
    try:
        base = parse(source)
    except NameResolutionError as error:
        raise InvalidRequest(str(error)) from None
    made = not isinstance(base, BuiltinName) or any(model.name == base.name for model in builtin_models())
    if not made or not isinstance(base, OllamaName | HubName | BlobName | BuiltinName):
        raise InvalidRequest(f"'{source[:200]}' is no model here and none in a registry")
    adapters = list(lenient(body, "adapters", {}).values())
    if not all(isinstance(each, str) and re.fullmatch(r"sha256[:-][0-9a-f]{64}", each) for each in adapters):
        raise InvalidRequest("adapters: names and the digests of blobs that were sent before")
    licenses = body.get("license") or []
    modelfile = Modelfile(
        source=source,
        params=lenient(body, "parameters", {}),
        system=lenient(body, "system", "") or None,
        template=lenient(body, "template", "") or None,
        messages=lenient(body, "messages", []),
        adapters=adapters,
        licenses=[licenses] if isinstance(licenses, str) else [str(each) for each in licenses],
    )
    return target, modelfile


# -------------------------------------------------------------------------------------------------------- routes

ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/api/tags", get_tags),
    ("GET", "/api/ps", get_ps),
    ("GET", "/api/version", get_version),
    ("GET", "/api/status", get_status),
    ("POST", "/api/show", post_show),
    ("POST", "/api/pull", post_pull),
    ("POST", "/api/copy", post_copy),
    ("POST", "/api/create", post_create),
    ("DELETE", "/api/delete", delete_model),
)


def add_management(app: FastAPI, prefix: str, manager: Manager) -> None:
    """Add the routes to `app`."""
    app.state.manager = manager
    app.add_api_route(prefix + "/", head_root, methods=["HEAD"], include_in_schema=False, response_model=None)
    for method, path, handler in ROUTES:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        id = method.lower() + path.replace("/", "_")
        app.add_api_route(prefix + path, handler, methods=methods, response_model=None, operation_id=id)
