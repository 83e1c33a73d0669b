"""Anthropic's `/v1/messages`: the request turned into a chat completion, the answer into content blocks.

The conversion and the field names are llama-server's. What follows Anthropic's own API instead, because its clients
rely on it: a block is closed before the next one opens, `message_start` is sent when the prompt starts (so that pings
never come first), a tool block starts with an empty `input`, and errors carry `"type": "error"` beside llama-server's
object.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ftgguf.chat.parser import ChatDelta
from ftgguf.chat.request import ChatPlan
from ftgguf.engine import messages as m
from ftgguf.server import sse
from ftgguf.server.chat import count_tokens, parse_chat
from ftgguf.server.errors import ApiError, server_error
from ftgguf.server.generation import Sequence, json_response, respond
from ftgguf.server.openai import parse_whole
from ftgguf.server.state import ServerState, state_of
from ftgguf.server.wire import dumps, lenient, random_id

log = logging.getLogger("ftgguf.server")

DEFAULT_MAX_TOKENS = 4096
DEFAULT_BUDGET = 10000
BILLING = "x-anthropic-billing-header:"
_CCH = re.compile(r"(cch=)[^;]{5}(?=;)")


# ------------------------------------------------------------------------------------------- the request


def to_chat(body: Any) -> dict[str, Any]:
    """The chat-completion body of a messages body. Raises `ApiError` 500 without `messages`, as llama-server does."""
    if not isinstance(body, dict) or "messages" not in body:
        raise server_error("'messages' is required")
    messages: list[Any] = []
    if body.get("system") is not None:
        messages.append({"role": "system", "content": _system_text(body["system"])})
    if isinstance(body["messages"], list):
        for message in body["messages"]:
            messages += _convert_message(message)
    out: dict[str, Any] = {"messages": messages, "max_tokens": body.get("max_tokens", DEFAULT_MAX_TOKENS)}
    if isinstance(body.get("tools"), list):
        out["tools"] = [_convert_tool(tool) for tool in body["tools"] if _is_function(tool)]
    _tool_choice(body.get("tool_choice"), out)
    if "stop_sequences" in body:
        out["stop"] = body["stop_sequences"]
    for key in ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs"):
        if key in body:
            out[key] = body[key]
    thinking = lenient(body, "thinking", {})
    if thinking.get("type") == "enabled":
        out["thinking_budget_tokens"] = lenient(thinking, "budget_tokens", DEFAULT_BUDGET)
    elif thinking.get("type") == "disabled":
        out["chat_template_kwargs"] = {"enable_thinking": False} | lenient(out, "chat_template_kwargs", {})
    return out


def _system_text(system: Any) -> str:
    """The system blocks as one text; a billing line's changing stamp is fixed, so that the prefix stays the same."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    texts = []
    for block in blocks if isinstance(blocks, list) else []:
        if isinstance(block, dict) and block.get("type") == "text":
            text = lenient(block, "text", "")
            texts.append(_CCH.sub(r"\1fffff", text, count=1) if text.startswith(BILLING) else text)
    return "".join(texts)


