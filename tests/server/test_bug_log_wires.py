"""The reports about streams, thinking and calls, on the whole server with a model that says what they need.

One rule for all: the joined deltas of a stream are the whole answer, on every wire, and every event is valid JSON.
docs/bug-log.md says which report is which test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from compat.scripted import make_scripted
from compat.server import our_server

PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
CITY = 'na\u00efve \u2615 \U0001f600 label=\'\\\'\' "\\n" {"a": "\\"b"}'
ODD = json.dumps({"name": "get_weather", "arguments": {"city": CITY}}, ensure_ascii=False)


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


SCRIPTS: dict[str, str | list[str]] = {
    "plain": "Hello there, na\u00efve \u2615 \U0001f600.",
    "empty": "",
    "thought": "<think>plan</think>answer",
    "thought in pieces": ["<th", "ink>", "pl", "an</", "thi", "nk>", "ans", "wer"],
    "two thoughts": "<think>a</think>b<think>c</think>d",
    "quoted thought": "In code: `<think>x</think>` it is.",
    "endless thought": "<think>on and on and on",
    "call": call(PARIS),
    "prose and call": "Let me look.\n" + call(PARIS),
    "thought and call": "<think>Look.</think>\n\n" + call(PARIS),
    "three calls": call(PARIS) + "\n" + call(ROME) + "\n" + call(PARIS),
    "odd call": call(ODD),
    "bare call": PARIS,
}
TOOL = {
    "name": "get_weather",
    "description": "Weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WIRES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
Answer = tuple[str, str, list[tuple[str, str]], str]
"""(thinking, text, calls as (name, arguments), why it ended)."""


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("wires")
    make_scripted(folder / "vocab.gguf", "Hello.")
    scripts = []
    for name, text in SCRIPTS.items():
        said = {"pieces": [*text, "<|im_end|>"]} if isinstance(text, list) else {"text": text + "<|im_end|>"}
        scripts.append({"when": f"[{name}]", **said})
    scripts.append({"text": " K L M N O P Q R<|im_end|>"})
    (folder / "script.json").write_text(json.dumps({"vocab": "vocab.gguf", "scripts": scripts}))
    args = ["-c", "8192", "-np", "4", "-a", "scripted"]
    with (
        our_server(f"scripted:{folder / 'script.json'}", args) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def body(wire: str, name: str, tools: bool, limit: int = 0) -> dict[str, Any]:
    """The request of one script on one wire."""
    text = f"[{name}]"
    if wire == "/v1/responses":
        out: dict[str, Any] = {"input": text, "tools": [{"type": "function", **TOOL}] if tools else []}
        return out | ({"max_output_tokens": limit} if limit else {})
    out = {"messages": [{"role": "user", "content": text}], **({"max_tokens": limit} if limit else {})}
    if tools and wire == "/v1/messages":
        out["tools"] = [{"name": TOOL["name"], "description": "", "input_schema": TOOL["parameters"]}]
    elif tools:
        out["tools"] = [{"type": "function", "function": TOOL}]
    return out


def whole(http: httpx.Client, wire: str, request: dict[str, Any]) -> Answer:
    response = http.post(wire, json=request)
    assert response.status_code == 200, response.text
    out = response.json()
    if wire == "/v1/chat/completions":
        (choice,) = out["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        return message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"]
    if wire == "/v1/messages":
        blocks = out["content"]
        calls = [(b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
        thinking = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
        return thinking, "".join(b["text"] for b in blocks if b["type"] == "text"), calls, out["stop_reason"]
    return *_items(out["output"]), out["status"]


def _items(items: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    thinking = "".join(i["content"][0]["text"] for i in items if i["type"] == "reasoning")
    text = "".join(i["content"][0]["text"] for i in items if i["type"] == "message")
    return thinking, text, [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]


def events(http: httpx.Client, wire: str, request: dict[str, Any]) -> list[Any]:
    with http.stream("POST", wire, json=request | {"stream": True}) as response:
        assert response.status_code == 200
        raw = b"".join(response.iter_bytes()).decode("utf-8", "strict")
    assert "\ufffd" not in raw
    lines = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    if wire == "/v1/chat/completions":
        assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(http: httpx.Client, wire: str, request: dict[str, Any]) -> Answer:
    found = events(http, wire, request)
    if wire == "/v1/chat/completions":
        return _chat(found)
    return _messages(found) if wire == "/v1/messages" else _responses(found)


def _chat(found: list[Any]) -> Answer:
    thinking = text = ""
    calls: list[list[str]] = []
    ids: list[str] = []
    ends = [e["choices"][0]["finish_reason"] for e in found if e["choices"][0]["finish_reason"] is not None]
    assert len(ends) == 1
    for event in found:
        delta = event["choices"][0]["delta"]
        thinking += delta.get("reasoning_content") or ""
        text += delta.get("content") or ""
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["type"] == "function"
                ids.append(part["id"])
                calls.append([part["function"]["name"], ""])
            else:
                assert "name" not in part["function"]
            calls[part["index"]][1] += part["function"]["arguments"]
    assert len(set(ids)) == len(ids)
    assert all(ids)
    return thinking, text, [(name, arguments) for name, arguments in calls], ends[0]


def _messages(found: list[Any]) -> Answer:
    assert isinstance(found[0]["message"]["usage"]["input_tokens"], int)
    blocks: list[dict[str, Any]] = []
    open_block = False
    for event in found:
        if event["type"] == "content_block_start":
            assert not open_block
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "said": ""})
            open_block = True
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["said"] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
        elif event["type"] == "content_block_stop":
            open_block = False
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    said = {kind: "".join(b["said"] for b in blocks if b["type"] == kind) for kind in ("thinking", "text")}
    used = [b for b in blocks if b["type"] == "tool_use"]
    assert len({b["id"] for b in used}) == len(used)
    calls = [(b["name"], json.dumps(json.loads(b["said"] or "{}"))) for b in used]
    return said["thinking"], said["text"], calls, found[-2]["delta"]["stop_reason"]


def _responses(found: list[Any]) -> Answer:
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.completed"
    final = found[-1]["response"]
    thinking, text, calls = _items(final["output"])
    assert text == "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert thinking == "".join(e["delta"] for e in found if e["type"] == "response.reasoning_text.delta")
    assert "".join(arguments for _, arguments in calls) == "".join(
        e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta"
    )
    return thinking, text, calls, final["status"]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_is_the_whole_answer(http: httpx.Client, name: str, wire: str) -> None:
    for tools in (False, True):
        request = body(wire, name, tools)
        answer = whole(http, wire, request)
        assert streamed(http, wire, request) == answer, tools


EXPECTED: dict[str, tuple[str, str, list[Any]]] = {
    "plain": ("", str(SCRIPTS["plain"]), []),
    "thought": ("plan", "answer", []),
    "thought in pieces": ("plan", "answer", []),
    "two thoughts": ("a", "b<think>c</think>d", []),
    "quoted thought": ("", "In code: `<think>x</think>` it is.", []),
    "endless thought": ("on and on and on", "", []),
    "call": ("", "", [{"city": "Paris"}]),
    "prose and call": ("", "Let me look.\n", [{"city": "Paris"}]),
    "thought and call": ("Look.", "", [{"city": "Paris"}]),
    "three calls": ("", "", [{"city": "Paris"}, {"city": "Rome"}, {"city": "Paris"}]),
    "odd call": ("", "", [json.loads(ODD)["arguments"]]),
    "bare call": ("", PARIS, []),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_each_script_becomes(http: httpx.Client, name: str) -> None:
    """R27, R33, R34, R40: what is thinking, what is text, and what is a call."""
    thinking, text, calls, end = whole(http, WIRES[0], body(WIRES[0], name, True))
    assert (thinking, text, [json.loads(arguments) for _, arguments in calls]) == EXPECTED[name]
    assert end == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("form", ["none", "deepseek", "auto"])
@pytest.mark.parametrize("name", ["thought", "thought in pieces", "two thoughts", "quoted thought"])
def test_r27_every_reasoning_format_in_both_modes(http: httpx.Client, name: str, form: str) -> None:
    request = body(WIRES[0], name, False) | {"reasoning_format": form}
    thinking, text, _, _ = whole(http, WIRES[0], request)
    assert streamed(http, WIRES[0], request)[:2] == (thinking, text)
    said = SCRIPTS[name]
    if form == "none":
        assert (thinking, text) == ("", said if isinstance(said, str) else "".join(said))


@pytest.mark.parametrize("wire", WIRES)
def test_r28_r38_the_limit_in_thinking_and_in_a_call(http: httpx.Client, wire: str) -> None:
    """Never an error and never lost: what was thought stays thinking, and a call that was begun stays a call."""
    request = body(wire, "endless thought", False, 8)
    thinking, text, _, end = whole(http, wire, request)
    assert thinking
    assert text == ""
    assert end in ("length", "max_tokens", "completed")
    assert streamed(http, wire, request)[:3] == (thinking, "", [])
    if wire != "/v1/messages":  # its arguments must be a whole object
        request = body(wire, "call", True, 24)
        _, text, calls, _ = whole(http, wire, request)
        assert calls or text
        assert streamed(http, wire, request)[1:3] == (text, calls)
    assert http.post(wire, json=body(wire, "call", True, 24)).status_code == 200


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
@pytest.mark.parametrize(
    ("stop", "text"), [(" K", ""), (" R", " K L M N O P Q"), (" K L M N O P Q R", ""), ("O P Q", " K L M N ")]
)
def test_r01_r03_stop_strings(http: httpx.Client, path: str, stop: str, text: str) -> None:
    """Over several tokens, as the first token, as the last, and as the whole output; nothing of it leaks."""
    request = {"prompt": "x", "stop": [stop], "max_tokens": 50}
    pieces = []
    for event in events_of_text(http, path, request):
        pieces.append(event["choices"][0]["text"] if "choices" in event else event["content"])
    assert "".join(pieces) == text
    out = http.post(path, json=request).json()
    assert (out["choices"][0]["text"] if "choices" in out else out["content"]) == text


def events_of_text(http: httpx.Client, path: str, request: dict[str, Any]) -> list[Any]:
    with http.stream("POST", path, json=request | {"stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


LIMITS: list[tuple[Any, int]] = [
    (0, 0), (1, 1), (2, 2), (None, -1), (-1, -1), (-2, 400), (2147483648, 400), ("5", 400), (1.5, 400), ([1], 400),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), LIMITS)
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_r12_limits(http: httpx.Client, path: str, value: Any, expected: int) -> None:
    """Exact counts, and 400 for what is no limit; `null` and -1 mean none. 1.5 is read as llama-server reads it."""
    request = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    response = http.post(path, json=request | {"max_tokens": value})
    if expected == 400 and value != 1.5:
        assert response.status_code == 400, response.text
        return
    assert response.status_code == 200, response.text
    out = response.json()
    count = out["tokens_predicted"] if path == "/completion" else out["usage"]["completion_tokens"]
    assert count == (1 if value == 1.5 else expected) if expected >= 0 else count > 5


def test_r53_all_counts_agree(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "How many na\u00efve tokens is this?"}]
    tools = [{"type": "function", "function": TOOL}]
    anthropic = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    chat: dict[str, Any] = {"messages": messages, "tools": tools, "max_tokens": 1}
    prompt = http.post("/apply-template", json=chat).json()["prompt"]
    tokens = http.post("/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
    assert http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == len(tokens)
    assert http.post("/v1/chat/completions/input_tokens", json=chat).json()["input_tokens"] == len(tokens)
    counted = http.post("/v1/messages/count_tokens", json={"messages": messages, "tools": anthropic}).json()
    assert counted == {"input_tokens": len(tokens)}
    again = http.post("/detokenize", json={"tokens": tokens}).json()["content"]
    assert again == prompt


@pytest.mark.parametrize("stream", [False, True])
def test_r29_prompts_around_the_limit(http: httpx.Client, stream: bool) -> None:
    limit = http.get("/props").json()["default_generation_settings"]["n_ctx"]
    for n, code in ((limit - 1, 200), (limit, 400), (limit + 1, 400), (3 * limit, 400)):
        request = {"prompt": [100] * n, "max_tokens": 5, "stream": stream}
        response = http.post("/v1/completions", json=request)
        assert response.status_code == code, n
        if code == 400:
            error = response.json()["error"]
            assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", n, limit)
        else:
            assert '"finish_reason":"length"' in response.text
