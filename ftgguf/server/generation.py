"""From a parsed request to an HTTP answer: sequences to the engine, messages back through a `Format`.

Every completion route ends here. A route makes the sequences (`make_sequences`) and a `Format`, which knows the shape
of its API; `respond` runs them, streaming or not, cancels when the client leaves, and turns the first error into a
plain HTTP error (later ones become an event, then the stream ends).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ftgguf.chat.reasoning import thinking_is_open
from ftgguf.engine import messages as m
from ftgguf.nouns import I32
from ftgguf.server.engine_client import Reply, RequestStream
from ftgguf.server.errors import ApiError, server_error
from ftgguf.server.params import RequestParams
from ftgguf.server.prompts import check_prompt
from ftgguf.server.sse import EventStream, unless_disconnected
from ftgguf.server.state import ServerState
from ftgguf.server.wire import dumps

JSON_TYPE = "application/json; charset=utf-8"
LOWEST = -3.4028234663852886e38
"""Float32's lowest, reported for a probability of 0 since JSON has no minus infinity."""


MAX_ANCHORS = 32
"""Turn ends that are told to the engine (llama-server keeps 32 checkpoints)."""


def json_response(value: Any, status: int = 200) -> Response:
    response = Response(dumps(value), status)
    response.headers["content-type"] = JSON_TYPE
    return response


@dataclass(slots=True)
class Sequence:
    """One running completion: what was asked, and what has come back so far."""

    index: int
    params: RequestParams
    request: m.Generate
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probs: list[m.TokenProbs] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    predicted_n: int = 0
    cached: int = 0
    slot: int = -1
    finished: m.Finished | None = None
    first_at: float = 0.0
    """When the first text came (`time.monotonic`)."""

    @property
    def prompt_n(self) -> int:
        return len(self.request.prompt)

    def take(self, message: Reply) -> None:
        if isinstance(message, m.Delta):
            if not self.first_at:
                self.first_at = time.monotonic()
            self.text.append(message.text)
            self.tokens += message.tokens
            self.probs += message.probs
            self.predicted_n = message.predicted_n or len(self.tokens)
            self.timings = message.timings
        elif isinstance(message, m.Started):
            self.slot, self.cached = message.slot, message.cached
        elif isinstance(message, m.Finished):
            self.finished = message
            self.predicted_n = message.predicted_n
            self.timings = message.timings
            self.slot = message.slot
            self.cached = int(message.timings.get("cache_n", self.cached))

    def finish_reason(self, tool_calls: bool = False) -> str:
        """OpenAI's word: `stop`, `length` or `tool_calls`."""
        if self.finished is not None and self.finished.stop_type in ("eos", "word"):
            return "tool_calls" if tool_calls else "stop"
        return "length"


class Format(Protocol):
    """The shape of one API. All methods return ready bytes (possibly several events, possibly none)."""

    ping: bytes

    def started(self, sequence: Sequence) -> bytes: ...
    def progress(self, sequence: Sequence, message: m.Progress) -> bytes: ...
    def delta(self, sequence: Sequence, message: m.Delta) -> bytes: ...
    def finished(self, sequence: Sequence) -> bytes: ...
    def error(self, error: ApiError) -> bytes: ...
    def end(self) -> bytes: ...
    def document(self, sequences: list[Sequence]) -> Any: ...


