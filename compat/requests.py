"""Which requests must be answered as llama-server does? Each is small and deterministic: greedy or seeded."""

from __future__ import annotations

from typing import Any

from compat.differential import Request, Rule

_PROMPT = "Once upon a time"
_GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7, "n_predict": 16}
_CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": _PROMPT}],
    "temperature": 0,
    "seed": 7,
    "max_tokens": 16,
}
_UNCACHED = {"cache_prompt": False}
"""Where counts of reused tokens are compared, so that the order of requests does not matter."""
_PREFILLED = [*_CHAT["messages"], {"role": "assistant", "content": "There"}]
_RESPONSE: dict[str, Any] = {"temperature": 0, "seed": 7, "max_output_tokens": 16, **_UNCACHED}


def _post(name: str, path: str, body: Any = None, *, raw: bytes | None = None, **rules: Rule) -> Request:
    return Request(name, "POST", path, body, raw, rules={k.replace("__", "."): v for k, v in rules.items()})


def _completion(name: str, **extra: Any) -> Request:
    return _post(f"completion {name}", "/completion", {"prompt": _PROMPT, **_GREEDY, **_UNCACHED, **extra})


def _openai(name: str, **extra: Any) -> Request:
    body = {"prompt": _PROMPT, "temperature": 0, "seed": 7, "max_tokens": 16, **_UNCACHED, **extra}
    return _post(f"v1/completions {name}", "/v1/completions", body)


def _chat(name: str, **extra: Any) -> Request:
    return _post(f"v1/chat {name}", "/v1/chat/completions", {**_CHAT, **_UNCACHED, **extra})


READ_ONLY = (
    Request("health", "GET", "/health"),
    Request("v1/health", "GET", "/v1/health"),
    Request("props", "GET", "/props"),
    Request("v1/models", "GET", "/v1/models"),
    Request("models", "GET", "/models"),
    Request("unknown route", "GET", "/nothing/here"),
    Request("props post disabled", "POST", "/props", {}),
    Request("metrics disabled", "GET", "/metrics"),
    Request("options", "OPTIONS", "/v1/chat/completions", headers={"Origin": "http://example.com"}),
)

TOKENS = (
    _post("tokenize", "/tokenize", {"content": "Once upon a time, there was a cat."}),
    _post("tokenize special", "/tokenize", {"content": "Once </s> upon", "add_special": True}),
    _post("tokenize no special parsing", "/tokenize", {"content": "a </s> b", "parse_special": False}),
    _post("tokenize pieces", "/tokenize", {"content": "Hello caf\u00e9 \U0001f600", "with_pieces": True}),
    _post("tokenize empty", "/tokenize", {"content": ""}),
    _post("tokenize mixed", "/tokenize", {"content": ["Once", 300, "upon"]}),
    _post("tokenize nothing", "/tokenize", {}),
    _post("detokenize", "/detokenize", {"tokens": [300, 301, 302, 303]}),
    _post("detokenize empty", "/detokenize", {"tokens": []}),
    _post("detokenize nothing", "/detokenize", {}),
    _post("apply-template", "/apply-template", {"messages": _CHAT["messages"]}),
    _post("apply-template no generation prompt", "/apply-template", {**_CHAT, "add_generation_prompt": False}),
    _post(
        "apply-template parts",
        "/apply-template",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    ),
    _post("apply-template nothing", "/apply-template", {}),
)

