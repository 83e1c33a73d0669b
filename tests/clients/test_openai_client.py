"""The `openai` package, unmodified, against our server and engine."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-4o", messages=ask("Why?"))
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "So it is, na\u00efve \u2615."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "Because.\n"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 5
    assert answer.model == "scripted"


def test_chat_stream_equals_the_whole(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="x", messages=ask("Hi"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there, na\u00efve \u2615."
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


def test_optional_fields_as_null(client: openai.OpenAI) -> None:
    """Bug log R13: what litellm and SDKs send when nothing was set."""
    names = ("max_tokens", "stop", "seed", "temperature", "top_p", "n", "logit_bias", "tools", "tool_choice",
             "response_format", "user", "stream_options")  # fmt: skip
    answer = client.chat.completions.create(model="x", messages=ask("Hi"), extra_body=dict.fromkeys(names))
    assert answer.choices[0].message.content == "Hello there, na\u00efve \u2615."


def test_a_tool_is_called_and_its_result_used(client: openai.OpenAI) -> None:
    messages = ask("Weather in Paris?")
    first = client.chat.completions.create(model="x", messages=messages, tools=[TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    (made,) = first.choices[0].message.tool_calls or []
    assert made.type == "function"
    assert (made.function.name, made.function.arguments) == ("get_weather", '{"city": "Paris"}')
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "sun"}]
    second = client.chat.completions.create(model="x", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It is sunny in Paris."


def test_parallel_calls_in_a_stream(client: openai.OpenAI) -> None:
    """Bug log R32, R33: indexes, ids, the name once; by the client's own accumulating helper."""
    with client.chat.completions.stream(model="x", messages=ask("two cities"), tools=[TOOL]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    calls = message.tool_calls or []
    assert [(c.function.name, c.function.arguments) for c in calls] == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_weather", '{"city": "Rome"}'),
    ]
    assert len({c.id for c in calls}) == 2


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    answer = client.chat.completions.create(
        model="x",
        messages=ask("Ann as JSON"),
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema, "strict": True}},
    )
    assert answer.choices[0].message.content == '{"name": "Ann", "age": 30}'


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="x", prompt="Hi", max_tokens=50, logprobs=1)
    assert answer.choices[0].text == "Hello there, na\u00efve \u2615."
    pieces = [c.choices[0].text for c in client.completions.create(model="x", prompt="Hi", max_tokens=50, stream=True)]
    assert "".join(pieces) == answer.choices[0].text


def test_errors_are_the_clients_own(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.completions.create(model="x", prompt="word " * 9000)
    with pytest.raises(openai.BadRequestError, match="Value must be between"):
        client.completions.create(model="x", prompt="a", max_tokens=-7)
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=f"{url}/nowhere", api_key="x", max_retries=0).models.list()


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="x", input="Why?", instructions="Be brief.")
    assert answer.output_text == "So it is, na\u00efve \u2615."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None
    assert answer.usage.output_tokens > 5


def test_responses_stream_with_a_call(client: openai.OpenAI) -> None:
    """Bug log R47, R49: unknown tool types are skipped; `completed` is last, and holds the call."""
    tools: Any = [{"type": "web_search"}, {"type": "function", **TOOL["function"]}]
    with client.responses.stream(model="x", input="Weather in Paris?", tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    (made,) = [item for item in final.output if item.type == "function_call"]
    assert (made.name, made.arguments) == ("get_weather", '{"city": "Paris"}')


def test_any_end_token_ends_the_answer(url: str) -> None:
    """Bug log R31: a file may have several; their texts are not content."""
    for end in ("<|endoftext|>", "<|im_end|>"):
        body = {"prompt": f"ends with {end[2:5]}", "return_tokens": True, "n_predict": 50}
        answer = httpx.post(f"{url}/completion", json=body, timeout=30).json()
        assert answer["content"] == "Short."
        assert answer["stop_type"] == "eos"
