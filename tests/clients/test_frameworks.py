"""litellm, langchain-openai, pydantic-ai and instructor, unmodified, against our server and engine.

They come with the extra `clients`, which `make test-all` installs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytestmark = pytest.mark.slow
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network for prices

ANSWER = "Hello there, na\u00efve \u2615."


def test_litellm_on_three_wires(url: str) -> None:
    import litellm

    litellm.telemetry = False
    hi = [{"role": "user", "content": "Hi"}]
    for model, base in (("openai/x", f"{url}/v1"), ("anthropic/x", url), ("text-completion-openai/x", f"{url}/v1")):
        common: Any = {"model": model, "api_base": base, "api_key": "none", "num_retries": 0}
        whole = litellm.completion(messages=hi, **common)
        assert whole.choices[0].message.content == ANSWER, model
        pieces = [c.choices[0].delta.content or "" for c in litellm.completion(messages=hi, stream=True, **common)]
        assert "".join(pieces) == ANSWER, model


def test_litellm_tools(url: str) -> None:
    import litellm

    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    answer = litellm.completion(
        model="openai/x",
        api_base=f"{url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": "two cities"}],
        tools=[tool],
    )
    calls = answer.choices[0].message.tool_calls
    assert [c.function.arguments for c in calls] == ['{"city": "Paris"}', '{"city": "Rome"}']


def test_langchain(url: str) -> None:
    """Text, a stream with usage, tool calls merged from a stream's fragments, and structured output."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, SecretStr

    class Person(BaseModel):
        name: str
        age: int

    @tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sun"

    model = ChatOpenAI(model="x", base_url=f"{url}/v1", api_key=SecretStr("none"), max_retries=0, stream_usage=True)
    assert model.invoke("Hi").content == ANSWER
    chunks = list(model.stream("Hi"))
    assert "".join(str(c.content) for c in chunks) == ANSWER
    assert any(c.usage_metadata for c in chunks)
    joined: Any = None
    for chunk in model.bind_tools([get_weather]).stream("two cities"):
        joined = chunk if joined is None else joined + chunk
    assert [(c["name"], c["args"]) for c in joined.tool_calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome"}),
    ]
    assert model.with_structured_output(Person, method="json_schema").invoke("Ann as JSON") == Person(
        name="Ann", age=30
    )
    assert model.with_structured_output(Person, method="function_calling").invoke("Ann") == Person(name="Ann", age=30)


def test_pydantic_ai(url: str) -> None:
    """An agent's loop with a tool, streamed (bug log R32: the tool's name must not repeat), and a typed result."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Person(BaseModel):
        name: str
        age: int

    model = OpenAIChatModel("x", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    asked: list[str] = []
    agent: Any = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sun"

    assert agent.run_sync("Weather in Paris?").output == "It is sunny in Paris."

    async def streamed() -> str:
        async with agent.run_stream("Weather in Paris?") as result:
            return str(await result.get_output())

    import asyncio

    assert asyncio.run(streamed()) == "It is sunny in Paris."
    assert asked == ["Paris", "Paris"]
    assert Agent(model, output_type=Person).run_sync("Who?").output == Person(name="Ann", age=30)


def test_instructor(url: str) -> None:
    """A tool forced by its name, and a JSON schema; no retries that would hide a fault."""
    import instructor
    import openai
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    for mode, text in ((instructor.Mode.TOOLS, "Ann"), (instructor.Mode.JSON_SCHEMA, "Ann as JSON")):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        person = client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": text}], response_model=Person, max_retries=0
        )
        assert person.model_dump() == {"name": "Ann", "age": 30}  # of a class that instructor derives
