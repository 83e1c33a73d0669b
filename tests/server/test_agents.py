"""Tools, thinking, Anthropic and Responses over HTTP, on a scripted engine.

Event orders and fields: a real llama-server (xllamacpp 2026.10) for what both have, Anthropic's and OpenAI's published
API references for the rest (`input`, one block at a time, `sequence_number`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_front import Front, front, script

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}<tool_call></tool_call>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
FUNCTION = {
    "name": "get_weather",
    "description": "Weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ANSWER = ["Need", " it.\n</th", "ink>\n\nLet me", " look.\n", *CALL]


@pytest.fixture(scope="module")
def thinking() -> Iterator[Front]:
    with front(TEMPLATE) as running:
        yield running


def asked(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script(pieces=ANSWER, **fields)}]}


OPENAI_TOOLS = [{"type": "function", "function": FUNCTION}]
ANTHROPIC_TOOLS = [
    {"name": "get_weather", "description": "", "input_schema": FUNCTION["parameters"]},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
]
RESPONSES_TOOLS = [
    {"type": "function", **FUNCTION},
    {"type": "web_search"}, {"type": "custom", "name": "x"}, {"type": "namespace", "name": "mcp"},
    {"type": "image_generation"},
]  # fmt: skip


def test_chat_with_thinking_and_a_call(thinking: Front) -> None:
    out = thinking.post("/v1/chat/completions", asked() | {"tools": OPENAI_TOOLS}).json()
    choice = out["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == "Need it.\n"
    assert message["content"] == "Let me look.\n"
    (call,) = message["tool_calls"]
    assert list(call) == ["type", "function", "id"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}


def test_streamed_deltas_join_to_the_same_message(thinking: Front) -> None:
    events = thinking.events("/v1/chat/completions", asked() | {"tools": OPENAI_TOOLS})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Need it.\n"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look.\n"
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "get_weather"
    assert calls[0]["type"] == "function"
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert json.loads(arguments) == {"city": "Zürich"}
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_a_call_is_text(thinking: Front) -> None:
    message = thinking.post("/v1/chat/completions", asked()).json()["choices"][0]["message"]
    assert message["content"] == "Let me look.\n" + CALL
    assert "tool_calls" not in message
    message = thinking.post("/v1/chat/completions", asked() | {"tools": OPENAI_TOOLS, "tool_choice": "none"}).json()
    assert message["choices"][0]["message"]["content"].endswith(CALL)


def test_a_call_cut_by_the_limit(thinking: Front) -> None:
    """Bug log R38: 200, finish_reason length, the partial call kept."""
    out = thinking.post(
        "/v1/chat/completions", asked() | {"tools": OPENAI_TOOLS, "max_tokens": len(ANSWER) - 20}
    ).json()
    choice = out["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


def test_formats_of_reasoning(thinking: Front) -> None:
    raw = thinking.post("/v1/chat/completions", asked() | {"reasoning_format": "none"}).json()
    assert raw["choices"][0]["message"]["content"] == "".join(ANSWER)


def test_tool_choice_is_checked(thinking: Front) -> None:
    body = asked() | {"tools": OPENAI_TOOLS, "tool_choice": "sometimes"}
    assert thinking.post("/v1/chat/completions", body).json()["error"]["message"] == "Invalid tool_choice: sometimes"
    body = asked() | {"tools": OPENAI_TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}
    assert thinking.post("/v1/chat/completions", body).status_code == 400
    body = asked() | {"tools": OPENAI_TOOLS, "grammar": 'root ::= "a"'}
    assert thinking.post("/v1/chat/completions", body).status_code == 400
    body = asked() | {"tools": OPENAI_TOOLS, "logprobs": True, "stream": True}
    assert thinking.post("/v1/chat/completions", body).status_code == 400


def test_required_and_response_format_reach_the_engine_as_grammars(thinking: Front) -> None:
    body = asked() | {"tools": OPENAI_TOOLS, "tool_choice": "required", "verbose": True}
    settings = thinking.post("/v1/chat/completions", body).json()["__verbose"]["generation_settings"]
    assert "get_weather" in settings["grammar"]
    assert settings["grammar_lazy"] is False
    shapes: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": FUNCTION["parameters"]}},
        {"type": "json_object", "schema": FUNCTION["parameters"]},
        {"type": "json_object"},
        {"type": "text"},
    ]
    grammars = []
    for shape in shapes:
        out = thinking.post("/v1/chat/completions", asked() | {"response_format": shape, "verbose": True}).json()
        grammars.append(out["__verbose"]["generation_settings"]["grammar"])
    assert "city" in grammars[0]
    assert grammars[0] == grammars[1]
    assert grammars[2] == '{"type": "object"}'
    assert grammars[3] == ""


# ---------------------------------------------------------------------------------------------- Anthropic


def anthropic_events(running: Front, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    with running.http.stream("POST", "/v1/messages?beta=true", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        text = response.read().decode()
    out = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        out.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return out


def test_messages(thinking: Front) -> None:
    out = thinking.post("/v1/messages", asked(cached=3) | {"tools": ANTHROPIC_TOOLS, "max_tokens": 500}).json()
    assert list(out) == ["id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"]
    assert [block["type"] for block in out["content"]] == ["thinking", "text", "tool_use"]
    assert out["content"][2]["input"] == {"city": "Zürich"}
    assert out["stop_reason"] == "tool_use"
    usage = out["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["output_tokens"] == len(ANSWER)
    body = {"messages": asked(cached=3)["messages"], "tools": ANTHROPIC_TOOLS}
    counted = thinking.post("/v1/messages/count_tokens", body).json()
    assert counted == {"input_tokens": usage["input_tokens"] + 3}


def test_message_events(thinking: Front) -> None:
    """Bug log R51 and R33: usage at the start, blocks one after the other with rising indexes."""
    events = anthropic_events(thinking, asked() | {"tools": ANTHROPIC_TOOLS, "max_tokens": 500})
    names = [name for name, _ in events]
    assert all(name == data["type"] for name, data in events)
    assert names[0] == "message_start"
    assert isinstance(events[0][1]["message"]["usage"]["input_tokens"], int)
    assert names[-2:] == ["message_delta", "message_stop"]
    opened = [data for name, data in events if name == "content_block_start"]
    assert [(data["index"], data["content_block"]["type"]) for data in opened] == [
        (0, "thinking"), (1, "text"), (2, "tool_use"),
    ]  # fmt: skip
    open_block: int | None = None
    for name, data in events:
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
        elif name == "content_block_delta":
            assert data["index"] == open_block
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    parts: dict[str, str] = {}
    for _, data in events:
        delta = data.get("delta", {})
        for key in ("thinking", "text", "partial_json"):
            parts[key] = parts.get(key, "") + delta.get(key, "")
    assert parts["thinking"] == "Need it.\n"
    assert parts["text"] == "Let me look.\n"
    assert json.loads(parts["partial_json"]) == {"city": "Zürich"}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_messages_conversion(thinking: Front) -> None:
    """System blocks, the billing line's changing stamp, tool results as lists, thinking in the history."""
    billing = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={};You are Claude Code."
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": billing.format("a5145"), "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Q"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "T", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "X"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "is_error": False,
                 "content": [{"type": "text", "text": "20"}, {"type": "text", "text": " C"}]},
                {"type": "text", "text": "And?"},
            ]},
        ],
        "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 100},
    }  # fmt: skip
    from ftgguf.server.anthropic import to_chat

    prompt = thinking.state.planner.plan(to_chat(body)).prompt
    assert "cch=fffff;You are Claude Code." in prompt
    assert "<think>\nT\n</think>" in prompt
    assert "<|im_start|>tool\n20 C<|im_end|>" in prompt
    assert "<|im_start|>user\nAnd?<|im_end|>" in prompt
    other = json.loads(json.dumps(body).replace("a5145", "b9999"))
    assert thinking.state.planner.plan(to_chat(other)).prompt == prompt
    choice = {"type": "tool", "name": "get_weather"}
    assert to_chat(body | {"tool_choice": choice})["tool_choice"]["function"] == {"name": "get_weather"}