def make_sequences(state: ServerState, prompts: list[list[int]], params: RequestParams) -> list[Sequence]:
    """`n_cmpl` sequences for each prompt, indexed in that order; seeds of the copies count up (llama-server)."""
    out: list[Sequence] = []
    n_ctx = state.n_ctx
    details = params.settings(brief=True)
    reasoning = reasoning_bound(state, params)
    adapters = state.adapters.of_request(params.lora)
    for prompt in prompts:
        if not prompt:
            raise ApiError('"prompt" must not be empty')
        ids = np.array(prompt, "<i4")
        check_prompt(state.vocab, ids, n_ctx)
        anchors = turn_ends(ids, state.vocab.eog_ids)
        tokens, packed = tuple(prompt), ids.tobytes()
        for copy in range(params.n_cmpl):
            sampling = dict(params.sampling)
            if copy and sampling["seed"] != m.RANDOM_SEED:
                sampling["seed"] = (sampling["seed"] + copy) & 0xFFFFFFFF
            request = m.Generate(
                id=state.engine.new_id(),
                prompt=tokens,
                packed=packed,
                sampling=m.SamplingParams(**sampling, grammar=params.grammar),
                max_tokens=params.n_predict,
                stop=tuple(params.stop),
                cache_prompt=params.cache_prompt,
                id_slot=params.id_slot if copy == 0 else -1,
                n_keep=params.n_keep,
                n_discard=params.n_discard,
                n_indent=params.n_indent,
                t_max_predict_ms=params.t_max_predict_ms,
                return_progress=params.return_progress and params.stream,
                special=state.config.chat.special,
                preserved_tokens=tuple(params.preserved_tokens),
                reasoning=reasoning,
                anchors=anchors,
                stream=params.stream,
                adapters=adapters,
                details=details,
            )
            out.append(Sequence(len(out), params, request))
    return out


def reasoning_bound(state: ServerState, params: RequestParams) -> m.Reasoning | None:
    """The budget of the answer's thinking; None where there is none, or nothing that would end thinking."""
    wanted = params.reasoning_budget_tokens >= 0 or params.reasoning_control
    if not wanted or not params.reasoning_ends:
        return None
    start, ends = params.reasoning_start, tuple(params.reasoning_ends)
    forced = state.vocab.tokenize(params.reasoning_message + ends[0], add_special=False, parse_special=True)
    return m.Reasoning(
        start=start,
        ends=ends,
        forced=tuple(forced),
        budget=params.reasoning_budget_tokens,
        open=bool(start) and thinking_is_open(params.generation_prompt, (start, *ends)),
    )


def turn_ends(prompt: list[int] | I32, eog: frozenset[int]) -> tuple[int, ...]:
    """Prompt lengths right after each end-of-turn token: where later requests are likely to part from this one.

    The first of them (the end of the system text) and the last `MAX_ANCHORS`; none where a template marks no turn ends.
    """
    body = np.asarray(prompt, np.int32)[:-1]
    marked = np.zeros(len(body), np.bool_)
    for token in eog:
        marked |= body == token
    ends: list[int] = (np.flatnonzero(marked) + 1).tolist()
    return tuple(ends if len(ends) <= MAX_ANCHORS else [ends[0], *ends[-MAX_ANCHORS:]])


async def respond(
    state: ServerState,
    request: Request,
    sequences: list[Sequence],
    shape: Format,
    streamed: Callable[[AsyncIterator[bytes]], Response] = EventStream,
) -> Response:
    """Run `sequences` and answer in `shape`; errors before the first event are raised as `ApiError`.

    `streamed` makes the response of a stream's bytes.
    """
    await state.engine.awake()
    entry = state.request_log.begin(request.url.path, getattr(request.state, "body", None), sequences)
    stream = state.engine.open([sequence.request for sequence in sequences])
    stream.on_exit = entry.end if entry is not None else None
    by_id = {sequence.request.id: sequence for sequence in sequences}
    if not sequences[0].params.stream:
        async with stream:
            await unless_disconnected(request, _collect(stream, by_id))
        return json_response(shape.document(sequences))
    try:
        first = await unless_disconnected(request, stream.next())
    except BaseException:
        await stream.__aexit__(None, None, None)
        raise
    content = _events(stream, first, by_id, shape, sequences[0].params.sse_ping_interval)
    conversation = request.headers.get("x-conversation-id", "")
    if conversation:
        content = state.sessions.open(conversation, content).follow(0)
    return streamed(content)


async def _collect(stream: RequestStream, by_id: dict[int, Sequence]) -> None:
    while stream.running:
        for message in await stream.next():
            by_id[message.id].take(message)


