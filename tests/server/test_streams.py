"""Replayed streams and the Vertex route; texts and status codes are llama-server's."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fake_front import Front, front, script

from ftgguf.server.vertex import request_format


def wait_done(server: Front, id: str) -> dict[str, Any]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        (found,) = server.post("/v1/streams/lookup", {"conversation_ids": [id]}).json()
        if found["is_done"]:
            return dict(found)
        time.sleep(0.02)
    raise AssertionError("the stream does not end")


def test_a_stream_goes_on_without_its_client_and_is_read_again(server: Front) -> None:
    body = {"prompt": script(delay=0.02, repeat=4), "stream": True}
    with server.http.stream("POST", "/completion", json=body, headers={"X-Conversation-Id": "a::m"}) as response:
        first = next(response.iter_bytes())
    found = wait_done(server, "a")
    assert found["conversation_id"] == "a::m"
    whole = server.http.get("/v1/stream", params={"conv_id": "a::m"})
    assert whole.headers["content-type"] == "text/event-stream"
    assert len(whole.content) == found["total_bytes"]
    assert whole.content.startswith(first)
    events = [json.loads(line[6:]) for line in whole.text.splitlines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == "Hello world!" * 4
    rest = server.http.get("/v1/stream", params={"conv_id": "a::m", "from": len(first)})
    assert first + rest.content == whole.content


def test_following_a_live_stream(server: Front) -> None:
    body = {"prompt": script(delay=0.05, repeat=3), "stream": True}
    with server.http.stream("POST", "/completion", json=body, headers={"X-Conversation-Id": "live"}) as response:
        next(response.iter_bytes())
    again = server.http.get("/v1/stream", params={"conv_id": "live"})
    assert again.text.count('"stop":true') == 1


def test_delete_stops_the_sequence() -> None:
    with front() as running:
        body = {"prompt": script(delay=0.05, repeat=500), "stream": True}
        with running.http.stream("POST", "/completion", json=body, headers={"X-Conversation-Id": "d"}) as response:
            next(response.iter_bytes())
        assert running.control("cancelled") == []
        assert running.http.delete("/v1/stream", params={"conv_id": "d"}).status_code == 204
        end = time.monotonic() + 5
        while not running.control("cancelled") and time.monotonic() < end:
            time.sleep(0.02)
        assert len(running.control("cancelled")) == 1
        assert running.http.get("/v1/stream", params={"conv_id": "d"}).status_code == 404
        assert running.http.delete("/v1/stream", params={"conv_id": "d"}).status_code == 204


@pytest.mark.parametrize(
    ("query", "code", "message"),
    [
        ({}, 400, "Missing conversation id in path"),
        ({"conv_id": "nope"}, 404, "Stream not found or expired"),
    ],
)
def test_stream_errors(server: Front, query: dict[str, str], code: int, message: str) -> None:
    response = server.http.get("/v1/stream", params=query)
    assert (response.status_code, response.json()["error"]["message"]) == (code, message)
    assert server.post("/v1/streams/lookup", {}).json() == []


def test_vertex_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "alive")
    with front() as running:
        assert running.http.get("/alive").json() == {"status": "ok"}
        chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        out = running.post(
            "/predict",
            {
                "instances": [
                    {"@requestFormat": "chatCompletions", **chat},
                    {"@requestFormat": "/tokenize", "content": "a"},
                    {"@requestFormat": "nope"},
                    {"@requestFormat": "chatCompletions"},
                    5,
                ]
            },
        ).json()["predictions"]
        assert out[0]["choices"][0]["message"]["content"] == "Hello world!"
        assert out[1] == {"tokens": [100]}
        assert out[2]["error"]["message"] == "no handler registered for @requestFormat: nope"
        assert out[3]["error"]["message"] == "'messages' is required"
        assert out[4]["error"]["message"] == "each instance must be a JSON object"
        assert running.post("/predict", {"instances": [1] * 129}).status_code == 400
        assert running.post("/predict", {}).status_code == 400


def test_vertex_names() -> None:
    assert request_format("/v1/chat/completions") == "chatCompletions"
    assert request_format("/apply-template") == "applyTemplate"
    assert request_format("/slots/{id_slot}") == "slots"
