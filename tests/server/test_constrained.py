"""Constrained answers end to end, with a real small model that would never write JSON by itself, hot.

What must hold is llama-server's: `tool_choice` in its four forms, a schema of a tool that nobody can compile, a format
that cannot be met, and templates that open or close the thinking in the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from compat.server import our_server
from ftgguf.pull.demo import resolve_stories

PAINT = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
ODD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}, "required": ["a"]}
"""Look-behind: no regular expression, so no grammar."""


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [tool("paint", PAINT), tool("stop", {"type": "object", "properties": {}})]
HOT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 1.5,
    "max_tokens": 150,
    "seed": 3,
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|><think>%s{% endif %}"
)


@contextmanager
def served(*flags: str) -> Iterator[httpx.Client]:
    with (
        our_server(resolve_stories(), ["-c", "4096", "-np", "2", "-t", "1", *flags]) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served() as client:
        yield client


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[httpx.Client]]:
    """`with_template(end, *flags)`: the generation prompt ends in `<think>` and `end`."""
    folder = tmp_path_factory.mktemp("templates")

    def start(end: str, *flags: str) -> AbstractContextManager[httpx.Client]:
        path: Path = folder / f"template{len(list(folder.iterdir()))}.jinja"
        path.write_text(TEMPLATE.replace("%s", end))
        return served("--chat-template-file", str(path), *flags)

    return start


def choice(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json=HOT | fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def test_tool_choice_in_its_four_forms(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    for seed in range(4):
        forced = choice(http, tools=TOOLS, tool_choice=named, seed=seed)
        assert [c["function"]["name"] for c in forced["message"]["tool_calls"]] == ["stop"]
        assert forced["finish_reason"] == "tool_calls"
        required = choice(http, tools=TOOLS, tool_choice="required", seed=seed)
        for call in required["message"]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert (call["function"]["name"], set(arguments)) in [("paint", {"colour"}), ("stop", set())]
        for free in ("auto", "none"):
            assert "tool_calls" not in choice(http, tools=TOOLS, tool_choice=free, seed=seed, max_tokens=8)["message"]
    refused = http.post("/v1/chat/completions", json=HOT | {"tools": TOOLS, "tool_choice": {"name": "nope"}})
    assert refused.status_code == 400
    assert "nope" in refused.json()["error"]["message"]


@pytest.mark.parametrize("wire", ["/v1/messages", "/v1/responses"])
def test_forced_calls_on_the_other_wires(http: httpx.Client, wire: str) -> None:
    if wire == "/v1/messages":
        tools = [{"name": "paint", "input_schema": PAINT}, {"name": "stop", "input_schema": {"type": "object"}}]
        out = http.post(wire, json=HOT | {"tools": tools, "tool_choice": {"type": "tool", "name": "paint"}}).json()
        (block,) = [b for b in out["content"] if b["type"] == "tool_use"]
        assert (block["name"], set(block["input"])) == ("paint", {"colour"})
        assert out["stop_reason"] == "tool_use"
        return
    tools = [{"type": "function", "name": "paint", "parameters": PAINT}]
    body = {"input": "Hi", "tools": tools, "tool_choice": {"type": "function", "name": "paint"}, "temperature": 1.5}
    (item,) = http.post(wire, json=body).json()["output"]
    assert json.loads(item["arguments"])["colour"] in ("red", "blue")


def test_a_tool_that_cannot_be_compiled_fails_nobody(http: httpx.Client) -> None:
    """Offered only: the request works, other tools stay constrained, and its own arguments are any object."""
    tools = [*TOOLS, tool("odd", ODD)]
    assert choice(http, tools=tools, max_tokens=8)["finish_reason"] in ("stop", "length")
    forced = choice(http, tools=tools, tool_choice={"type": "function", "function": {"name": "paint"}})
    assert json.loads(forced["message"]["tool_calls"][0]["function"]["arguments"])["colour"] in ("red", "blue")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "odd", "schema": ODD, "strict": True}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "no-such-type"}}},
        {"type": "json_object", "schema": {"$ref": "#/$defs/missing"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "array", "minItems": 3, "maxItems": 1}}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_cannot_be_met_is_an_error(http: httpx.Client, form: dict[str, Any], stream: bool) -> None:
    """Never unconstrained text."""
    answer = http.post("/v1/chat/completions", json=HOT | {"response_format": form, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


FORMAT = {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT}}


@pytest.mark.parametrize("end", ["\n\n</think>\n\n", "\n", ""])
def test_a_prefilled_thought_does_not_defeat_the_constraint(
    with_template: Callable[..., AbstractContextManager[httpx.Client]], end: str
) -> None:
    """The prompt closes the thinking, or opens it: then it is free, ended by the budget here, and JSON comes after."""
    with with_template(end, "--reasoning-budget", "6") as http:
        for seed in range(3):
            message = choice(http, response_format=FORMAT, seed=seed)["message"]
            assert json.loads(message["content"])["colour"] in ("red", "blue"), message
            assert bool(message.get("reasoning_content")) == ("</think>" not in end)
            forced = choice(http, tools=TOOLS, tool_choice="required", seed=seed)["message"]
            assert forced["tool_calls"], forced
        raw = choice(http, response_format=FORMAT, reasoning_format="none")["message"]["content"]
        assert json.loads(raw.rpartition("</think>")[2])["colour"] in ("red", "blue")
        continued = [*HOT["messages"], {"role": "assistant", "content": '{"colour": "'}]
        prefilled = choice(http, messages=continued, max_tokens=12)
        assert prefilled["message"]["content"].startswith('{"colour": "')
