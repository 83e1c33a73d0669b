"""`GET /v1/cache/status` and `POST /v1/cache/rebuild`: the expert cache and the KV cells in service."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.errors import InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.state import state_of


async def get_status(request: Request) -> Response:
    """`{"experts": ..., "kv": ...}`; see experts.status.cache_status and engine.controls."""
    engine = state_of(request).engine
    experts = await engine.control("expert_cache_status")
    return json_response({"experts": experts, "kv": await engine.control("cache_status")})


async def post_rebuild(request: Request) -> Response:
    """Body `{"size_mib": N}`: device memory for cached experts; `{}`: the size stays, and the slots are filled anew
    with the experts that are worth most. Requests in flight go on; no weights are read from the file again. Answers
    with the bytes before and after and the slots."""
    state = state_of(request)
    body, _ = await state.json(request)
    size = body.get("size_mib") if isinstance(body, dict) else -1
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise InvalidRequest("'size_mib' must be a whole number of MiB from 0 on, or left out")
    return json_response(await state.engine.control("expert_cache_rebuild", size_mib=size))
