"""Embeddings: llama-server's `/embedding(s)` and OpenAI's `/v1/embeddings`.

The engine pools, the front normalises and writes. Checks and their words are those of llama-server's
`handle_embeddings_impl`, in its order.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ftgguf.engine import messages as m
from ftgguf.nouns import F32
from ftgguf.server.errors import InvalidRequest, not_supported
from ftgguf.server.generation import json_response
from ftgguf.server.prompts import check_prompt, tokenize_prompts
from ftgguf.server.sse import unless_disconnected
from ftgguf.server.state import ServerState, state_of
from ftgguf.server.wire import WrongType, as_int, as_str

NOT_STARTED = "This server does not support embeddings. Start it with `--embeddings`"
ONLY_SCORES = "This server was started for reranking and computes scores only: use /rerank"
VALUES_AT_ONCE = 1 << 14
"""Numbers that become JSON on the event loop; more of them leave it (about 3 ms)."""


async def embed(
    state: ServerState, request: Request, prompts: list[list[int]], pooling: str = "model"
) -> list[m.Embedded]:
    """The engine's embeddings of `prompts` (checked here), in their order."""
    await state.engine.awake()
    n_ctx = state.n_ctx
    for prompt in prompts:
        check_prompt(state.vocab, prompt, n_ctx)
    adapters = state.adapters.of_request({})
    requests = [
        m.Generate(id=state.engine.new_id(), prompt=tuple(prompt), max_tokens=0, embed=pooling, adapters=adapters)
        for prompt in prompts
    ]
    found: dict[int, m.Embedded] = {}
    stream = state.engine.open(requests)

    async def collect() -> None:
        while stream.running:
            for message in await stream.next():
                if isinstance(message, m.Embedded):
                    found[message.id] = message

    async with stream:
        await unless_disconnected(request, collect())
    return [found[each.id] for each in requests]


def states_of(message: m.Embedded) -> F32:
    """float32 [rows, columns] of one answer."""
    return np.frombuffer(message.data, "<f4").reshape(message.rows, message.columns)


def normalised(values: F32, norm: int) -> F32:
    """One vector, float32 [n], as llama.cpp's `common_embd_normalize` does it.

    `norm` -1: as it is; 0: the largest absolute value becomes 32760; otherwise the p-norm becomes 1 (2: Euclidean).
    """
    if norm == -1:
        return values
    wide = np.abs(values.astype(np.float64))
    if norm == 0:
        total = float(wide.max(initial=0.0)) / 32760.0
    elif norm == 2:
        total = float(np.sqrt((values * values).astype(np.float64).sum()))
    else:
        with np.errstate(over="ignore", divide="ignore"):
            total = float((wide**norm).sum() ** (1.0 / norm))
    factor = np.float32(1.0 / total) if total > 0.0 else np.float32(0.0)
    return np.asarray(values * factor, np.float32)


async def post_embedding(request: Request) -> Response:
    return await _answer(request, openai=False)


async def post_openai_embeddings(request: Request) -> Response:
    return await _answer(request, openai=True)


async def _answer(request: Request, openai: bool) -> Response:
    state = state_of(request)
    if not state.config.http.embedding:
        raise not_supported(NOT_STARTED)
    await state.engine.awake()
    n_ctx = state.n_ctx  # 503 while the model loads
    pooling = state.info.get("pooling", "none")
    if pooling == "rank":
        raise InvalidRequest(ONLY_SCORES)
    if openai and pooling == "none":
        raise InvalidRequest("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    parsed, size = await state.json(request)
    body: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    openai = openai and "input" in body
    as_base64, norm = _options(state, body)
    prompts = await state.run(size, lambda: _prompts(state, body, n_ctx))
    answers = await embed(state, request, prompts)
    values = sum(each.rows * each.columns for each in answers)

    def document() -> Any:
        rows = [states_of(each) for each in answers]
        if pooling != "none":
            rows = [normalised(each[0], norm)[None] for each in rows]
        if not openai:
            return [{"index": index, "embedding": each.tolist()} for index, each in enumerate(rows)]
        n_tokens = sum(each.evaluated_n for each in answers)
        return {
            "model": body.get("model", state.name),
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "data": [_openai_item(index, each[0], as_base64) for index, each in enumerate(rows)],
        }

    return await state.run(65536 if values > VALUES_AT_ONCE else 0, lambda: json_response(document()))


def _openai_item(index: int, values: F32, as_base64: bool) -> dict[str, Any]:
    item: dict[str, Any] = {"embedding": values.tolist(), "index": index, "object": "embedding"}
    if as_base64:
        item["embedding"] = base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()
        item["encoding_format"] = "base64"
    return item


def _options(state: ServerState, body: dict[str, Any]) -> tuple[bool, int]:
    """(base64?, norm) of a body."""
    if "input" not in body and "content" not in body:
        raise InvalidRequest('"input" or "content" must be provided')
    try:
        form = as_str(body["encoding_format"]) if "encoding_format" in body else "float"
        norm = as_int(body["embd_normalize"]) if "embd_normalize" in body else state.config.http.embd_normalize
    except WrongType as error:
        raise InvalidRequest(str(error)) from None
    if form not in ("float", "base64"):
        raise InvalidRequest("The format to return the embeddings in. Can be either float or base64")
    return form == "base64", norm


def _prompts(state: ServerState, body: dict[str, Any], n_ctx: int) -> list[list[int]]:
    value = body["input"] if "input" in body else body["content"]
    if value == []:
        raise InvalidRequest('"input" must not be empty')
    prompts = tokenize_prompts(state.vocab, value)
    if not all(prompts):
        raise InvalidRequest("Input content cannot be empty")
    for prompt in prompts:
        check_prompt(state.vocab, prompt, n_ctx)
    return prompts