COMPLETION = (
    _completion("greedy"),
    _completion("stream", stream=True),
    _completion("nothing to generate", n_predict=0),
    _completion("token prompt", prompt=[1, 403, 407, 261, 378]),
    _completion("mixed prompt", prompt=[1, "Once upon", 261, " time"]),
    _completion("several prompts", prompt=[_PROMPT, "The cat"]),
    _completion("empty prompt", prompt=""),
    _completion("stop", stop=["girl"]),
    _completion("stop stream", stop=["girl"], stream=True),
    _completion("stop inside a token", stop=["ir"]),
    _completion("probabilities", n_probs=3, n_predict=4),
    _completion("probabilities stream", n_probs=3, n_predict=4, stream=True),
    _completion("probabilities after sampling", n_probs=3, n_predict=4, post_sampling_probs=True),
    _completion("seeded", temperature=0.8, seed=42),
    _completion("samplers", temperature=0.9, seed=3, samplers=["top_k", "temperature"], top_k=5),
    _completion("penalties", repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    _completion("logit bias", logit_bias=[[403, -5.0], [300, False]]),
    _completion("logit bias by text", logit_bias={" little": False}),
    _completion("mirostat", temperature=0.8, seed=5, mirostat=2),
    _completion("return tokens", return_tokens=True),
    _completion("timings per token", stream=True, timings_per_token=True, n_predict=3),
    _completion("progress", stream=True, return_progress=True, n_predict=2),
    _completion("progress timings", stream=True, return_progress=True, timings_per_token=True, n_predict=2),
    _completion("response fields", response_fields=["content", "generation_settings/n_predict"]),
    _completion("grammar", grammar='root ::= "yes" | "no"'),
    _completion("json schema", json_schema={"type": "boolean"}),
    _completion("ignore eos", ignore_eos=True),
    _completion("unknown field", no_such_field=1),
)

OPENAI = (
    _openai("greedy"),
    _openai("stream", stream=True),
    _openai("stream usage", stream=True, stream_options={"include_usage": True}),
    _openai("logprobs", logprobs=2, max_tokens=4),
    _openai("stop", stop="girl"),
    _openai("stop stream", stop="girl", stream=True),
    _openai("progress", stream=True, return_progress=True, timings_per_token=True, max_tokens=2),
    _chat("greedy"),
    _chat("stream", stream=True),
    _chat("stream usage", stream=True, stream_options={"include_usage": True}),
    _chat("logprobs", logprobs=True, top_logprobs=2, max_tokens=3),
    _chat("logprobs stream", logprobs=True, top_logprobs=2, max_tokens=3, stream=True),
    _chat("stop", stop=["the"]),
    _chat("one token", max_tokens=1),
    _chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    _chat("content parts", messages=[{"role": "user", "content": [{"type": "text", "text": _PROMPT}]}]),
    _chat("assistant prefill", messages=_PREFILLED),
    _chat("json object", response_format={"type": "json_object"}, max_tokens=8),
    _chat("other model name", model="gpt-4o"),
    _chat("two choices", n=2, temperature=0.8),
    _chat("stop stream", stop=["girl"], stream=True),
    _chat("progress", stream=True, return_progress=True, timings_per_token=True, max_tokens=2),
    _chat("assistant prefill stream", messages=_PREFILLED, stream=True),
    _chat("continued", messages=_PREFILLED, continue_final_message=True, add_generation_prompt=False),
    _post("chat input tokens", "/v1/chat/completions/input_tokens", _CHAT),
    _post("messages count tokens", "/v1/messages/count_tokens", _CHAT),
    _post("v1/messages greedy", "/v1/messages", {**_CHAT, **_UNCACHED}),
    _post("v1/messages prefill", "/v1/messages", {**_CHAT, **_UNCACHED, "messages": _PREFILLED}),
    _post("v1/messages stop", "/v1/messages", {**_CHAT, **_UNCACHED, "stop_sequences": ["the"]}),
    _post("v1/responses greedy", "/v1/responses", {**_RESPONSE, "input": _PROMPT}),
    _post("v1/responses messages", "/v1/responses", {**_RESPONSE, "input": _CHAT["messages"]}),
    _post("responses input tokens", "/v1/responses/input_tokens", {"input": _PROMPT}),
)

_LONG = " ".join(["once"] * 3000)
ERRORS = (
    _post("error broken json", "/completion", raw=b'{"prompt": "a"', body__error__message=Rule.TYPE),
    _post("error no prompt", "/completion", {}),
    _post("error prompt type", "/completion", {"prompt": {"a": 1}}),
    _post("error n_predict", "/completion", {"prompt": "a", "n_predict": -5}),
    _post("error temperature type", "/completion", {"prompt": "a", "temperature": "hot"}),
    _post("error n_predict type", "/completion", {"prompt": "a", "n_predict": "x"}),
    _post("error token out of range", "/completion", {"prompt": [1, 999999999], "n_predict": 1}),
    _post("error bad grammar", "/completion", {"prompt": "a", "grammar": "root :: ="}),
    _post("error too long", "/completion", {"prompt": _LONG, "n_predict": 1}),
    _post("error too long chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": _LONG}]}),
    _post("error no messages", "/v1/chat/completions", {}),
    _post("error messages type", "/v1/chat/completions", {"messages": "hello"}),
    _post("error message without role", "/v1/chat/completions", {"messages": [{"content": "a"}]}),
    _post("error part type", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}),
    _post("error two assistants", "/v1/chat/completions", {"messages": [{"role": "assistant", "content": "a"}] * 2}),
    _post("error grammar and schema", "/v1/chat/completions", {**_CHAT, "grammar": 'root ::= "a"', "json_schema": {}}),
    _post("error n", "/v1/chat/completions", {**_CHAT, "n": 100}),
    _post("error embeddings disabled", "/v1/embeddings", {"input": "a"}),
    _post("error rerank disabled", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    _post("error messages without messages", "/v1/messages", {}),
    _post("error previous response", "/v1/responses", {"input": "a", "previous_response_id": "x"}),
    _post("error responses without input", "/v1/responses", {}),
    _post("error slots disabled", "/slots/0?action=erase"),
    _post("error control without id", "/v1/chat/completions/control", {}),
    _post("error control action", "/v1/chat/completions/control", {"id": "x", "action": "y"}),
    _post("error control unknown", "/v1/chat/completions/control", {"id": "x", "action": "reasoning_end"}),
    _post("error infill", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    _post("error lora", "/lora-adapters", {"id": 0}),
    _post("error lora unknown", "/lora-adapters", [{"id": 0, "scale": 1.0}]),
    _post("error audio", "/v1/audio/transcriptions", {}),
    Request("error wrong method", "GET", "/completion"),
)

REQUESTS = (*READ_ONLY, *TOKENS, *COMPLETION, *OPENAI, *ERRORS)
"""In this order: later ones do not depend on what earlier ones left in the cache, as `cache_prompt` is off."""

SCRIPT = (
    "<think>\nThe user wants a caf\u00e9 \U0001f600; caf\u00e9 again and again.\n</think>\n\n"
    'Hello there.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
)
"""What the model of `scripted.make_scripted` must say for `SCRIPTED`: thinking, text with characters that are cut
between tokens, and a tool call."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 400, **_UNCACHED}


def _scripted(name: str, **extra: Any) -> Request:
    return _post(f"scripted {name}", "/v1/chat/completions", {**_ASK, **extra})


_TURNS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "Sunny"},
]

SCRIPTED = (
    _scripted("thinking"),
    _scripted("thinking stream", stream=True),
    _scripted("thinking raw", reasoning_format="none"),
    _scripted("thinking raw stream", reasoning_format="none", stream=True),
    _scripted("tools", tools=[_TOOL]),
    _scripted("tools stream", tools=[_TOOL], stream=True),
    _scripted("tools stream usage", tools=[_TOOL], stream=True, stream_options={"include_usage": True}),
    _scripted("tools none", tools=[_TOOL], tool_choice="none"),
    _scripted("tools after a result", tools=[_TOOL], messages=_TURNS),
    _scripted("stop in the text", stop=["there"]),
    _scripted("stop in the text stream", stop=["there"], stream=True),
    _scripted("cut in the thinking", max_tokens=8),
    _scripted("cut in a character", max_tokens=11, stream=True),
    _scripted("cut in the tool call", tools=[_TOOL], max_tokens=36, stream=True),
    _scripted("two choices", n=2),
    *(_scripted(f"budget {n}", reasoning_budget_tokens=n, stream=n == 3) for n in (0, 1, 3, 5, 6, 7, 8, 100)),
    _scripted("thinking budget", thinking_budget_tokens=2),
    _scripted("budget with a message", reasoning_budget_tokens=2, reasoning_budget_message=" Enough."),
    _scripted("budget and tools", reasoning_budget_tokens=2, tools=[_TOOL]),
    _post("scripted messages budget", "/v1/messages", {**_ASK, "thinking": {"type": "enabled", "budget_tokens": 2}}),
    _post("scripted completion", "/completion", {"prompt": "x", "n_predict": 400, **_UNCACHED}),
    _post("scripted completion stream", "/completion", {"prompt": "x", "stream": True, **_UNCACHED}),
    _post(
        "scripted completion stop", "/completion", {"prompt": "x", "stop": ["\u00e9 ag"], "stream": True, **_UNCACHED}
    ),
    _post("scripted template", "/apply-template", {"messages": _TURNS, "tools": [_TOOL]}),
)
"""For a server on the scripted model; see `SCRIPT`."""
