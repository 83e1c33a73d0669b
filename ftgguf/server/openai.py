"""OpenAI's API: models, text completions and chat completions, with llama-server's extra fields."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.chat.parser import ChatDelta, Message, OutputParser
from ftgguf.chat.request import ChatPlan
from ftgguf.engine import messages as m
from ftgguf.server import sse
from ftgguf.server.chat import parse_chat
from ftgguf.server.errors import ApiError
from ftgguf.server.generation import Sequence, json_response, probs_json, progress_json, respond, timings_json
from ftgguf.server.native import final_document, parse_completion
from ftgguf.server.state import BUILD_INFO, ServerState, state_of
from ftgguf.server.wire import random_id

VOCAB_TYPES = {"no_vocab": 0, "none": 0, "llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}
"""llama.cpp's `llama_vocab_type` by `tokenizer.ggml.model`."""


def usage_json(sequence: Sequence) -> dict[str, Any]:
    return {
        "completion_tokens": sequence.predicted_n,
        "prompt_tokens": sequence.prompt_n,
        "total_tokens": sequence.predicted_n + sequence.prompt_n,
        "prompt_tokens_details": {"cached_tokens": sequence.cached},
    }


def logprobs_json(sequence: Sequence, probs: Any) -> dict[str, Any] | None:
    if not probs:
        return None
    return {"content": probs_json(probs, sequence.params.sampling["post_sampling_probs"])}


class _OpenAIFormat:
    """What text and chat completions share."""

    ping = sse.PING

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.id = random_id("chatcmpl-")

    def started(self, sequence: Sequence) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return sse.data(error.document())

    def end(self) -> bytes:
        return sse.DONE


# ----------------------------------------------------------------------------------------- text completions


