"""Ollama's text routes for one loaded model: /api/chat and /api/generate (embeddings are in `ollama_embed`).

A request becomes the same sequences as on the other APIs; what differs is the shape of the answer: one JSON object a
line, tool calls with their arguments as an object, thinking beside the content, durations in nanoseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ftgguf.chat.parser import ChatDelta, OutputParser, PlainParser, ToolCall
from ftgguf.engine import messages as m
from ftgguf.pull.layers import Extras
from ftgguf.server.chat import parse_chat
from ftgguf.server.errors import ApiError, InvalidRequest, server_error
from ftgguf.server.generation import Sequence, json_response, make_sequences, probs_json, respond
from ftgguf.server.ollama_requests import chat_body, generate_body, is_empty, raw_body, wanted_context
from ftgguf.server.ollama_wire import keep_alive_seconds, line, model_name, now, same_name, stream_response
from ftgguf.server.prompts import tokenize_mixed, tokenize_prompts
from ftgguf.server.schema import evaluate
from ftgguf.server.state import ServerState, state_of
from ftgguf.server.wire import lenient

log = logging.getLogger("ftgguf.server")

LOAD_NS = "ftgguf.load_ns"
"""Key of the ASGI scope: how long the request waited for its model to load, where it did."""
ROUTED = "ftgguf.model"
"""Key of the ASGI scope: the request was sent here by the model's name, which need not be checked again."""


@dataclass(slots=True)
class Served:
    """The model of this application as Ollama's API sees it."""

    names: tuple[str, ...]
    extras: Extras
    warned: bool = False


def served(request: Request) -> Served:
    found: Served = request.app.state.ollama
    return found


class OllamaFormat:
    """Lines of /api/chat (`chat`) or /api/generate for one sequence."""

    ping = b""

    def __init__(self, model: str, chat: bool, parser: OutputParser, started: int, load_ns: int) -> None:
        self._model = model
        self._chat = chat
        self._parser = parser
        self._started = started
        self._load_ns = load_ns

    def _object(self, content: str = "", thinking: str = "", calls: list[ToolCall] | None = None) -> dict[str, Any]:
        out: dict[str, Any] = {"model": self._model, "created_at": now()}
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            extra["tool_calls"] = [_call_json(call, index) for index, call in enumerate(calls)]
        if self._chat:
            out["message"] = {"role": "assistant", "content": content, **extra}
        else:
            out |= {"response": content, **extra}
        return out | {"done": False}

    def _lines(self, deltas: list[ChatDelta], probs: Any = ()) -> bytes:
        """Text as it comes; calls wait for the end, when their arguments are whole."""
        objects = [self._object(d.content, d.reasoning) for d in deltas if d.content or d.reasoning]
        if probs:
            if not objects:
                objects.append(self._object())
            objects[-1]["logprobs"] = logprobs_json(probs)
        return b"".join(line(each) for each in objects)

    def started(self, sequence: Sequence) -> bytes:
        return b""

    def progress(self, sequence: Sequence, message: m.Progress) -> bytes:
        return b""

    def delta(self, sequence: Sequence, message: m.Delta) -> bytes:
        return self._lines(self._parser.feed(message.text), message.probs)

    def finished(self, sequence: Sequence) -> bytes:
        out = self._lines(self._parser.finish())
        calls = self._parser.message.tool_calls
        if calls:
            out += line(self._object(calls=calls))
        return out + line(self._object() | self._end(sequence))

    def document(self, sequences: list[Sequence]) -> Any:
        (sequence,) = sequences
        self._parser.feed("".join(sequence.text))
        self._parser.finish()
        message = self._parser.message
        out = self._object(message.content, message.reasoning, message.tool_calls) | self._end(sequence)
        return out | {"logprobs": logprobs_json(sequence.probs)} if sequence.probs else out

    def error(self, error: ApiError) -> bytes:
        return line({"error": error.message})

    def end(self) -> bytes:
        return b""

    def _end(self, sequence: Sequence) -> dict[str, Any]:
        """The last object's fields. `prompt_eval_count` is the whole prompt, reused tokens included, as in Ollama."""
        timings = sequence.timings
        out: dict[str, Any] = {"done": True, "done_reason": sequence.finish_reason()}
        if not self._chat:
            out["context"] = [*sequence.request.prompt, *sequence.tokens]
        return out | {
            "total_duration": time.monotonic_ns() - self._started + self._load_ns,
            "load_duration": self._load_ns,
            "prompt_eval_count": sequence.prompt_n,
            "prompt_eval_duration": int(timings.get("prompt_ms", 0.0) * 1e6),
            "eval_count": sequence.predicted_n,
            "eval_duration": int(timings.get("predicted_ms", 0.0) * 1e6),
        }