def _convert_message(message: Any) -> list[Any]:
    """One Anthropic message as OpenAI messages: its own, then one for each tool result."""
    if not isinstance(message, dict):
        return [message]
    role, content = message.get("role", ""), message.get("content")
    if not isinstance(content, list):
        return [] if role == "assistant" and "content" not in message else [message]
    parts: list[Any] = []
    calls: list[Any] = []
    results: list[Any] = []
    thinking = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            parts.append({"type": "text", "text": lenient(block, "text", "")})
        elif kind == "thinking":
            thinking += lenient(block, "thinking", "")
        elif kind == "image":
            parts.append(_image(block))
        elif kind == "tool_use":
            arguments = dumps(lenient(block, "input", {})).decode()
            function = {"name": lenient(block, "name", ""), "arguments": arguments}
            calls.append({"id": lenient(block, "id", ""), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_tool_result(block))
    if not (parts or calls or thinking):
        return results
    out: dict[str, Any] = {"role": role, "content": parts or ""}
    if calls:
        out["tool_calls"] = calls
    if thinking:
        out["reasoning_content"] = thinking
    return [out, *results]


def _image(block: dict[str, Any]) -> dict[str, Any]:
    source = lenient(block, "source", {})
    url = lenient(source, "url", "")
    if source.get("type") == "base64":
        url = f"data:{lenient(source, 'media_type', 'image/jpeg')};base64,{lenient(source, 'data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        if any(part.get("type") == "image" for part in parts):
            content = [
                _image(part) if part.get("type") == "image" else {"type": "text", "text": lenient(part, "text", "")}
                for part in parts
                if part.get("type") in ("text", "image")
            ]
        else:
            content = "".join(lenient(part, "text", "") for part in parts if part.get("type") == "text")
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": lenient(block, "tool_use_id", ""), "content": content}


def _is_function(tool: Any) -> bool:
    """Anthropic's server tools (web search and kin) cannot be run here; they are left out."""
    if not isinstance(tool, dict):
        return False
    if "input_schema" in tool or tool.get("type") in (None, "custom"):
        return True
    log.warning("tool of type '%s' skipped", tool.get("type"))
    return False


def _convert_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": lenient(tool, "name", ""),
        "description": lenient(tool, "description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Any, out: dict[str, Any]) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("auto", "none"):
        out["tool_choice"] = kind
    elif kind == "any":
        out["tool_choice"] = "required"
    elif kind == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": lenient(choice, "name", "")}}
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True:
        out["parallel_tool_calls"] = False


# -------------------------------------------------------------------------------------------- the answer


class MessagesFormat:
    """Anthropic's message object and its events."""

    ping = sse.event("ping", {"type": "ping"})

    def __init__(self, state: ServerState, plan: ChatPlan) -> None:
        self._state = state
        self._plan = plan
        self._parser = plan.parser()
        self.id = random_id("msg_")
        self._started = False
        self._block = ""
        """What is open: `thinking`, `text`, `tool_use` or nothing."""
        self._index = -1

    def started(self, sequence: Sequence) -> bytes:
        if self._started:
            return b""
        self._started = True
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._state.name,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(sequence, 0),
        }
        return sse.event("message_start", {"type": "message_start", "message": message})

    def progress(self, sequence: Sequence, message: m.Progress) -> bytes:
        return self.started(sequence)

    def delta(self, sequence: Sequence, message: m.Delta) -> bytes:
        return self.started(sequence) + b"".join(map(self._delta, self._parser.feed(message.text)))

    def _delta(self, delta: ChatDelta) -> bytes:
        if delta.reasoning:
            opening = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return opening + self._change({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            opening = self._open("text", {"type": "text", "text": ""})
            return opening + self._change({"type": "text_delta", "text": delta.content})
        out = b""
        if delta.tool_name:
            block = {"type": "tool_use", "id": delta.tool_id, "name": delta.tool_name, "input": {}}
            out = self._close() + self._open("tool_use", block)
        if delta.arguments:
            out += self._change({"type": "input_json_delta", "partial_json": delta.arguments})
        return out

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._block == kind:
            return b""
        out = self._close()
        self._block = kind
        self._index += 1
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        return out + sse.event("content_block_start", event)

    def _change(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse.event("content_block_delta", event)

    def _close(self) -> bytes:
        if not self._block:
            return b""
        out = b""
        if self._block == "thinking":  # clients expect a signature; there is nothing to sign here
            out = self._change({"type": "signature_delta", "signature": ""})
        self._block = ""
        return out + sse.event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def finished(self, sequence: Sequence) -> bytes:
        out = self.started(sequence) + b"".join(map(self._delta, self._parser.finish())) + self._close()
        reason = {
            "stop_reason": self._stop_reason(sequence),
            "stop_sequence": _stop_sequence(sequence),
        }
        usage = {"output_tokens": sequence.predicted_n}
        out += sse.event("message_delta", {"type": "message_delta", "delta": reason, "usage": usage})
        return out + sse.event("message_stop", {"type": "message_stop"})

    def _stop_reason(self, sequence: Sequence) -> str:
        reason = sequence.finish_reason(bool(self._parser.message.tool_calls))
        return {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[reason]

    def error(self, error: ApiError) -> bytes:
        return sse.event("error", error_document(error))

    def end(self) -> bytes:
        return b""

    def document(self, sequences: list[Sequence]) -> Any:
        sequence = sequences[0]
        message = parse_whole(self._plan, self._parser, sequence)
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._state.name,
            "stop_reason": self._stop_reason(sequence),
            "stop_sequence": _stop_sequence(sequence),
            "usage": _usage(sequence, sequence.predicted_n),
        }


def _usage(sequence: Sequence, output: int) -> dict[str, int]:
    return {
        "cache_read_input_tokens": sequence.cached,
        "input_tokens": sequence.prompt_n - sequence.cached,
        "output_tokens": output,
    }


def _stop_sequence(sequence: Sequence) -> str | None:
    return (sequence.finished.stopping_word or None) if sequence.finished else None


def _input(arguments: str) -> Any:
    """The arguments as an object; an empty one if the call was cut off."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def error_document(error: ApiError) -> dict[str, Any]:
    return {"type": "error", **error.document()}


async def post_messages(request: Request) -> Response:
    state = state_of(request)
    try:
        body, size = await state.json(request)
        plan, sequences = await parse_chat(state, to_chat(body), size)
        return await respond(state, request, sequences, MessagesFormat(state, plan))
    except ApiError as error:
        return json_response(error_document(error), error.code)


async def post_count_tokens(request: Request) -> Response:
    state = state_of(request)
    try:
        body, size = await state.json(request)
        return json_response({"input_tokens": await count_tokens(state, to_chat(body), size)})
    except ApiError as error:
        return json_response(error_document(error), error.code)
