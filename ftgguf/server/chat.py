"""Chat requests of every API, once they have OpenAI's form: planned, tokenised, counted, shown."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.chat.request import ChatPlan
from ftgguf.server.generation import Sequence, json_response, make_sequences
from ftgguf.server.prompts import tokenize_prompts
from ftgguf.server.schema import evaluate
from ftgguf.server.state import ServerState, state_of


async def parse_chat(state: ServerState, body: Any, size: int) -> tuple[ChatPlan, list[Sequence]]:
    """The plan of a chat body of `size` bytes and its sequences, ready to run."""

    def work() -> tuple[ChatPlan, list[Sequence]]:
        plan = state.planner.plan(body)
        params = evaluate(plan.body, state.context)
        params.chat_format = plan.dialect.format
        prompts = tokenize_prompts(state.vocab, plan.prompt)
        return plan, make_sequences(state, prompts, params)

    return await state.run(size, work)


async def post_apply_template(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    return json_response({"prompt": (await state.run(size, lambda: state.planner.plan(body))).prompt})


async def count_tokens(state: ServerState, body: Any, size: int) -> int:
    """Prompt tokens of a chat body; the same number as `usage.prompt_tokens` of the real call."""

    def work() -> int:
        return len(tokenize_prompts(state.vocab, state.planner.plan(body).prompt)[0])

    return await state.run(size, work)


async def post_input_tokens(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    return json_response({"input_tokens": await count_tokens(state, body, size), "object": "response.input_tokens"})
