"""`/v1/stream` and `/v1/streams/lookup`: reading again what `replay` keeps, and stopping it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.errors import ApiError, InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.replay import Sessions
from ftgguf.server.sse import EventStream
from ftgguf.server.state import state_of


def _conversation(request: Request) -> str:
    id = request.query_params.get("conv_id", "")
    if not id:
        raise InvalidRequest("Missing conversation id in path")
    return id


async def get_stream(request: Request) -> Response:
    session = state_of(request).sessions.get(_conversation(request))
    if session is None:
        raise ApiError("Stream not found or expired", "not_found_error")
    try:
        offset = int(request.query_params.get("from") or 0)
    except ValueError:
        raise InvalidRequest("Invalid 'from' offset") from None
    if offset < session.dropped:
        raise InvalidRequest("Stream offset lost, please restart")
    return EventStream(session.follow(offset))


async def delete_stream(request: Request) -> Response:
    state_of(request).sessions.remove(_conversation(request))
    return Response(status_code=204)


async def post_lookup(request: Request) -> Response:
    state = state_of(request)
    body, _ = await state.json(request)
    return json_response(found_json(wanted_ids(body), [state.sessions]))


def wanted_ids(body: Any) -> list[str]:
    """`conversation_ids` of a lookup's body, texts only."""
    wanted = body.get("conversation_ids") if isinstance(body, dict) else None
    return [id for id in wanted if isinstance(id, str) and id] if isinstance(wanted, list) else []


def found_json(ids: list[str], kept: list[Sessions]) -> list[dict[str, Any]]:
    """What is known about the conversations `ids`."""
    return [
        {
            "conversation_id": session.id,
            "is_done": session.done,
            "total_bytes": session.total,
            "started_at": session.started_at,
            "completed_at": session.completed_at,
        }
        for id in ids
        for sessions in kept
        for session in sessions.matching(id)
    ]
