"""Google Vertex AI's prediction route, which llama-server serves when `AIP_MODE=PREDICTION` is in the environment.

`{"instances": [{"@requestFormat": "chatCompletions", ...}]}`: each instance is the body of another POST route, named by
its path or by the path in camel case; the answers come back as `{"predictions": [...]}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from ftgguf.server.errors import ApiError, InvalidRequest, server_error
from ftgguf.server.generation import json_response
from ftgguf.server.state import state_of
from ftgguf.server.wire import dumps

Handler = Callable[[Request], Awaitable[Response]]
MAX_INSTANCES = 128


def enabled() -> bool:
    return os.environ.get("AIP_MODE") == "PREDICTION"


def _route(name: str, default: str) -> str:
    value = os.environ.get(name, "") or default
    return value if not value or value.startswith("/") else "/" + value


def predict_route() -> str:
    return _route("AIP_PREDICT_ROUTE", "/predict")


def health_route() -> str:
    """Empty: no route of its own."""
    return _route("AIP_HEALTH_ROUTE", "")


def port() -> int:
    return int(os.environ.get("AIP_HTTP_PORT", "8080"))


def request_format(path: str) -> str:
    """`/v1/chat/completions` -> `chatCompletions`."""
    words = [word for word in re.split(r"[/_-]", path.removeprefix("/v1").lstrip("/").partition("{")[0]) if word]
    return "".join(word if i == 0 else word[0].upper() + word[1:] for i, word in enumerate(words))


def predict_handler(routes: Mapping[str, Handler]) -> Handler:
    """The route's handler over the other POST `routes`."""
    aliases: dict[str, str] = {}
    for path in routes:
        aliases.setdefault(request_format(path), path)

    async def one(request: Request, instance: Any) -> Any:
        try:
            if not isinstance(instance, dict):
                raise InvalidRequest("each instance must be a JSON object")
            name = instance.get("@requestFormat")
            if not isinstance(name, str):
                raise InvalidRequest("each instance must include a string @requestFormat")
            path = aliases.get(name, name)
            if path not in routes:
                raise InvalidRequest(f"no handler registered for @requestFormat: {name}")
            body = {key: value for key, value in instance.items() if key != "@requestFormat"}
            if "stream" in body:
                body["stream"] = False
            response = await routes[path](_inner(request, path, dumps(body)))
            return json.loads(bytes(response.body)) if response.body else None
        except ApiError as error:
            return error.document()
        except Exception as error:
            return server_error(f"{type(error).__name__}: {error}").document()

    async def handler(request: Request) -> Response:
        data, _ = await state_of(request).json(request)
        if not isinstance(data, dict):
            raise InvalidRequest("request body must be a JSON object")
        instances = data.get("instances")
        if not isinstance(instances, list):
            raise InvalidRequest("request body must include an array field named instances")
        if len(instances) > MAX_INSTANCES:
            raise InvalidRequest(f"instances array exceeds maximum size of {MAX_INSTANCES}")
        predictions = await asyncio.gather(*(one(request, instance) for instance in instances))
        return json_response({"predictions": predictions})

    return handler


def _inner(request: Request, path: str, body: bytes) -> Request:
    """A request for `path` that hands over `body`, then never disconnects (the outer request is watched)."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(dict(request.scope) | {"path": path}, receive)
