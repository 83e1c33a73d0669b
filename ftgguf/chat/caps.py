"""What a chat template can do, found by rendering probes and watching what it reads (`chat_template_caps`).

The probes and the rules are llama.cpp's (`common/jinja/caps.cpp`): message contents and tool definitions are given
as containers that remember which of their parts were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

MARKER = "STRING_MARKER"
REASONING = "<REASONING_CONTENT_PLACEHOLDER>"

Render = Callable[[dict[str, Any]], str]
"""Renders the template with these variables; raises on any failure."""


class RenderStopped(Exception):
    """A render that went over its limits; a probe that meets it gives up on the template."""


@dataclass(slots=True)
class Caps:
    """Field names and order are those of `/props`."""

    supports_object_arguments: bool = False
    supports_parallel_tool_calls: bool = True
    supports_preserve_reasoning: bool = False
    supports_reasoning_effort: bool = False
    supports_string_content: bool = True
    supports_system_role: bool = True
    supports_tool_calls: bool = True
    supports_tools: bool = True
    supports_typed_content: bool = False

    def as_dict(self) -> dict[str, bool]:
        return asdict(self)


class WatchedStr(str):
    """A string that notes when it is looked into like a list."""

    __slots__ = ("as_array", "asked_string")

    def __init__(self, _: str = "") -> None:
        self.as_array = False
        self.asked_string = False

    def __iter__(self) -> Iterator[str]:
        self.as_array = True
        return super().__iter__()

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, int):
            self.as_array = True
        return super().__getitem__(key)


class WatchedList(list[Any]):
    """A list that notes when it is iterated or indexed."""

    def __init__(self, values: Any = ()) -> None:
        super().__init__(values)
        self.as_array = False
        self.asked_string = False

    def __iter__(self) -> Iterator[Any]:
        self.as_array = True
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self.as_array = True
        return super().__getitem__(key)


class WatchedDict(dict[str, Any]):
    """A dict that notes which of its keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.mark_all()
        return super().items()

    def values(self) -> Any:
        self.mark_all()
        return super().values()

    def __str__(self) -> str:
        self.mark_all()
        return super().__str__()

    def mark_all(self) -> None:
        """Everything inside was used (iterated, or printed as JSON)."""
        self.seen |= set(self)
        for value in dict.values(self):
            mark_all(value)


def mark_all(value: Any) -> None:
    """Note that `value` was used as a whole."""
    if isinstance(value, WatchedDict):
        value.mark_all()
    elif isinstance(value, list):
        for item in list.__iter__(value):
            mark_all(item)


def _watched(value: Any) -> Any:
    if isinstance(value, dict):
        return WatchedDict({key: _watched(item) for key, item in value.items()})
    if isinstance(value, list):
        return [_watched(item) for item in value]
    return value


def probe(render: Render) -> Caps:
    """The capabilities of the template behind `render`."""
    caps = Caps()
    _probe_content(render, caps)
    _probe_system(render, caps)
    _probe_tools(render, caps)
    _probe_parallel(render, caps)
    _probe_reasoning(render, caps)
    return caps


def _try(render: Render, messages: list[Any], **variables: Any) -> str | None:
    context = {"messages": messages, "tools": [], "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    try:
        return render(context | variables)
    except RenderStopped:
        raise
    except Exception:
        return None


def _probe_content(render: Render, caps: Caps) -> None:
    text = WatchedStr(MARKER)
    out = _try(render, [{"role": "user", "content": text}])
    caps.supports_typed_content = text.as_array
    if out is None or (text.as_array and MARKER not in out):
        caps.supports_string_content = False
    if text.asked_string:
        parts = WatchedList()
        out = _try(render, [{"role": "user", "content": parts}])
        if parts.as_array and out is not None:
            caps.supports_typed_content = True


def _probe_system(render: Render, caps: Caps) -> None:
    system = WatchedDict({"role": "system", "content": "System message"})
    _try(render, [system, {"role": "user", "content": "User message"}])
    caps.supports_system_role = "content" in system.seen


TOOLS = [
    {
        "name": "tool",
        "type": "function",
        "function": {
            "name": "tool1",
            "description": "Tool description",
            "parameters": {
                "type": "object",
                "properties": {"arg": {"type": "string", "description": "Arg description"}},
                "required": ["arg"],
            },
        },
    }
]


def _tool_messages(arguments: Any, n_calls: int) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call0000{i + 1}", "type": "function", "function": {"name": "tool1", "arguments": arguments}}
        for i in range(n_calls)
    ]
    return [
        {"role": "user", "content": "User message"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "Tool response", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "The tool response was 'tool response'"},
        {"role": "user", "content": "User message"},
    ]


