"""Ollama's /api/embed and, as older clients say, /api/embeddings.

Ollama embeds with every model and without a flag; where the model names no pooling it takes the last token's state.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.embeddings import embed, normalised, states_of
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.generation import json_response
from ftgguf.server.ollama import LOAD_NS, named_body
from ftgguf.server.state import ServerState, state_of
from ftgguf.server.wire import lenient


async def post_embed(request: Request) -> Response:
    """`{model, input, truncate, dimensions}` -> one vector of length 1 for each input."""
    started, state = time.monotonic_ns(), state_of(request)
    body, size, name = await named_body(request)
    texts = _inputs(body.get("input"))
    dimensions = body.get("dimensions") or 0
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or dimensions < 0:
        raise InvalidRequest("dimensions must be a positive number")
    truncate = lenient(body, "truncate", True)
    answers = []
    if texts:
        prompts = await state.run(size, lambda: [_prompt(state, text, truncate) for text in texts])
        answers = await embed(state, request, prompts, _pooling(state))
    vectors = [normalised(states_of(answer)[0], 2) for answer in answers]
    if dimensions:
        vectors = [normalised(vector[:dimensions], 2) for vector in vectors]
    load_ns = request.scope.get(LOAD_NS, 0)
    return json_response(
        {
            "model": name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": time.monotonic_ns() - started + load_ns,
            "load_duration": load_ns,
            "prompt_eval_count": sum(answer.evaluated_n for answer in answers),
        }
    )


async def post_embeddings(request: Request) -> Response:
    """`{model, prompt}` -> one vector as the model gives it."""
    state = state_of(request)
    body, size, _ = await named_body(request)
    text = body.get("prompt", "")
    if not isinstance(text, str):
        raise InvalidRequest("prompt must be a string")
    if not text:
        return json_response({"embedding": []})
    prompt = await state.run(size, lambda: _prompt(state, text, True))
    (answer,) = await embed(state, request, [prompt], _pooling(state))
    return json_response({"embedding": states_of(answer)[0].tolist()})


def _inputs(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise InvalidRequest("invalid input type")


def _pooling(state: ServerState) -> str:
    pooling: str = state.info.get("pooling", "none")
    if pooling == "rank":
        raise InvalidRequest("this model is a reranker and computes no embeddings: use /rerank")
    return "last" if pooling == "none" else pooling


def _prompt(state: ServerState, text: str, truncate: bool) -> list[int]:
    ids = state.vocab.tokenize(text, add_special=True, parse_special=True)
    limit = state.n_ctx - 1
    if len(ids) > limit:
        if not truncate:
            raise InvalidRequest("the input length exceeds the context length")
        last = ids[-1]
        ids = ids[:limit]
        if last in state.vocab.eog_ids:  # models with an end token pool over it
            ids[-1] = last
    if not ids:
        raise InvalidRequest("the input holds no tokens")
    return ids
