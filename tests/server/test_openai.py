"""OpenAI's routes on a scripted engine; shapes recorded from a real llama-server (xllamacpp 2026.10)."""

from __future__ import annotations

import pytest
from fake_front import Front, script

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
USAGE_KEYS = ["completion_tokens", "prompt_tokens", "total_tokens", "prompt_tokens_details"]


def said(prompt: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}]}


def test_text_completion(server: Front) -> None:
    out = server.post("/v1/completions", {"prompt": script(cached=2)}).json()
    assert list(out) == ["choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"]
    assert out["choices"] == [{"text": "Hello world!", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert list(out["usage"]) == USAGE_KEYS
    assert out["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert out["object"] == "text_completion"
    assert out["id"].startswith("chatcmpl-")
    assert len(out["id"]) == len("chatcmpl-") + 32


def test_text_completion_of_several_prompts_is_one_object(server: Front) -> None:
    out = server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 1}).json()
    assert [choice["index"] for choice in out["choices"]] == [0, 1, 2, 3]
    assert out["choices"][3]["logprobs"]["content"][0]["token"] == "Hello"


def test_text_stream(server: Front) -> None:
    events = server.events("/v1/completions", {"prompt": "hi"})
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hello world!"
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * 5 + ["stop"]
    assert "usage" in events[-2]  # a real server sends it whether asked or not
    assert list(events[0]) == ["choices", "created", "model", "system_fingerprint", "object", "id"]


def test_chat_completion(server: Front) -> None:
    out = server.post("/v1/chat/completions", CHAT).json()
    assert list(out) == ["choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"]
    assert out["choices"] == [
        {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "Hello world!"}}
    ]
    assert out["model"] == "/models/fake.gguf"  # never an echo of the request


def test_chat_stream_order(server: Front) -> None:
    """Bug log R09 and R10: role first, then text, one terminal reason, then usage on request, then [DONE]."""
    events = server.events("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events[1:-3]) == "Hello world!"
    assert events[-3]["choices"] == [{"finish_reason": "stop", "index": 0, "delta": {}}]
    assert events[-2]["choices"] == []
    assert list(events[-2]["usage"]) == USAGE_KEYS
    assert "timings" in events[-2]
    without = server.events("/v1/chat/completions", CHAT)
    assert not any("usage" in event for event in without[:-1])
    assert "timings" in without[-2]
    reasons = [event["choices"][0]["finish_reason"] for event in without[:-1]]
    assert [reason for reason in reasons if reason] == ["stop"]


def test_chat_stream_with_no_tokens_still_opens_and_ends(server: Front) -> None:
    events = server.events("/v1/chat/completions", CHAT | {"max_tokens": 0})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_chat_progress_chunks(server: Front) -> None:
    events = server.events("/v1/chat/completions", CHAT | {"return_progress": True})
    assert events[0]["prompt_progress"]["processed"] == events[0]["prompt_progress"]["total"]
    assert [e["choices"][0]["delta"].get("role") for e in events[:3]] == ["assistant", "assistant", None]


def test_chat_logprobs(server: Front) -> None:
    """Bug log R15."""
    out = server.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}).json()
    content = out["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hello", " ", "wor", "ld", "!"]
    assert len(content[0]["top_logprobs"]) == 2
    events = server.events("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1})
    assert events[1]["choices"][0]["logprobs"]["content"][0]["token"] == "Hello"


def test_chat_copies(server: Front) -> None:
    out = server.post("/v1/chat/completions", CHAT | {"n": 2}).json()
    assert [choice["index"] for choice in out["choices"]] == [0, 1]
    events = server.events("/v1/chat/completions", CHAT | {"n": 2})[:-1]
    for index in (0, 1):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": None}
        assert "".join(choice["delta"].get("content") or "" for choice in mine) == "Hello world!"


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({}, 400, "'messages' is required"),
        ({"messages": "x"}, 400, "Expected 'messages' to be an array"),
        ({"messages": [{"role": "user"}]}, 400, "All non-assistant messages must contain 'content'"),
        ({"messages": [5]}, 400, "All non-assistant messages must contain 'content'"),
        ({"messages": [{"role": "assistant"}]}, 400, "Assistant message must contain either 'content' or"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "Expected 'content' to be a string or an array"),
        ({"messages": [{"role": "user", "content": [{"type": "foo"}]}]}, 400, "unsupported content[].type"),
        ({"messages": [{"content": "x"}]}, 500, "Failed to parse messages: Missing 'role' in message: {\"content\""),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 500, "image input is not supported"),
        (CHAT | {"top_logprobs": 2}, 400, "top_logprobs requires logprobs to be set to true"),
        (CHAT | {"response_format": {"type": "xml"}}, 400, 'response_format type must be one of "text" or'),
        (CHAT | {"json_schema": {}, "grammar": "root ::= \"a\""}, 500, "Cannot use both json_schema and grammar"),
        (CHAT | {"chat_template_kwargs": {"enable_thinking": "x"}}, 400, 'invalid type for "enable_thinking"'),
        (CHAT | {"tools": [{"type": "x"}]}, 500, "Failed to parse tools: Unsupported tool type"),
    ],
)  # fmt: skip
def test_bad_chat_bodies(server: Front, body: dict[str, object], code: int, message: str) -> None:
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == code
    assert response.json()["error"]["message"].startswith(message)


def test_apply_template_and_counts_agree_with_usage(server: Front) -> None:
    """Bug log R25 and R53: one BOS, and the count of the real call."""
    prompt = server.post("/apply-template", CHAT).json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    count = server.post("/v1/chat/completions/input_tokens", CHAT).json()
    usage = server.post("/v1/chat/completions", CHAT).json()["usage"]
    assert count == {"input_tokens": usage["prompt_tokens"], "object": "response.input_tokens"}


def test_models(server: Front) -> None:
    out = server.http.get("/v1/models").json()
    assert list(out) == ["models", "object", "data"]
    assert list(out["data"][0]) == [
        "id", "aliases", "tags", "object", "architecture", "created", "owned_by", "meta",
    ]  # fmt: skip
    assert out["data"][0]["meta"]["n_ctx"] == 4096
    assert out == server.http.get("/models").json() | {"data": out["data"]}


@pytest.mark.parametrize("emoji", ["😀", "naïve ☕"])
def test_text_outside_ascii_is_whole_in_every_event(server: Front, emoji: str) -> None:
    """Bug log R05: the engine sends whole characters; nothing on the way may break them."""
    events = server.events("/v1/chat/completions", said(script(pieces=list(emoji))))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert text == emoji
    assert "�" not in text
