"""/lora-adapters and the request field `lora`: the same requests to us and to a real llama-server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from compat.adapters import make_adapter
from compat.differential import Request, Rule, run
from compat.peer import peer_server
from compat.server import ServerError, our_server
from compat.synth import make
from ftgguf.flags.config import LoraAdapter, ModelConfig
from ftgguf.server.adapters import Adapters, parse_scales
from ftgguf.server.errors import InvalidRequest

BASE = ["-t", "1", "-np", "2", "-c", "1024", "-kvu", "--no-warmup"]
FIELDS = ["tokens", "generation_settings/lora", "tokens_evaluated"]
ASK = {"prompt": "hello", "n_predict": 4, "temperature": 0, "return_tokens": True, "response_fields": FIELDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-api")
    model = make("qwen3", folder / "model.gguf", types="F16")
    make_adapter(model, folder / "a.gguf")
    names = {"adapter.lora.task_name": "task", "adapter.lora.prompt_prefix": "prefix"}
    make_adapter(model, folder / "b.gguf", seed=2, metadata=names)
    return folder


def flags(folder: Path, *more: str) -> list[str]:
    return [*BASE, "--lora", str(folder / "a.gguf"), "--lora-scaled", f"{folder / 'b.gguf'}:0.5", *more]


def requests() -> list[Request]:
    """Each change of the server's scales is followed by a look at them and by a completion."""
    out = [Request("adapters", "GET", "/lora-adapters"), Request("with them", "POST", "/completion", ASK)]
    lists: list[Any] = [
        [], [{"id": 0, "scale": 0.5}], [{"id": 1, "scale": 0.5}], [{"id": 0, "scale": 1}, {"id": 1, "scale": 0}],
        [{"id": 1}], [{"scale": 1}], [{"id": 5, "scale": 1}], [{"id": "x", "scale": 1}], ["x"], 5,
        [{"id": 0, "scale": "x"}], [{"id": 0, "scale": 0.2}, {"id": 0, "scale": 0.7}],
    ]  # fmt: skip
    out += [Request(f"asked for {each}", "POST", "/completion", ASK | {"lora": each}) for each in lists]
    bodies: list[Any] = [[{"id": 0, "scale": 0.25}], [], [{"id": 7, "scale": 1}], {"id": 1}, [5], "x", None]
    for body in [*bodies, [{"id": 1, "scale": 0.5}]]:
        out.append(Request(f"set {body}", "POST", "/lora-adapters", body, raw=b"null" if body is None else None))
        out.append(Request(f"after {body}", "GET", "/lora-adapters"))
    # without its cache: the peer would go on from K and V that were computed with the scales of before
    return [*out, Request("at the end", "POST", "/completion", ASK | {"cache_prompt": False})]


@pytest.mark.slow
def test_like_llama_server(folder: Path) -> None:
    """Lists, words and greedy tokens, with the server's scales and the request's."""
    pytest.importorskip("xllamacpp", reason="the real llama-server is an optional test dependency")
    path = folder / "model.gguf"
    with our_server(path, flags(folder)) as ours, peer_server(path, flags(folder)) as peer:
        found = run(ours, peer, requests())
    assert [str(each) for each in found] == []


@pytest.mark.slow
def test_a_server_without_adapters_is_like_llama_server(folder: Path) -> None:
    """The field has no effect there, and is shown all the same."""
    pytest.importorskip("xllamacpp", reason="the real llama-server is an optional test dependency")
    path = folder / "model.gguf"
    asked = [
        Request("field", "POST", "/completion", ASK | {"lora": [{"id": 0, "scale": 1}]}),
        Request("set", "POST", "/lora-adapters", [{"id": 0, "scale": 1}], rules={"body.success": Rule.EXACT}),
        Request("get", "GET", "/lora-adapters"),
    ]
    with our_server(path, BASE) as ours, peer_server(path, BASE) as peer:
        assert [str(each) for each in run(ours, peer, asked)] == []


def test_adapters_over_http(folder: Path) -> None:
    """--lora-init-without-apply starts with scale 0, as its help says (llama-server's server does not heed it)."""
    path = folder / "model.gguf"
    with our_server(path, BASE) as url:
        plain = httpx.post(f"{url}/completion", json=ASK, timeout=30).json()["tokens"]
    with (
        our_server(path, flags(folder, "--lora-init-without-apply")) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        listed = http.get("/lora-adapters").json()
        assert [each["scale"] for each in listed] == [0.0, 0.0]
        assert [each["path"] for each in listed] == [str(folder / "a.gguf"), str(folder / "b.gguf")]
        assert (listed[1]["task_name"], listed[1]["prompt_prefix"]) == ("task", "prefix")
        assert http.post("/completion", json=ASK).json()["tokens"] == plain
        one = http.post("/completion", json=ASK | {"lora": [{"id": 0, "scale": 1.0}]}).json()["tokens"]
        assert http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json() == {"success": True}
        assert http.post("/completion", json=ASK).json()["tokens"] == one != plain
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "lora": [{"id": 1, "scale": 2}]}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert http.post("/completion", content=b'{"prompt":"x","lora":[{"id":0,"scale":1e39}]}').status_code == 400


@pytest.mark.parametrize("wrong", ["missing", "model"])
def test_an_adapter_that_does_not_fit_ends_the_start(folder: Path, wrong: str) -> None:
    """One line that names the file, from the engine's process to the terminal."""
    with (
        pytest.raises(ServerError, match=rf"{wrong}\.gguf.*(not a LoRA adapter|cannot be opened)"),
        our_server(folder / "model.gguf", [*BASE, "--lora", str(folder / f"{wrong}.gguf")]),
    ):
        pass


def test_scales() -> None:
    """Recorded from llama-server: ids in order, the last of equal ones counts, what is not listed gets 0."""
    items = [{"id": 3, "scale": 1}, {"id": 0}, {"id": 3, "scale": 0.5}, "x", {"scale": True}]
    assert parse_scales(items) == {-1: 1.0, 0: 0.0, 3: 0.5}
    for bad in (float("inf"), 1e39):
        with pytest.raises(InvalidRequest, match="finite"):
            parse_scales([{"id": 0, "scale": bad}])
    adapters = Adapters(ModelConfig(lora=(LoraAdapter("a"), LoraAdapter("b", 0.25))))
    assert adapters.of_request({}) == (1.0, 0.25)
    assert adapters.of_request({1: 2.0, 9: 1.0, -1: 1.0}) == (0.0, 2.0)
    adapters.set({1: 0.5})
    assert adapters.of_request({}) == (0.0, 0.5)
