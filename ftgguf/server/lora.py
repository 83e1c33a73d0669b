"""`/lora-adapters`: which LoRA adapters are loaded, and with what scale requests run that do not say."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.adapters import parse_scales
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.state import state_of


async def get_adapters(request: Request) -> Response:
    state = state_of(request)
    return json_response(state.adapters.document(state.info))


async def post_adapters(request: Request) -> Response:
    state = state_of(request)
    body, _ = await state.json(request)
    if not isinstance(body, list):
        raise InvalidRequest("Request body must be an array")
    state.adapters.set(parse_scales(body))
    return json_response({"success": True})