class TextFormat(_OpenAIFormat):
    """`/v1/completions`. Usage is in the final chunk always, as in llama-server."""

    def _document(self, sequence: Sequence, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": sequence.index, "logprobs": logprobs, "finish_reason": reason}
        return {
            "choices": [choice],
            "created": int(time.time()),
            "model": self._state.name,
            "system_fingerprint": BUILD_INFO,
            "object": "text_completion",
        }

    def progress(self, sequence: Sequence, message: m.Progress) -> bytes:
        document = self._document(sequence, "", None, None) | {"id": self.id}
        return sse.data(document | progress_json(sequence.params, message))

    def delta(self, sequence: Sequence, message: m.Delta) -> bytes:
        if not message.text and not message.tokens:
            return b""
        document = self._document(sequence, message.text, logprobs_json(sequence, message.probs), None)
        document["id"] = self.id
        if sequence.params.timings_per_token or message.stopped:
            document["timings"] = timings_json(message.timings)
        return sse.data(document)

    def finished(self, sequence: Sequence) -> bytes:
        return sse.data(self._final(sequence))

    def _final(self, sequence: Sequence) -> dict[str, Any]:
        stream = sequence.params.stream
        logprobs = None if stream else logprobs_json(sequence, sequence.probs)
        text = "" if stream else "".join(sequence.text)
        document = self._document(sequence, text, logprobs, sequence.finish_reason())
        document |= {"usage": usage_json(sequence), "id": self.id}
        if sequence.params.verbose:
            document["__verbose"] = final_document(self._state, sequence)
        return document | {"timings": timings_json(sequence.timings)}

    def document(self, sequences: list[Sequence]) -> Any:
        documents = [self._final(sequence) for sequence in sequences]
        documents[0]["choices"] = [document["choices"][0] for document in documents]
        return documents[0]


async def post_completions(request: Request) -> Response:
    state = state_of(request)
    _, sequences = await parse_completion(state, request)
    return await respond(state, request, sequences, TextFormat(state))


# ----------------------------------------------------------------------------------------- chat completions


class ChatFormat(_OpenAIFormat):
    """`/v1/chat/completions`. Each sequence has its own parser; text becomes reasoning, content and tool calls."""

    def __init__(self, state: ServerState, plan: ChatPlan, sequences: list[Sequence]) -> None:
        super().__init__(state)
        self._plan = plan
        self._parsers: list[OutputParser] = [plan.parser() for _ in sequences]
        self._opened: set[int] = set()
        self.requests = [sequence.request.id for sequence in sequences]
        self.controllable = sequences[0].params.reasoning_control
        state.chats[self.id] = self

    def _chunk(self, sequence: Sequence, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._frame([{"finish_reason": reason, "index": sequence.index, "delta": delta}])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": int(time.time()),
            "id": self.id,
            "model": self._state.name,
            "system_fingerprint": BUILD_INFO,
            "object": "chat.completion.chunk",
        }

    def _role(self, sequence: Sequence) -> dict[str, Any]:
        self._opened.add(sequence.index)
        return self._chunk(sequence, {"role": "assistant", "content": None})

    def progress(self, sequence: Sequence, message: m.Progress) -> bytes:
        chunk = self._role(sequence)
        self._opened.discard(sequence.index)  # the first token opens the message again, as in llama-server
        return sse.data(chunk | progress_json(sequence.params, message))

    def delta(self, sequence: Sequence, message: m.Delta) -> bytes:
        chunks = [] if sequence.index in self._opened else [self._role(sequence)]
        chunks += [self._chunk(sequence, delta_json(d)) for d in self._parsers[sequence.index].feed(message.text)]
        if not chunks:
            return b""
        if message.probs:
            chunks[-1]["choices"][0]["logprobs"] = logprobs_json(sequence, message.probs)
        if sequence.params.timings_per_token or message.stopped:
            chunks[-1]["timings"] = timings_json(message.timings)
        return b"".join(sse.data(chunk) for chunk in chunks)

    def finished(self, sequence: Sequence) -> bytes:
        parser = self._parsers[sequence.index]
        chunks = [] if sequence.index in self._opened else [self._role(sequence)]
        chunks += [self._chunk(sequence, delta_json(d)) for d in parser.finish()]
        chunks.append(self._chunk(sequence, {}, sequence.finish_reason(bool(parser.message.tool_calls))))
        if sequence.params.include_usage:
            chunks.append(self._frame([]) | {"usage": usage_json(sequence)})
        chunks[-1]["timings"] = timings_json(sequence.timings)
        if sequence.params.verbose:
            chunks[0]["__verbose"] = final_document(self._state, sequence)
        return b"".join(sse.data(chunk) for chunk in chunks)

    def _final(self, sequence: Sequence) -> dict[str, Any]:
        message = parse_whole(self._plan, self._parsers[sequence.index], sequence)
        choice: dict[str, Any] = {
            "finish_reason": sequence.finish_reason(bool(message.tool_calls)),
            "index": sequence.index,
            "message": message_json(message),
        }
        if sequence.probs:
            choice["logprobs"] = logprobs_json(sequence, sequence.probs)
        document: dict[str, Any] = {
            "choices": [choice],
            "created": int(time.time()),
            "model": self._state.name,
            "system_fingerprint": BUILD_INFO,
            "object": "chat.completion",
            "usage": usage_json(sequence),
            "id": self.id,
        }
        if sequence.params.verbose:
            document["__verbose"] = final_document(self._state, sequence)
        return document | {"timings": timings_json(sequence.timings)}

    def document(self, sequences: list[Sequence]) -> Any:
        documents = [self._final(sequence) for sequence in sequences]
        documents[0]["choices"] = [document["choices"][0] for document in documents]
        return documents[0]


def parse_whole(plan: ChatPlan, parser: OutputParser, sequence: Sequence) -> Message:
    """The message of a finished, non-streamed sequence, with what the prompt held of it already."""
    parser.feed("".join(sequence.text))
    parser.finish()
    message = parser.message
    thought, text = plan.prefilled
    message.reasoning, message.content = thought + message.reasoning, text + message.content
    return message


def delta_json(delta: ChatDelta) -> dict[str, Any]:
    """One difference as OpenAI's `delta`: id, type and name only in a call's first fragment, and `arguments` in every
    one, as OpenAI and llama-server send them."""
    out: dict[str, Any] = {}
    if delta.reasoning:
        out["reasoning_content"] = delta.reasoning
    if delta.content:
        out["content"] = delta.content
    if delta.tool_index >= 0:
        call: dict[str, Any] = {"index": delta.tool_index}
        if delta.tool_id:
            call |= {"id": delta.tool_id, "type": "function"}
        name = {"name": delta.tool_name} if delta.tool_name else {}
        call["function"] = name | {"arguments": delta.arguments}
        out["tool_calls"] = [call]
    return out


def message_json(message: Message) -> dict[str, Any]:
    """The final `message`; `content` is an empty string beside tool calls when there is none (llama-server)."""
    out: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call.id}
            for call in message.tool_calls
        ]
    return out


async def post_chat_completions(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    plan, sequences = await parse_chat(state, body, size)
    return await respond(state, request, sequences, ChatFormat(state, plan, sequences))


# --------------------------------------------------------------------------------------------------- models


async def get_models(request: Request) -> Response:
    """llama-server's list: OpenAI's `data` and Ollama's `models` of the one model."""
    state = state_of(request)
    info = state.info
    vocab_type = VOCAB_TYPES.get(str(info.get("metadata", {}).get("tokenizer.ggml.model", "")), 0)
    model = {
        "name": state.name,
        "model": state.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    entry = {
        "id": state.name,
        "aliases": list(state.config.model.aliases) or [state.name],
        "tags": list(state.config.model.tags),
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": vocab_type,
            "n_vocab": info.get("n_vocab", state.vocab.n_vocab),
            "n_ctx": state.n_ctx,
            "n_ctx_train": info.get("n_ctx_train", 0),
            "n_embd": info.get("n_embd", 0),
            "n_params": info.get("n_params", 0),
            "size": info.get("size", 0),
            "ftype": info.get("file_type", ""),
        },
    }
    return json_response({"models": [model], "object": "list", "data": [entry]})