def _call_json(call: ToolCall, index: int) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise server_error(
            f"the model called {call.name} with arguments that are no JSON object: {call.arguments[:80]}"
        )
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def logprobs_json(probs: Any) -> list[dict[str, Any]]:
    """`logprobs` of newer clients: our OpenAI form without token ids."""
    out = probs_json(probs, False)
    for each in out:
        for item in (each, *each["top_logprobs"]):
            item.pop("id")
    return out


async def named_body(request: Request) -> tuple[dict[str, Any], int, str]:
    """(body, size, model's name as given); 404 for another model than this one."""
    parsed, size = await state_of(request).json(request)
    name = model_name(parsed)
    if ROUTED not in request.scope and not any(same_name(name, own) for own in served(request).names):
        own = ", ".join(served(request).names)
        raise ApiError(
            f"model '{name}' not found: this server has {own}; 'ftgguf serve' without -m loads others, too",
            "not_found_error",
        )
    _note_context(request, parsed)
    return parsed, size, name


def _note_context(request: Request, body: dict[str, Any]) -> None:
    """A larger context than the loaded one is said once: it is set where the server starts."""
    state, own = state_of(request), served(request)
    if wanted_context(body) > state.n_ctx and not own.warned:
        own.warned = True
        log.warning(
            "a request wants num_ctx %d, the context is %d tokens: start with -c", wanted_context(body), state.n_ctx
        )


def _short_answer(request: Request, body: dict[str, Any], name: str, chat: bool) -> Response:
    """Nothing to generate: the model is loaded already; a model given by `-m` stays."""
    if keep_alive_seconds(body.get("keep_alive")) == 0 and ROUTED not in request.scope:
        raise InvalidRequest(
            f"{name} was named when the server started and stays loaded: end the server, or start it without a model"
        )
    return load_answer(name, chat, "load")


def load_answer(name: str, chat: bool, reason: str) -> Response:
    """The answer to a request that only loads or unloads."""
    out: dict[str, Any] = {"model": name, "created_at": now()}
    out |= {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return json_response(out | {"done": True, "done_reason": reason})


async def post_chat(request: Request) -> Response:
    started, state = time.monotonic_ns(), state_of(request)
    body, size, name = await named_body(request)
    if is_empty(body, chat=True):
        return _short_answer(request, body, name, chat=True)
    plan, sequences = await parse_chat(state, _checked(lambda: chat_body(state, body, served(request).extras)), size)
    load_ns = request.scope.get(LOAD_NS, 0)
    return await _respond(state, request, sequences, OllamaFormat(name, True, plan.parser(), started, load_ns))


async def post_generate(request: Request) -> Response:
    started, state = time.monotonic_ns(), state_of(request)
    body, size, name = await named_body(request)
    if is_empty(body, chat=False):
        return _short_answer(request, body, name, chat=False)
    if body.get("suffix"):
        raise InvalidRequest(f"{name} does not support insert here: /infill fills in the middle")
    if body.get("template"):
        raise InvalidRequest("Go templates are not supported: give raw=true and the whole prompt")
    load_ns = request.scope.get(LOAD_NS, 0)
    parser: OutputParser = PlainParser()
    if lenient(body, "raw", False) or not state.templates.explicit:
        fields = _checked(lambda: raw_body(state, body))

        def work() -> list[Sequence]:
            prompts = [_continued(state, body, prompt) for prompt in tokenize_prompts(state.vocab, fields["prompt"])]
            return make_sequences(state, prompts, evaluate(fields, state.context))

        sequences = await state.run(size, work)
    else:
        fields = _checked(lambda: generate_body(state, body, served(request).extras))
        plan = await state.run(size, lambda: state.planner.plan(fields))
        parser = plan.parser()

        def planned() -> list[Sequence]:
            params = evaluate(plan.body, state.context)
            params.chat_format = plan.dialect.format
            prompts = [_continued(state, body, prompt) for prompt in tokenize_prompts(state.vocab, plan.prompt)]
            return make_sequences(state, prompts, params)

        sequences = await state.run(size, planned)
    return await _respond(state, request, sequences, OllamaFormat(name, False, parser, started, load_ns))


def _continued(state: ServerState, body: dict[str, Any], prompt: list[int]) -> list[int]:
    """The prompt behind `context`, the token ids that an earlier answer ended with."""
    context = body.get("context")
    if not context:
        return prompt
    if not isinstance(context, list) or not all(isinstance(token, int) for token in context):
        raise InvalidRequest("context must be the list of token ids of an earlier answer")
    return [*tokenize_mixed(state.vocab, context, False, True), *prompt]


def _checked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work()`; wrong JSON types are the client's fault."""
    try:
        return work()
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


async def _respond(state: ServerState, request: Request, sequences: list[Sequence], shape: OllamaFormat) -> Response:
    for sequence in sequences:
        sequence.params.sse_ping_interval = -1  # JSON lines have no comments
    return await respond(state, request, sequences, shape, stream_response)