def _run_tools(render: Render, arguments: Any, n_calls: int) -> tuple[bool, Any, Any]:
    tools, messages = _watched(TOOLS), _watched(_tool_messages(arguments, n_calls))
    out = _try(render, messages, tools=tools)
    return out is not None, tools, messages


def _probe_tools(render: Render, caps: Caps) -> None:
    ok, tools, messages = _run_tools(render, {"arg": "value"}, 1)
    if ok:
        _judge_tools(caps, tools, messages)
        if caps.supports_tool_calls:
            call = dict.__getitem__(messages[1], "tool_calls")[0]
            arguments = dict.__getitem__(dict.__getitem__(call, "function"), "arguments")
            caps.supports_object_arguments = "arg" in arguments.seen
    if caps.supports_object_arguments:
        return
    ok, tools, messages = _run_tools(render, '{"arg": "value"}', 1)
    if not ok:
        caps.supports_tool_calls = caps.supports_tools = False
    else:
        _judge_tools(caps, tools, messages)


def _judge_tools(caps: Caps, tools: Any, messages: Any) -> None:
    if "name" not in dict.__getitem__(tools[0], "function").seen:
        caps.supports_tools = False
    if "tool_calls" not in messages[1].seen:
        caps.supports_tool_calls = False


def _probe_parallel(render: Render, caps: Caps) -> None:
    arguments = {"arg": "value"} if caps.supports_object_arguments else '{"arg": "value"}'
    ok, _, messages = _run_tools(render, arguments, 2)
    second = dict.__getitem__(messages[1], "tool_calls")[1]
    caps.supports_parallel_tool_calls = ok and "function" in second.seen


def _probe_reasoning(render: Render, caps: Caps) -> None:
    user = {"role": "user", "content": "User message"}
    messages = [
        user,
        {"role": "assistant", "content": "Assistant message", "reasoning_content": REASONING},
        user,
        {"role": "assistant", "content": "Assistant message", "reasoning_content": "Reasoning content"},
        user,
    ]
    out = _try(render, messages, enable_thinking=True, **preserve_reasoning(True))
    caps.supports_preserve_reasoning = out is not None and REASONING in out
    effort = _Effort("low")
    _try(render, [user], enable_thinking=True, reasoning_effort=effort, reasoning_strength=effort)
    caps.supports_reasoning_effort = effort.used


def preserve_reasoning(enabled: bool) -> dict[str, bool]:
    """The names that templates use for keeping the thinking of older turns."""
    return {
        "preserve_thinking": enabled,
        "clear_thinking": not enabled,
        "truncate_history_thinking": not enabled,
        "drop_thinking": not enabled,
    }


class _Effort(str):
    """A string that notes whether it was compared, printed or asked anything."""

    __slots__ = ("used",)

    def __init__(self, _: str = "") -> None:
        self.used = False

    def __getattribute__(self, name: str) -> Any:
        if name[:1] != "_" and name != "used":
            self.used = True
        return str.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        self.used = True
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self.used = True
        return str.__ne__(self, other)

    def __hash__(self) -> int:
        self.used = True
        return str.__hash__(self)

    def __str__(self) -> str:
        self.used = True
        return str.__str__(self)

    def __len__(self) -> int:
        self.used = True
        return str.__len__(self)
