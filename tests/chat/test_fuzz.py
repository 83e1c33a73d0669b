"""Wrong types everywhere: whatever a chat, messages or responses body holds, the answer is a plan or one API error."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.chat.request import ChatPlanner
from ftgguf.chat.template import load_templates
from ftgguf.flags.config import ChatConfig
from ftgguf.server import anthropic, responses
from ftgguf.server.errors import ApiError

PLANNER = ChatPlanner(load_templates("chatml"), ChatConfig())

scalars = st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.sampled_from(
    ["", "x", "user", "assistant", "tool", "system", "auto", "required", "function", "text", "{}", "reasoning_content"]
)  # fmt: skip
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "tool_call_id", "input",
     "reasoning_content", "parameters", "properties", "schema", "json_schema", "thinking", "tool_use_id", "summary",
     "call_id", "output", "description", "format", "effort", "input_schema"]
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)
FIELDS = st.sampled_from(
    ["messages", "tools", "tool_choice", "response_format", "json_schema", "grammar", "stop", "system", "input",
     "instructions", "chat_template_kwargs", "reasoning_effort", "reasoning_format", "continue_final_message",
     "add_generation_prompt", "logprobs", "top_logprobs", "thinking", "text", "reasoning", "max_tokens", "stream",
     "parallel_tool_calls", "stop_sequences", "max_output_tokens", "previous_response_id"]
)  # fmt: skip
bodies = st.dictionaries(FIELDS, values, max_size=8)


@settings(max_examples=400, deadline=None)
@given(bodies, st.sampled_from(["chat", "messages", "responses"]))
def test_bodies_of_any_shape(body: dict[str, Any], api: str) -> None:
    with contextlib.suppress(ApiError):  # any other exception fails the test
        if api == "messages":
            body = anthropic.to_chat(body)
        elif api == "responses":
            body = responses.to_chat(body)
        assert isinstance(PLANNER.plan(body).prompt, str)