def test_message_errors(thinking: Front) -> None:
    """llama-server's 500 for a body without messages; the shape is readable to Anthropic's clients too."""
    response = thinking.post("/v1/messages", {})
    assert response.status_code == 500
    assert response.json() == {
        "type": "error",
        "error": {"code": 500, "message": "'messages' is required", "type": "server_error"},
    }
    assert thinking.http.post("/v1/messages", content=b"{").json()["type"] == "error"


def test_message_pings_come_after_the_start() -> None:
    with front(TEMPLATE, http={"sse_ping_interval": 1}) as running:
        names = [name for name, _ in anthropic_events(running, asked(prefill=1.5))]
    assert names[:2] == ["message_start", "ping"]


# ---------------------------------------------------------------------------------------------- Responses


def response_events(running: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    with running.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        text = response.read().decode()
    out = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        out.append(event)
    return out


def test_responses(thinking: Front) -> None:
    """Bug log R47: tools that are no functions are skipped."""
    out = thinking.post("/v1/responses", {"input": script(pieces=ANSWER), "tools": RESPONSES_TOOLS}).json()
    assert list(out) == ["completed_at", "created_at", "id", "model", "object", "output", "status", "usage"]
    assert [item["type"] for item in out["output"]] == ["reasoning", "message", "function_call"]
    call = out["output"][2]
    assert json.loads(call["arguments"]) == {"city": "Zürich"}
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert out["usage"]["total_tokens"] == out["usage"]["input_tokens"] + out["usage"]["output_tokens"]
    assert out["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Need it.\n")}


