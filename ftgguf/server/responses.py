"""OpenAI's `/v1/responses`: stateless, converted to a chat completion and back, as Codex and the SDKs use it.

Conversion, ids and event order are llama-server's; added are the fields that OpenAI's schema has and clients may read
(`sequence_number`, `output_index`, `content_index`, `function_call_arguments.done`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.chat.parser import ChatDelta
from ftgguf.chat.request import ChatPlan
from ftgguf.engine import messages as m
from ftgguf.server import sse
from ftgguf.server.chat import count_tokens, parse_chat
from ftgguf.server.errors import ApiError, InvalidRequest
from ftgguf.server.generation import Sequence, json_response, respond, timings_json
from ftgguf.server.openai import parse_whole
from ftgguf.server.state import ServerState, state_of
from ftgguf.server.wire import lenient, random_id

log = logging.getLogger("ftgguf.server")


# ------------------------------------------------------------------------------------------- the request


def to_chat(body: Any) -> dict[str, Any]:
    """The chat-completion body of a responses body; errors have llama-server's texts."""
    if not isinstance(body, dict) or "input" not in body:
        raise InvalidRequest("'input' is required")
    if lenient(body, "previous_response_id", ""):
        raise InvalidRequest("llama.cpp does not support 'previous_response_id'.")
    out = {k: v for k, v in body.items() if k not in ("input", "instructions", "tools", "reasoning", "text", "n")}
    messages: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        messages.append({"role": "system", "content": lenient(body, "instructions", "")})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add_item(item, messages)
    else:
        raise InvalidRequest("'input' must be a string or array of objects")
    out["messages"] = messages
    tools = _tools(body)
    if tools:
        out["tools"] = tools
    elif isinstance(out.get("tool_choice"), dict):
        del out["tool_choice"]  # it named a tool that was skipped
    if body.get("max_output_tokens") is not None:
        out["max_tokens"] = out.pop("max_output_tokens")
    effort = lenient(body, "reasoning", {}).get("effort")
    if isinstance(effort, str):
        out["reasoning_effort"] = effort
    format = lenient(lenient(body, "text", {}), "format", {})
    if format.get("type") in ("json_schema", "json_object"):
        out["response_format"] = {"type": format["type"], "json_schema": format, **({} if "schema" not in format else {
            "schema": format["schema"]})}  # fmt: skip
    return out


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("tools")
    if given is None:
        return []
    if not isinstance(given, list):
        raise InvalidRequest("'tools' must be an array of objects")
    tools = []
    for tool in given:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            log.warning("unsupported Responses tool type '%s' skipped", kind)
            continue
        tools.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
    return tools


def _add_item(item: Any, messages: list[dict[str, Any]]) -> None:
    """Append one input item, or merge it into the assistant message that is being put together."""
    if not isinstance(item, dict):
        raise InvalidRequest("Cannot determine type of 'item'")
    role, kind, content = item.get("role"), item.get("type"), item.get("content")
    if role in ("user", "system", "developer") and isinstance(content, str | list):
        messages.append({"role": role, "content": [_input_part(part) for part in _parts(content, "input_text")]})
    elif role == "assistant" and kind in ("message", None):
        parts = [_output_part(part) for part in _parts(content if content is not None else [], "output_text")]
        _assistant(messages, content=parts)
    elif kind == "function_call" and all(isinstance(item.get(key), str) for key in ("arguments", "call_id", "name")):
        function = {"name": item["name"], "arguments": item["arguments"]}
        _assistant(messages, call={"type": "function", "id": item["call_id"], "function": function})
    elif kind == "function_call_output" and isinstance(item.get("call_id"), str) and "output" in item:
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _tool_output(item["output"])})
    elif kind == "reasoning":
        thought = content if isinstance(content, list) else []
        text = "".join(lenient(part, "text", "") for part in thought if isinstance(part, dict))
        if text:
            _assistant(messages, reasoning=text)
    else:
        raise InvalidRequest("Cannot determine type of 'item'")


