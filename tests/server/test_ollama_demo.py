"""The demo model by name over Ollama's API, with the public `ollama` client unmodified: as after `make serve`, but the
server is told of no model.

SmolLM2-135M knows the capital of France; what is structured is right because it is constrained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from compat.server import our_server
from ftgguf.pull.demo import resolve_demo

pytestmark = pytest.mark.slow
ASK: Any = [{"role": "user", "content": "Name the capital city of France."}]
GREEDY = {"temperature": 0, "num_predict": 60}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    """A server in router mode; its only store is an empty one, so that the demo comes from the cache folder."""
    resolve_demo()
    store = tmp_path_factory.mktemp("store")
    flags = ["-c", "2048", "-np", "1", "-t", "1", "--store", str(store), "--keep-alive", "60"]
    with our_server(None, flags, timeout_s=120) as url:
        yield ollama.Client(host=url)


def test_listed_and_shown(client: ollama.Client) -> None:
    (demo,) = [model for model in client.list().models if model.model == "demo"]
    assert demo.details is not None
    assert (demo.details.family, demo.details.quantization_level) == ("llama", "Q4_1")
    shown = client.show("demo")
    assert "completion" in (shown.capabilities or [])
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.expert_count"] == 4


def test_chat_and_generate(client: ollama.Client) -> None:
    answer = client.chat("demo", ASK, options=GREEDY)
    assert "Paris" in (answer.message.content or "")
    assert answer.done_reason in ("stop", "length")
    assert (answer.eval_count or 0) > 0 < (answer.prompt_eval_count or 0)
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) + (answer.prompt_eval_duration or 0) > 1000
    parts = list(client.chat("demo", ASK, stream=True, options=GREEDY))
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    generated = client.generate("demo", ASK[0]["content"], options=GREEDY)
    assert generated.response == answer.message.content
    raw = client.generate("demo", "The capital of France is", raw=True, options={"temperature": 0, "num_predict": 8})
    assert "Paris" in raw.response


def test_load_ps_and_stop(client: ollama.Client) -> None:
    assert client.generate("demo", keep_alive="10m").done_reason == "load"
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("demo", 2048)
    assert (loaded.size or 0) > 90_000_000
    assert client.generate("demo", keep_alive=0).done_reason == "unload"
    assert client.chat("demo", ASK, options=GREEDY).load_duration > 0  # type: ignore[operator]


def test_formats_and_tools(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = client.chat("demo", ASK, format=schema, options=GREEDY)
    assert json.loads(answer.message.content or "")["city"] in ("Paris", "Rome")
    anything = client.chat("demo", ASK, format="json", options={"temperature": 0, "num_predict": 200})
    assert anything.done_reason == "length" or isinstance(json.loads(anything.message.content or ""), dict)
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat("demo", ASK, think=True)
    missing = Path("/etc/passwd")
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(str(missing), ASK)
    assert caught.value.status_code == 404


def test_the_front_answers_while_the_model_loads(client: ollama.Client) -> None:
    """/health is answered again and again meanwhile, and says which model and how far it is."""
    client.generate("demo", keep_alive=0)
    http = client._client
    while client.ps().models:
        pass
    assert http.post("/models/load", json={"model": "demo"}).json() == {"success": True}
    told: list[Any] = []
    while not client.ps().models:
        told += http.get("/health").json().get("loading", [])
    assert len(told) >= 3
    assert {each["model"] for each in told} == {"demo"}
    assert all(0 <= each["progress"] <= 1 and each["stage"] for each in told)
    assert [model.model for model in client.ps().models] == ["demo"]
