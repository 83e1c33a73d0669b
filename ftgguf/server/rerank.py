"""Reranking: `/rerank`, `/v1/rerank`, `/reranking` in Jina's shape, or in TEI's where the body has `texts`.

Prompts, checks and words are llama-server's (`format_prompt_rerank`, `handle_rerank`); the score is the first of the
classifier's labels.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.embeddings import embed, states_of
from ftgguf.server.errors import InvalidRequest, not_supported
from ftgguf.server.generation import json_response
from ftgguf.server.prompts import check_prompt
from ftgguf.server.state import state_of
from ftgguf.server.wire import lenient


async def post_rerank(request: Request) -> Response:
    state = state_of(request)
    wanted = "This server does not support reranking. Start it with `--reranking`"
    if not state.config.http.embedding:
        raise not_supported(wanted)
    await state.engine.awake()
    n_ctx = state.n_ctx
    if state.info.get("pooling") != "rank":
        raise not_supported(wanted)
    parsed, size = await state.json(request)
    body: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    query, documents, top_n = _fields(body)

    def prompts() -> list[list[int]]:
        found = [state.rerank.tokens(state.vocab, query, document) for document in documents]
        for prompt in found:
            if not prompt:
                raise InvalidRequest("Input content cannot be empty")
            check_prompt(state.vocab, prompt, n_ctx)
        return found

    answers = await embed(state, request, await state.run(size * len(documents), prompts))
    scores = [float(states_of(answer)[0, 0]) for answer in answers]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    if "texts" in body:
        texts = lenient(body, "return_text", False)
        return json_response(
            [{"index": i, "score": scores[i]} | ({"text": documents[i]} if texts else {}) for i in best]
        )
    n_tokens = sum(answer.evaluated_n for answer in answers)
    return json_response(
        {
            "model": body.get("model", state.name),
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "results": [{"index": i, "relevance_score": scores[i]} for i in best],
        }
    )


def _fields(body: dict[str, Any]) -> tuple[str, list[str], int]:
    """(query, documents, number of results) of a body."""
    if "query" not in body:
        raise InvalidRequest('"query" must be provided')
    query = body["query"]
    if not isinstance(query, str):
        raise InvalidRequest('"query" must be a string')
    documents = next((body[key] for key in ("documents", "texts") if _are_texts(body.get(key))), None)
    if not documents:
        raise InvalidRequest('"documents" must be a non-empty string array')
    top_n = lenient(body, "top_n", len(documents))
    if top_n < 0:
        raise InvalidRequest('"top_n" must not be negative')
    return query, documents, top_n


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