async def _events(
    stream: RequestStream, first: list[Any], by_id: dict[int, Sequence], shape: Format, interval: float
) -> AsyncIterator[bytes]:
    async with stream:
        try:
            for piece in _encode(first, by_id, shape):
                yield piece
            while stream.running:
                batch = await stream.next(interval)
                if not batch:
                    yield shape.ping
                for piece in _encode(batch, by_id, shape):
                    yield piece
            yield shape.end()
        except ApiError as error:
            yield shape.error(error)
        except Exception as error:
            yield shape.error(server_error(f"{type(error).__name__}: {error}"))
            raise


def _encode(batch: list[Any], by_id: dict[int, Sequence], shape: Format) -> Iterator[bytes]:
    """The events of `batch`; what comes before an end goes out before that is made: it may hold the whole prompt."""
    out: list[bytes] = []
    for message in batch:
        sequence = by_id[message.id]
        if isinstance(message, m.Finished):
            if any(out):
                yield b"".join(out)
                os.sched_yield()  # the reader may wait for this very CPU
            out = []
        sequence.take(message)
        if isinstance(message, m.Delta):
            out.append(shape.delta(sequence, message))
        elif isinstance(message, m.Finished):
            out.append(shape.finished(sequence))
        elif isinstance(message, m.Progress):
            out.append(shape.progress(sequence, message))
        elif isinstance(message, m.Started):
            out.append(shape.started(sequence))
    yield b"".join(out)


# ------------------------------------------------------------------------------------------- shared parts


def timings_json(timings: dict[str, float]) -> dict[str, float]:
    """llama-server's `timings`. The first generated token costs the prompt, so rates of generation use n - 1."""
    prompt_n, prompt_ms = int(timings.get("prompt_n", 0)), float(timings.get("prompt_ms", 0.0))
    predicted_n, predicted_ms = int(timings.get("predicted_n", 0)), float(timings.get("predicted_ms", 0.0))
    steps = max(predicted_n - 1, 0)
    out: dict[str, float] = {
        "cache_n": int(timings.get("cache_n", 0)),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": 1e3 * prompt_n / prompt_ms if prompt_ms > 0 else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1e3 * steps / predicted_ms if predicted_ms > 0 else 0.0,
    }
    for name in ("draft_n", "draft_n_accepted"):
        if timings.get(name):
            out[name] = int(timings[name])
    return out


def probs_json(probs: list[m.TokenProbs] | tuple[m.TokenProbs, ...], post_sampling: bool) -> list[dict[str, Any]]:
    """`completion_probabilities` / `logprobs.content`."""
    value, top = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def one(prob: m.TokenProb) -> dict[str, Any]:
        number = prob.value if math.isfinite(prob.value) else LOWEST
        return {
            "id": prob.id,
            "token": whole_characters(prob.piece),
            "bytes": list(prob.piece),
            value: number,
        }

    return [one(item.chosen) | {top: [one(other) for other in item.top]} for item in probs]


def whole_characters(piece: bytes) -> str:
    """`piece` without a character cut off at its end (a token may hold part of one); other bad bytes are replaced."""
    for cut in range(1, min(3, len(piece)) + 1):
        byte = piece[-cut]
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            if need > cut:
                piece = piece[:-cut]
            break
        if byte < 0x80:
            break
    return piece.decode("utf-8", errors="replace")


def progress_json(params: RequestParams, message: m.Progress) -> dict[str, Any]:
    """What a progress chunk adds: the timings so far (`timings_per_token`) and `prompt_progress`."""
    out: dict[str, Any] = {}
    if params.timings_per_token:
        done = message.processed - message.cache
        spent = message.time_ms if done else 0.0
        out["timings"] = timings_json({"cache_n": message.cache, "prompt_n": done, "prompt_ms": spent})
    out["prompt_progress"] = {
        "total": message.total,
        "cache": message.cache,
        "processed": message.processed,
        "time_ms": int(message.time_ms),
    }
    return out


def nested_fields(paths: list[str], document: dict[str, Any]) -> dict[str, Any]:
    """`response_fields`: only the named fields; `a/b` lifts a nested one to the top under that name."""
    out: dict[str, Any] = {}
    for path in paths:
        value: Any = document
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            out[path] = value
    return out
