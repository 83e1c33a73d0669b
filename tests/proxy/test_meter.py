"""The meter on the streams of every API, written down from their documentation."""

from __future__ import annotations

import json

import pytest

from ftgguf.proxy.meter import Meter


def sse(*documents: object) -> bytes:
    return "".join(f"data: {json.dumps(d)}\n\n" for d in documents).encode()


STREAMS = {
    "native": sse(
        {"content": "Hel", "tokens": [5], "stop": False},
        {"content": "lo", "tokens": [6], "stop": False},
        {"content": "", "tokens": [], "stop": True, "timings": {"cache_n": 3, "prompt_n": 4, "predicted_n": 2}},
    ),
    "chat": sse(
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "Hel"}}]},
        {"choices": [{"delta": {"content": "lo"}}]},
        {
            "choices": [],
            "usage": {"completion_tokens": 2, "prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}},
        },
    )
    + b"data: [DONE]\n\n",
    "completions": sse(
        {"choices": [{"text": "Hel"}]},
        {"choices": [{"text": "lo"}], "usage": {"completion_tokens": 2, "prompt_tokens": 7}},
    ),
    "anthropic": b"event: message_start\n"
    + sse({"type": "message_start", "message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 3}}})
    + sse({"type": "content_block_start", "content_block": {"type": "text", "text": ""}})
    + sse({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hel"}})
    + b": ping\n\n"
    + sse({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "lo"}})
    + sse({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
    "responses": sse(
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.output_text.delta", "delta": "Hel"},
        {"type": "response.output_text.delta", "delta": "lo"},
        {
            "type": "response.completed",
            "response": {
                "usage": {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}},
            },
        },
    ),
    "ollama chat": b'{"message":{"role":"assistant","content":"Hel"},"done":false}\n'
    b'{"message":{"role":"assistant","content":"lo"},"done":false}\n'
    b'{"message":{"role":"assistant","content":""},"done":true,"eval_count":2,"prompt_eval_count":7}\n',
    "ollama generate": b'{"response":"Hel","done":false}\n{"response":"lo","done":false}\n'
    b'{"response":"","done":true,"eval_count":2,"prompt_eval_count":7}\n',
    "whole chat": json.dumps(
        {"choices": [{"message": {"content": "Hello"}}], "usage": {"completion_tokens": 2, "prompt_tokens": 7}},
        indent=1,
    ).encode(),
    "whole native": json.dumps(
        {"content": "Hello", "timings": {"cache_n": 3, "prompt_n": 4, "predicted_n": 2}}
    ).encode(),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_text_times_and_counts(name: str, size: int) -> None:
    """Whatever pieces the network makes of it."""
    stream, meter = STREAMS[name], Meter()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    for at, piece in enumerate(pieces, start=1):
        meter.feed(piece, float(at))
    meter.end(float(len(pieces) + 1))
    assert meter.text == "Hello"
    assert (meter.n_gen, meter.prompt_n) == (2, 7)
    assert meter.cached_n in (3, -1)
    assert 0 < meter.first <= meter.last <= len(pieces) + 1
    assert meter.error == ""
    assert meter.whole == name.startswith("whole")


def test_a_tool_call_counts_as_the_first_sign_of_life() -> None:
    meter = Meter()
    meter.feed(sse({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}), 0.5)
    assert (meter.first, meter.events, meter.text) == (0.5, 1, "")


def test_errors_in_a_stream_are_kept() -> None:
    meter = Meter()
    meter.feed(sse({"error": {"code": 500, "message": "Compute error."}}), 0.5)
    assert meter.error == "Compute error."


def test_what_is_no_json_is_left_alone() -> None:
    meter = Meter()
    meter.feed(b"<html>\nno\n</html>\n", 0.5)
    meter.end(1.0)
    assert (meter.first, meter.events) == (-1.0, 0)
