"""The public clients, unmodified, against `-m demo`: a real small model, as after `make serve`.

SmolLM2-135M knows the capital of France and has never seen a tool, so structured answers are right because they are
constrained: a grammar that does not hold would show at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from compat.server import our_server
from ftgguf.pull.demo import resolve_demo

pytestmark = pytest.mark.slow
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network for prices

QUESTION = "Name the capital city of France."
ASK: Any = [{"role": "user", "content": QUESTION}]
PICK: Any = [{"role": "user", "content": "Pick a colour for the sky, and say how many clouds there are."}]


class Sky(BaseModel):
    """The sky as the user describes it."""

    colour: Literal["red", "blue", "grey"]
    clouds: int = Field(ge=0, le=9)


TOOL: Any = {
    "type": "function",
    "function": {"name": "paint_sky", "description": "Paints the sky.", "parameters": Sky.model_json_schema()},
}


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with our_server(resolve_demo(), ["-c", "4096", "-np", "2", "-a", "demo", "--temp", "0"], timeout_s=300) as url:
        yield url


def test_openai_on_three_routes(demo: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{demo}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(model="demo", messages=ASK, max_tokens=40)
    assert "Paris" in (chat.choices[0].message.content or "")
    chunks = list(client.chat.completions.create(model="demo", messages=ASK, max_tokens=40, stream=True))
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks)
    text = client.completions.create(model="demo", prompt="The capital of France is", max_tokens=8)
    assert "Paris" in text.choices[0].text
    response = client.responses.create(model="demo", input=QUESTION, max_output_tokens=40)
    assert "Paris" in response.output_text
    with client.responses.stream(model="demo", input=QUESTION, max_output_tokens=40) as events:
        assert "Paris" in "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert [model.id for model in client.models.list()] == ["demo"]


def test_openai_structured(demo: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{demo}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(model="demo", messages=PICK, response_format=Sky, max_tokens=100)
    assert isinstance(parsed.choices[0].message.parsed, Sky)
    answer = client.chat.completions.create(
        model="demo", messages=PICK, tools=[TOOL], max_tokens=100,
        tool_choice={"type": "function", "function": {"name": "paint_sky"}},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name == "paint_sky"
    Sky.model_validate_json(call.function.arguments)


def test_anthropic(demo: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=demo, api_key="none", max_retries=0)
    message = client.messages.create(model="demo", messages=ASK, max_tokens=40)
    assert message.content[0].type == "text"
    assert "Paris" in message.content[0].text
    assert message.usage.output_tokens > 0
    with client.messages.stream(model="demo", messages=ASK, max_tokens=40) as stream:
        assert "Paris" in "".join(stream.text_stream)
    tool: Any = {"name": "paint_sky", "description": "Paints the sky.", "input_schema": Sky.model_json_schema()}
    choice: Any = {"type": "any"}
    used = client.messages.create(model="demo", messages=PICK, max_tokens=100, tools=[tool], tool_choice=choice)
    assert used.stop_reason == "tool_use"
    block = used.content[-1]
    assert block.type == "tool_use"
    Sky.model_validate(block.input)
    count = client.messages.count_tokens(model="demo", messages=ASK)
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_litellm(demo: str) -> None:
    import litellm

    for model, base in (("openai/demo", f"{demo}/v1"), ("anthropic/demo", demo)):
        common: Any = {"model": model, "api_base": base, "api_key": "none", "num_retries": 0, "max_tokens": 40}
        whole = litellm.completion(messages=ASK, **common)
        assert "Paris" in whole.choices[0].message.content, model
        pieces = [c.choices[0].delta.content or "" for c in litellm.completion(messages=ASK, stream=True, **common)]
        assert "Paris" in "".join(pieces), model
        common["max_tokens"] = 100
        used = litellm.completion(messages=PICK, tools=[TOOL], tool_choice="required", **common)
        Sky.model_validate_json(used.choices[0].message.tool_calls[0].function.arguments)


def test_langchain(demo: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(model="demo", base_url=f"{demo}/v1", api_key=SecretStr("none"), max_retries=0, max_tokens=100)
    assert "Paris" in str(model.invoke(QUESTION).content)
    assert "Paris" in "".join(str(chunk.content) for chunk in model.stream(QUESTION))
    for method in ("json_schema", "function_calling"):
        sky = model.with_structured_output(Sky, method=method).invoke(PICK[0]["content"])
        assert isinstance(sky, Sky), method


def test_pydantic_ai(demo: str) -> None:
    """Typed results by a forced tool and by the response format, plain text, and text streamed."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{demo}/v1", api_key="none"))
    settings: Any = {"max_tokens": 100}
    assert "Paris" in Agent(model).run_sync(QUESTION, model_settings=settings).output

    async def streamed() -> str:
        async with Agent(model).run_stream(QUESTION, model_settings=settings) as result:
            return str(await result.get_output())

    assert "Paris" in asyncio.run(streamed())
    for output in (Sky, NativeOutput(Sky)):
        typed: Any = Agent(model, output_type=output, retries=0)
        assert isinstance(typed.run_sync(PICK[0]["content"], model_settings=settings).output, Sky)


def test_instructor(demo: str) -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{demo}/v1", api_key="none"), mode=mode)
        sky = client.chat.completions.create(
            model="demo", messages=PICK, response_model=Sky, max_retries=0, max_tokens=100
        )
        assert isinstance(sky, Sky), mode