def test_response_events(thinking: Front) -> None:
    """Bug log R49: the full chain, numbered, `completed` last with usage."""
    events = response_events(thinking, {"input": script(pieces=ANSWER), "tools": RESPONSES_TOOLS})
    types = [event["type"].removeprefix("response.") for event in events]
    collapsed = [kind for i, kind in enumerate(types) if i == 0 or kind != types[i - 1]]
    assert collapsed == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert final["usage"]["output_tokens"] == len(ANSWER)
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Need it.\n")}
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == final["output"][1]["content"][0]["text"] == "Let me look.\n"


def test_responses_conversion(thinking: Front) -> None:
    from ftgguf.server.responses import to_chat

    body: dict[str, Any] = {
        "instructions": "SYS",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Q"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"X"}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "20"}]},
        ],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": FUNCTION["parameters"]}},
        "max_output_tokens": 7, "reasoning": {"effort": "low"}, "store": False, "include": [],
    }  # fmt: skip
    chat = to_chat(body)
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "tool"]
    assistant = chat["messages"][2]
    assert assistant["reasoning_content"] == "T"
    assert assistant["tool_calls"][0]["id"] == "c1"
    assert (chat["max_tokens"], chat["reasoning_effort"]) == (7, "low")
    assert chat["response_format"]["type"] == "json_schema"
    count = thinking.post("/v1/responses/input_tokens", body).json()
    assert count["object"] == "response.input_tokens"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'input' is required"),
        ({"input": 5}, "'input' must be a string or array of objects"),
        ({"input": "x", "previous_response_id": "r"}, "llama.cpp does not support 'previous_response_id'."),
        ({"input": [{"type": "nope"}]}, "Cannot determine type of 'item'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file' is not supported"),
        ({"input": "x", "tools": 5}, "'tools' must be an array of objects"),
    ],
)
def test_bad_responses_bodies(thinking: Front, body: dict[str, Any], message: str) -> None:
    response = thinking.post("/v1/responses", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_an_engine_that_dies_ends_a_response_with_failed() -> None:
    with front(TEMPLATE) as running:
        events = response_events(running, {"input": script(pieces=ANSWER, die=3)})
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"


# -------------------------------------------------------------------------------------------------- infill


def test_infill_prompt() -> None:
    """llama.cpp's `format_prompt_infill`: order of the parts and the 3:1 cut to the batch."""
    from fake_front import FakeVocab

    from ftgguf.server.infill import check_infill, infill_prompt, missing_tokens

    class Fim(FakeVocab):
        fim_pre, fim_suf, fim_mid, fim_rep, fim_sep = 300, 301, 302, 303, 304
        bos, add_bos = 1, True

    vocab: Any = Fim()
    body = check_infill({"input_prefix": "ab", "input_suffix": "cd", "input_extra": [{"filename": "f", "text": "t"}]})
    ids = infill_prompt(vocab, body, n_batch=64, n_predict=8, n_ctx=4096, spm=False)

    def text(string: str) -> list[int]:
        return [byte + 3 for byte in string.encode()]

    extra = [303, *text("myproject\n"), 304, *text("f\n"), *text("t"), 304, *text("filename\n")]
    assert ids == [*extra, 1, 300, *text("ab"), 301, *text("cd"), 302]
    swapped = infill_prompt(vocab, body, n_batch=64, n_predict=8, n_ctx=0, spm=True)
    assert swapped == [1, 301, *text("cd"), 300, *text("ab"), 302]
    long = infill_prompt(
        vocab, {"input_prefix": "p" * 99, "input_suffix": "s" * 99}, n_batch=64, n_predict=8, n_ctx=0, spm=False
    )
    assert (long.count(text("p")[0]), long.count(text("s")[0])) == (48, 14)
    assert missing_tokens(FakeVocab()) == "prefix token is missing. suffix token is missing. middle token is missing. "


def test_infill_without_tokens_is_501(server: Front) -> None:
    assert server.post("/infill", {"input_prefix": "a", "input_suffix": "b"}).status_code == 501


def test_control_of_a_completion(server: Front) -> None:
    assert server.post("/v1/chat/completions/control", {}).json()["error"]["message"] == "missing completion id"
    out = server.post("/v1/chat/completions/control", {"id": "x", "action": "reasoning_end"}).json()
    assert out == {"success": False, "message": "no active completion for this id"}
