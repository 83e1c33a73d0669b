"""The messages of a chat request: checked, brought to one form, and fitted to what a template can take.

The canonical form is llama-server's (`common_chat_msg::to_json_oaicompat`): `role`, `content` (never null), then
`reasoning_content`, `name`, `tool_call_id` and `tool_calls` where present; a call is `{type, function{name,
arguments}, id}` with the arguments as a JSON string.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ftgguf.chat.caps import Caps
from ftgguf.server.errors import InvalidRequest, server_error
from ftgguf.server.wire import WrongType, as_str, dumps

Message = dict[str, Any]

MEDIA = {
    "image_url": "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
    "input_audio": "audio input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
    "input_video": "video input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
    "video_url": "video input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
}


def _text(value: Any) -> str:
    return dumps(value).decode()


def check_messages(body: dict[str, Any]) -> list[Any]:
    """`body["messages"]`, with llama-server's first checks and texts."""
    if "messages" not in body:
        raise InvalidRequest("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise InvalidRequest("Expected 'messages' to be an array")
    for message in messages:
        known = message if isinstance(message, dict) else {}
        if known.get("role") != "assistant":
            if "content" not in known:
                raise InvalidRequest("All non-assistant messages must contain 'content'")
        elif "content" not in known:
            if "tool_calls" not in known:
                raise InvalidRequest("Assistant message must contain either 'content' or 'tool_calls'!")
            continue
        _check_content(known["content"])
    return messages


def _check_content(content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest("Expected 'content' to be a string or an array")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA:
            raise server_error(MEDIA[kind])
        if kind != "text":
            raise InvalidRequest("unsupported content[].type")


def parse_messages(messages: list[Any]) -> list[Message]:
    """Canonical messages; a fault is a 500 with llama-server's text, as in llama-server."""
    try:
        return [_parse_message(message) for message in messages]
    except (WrongType, ValueError) as error:
        raise server_error(f"Failed to parse messages: {error}") from None


def _parse_message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"Expected 'message' to be an object, got {_text(message)}")
    if "role" not in message:
        raise ValueError(f"Missing 'role' in message: {_text(message)}")
    out: Message = {"role": as_str(message["role"]), "content": ""}
    content = message.get("content")
    if isinstance(content, str):
        out["content"] = content
    elif isinstance(content, list) and content:
        out["content"] = [{"type": "text", "text": as_str(part.get("text"))} for part in content]
    elif "content" not in message and "tool_calls" not in message:
        raise ValueError("Expected 'content' or 'tool_calls'")
    for key, name in (("reasoning_content", "reasoning_content"), ("name", "name"), ("tool_call_id", "tool_call_id")):
        if message.get(key) is not None:
            text = as_str(message[key])
            if text:
                out[name] = text
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"Expected 'tool_calls' to be an array, got {_text(calls)}")
        out["tool_calls"] = [_parse_call(call) for call in calls]
    return out


def _parse_call(call: Any) -> dict[str, Any]:
    known = call if isinstance(call, dict) else {}
    if "type" not in known:
        raise ValueError(f"Missing tool call type: {_text(call)}")
    if known["type"] != "function":
        raise ValueError(f"Unsupported tool call type: {_text(call)}")
    if "function" not in known:
        raise ValueError(f"Missing tool call function: {_text(call)}")
    function = known["function"]
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"Missing tool call name: {_text(call)}")
    if "arguments" not in function:
        raise ValueError("[json.exception.out_of_range.403] key 'arguments' not found")
    arguments = function["arguments"]
    out: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": as_str(function["name"]),
            "arguments": arguments if isinstance(arguments, str) else _text(arguments),
        },
    }
    if known.get("id"):
        out["id"] = as_str(known["id"])
    return out


def parse_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools in canonical form (`name`, `description`, `parameters`); a fault is a 500 as in llama-server."""
    if tools is None:
        return []
    try:
        if not isinstance(tools, list):
            raise ValueError(f"Expected 'tools' to be an array, got {_text(tools)}")
        return [_parse_tool(tool) for tool in tools]
    except (WrongType, ValueError) as error:
        indented = msgspec.json.format(dumps(tools), indent=2).decode()
        raise server_error(f"Failed to parse tools: {error}; tools = {indented}") from None


def _parse_tool(tool: Any) -> dict[str, Any]:
    known = tool if isinstance(tool, dict) else {}
    if "type" not in known:
        raise ValueError(f"Missing tool type: {_text(tool)}")
    if known["type"] != "function":
        raise ValueError(f"Unsupported tool type: {_text(tool)}")
    if not isinstance(known.get("function"), dict):
        raise ValueError(f"Missing tool function: {_text(tool)}")
    function = known["function"]
    if "name" not in function:
        raise ValueError("[json.exception.out_of_range.403] key 'name' not found")
    description = function.get("description")
    parameters = function.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": as_str(function["name"]),
            "description": description if isinstance(description, str) else "",
            "parameters": parameters if parameters is not None else {},
        },
    }


# -------------------------------------------------------------------------------- fitting to a template


def text_of(content: Any) -> str:
    """A content's text; typed parts are joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or [])


def fit_messages(messages: list[Message], caps: Caps, keep_developer: bool) -> list[Message]:
    """Copies of `messages` in the form the template takes: typed or plain content, roles, tool arguments."""
    out = [dict(message) for message in messages]
    only_string = caps.supports_string_content and not caps.supports_typed_content
    only_typed = caps.supports_typed_content and not caps.supports_string_content
    for message in out:
        if only_string and isinstance(message["content"], list):
            message["content"] = text_of(message["content"])
        elif only_typed and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "developer" and not keep_developer:
            message["role"] = "system"
    if not caps.supports_system_role:
        _fold_system(out)
    if caps.supports_object_arguments:
        for message in out:
            if "tool_calls" in message:
                message["tool_calls"] = [_object_arguments(call) for call in message["tool_calls"]]
    return out


def _fold_system(messages: list[Message]) -> None:
    """The template has no system role: a leading system text goes in front of the next message's."""
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)
        if messages:
            messages[0]["content"] = text_of(system["content"]) + "\n" + text_of(messages[0]["content"])


def _object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError as error:
        raise server_error(f"Failed to parse tool call arguments as JSON: {error}") from None
    return call | {"function": call["function"] | {"arguments": value}}
