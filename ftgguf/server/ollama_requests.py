"""Bodies of /api/chat and /api/generate in the words of our other routes: OpenAI's messages, llama-server's fields."""

from __future__ import annotations

import logging
from typing import Any

from ftgguf.pull.layers import MACHINE_PARAMETERS, PARAMETERS, Extras
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.state import ServerState
from ftgguf.server.wire import as_list, as_object, as_str, dumps, lenient

log = logging.getLogger("ftgguf.server")

OPTION_FIELDS = {**{name: name for name in PARAMETERS}, "num_predict": "n_predict", "num_keep": "n_keep"}
"""Ollama's option -> our request field; `num_ctx` is the model's, not the request's."""
_LEVELS = ("low", "medium", "high", "max")


def options_of(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidRequest("options must be an object")
    return options


def wanted_context(body: Any) -> int:
    """`options.num_ctx`, 0 where it is not a positive number."""
    options = body.get("options") if isinstance(body, dict) else None
    value = options.get("num_ctx") if isinstance(options, dict) else None
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def is_empty(body: dict[str, Any], chat: bool) -> bool:
    """Whether a body asks for no text: it loads or unloads the model."""
    if chat:
        return not body.get("messages")
    return not (body.get("prompt") or body.get("suffix") or body.get("images") or body.get("context"))


def common_fields(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """What chat and generate share: stream, sampling options, the format, logprobs."""
    out: dict[str, Any] = {"stream": lenient(body, "stream", True)}
    for key, value in options_of(body).items():
        if value is None or key == "num_ctx" or key in MACHINE_PARAMETERS:
            continue
        if key not in OPTION_FIELDS:
            log.debug("option '%s' is not supported: ignored", key)
            continue
        out[OPTION_FIELDS[key]] = value
    if out.get("n_predict") == -2:  # "until the context is full", which -1 is here
        out["n_predict"] = -1
    if out.get("repeat_last_n") == -1:
        out["repeat_last_n"] = state.n_ctx
    if isinstance(out.get("seed"), int) and out["seed"] < 0:
        del out["seed"]
    out.setdefault("stop", list(state.config.chat.reverse_prompt))
    return out


def schema_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """`format`: a JSON schema, any object for `"json"`, None for no constraint."""
    wanted = body.get("format")
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "object"}
    if isinstance(wanted, dict):
        return wanted
    raise InvalidRequest('invalid format: expected "json" or a JSON Schema object')


def thinking_fields(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """`think`: true, false or a level. Without it a model that thinks does, as in Ollama."""
    think = body.get("think")
    if think is None:
        return {}
    if isinstance(think, str) and think in _LEVELS:
        fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": think}
    elif isinstance(think, bool):
        fields = {"chat_template_kwargs": {"enable_thinking": think}}
    else:
        raise InvalidRequest('think must be true, false, "low", "medium", "high" or "max"')
    if think and not state.planner.thinks(state.templates.default):
        raise InvalidRequest(f'"{state.name}" does not support thinking')
    return fields


def chat_body(state: ServerState, body: dict[str, Any], extras: Extras) -> dict[str, Any]:
    """The OpenAI chat body of an Ollama chat; the model's own messages and system prompt come first."""
    messages = [_message(message) for message in as_list(body.get("messages"))]
    messages = [dict(message) for message in extras.messages] + with_call_ids(messages)
    if extras.system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": extras.system})
    out = common_fields(state, body) | thinking_fields(state, body) | {"messages": messages}
    tools = body.get("tools")
    if tools:
        if not state.templates.pick(True).caps.supports_tools:
            raise InvalidRequest(f"{state.name} does not support tools")
        out["tools"] = tools
    return out | _response_format(body) | _logprobs(body)


def generate_body(state: ServerState, body: dict[str, Any], extras: Extras) -> dict[str, Any]:
    """The chat body of a templated /api/generate: the prompt is the user's one message."""
    _no_images(body)
    system = lenient(body, "system", "") or extras.system
    messages = [{"role": "system", "content": system}] if system else []
    messages += [dict(message) for message in extras.messages]
    messages.append({"role": "user", "content": lenient(body, "prompt", "")})
    out = common_fields(state, body) | thinking_fields(state, body) | {"messages": messages}
    return out | _response_format(body) | _logprobs(body)


def raw_body(state: ServerState, body: dict[str, Any]) -> dict[str, Any]:
    """The completion body of a raw /api/generate, or of a model without a template."""
    _no_images(body)
    out = common_fields(state, body) | {"prompt": lenient(body, "prompt", "")}
    schema = schema_of(body)
    if schema is not None:
        out["json_schema"] = schema
    if body.get("logprobs"):
        out["n_probs"] = max(1, lenient(body, "top_logprobs", 0))
    return out


def _response_format(body: dict[str, Any]) -> dict[str, Any]:
    schema = schema_of(body)
    if schema is None:
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _logprobs(body: dict[str, Any]) -> dict[str, Any]:
    if not body.get("logprobs"):
        return {}
    return {"logprobs": True, "top_logprobs": lenient(body, "top_logprobs", 0)}


def _no_images(message: dict[str, Any]) -> None:
    if message.get("images"):
        raise InvalidRequest("this model does not support images")


def _message(message: Any) -> dict[str, Any]:
    """One message as OpenAI has it: thinking by its other name, arguments as text."""
    message = as_object(message, "role")
    _no_images(message)
    out: dict[str, Any] = {"role": as_str(message["role"]), "content": as_str(message.get("content") or "")}
    if message.get("thinking"):
        out["reasoning_content"] = as_str(message["thinking"])
    name = message.get("tool_name") or message.get("name")
    if name:
        out["name"] = as_str(name)
    if message.get("tool_call_id"):
        out["tool_call_id"] = as_str(message["tool_call_id"])
    calls = [_call(call) for call in as_list(message.get("tool_calls") or [])]
    if calls:
        out["tool_calls"] = calls
    return out


def _call(call: Any) -> dict[str, Any]:
    function = as_object(call, "function")["function"]
    function = as_object(function, "name")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
    return {
        "id": as_str(call.get("id") or ""),
        "type": "function",
        "function": {"name": as_str(function["name"]), "arguments": text},
    }


def with_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids for calls that have none (Ollama needs none), and the same ids at the results that follow, by name and order.

    Templates of models that were trained with ids ask for them on both sides.
    """
    open_calls: list[tuple[str, str]] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            if not call["id"]:
                call["id"] = f"call_{count}"
            count += 1
            open_calls.append((call["function"]["name"], call["id"]))
        if message["role"] == "tool" and not message.get("tool_call_id") and open_calls:
            name = message.get("name")
            at = next((i for i, (called, _) in enumerate(open_calls) if called == name), 0)
            message["tool_call_id"] = open_calls.pop(at)[1]
    return messages
