"""The same requests to us and to a real llama-server (xllamacpp): status, headers, keys in order, types, texts.

Both serve the model inside the package. Numbers that measure time, ids and fingerprints may differ; the list of known
differences is `DIFFERENT`, with the reason for each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from test_process import MODEL, serve

pytestmark = pytest.mark.slow
pytest.importorskip("xllamacpp", reason="the real llama-server is an optional test dependency")

PEER = f"""
import time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path = {str(MODEL)!r}
p.port, p.n_ctx, p.n_parallel, p.endpoint_metrics, p.kv_unified = 0, 512, 2, True, False
p.verbosity = 0
s = xllamacpp.Server(p)
print(s.listening_address, flush=True)
time.sleep(3600)
"""

DIFFERENT = {
    "build_info": "ours", "system_fingerprint": "ours", "model_path": "", "created": "time", "id": "random",
    "media_marker": "random", "modified_at": "", "created_at": "time", "completed_at": "time",
    "model_ftype": "the peer guesses F32", "ftype": "the peer guesses F32", "size": "", "id_task": "counter",
    "params": "compared on its own", "ui_settings": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """(llama-server, ours)."""
    peer = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert peer.stdout is not None
    try:
        url = ""
        for line in peer.stdout:
            if found := re.search(r"http://\S+", line):
                url = found.group()
                break
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if httpx.get(url + "/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        with serve("--port", "0", "--metrics") as (_, ours, _text):
            yield httpx.Client(base_url=url, timeout=60), httpx.Client(base_url=ours, timeout=60)
    finally:
        peer.kill()
        peer.wait()


def shape(value: Any, key: str = "") -> Any:
    """What must be equal: structure, key order, types; values of texts and flags, not of measurements."""
    if key in DIFFERENT and not isinstance(value, dict | list):
        return "different"
    if isinstance(value, dict):
        return [(name, shape(item, name)) for name, item in value.items()]
    if isinstance(value, list):
        return [shape(item, key) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    return type(value).__name__ if isinstance(value, float) else "int"


def events(text: str) -> list[Any]:
    out: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: "):
            out.append("[DONE]" if line == "data: [DONE]" else shape(json.loads(line[6:])))
    return out


GREEDY = {"temperature": 0, "n_predict": 12}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0, "max_tokens": 12}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Once upon a time"} | GREEDY),
    ("/completion", {"prompt": "Once upon a time", "n_probs": 2, "return_tokens": True} | GREEDY | {"n_predict": 1}),
    ("/completion", {"prompt": "Once", "stop": ["time"], "return_tokens": True} | GREEDY),
    ("/completion", {"prompt": ["Once", "The"]} | GREEDY),
    ("/completion", {"prompt": "Once", "response_fields": ["content", "generation_settings/top_k"]} | GREEDY),
    ("/completion", {"prompt": "Once", "logit_bias": [[300, False]], "ignore_eos": True} | GREEDY),
    ("/v1/completions", {"prompt": "Once upon a time", "logprobs": 1, "temperature": 0, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "Once upon a time"} | GREEDY),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"verbose": True}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/chat/completions", CHAT | {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}),
    ("/v1/chat/completions", {}),
    ("/apply-template", CHAT),
    ("/apply-template", {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Sure"}]}),  # type: ignore[misc]
    ("/tokenize", {"content": "Hello there é", "add_special": True}),
    ("/tokenize", {"content": "Hello </s>", "with_pieces": True}),
    ("/tokenize", {"content": "Hello </s>", "parse_special": False}),
    ("/tokenize", {"content": ["a", 5, "b"]}),
    ("/detokenize", {"tokens": [1, 2, 300, 301]}),
    ("/v1/chat/completions/input_tokens", CHAT),
    ("/v1/messages/count_tokens", CHAT),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/embedding", {}),
    ("/rerank", {}),
    ("/props", {}),
    ("/tools", {}),
    ("/nope", {}),
    *(("/completion", {"prompt": "x"} | bad) for bad in (
        {"n_predict": "5"}, {"n_predict": -2}, {"n": 9}, {"temperature": "a"}, {"stream": 1}, {"repeat_last_n": -1},
        {"adaptive_decay": 2}, {"dry_sequence_breakers": []}, {"lora": 5}, {"stop": [5]}, {"reasoning_format": "x"},
        {"prompt": []}, {"prompt": None}, {"prompt": [1, 99999]}, {"prompt": {"a": 1}}, {"prompt": "x " * 600},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[f"{i}{path}" for i, (path, _) in enumerate(REQUESTS)])
def test_answers_are_equal(both: tuple[httpx.Client, httpx.Client], path: str, body: dict[str, Any]) -> None:
    theirs, ours = (client.post(path, json=body | {"cache_prompt": False}) for client in both)
    assert ours.status_code == theirs.status_code
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    assert ours.headers["server"] == theirs.headers["server"]
    assert shape(ours.json()) == shape(theirs.json())


STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Once upon a time"} | GREEDY),
    ("/completion", {"prompt": "Once upon a time", "n_probs": 1, "timings_per_token": True} | GREEDY),
    ("/v1/completions", {"prompt": "Once upon a time"} | GREEDY),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_streams_are_equal(both: tuple[httpx.Client, httpx.Client], path: str, body: dict[str, Any]) -> None:
    theirs, ours = (client.post(path, json=body | {"stream": True, "cache_prompt": False}) for client in both)
    assert ours.headers["content-type"] == theirs.headers["content-type"] == "text/event-stream"
    assert ours.headers["x-accel-buffering"] == theirs.headers["x-accel-buffering"]
    assert events(ours.text) == events(theirs.text)


@pytest.mark.parametrize("path", ["/props", "/v1/models", "/slots", "/lora-adapters", "/health", "/tools"])
def test_read_only_endpoints_are_equal(both: tuple[httpx.Client, httpx.Client], path: str) -> None:
    for client in both:
        client.post("/completion", json={"prompt": "x", "n_predict": 1, "id_slot": 0})
        client.post("/completion", json={"prompt": "x", "n_predict": 1, "id_slot": 1})
    theirs, ours = (client.get(path) for client in both)
    assert ours.status_code == theirs.status_code
    assert shape(ours.json()) == shape(theirs.json())


def test_metrics_have_the_same_names_and_types(both: tuple[httpx.Client, httpx.Client]) -> None:
    def lines(client: httpx.Client) -> list[str]:
        return [
            line for line in client.get("/metrics").text.splitlines() if line.startswith("# ") and "llamacpp:" in line
        ]

    assert lines(both[1]) == lines(both[0])