def _parts(content: Any, kind: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    return content if isinstance(content, list) else []


def _input_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_text":
        if "text" not in part:
            raise InvalidRequest("'Input text' requires 'text'")
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        if "image_url" not in part:
            raise InvalidRequest("'image_url' is required")
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_file":
        raise InvalidRequest("'input_file' is not supported by llamacpp at this moment")
    raise InvalidRequest("'type' must be one of 'input_text', 'input_image', or 'input_file'")


def _output_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("output_text", "input_text"):
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("'Output text' requires 'text'")
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        if not isinstance(part.get("refusal"), str):
            raise InvalidRequest("'Refusal' requires 'refusal'")
        return {"type": "text", "text": part["refusal"]}
    raise InvalidRequest("'type' must be one of 'output_text' or 'refusal'")


def _tool_output(output: Any) -> Any:
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise InvalidRequest("Cannot determine type of 'item'")
    parts = []
    for part in output:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise InvalidRequest("Output of tool call missing 'type' field")
        if kind not in ("input_text", "input_image"):
            raise InvalidRequest("Output of tool call should be 'Input text' or 'Input image'")
        parts.append(_input_part(part))
    return parts


def _assistant(
    messages: list[dict[str, Any]], content: list[Any] | None = None, call: Any = None, reasoning: str = ""
) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    last = messages[-1]
    if content:
        last["content"] = last["content"] + content
    if call is not None:
        last.setdefault("tool_calls", []).append(call)
    if reasoning:
        last["reasoning_content"] = reasoning


# -------------------------------------------------------------------------------------------- the answer


class ResponsesFormat:
    """The response object and its events. One item is open at a time; `_output` holds those that are complete."""

    ping = sse.PING

    def __init__(self, state: ServerState, plan: ChatPlan) -> None:
        self._state = state
        self._plan = plan
        self._parser = plan.parser()
        self.id = random_id("resp_")
        self._created = int(time.time())
        self._number = -1
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._output: list[dict[str, Any]] = []
        self._begun = False

    def _event(self, event: str, /, **fields: Any) -> bytes:
        self._number += 1
        return sse.event(event, {"type": event, **fields, "sequence_number": self._number})

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._state.name,
            "output": self._output,
            **fields,
        }

    def started(self, sequence: Sequence) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        out = self._event("response.created", response=self._response("in_progress"))
        return out + self._event("response.in_progress", response=self._response("in_progress"))

    def progress(self, sequence: Sequence, message: m.Progress) -> bytes:
        out = self.started(sequence)
        return out or self._event("response.in_progress", response=self._response("in_progress"))

    def delta(self, sequence: Sequence, message: m.Delta) -> bytes:
        return self.started(sequence) + b"".join(map(self._delta, self._parser.feed(message.text)))

    def _delta(self, delta: ChatDelta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._begin("reasoning", random_id("rs_"), summary=[], content=[], encrypted_content="")
            out += self._change("response.reasoning_text.delta", delta.reasoning, content_index=0)
        elif delta.content:
            out += self._begin("message", random_id("msg_"), content=[], role="assistant")
            out += self._change("response.output_text.delta", delta.content, content_index=0)
        if delta.tool_name:
            out += self._close()
            id = "fc_" + delta.tool_id
            out += self._begin("function_call", id, arguments="", call_id="call_" + delta.tool_id, name=delta.tool_name)
        if delta.arguments:
            out += self._change("response.function_call_arguments.delta", delta.arguments)
        return out

    def _begin(self, kind: str, id: str, **fields: Any) -> bytes:
        """Open an item of `kind` unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        out = self._close()
        self._open = {"id": id, "type": kind, **fields, "status": "in_progress"}
        self._text = ""
        index = len(self._output)
        out += self._event("response.output_item.added", output_index=index, item=self._open)
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out += self._event(
                "response.content_part.added", item_id=id, output_index=index, content_index=0, part=part
            )
        return out

    def _change(self, name: str, text: str, **fields: Any) -> bytes:
        assert self._open is not None
        self._text += text
        return self._event(name, delta=text, item_id=self._open["id"], output_index=len(self._output), **fields)

    def _close(self) -> bytes:
        """The events that complete the open item."""
        item, self._open = self._open, None
        if item is None:
            return b""
        place = {"item_id": item["id"], "output_index": len(self._output)}
        out = b""
        if item["type"] == "message":
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": self._text}
            out = self._event("response.output_text.done", **place, content_index=0, text=self._text, logprobs=[])
            out += self._event("response.content_part.done", **place, content_index=0, part=part)
            item = item | {"content": [part]}
        elif item["type"] == "reasoning":
            out = self._event("response.reasoning_text.done", **place, content_index=0, text=self._text)
            item = item | {"content": [{"text": self._text, "type": "reasoning_text"}]}
        else:
            out = self._event("response.function_call_arguments.done", **place, arguments=self._text, name=item["name"])
            item = item | {"arguments": self._text}
        item["status"] = "completed"
        self._output.append(item)
        return out + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def finished(self, sequence: Sequence) -> bytes:
        out = self.started(sequence) + b"".join(map(self._delta, self._parser.finish())) + self._close()
        response = self._response("completed", usage=self._usage(sequence, self._parser.message.reasoning))
        return out + self._event("response.completed", response=response, timings=timings_json(sequence.timings))

    def error(self, error: ApiError) -> bytes:
        response = self._response("failed", error={"code": error.type, "message": error.message})
        return self._event("response.failed", response=response)

    def end(self) -> bytes:
        return b""

    def document(self, sequences: list[Sequence]) -> Any:
        sequence = sequences[0]
        message = parse_whole(self._plan, self._parser, sequence)
        output: list[dict[str, Any]] = []
        if message.reasoning:
            output.append({
                "id": random_id("rs_"), "summary": [], "type": "reasoning",
                "content": [{"text": message.reasoning, "type": "reasoning_text"}],
                "encrypted_content": "", "status": "completed",
            })  # fmt: skip
        if message.content:
            part = {"type": "output_text", "annotations": [], "logprobs": [], "text": message.content}
            output.append({
                "content": [part], "id": random_id("msg_"), "role": "assistant", "status": "completed",
                "type": "message",
            })  # fmt: skip
        for call in message.tool_calls:
            output.append({
                "id": "fc_" + call.id, "type": "function_call", "status": "completed", "arguments": call.arguments,
                "call_id": "call_" + call.id, "name": call.name,
            })  # fmt: skip
        return {
            "completed_at": int(time.time()),
            "created_at": self._created,
            "id": self.id,
            "model": self._state.name,
            "object": "response",
            "output": output,
            "status": "completed",
            "usage": self._usage(sequence, message.reasoning),
        }

    def _usage(self, sequence: Sequence, thinking: str) -> dict[str, Any]:
        """llama-server's counts, and OpenAI's `reasoning_tokens`: those of the thinking's text, without its tags."""
        thought = len(self._state.vocab.tokenize(thinking, parse_special=False)) if thinking else 0
        return {
            "input_tokens": sequence.prompt_n,
            "output_tokens": sequence.predicted_n,
            "total_tokens": sequence.prompt_n + sequence.predicted_n,
            "input_tokens_details": {"cached_tokens": sequence.cached},
            "output_tokens_details": {"reasoning_tokens": thought},
        }


async def post_responses(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    plan, sequences = await parse_chat(state, to_chat(body), size)
    return await respond(state, request, sequences, ResponsesFormat(state, plan))


async def post_input_tokens(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    count = await count_tokens(state, to_chat(body), size)
    return json_response({"input_tokens": count, "object": "response.input_tokens"})
