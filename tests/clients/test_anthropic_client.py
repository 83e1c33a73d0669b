"""The `anthropic` package, unmodified, against our server and engine."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="claude", max_tokens=100, messages=ask("Why?"), system=[{"type": "text", "text": "Be brief."}]
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[-1].text == "So it is, na\u00efve \u2615."  # type: ignore[union-attr]
    assert answer.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="claude", messages=ask("Why?"), system="Be brief.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stream(client: anthropic.Anthropic) -> None:
    """Bug log R51: usage is there from the first event; the helper's own accumulated message."""
    with client.messages.stream(model="claude", max_tokens=100, messages=ask("Why?")) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "So it is, na\u00efve \u2615."
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert isinstance(message.usage.input_tokens, int)
    assert message.usage.output_tokens > 5


def test_a_tool_is_called_and_its_result_used(client: anthropic.Anthropic) -> None:
    messages = ask("Weather in Paris?")
    with client.messages.stream(model="claude", max_tokens=200, messages=messages, tools=[TOOL]) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model="claude", max_tokens=100, messages=messages, tools=[TOOL])
    assert second.content[-1].text == "It is sunny in Paris."  # type: ignore[union-attr]


def test_stop_sequences_and_limits(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="claude", max_tokens=100, messages=ask("Hi"), stop_sequences=["there"])
    assert (cut.stop_sequence, cut.content[0].text) == ("there", "Hello ")  # type: ignore[union-attr]
    short = client.messages.create(model="claude", max_tokens=2, messages=ask("Hi"))
    assert short.stop_reason == "max_tokens"


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available context size"):
        client.messages.create(model="claude", max_tokens=5, messages=ask("word " * 9000))
