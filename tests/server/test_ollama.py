"""Ollama's HTTP API beside llama-server's, with the public `ollama` client unmodified where it has a call for it.

Shapes are those of Ollama's API types (its docs/api.md and api/types.go, as the reference notes them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from fake_front import Front, script

from compat.registry import FakeSource, Running, running
from ftgguf.pull.demo import resolve_stories
from ftgguf.server.ollama_guard import is_loopback, local_name, local_origin
from ftgguf.server.ollama_wire import keep_alive_seconds, plain_name

MODEL = "/models/fake.gguf"
GB = "library/tiny:latest"


@pytest.fixture(scope="module")
def registry() -> Iterator[Running]:
    with running(FakeSource()) as server:
        yield server


@pytest.fixture
def client(server: Front) -> ollama.Client:
    return ollama.Client(host=server.url)


@pytest.fixture
def pulling(make_front: Callable[..., Any], registry: Running, tmp_path: Path) -> Iterator[Front]:
    """A front whose store is empty and that may pull from the fake registry."""
    registry.source.reset()
    registry.source.add_model(GB, [("model", resolve_stories().read_bytes()), ("system", b"Be kind.")])
    with make_front(model={"store": str(tmp_path / "store"), "pull_hosts": (registry.host,)}) as front:
        yield front


def test_the_command_lines_first_requests(server: Front) -> None:
    """HEAD /, GET /api/status, POST /api/show with unknown fields, GET /api/tags: 200, and model_info is an object."""
    assert server.http.head("/").status_code == 200
    assert server.http.get("/api/status").json() == {"cloud": {"disabled": True, "source": "ftgguf"}}
    shown = server.post("/api/show", {"model": "stories", "name": "", "template": "", "options": None})
    assert shown.status_code == 200
    assert shown.json()["model_info"]["general.architecture"] == "llama"
    tags = server.http.get("/api/tags").json()["models"]
    assert "stories" in [tag["name"] for tag in tags]
    assert all(len(tag["digest"]) == 64 and tag["details"]["format"] == "gguf" for tag in tags)
    assert all("completion" in tag["capabilities"] for tag in tags)
    assert server.http.get("/api/version").json()["version"].count(".") == 2


def test_chat(client: ollama.Client) -> None:
    answer = client.chat(MODEL, [{"role": "user", "content": script(pieces=["Hi", " there"])}])
    assert answer.message.content == "Hi there"
    assert answer.done
    assert answer.done_reason == "stop"
    assert answer.eval_count == 2
    assert answer.prompt_eval_count > 10
    assert answer.total_duration > 0 < answer.eval_duration
    assert answer.load_duration == 0


def test_chat_stream_is_json_lines(server: Front) -> None:
    """Streaming is the default; every line is an object, the last one alone has done and the numbers."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": script(pieces=["a", "b", "c"])}]}
    answer = server.post("/api/chat", body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *parts, last = [json.loads(text) for text in answer.text.splitlines()]
    assert [part["message"]["content"] for part in parts] == ["a", "b", "c"]
    assert not any(part["done"] for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["done"] is True
    assert {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count"} <= set(last)
    assert all(isinstance(last[key], int) for key in last if key.endswith(("duration", "count")))


def test_options_reach_the_engine(server: Front) -> None:
    """num_predict cuts, stop stops; done_reason says which."""
    pieces = ["one", " two", " three"]
    messages = [{"role": "user", "content": script(pieces=pieces)}]
    cut = server.post("/api/chat", {"model": MODEL, "messages": messages, "options": {"num_predict": 2}})
    assert json.loads(cut.text.splitlines()[-1])["done_reason"] == "length"
    body = {"model": MODEL, "messages": messages, "stream": False, "options": {"stop": [" three"], "num_ctx": 8}}
    stopped = server.post("/api/chat", body).json()
    assert stopped["message"]["content"] == "one two"
    assert stopped["done_reason"] == "stop"
    wrong = server.post("/api/chat", body | {"options": {"temperature": "hot"}})
    assert wrong.status_code == 400
    assert isinstance(wrong.json()["error"], str)


def test_generate_raw_and_context(server: Front, client: ollama.Client) -> None:
    """raw skips the template; context carries the token ids on."""
    prompt = script(pieces=["x", "y"])
    raw = client.generate(MODEL, prompt, raw=True)
    templated = client.generate(MODEL, prompt, system="Be brief.")
    assert raw.response == templated.response == "xy"
    assert templated.prompt_eval_count > raw.prompt_eval_count
    more = client.generate(MODEL, prompt, raw=True, context=raw.context)
    assert more.prompt_eval_count == raw.prompt_eval_count + len(raw.context)
    for body in ({"suffix": "b"}, {"template": "{{ .Prompt }}"}, {"images": ["aGk="]}):
        assert server.post("/api/generate", {"model": MODEL, "prompt": "a", **body}).status_code == 400


def test_loading_and_other_models(server: Front, client: ollama.Client) -> None:
    """An empty request loads; the one model of the server stays; another name is not found."""
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="stays loaded"):
        client.generate(MODEL, keep_alive=0)
    with pytest.raises(ollama.ResponseError, match="model 'other' not found") as error:
        client.chat("other", [{"role": "user", "content": "hi"}])
    assert error.value.status_code == 404
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == (MODEL, 4096)


def test_tools_have_object_arguments(make_front: Callable[..., Any]) -> None:
    """A call in the model's text becomes an object; what the client sends back has ids on both sides again."""
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
        "{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<assistant>"
    )

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    with make_front(template=template) as front:
        client = ollama.Client(host=front.url)
        messages: list[Any] = [{"role": "user", "content": script(pieces=[text[:20], text[20:]])}]
        answer = client.chat(MODEL, messages, tools=[add])
        (call,) = answer.message.tool_calls or []
        assert call.function.name == "add"
        assert call.function.arguments == {"a": 1, "b": [2]}
        assert answer.done_reason == "stop"
        streamed = list(client.chat(MODEL, messages, tools=[add], stream=True))
        assert (
            next(part.message.tool_calls for part in streamed if part.message.tool_calls)[0].function == call.function
        )
        messages += [answer.message, {"role": "tool", "tool_name": "add", "content": "3"}, messages[0]]
        assert client.chat(MODEL, messages, tools=[add]).message.tool_calls


def test_thinking_is_beside_the_content(make_front: Callable[..., Any]) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    with make_front(template=template) as front:
        client = ollama.Client(host=front.url)
        messages = [{"role": "user", "content": script(pieces=["<think>", "hm", "</think>", "yes"])}]
        answer = client.chat(MODEL, messages, think=True)
        assert (answer.message.thinking, answer.message.content) == ("hm", "yes")
        parts = list(client.chat(MODEL, messages, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == "hm"
        assert "".join(part.message.content or "" for part in parts) == "yes"
        generated = client.generate(MODEL, messages[0]["content"])
        assert (generated.thinking, generated.response) == ("hm", "yes")


def test_think_wants_a_model_that_thinks(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(MODEL, [{"role": "user", "content": "x"}], think=True)


def test_errors_are_strings(server: Front) -> None:
    """Before the first line with a status, afterwards as a last line."""
    for path, body in (
        ("/api/chat", {}),
        ("/api/chat", {"model": MODEL, "messages": 3}),
        ("/api/show", {"model": "a//"}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, (path, body)
        assert isinstance(answer.json()["error"], str)
    assert server.post("/api/embed", {"model": MODEL, "input": [5]}).status_code == 400
    failing = script(pieces=["a"], fail=[500, "server_error", "broken"])
    lines = server.post("/api/generate", {"model": MODEL, "prompt": failing}).text.splitlines()
    assert json.loads(lines[-1])["error"] == "broken"


# --------------------------------------------------------------------------------------------------- the store


def test_life_of_a_model(pulling: Front, registry: Running) -> None:
    """pull, list, show, copy, create, delete with the client; unmodified, streaming and not."""
    client, name = ollama.Client(host=pulling.url), f"{registry.host}/{GB}"
    statuses = [part.status for part in client.pull(name, stream=True, insecure=True)]
    assert statuses[0] == "pulling manifest"
    assert statuses[-1] == "success"
    assert client.pull(name, insecure=True).status == "success"
    (pulled,) = [model for model in client.list().models if model.model == name]
    assert pulled.size > 2_000_000
    shown = client.show(name)
    assert shown.modelinfo["general.architecture"] == "llama"
    assert pulling.post("/api/show", {"model": name}).json()["system"] == "Be kind."
    client.copy(name, "twin")
    client.create("kinder", from_="twin", system="Be kinder.", parameters={"temperature": 0})
    assert pulling.post("/api/show", {"model": "kinder"}).json()["system"] == "Be kinder."
    client.create("teller", from_="stories", system="Tell.")
    for each in (name, "twin", "kinder", "teller"):
        assert client.delete(each).status == "success"
    with pytest.raises(ollama.ResponseError) as error:
        client.delete("kinder")
    assert error.value.status_code == 404
    assert not {name, "twin:latest", "kinder:latest"} & {model.model for model in client.list().models}


def test_a_fixed_model_of_the_store(tmp_path: Path, make_front: Callable[..., Any]) -> None:
    """It is shown with what came with it, and listed once."""
    from ftgguf.pull import commands
    from ftgguf.pull.store import Store, stored_name

    (tmp_path / "Modelfile").write_text("FROM stories\nSYSTEM Be kind.\n")
    assert commands.create(["kind", "-f", str(tmp_path / "Modelfile"), "--store", str(tmp_path)]) == 0
    store = Store(tmp_path)
    entry = store.get(stored_name("kind"))
    assert entry is not None
    fields = {"store": str(tmp_path), "aliases": ("kind:latest",), "path": str(store.model_path(entry))}
    with make_front(model=fields) as front:
        assert front.post("/api/show", {"model": "Kind"}).json()["system"] == "Be kind."
        names = [model["name"] for model in front.http.get("/api/tags").json()["models"]]
        assert names.count("kind:latest") == 1


def test_blobs(pulling: Front, tmp_path: Path) -> None:
    """A GGUF sent as a blob becomes a model; wrong bytes and odd digests do not."""
    client, path = ollama.Client(host=pulling.url), tmp_path / "sent.gguf"
    path.write_bytes(resolve_stories().read_bytes())
    digest = client.create_blob(path)
    assert pulling.http.head(f"/api/blobs/{digest}").status_code == 200
    client.create("sent", files={"sent.gguf": digest})
    assert client.show("sent").modelinfo["general.architecture"] == "llama"
    other = "sha256:" + "0" * 64
    assert pulling.http.post(f"/api/blobs/{other}", content=b"else").status_code == 400
    assert pulling.http.head(f"/api/blobs/{other}").status_code == 404
    assert not list((tmp_path / "store" / "partial").iterdir())
    for bad in ("sha256:..%2f..%2fetc", "sha256:" + "0" * 63, "md5:" + "0" * 64):
        assert pulling.http.post(f"/api/blobs/{bad}", content=b"x").status_code >= 400


def test_what_a_pull_may_not_do(pulling: Front, registry: Running, tmp_path: Path) -> None:
    """Hosts off the list, addresses, paths: refused before anything is asked of the network."""
    before = len(registry.source.seen)
    for name, status in (
        (f"{registry.other}/{GB}", 403),
        ("qwen3:30b", 403),
        ("hf.co/user/repo", 403),
        (f"http://{registry.host}/x.gguf", 400),
        ("/etc/passwd", 400),
        ("../up", 400),
        ("stories", 400),
    ):
        answer = pulling.post("/api/pull", {"model": name})
        assert answer.status_code == status, (name, answer.text)
        assert isinstance(answer.json()["error"], str)
    assert len(registry.source.seen) == before
    for source in (str(tmp_path), "/etc/passwd", "./x.gguf", "sha256:../x"):
        assert pulling.post("/api/create", {"model": "m", "from": source}).status_code == 400
    # a valid name that is a path, too: the file is not looked at
    named = pulling.post("/api/create", {"model": "m", "from": "etc/passwd", "stream": False})
    assert (named.status_code, "not allowed" in named.json()["error"]) == (403, True)
    assert pulling.post("/api/show", {"model": "/etc/passwd"}).status_code in (400, 404)
    late = pulling.post("/api/pull", {"model": f"{registry.host}/library/none", "insecure": True})
    assert "error" in json.loads(late.text.splitlines()[-1])


@pytest.mark.parametrize(
    ("fields", "headers", "allowed"),
    [
        ({}, {}, True),
        ({"allow_pull": "off"}, {}, False),
        ({}, {"host": "evil.example"}, False),
        ({}, {"origin": "https://evil.example"}, False),
        ({"allow_pull": "on"}, {"origin": "https://evil.example"}, False),
        ({}, {"origin": "http://localhost:3000"}, True),
        ({}, {"x-forwarded-for": "203.0.113.9"}, False),
        ({"allow_pull": "on"}, {"x-forwarded-for": "203.0.113.9"}, True),
    ],
)
def test_who_may_delete(
    make_front: Callable[..., Any], tmp_path: Path, fields: dict[str, Any], headers: dict[str, str], allowed: bool
) -> None:
    """DELETE answers 404 (no such model) where it is allowed at all."""
    with make_front(model={"store": str(tmp_path), **fields}) as front:
        answer = front.http.request("DELETE", "/api/delete", json={"model": "none"}, headers=headers)
        assert answer.status_code == (404 if allowed else 403), answer.text


def test_with_an_api_key(make_front: Callable[..., Any], tmp_path: Path) -> None:
    """The key guards every route of Ollama's API; with one, changes need --allow-pull on."""
    for setting, status in (("auto", 403), ("on", 404)):
        model = {"store": str(tmp_path), "allow_pull": setting}
        with make_front(http={"api_keys": ("k",)}, model=model) as front:
            assert front.http.get("/api/tags").status_code == 401
            assert front.http.get("/api/tags").json() == {"error": "Invalid API Key"}
            keyed = httpx.Client(base_url=front.url, headers={"authorization": "Bearer k"})
            assert keyed.get("/api/tags").status_code == 200
            assert keyed.request("DELETE", "/api/delete", json={"model": "none"}).status_code == status


def test_guard_words() -> None:
    """Loopback in all its spellings; names that only a local network has (RFC 6761, 6762)."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "")))
    assert not any(
        map(is_loopback, ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "localhost.evil.example", "0.0.0.0"))
    )
    assert all(map(local_name, ("localhost:8080", "127.0.0.1", "[::1]:8080", "box.local", "a.localhost", "")))
    assert not any(map(local_name, ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80")))
    assert all(map(local_origin, ("app://x", "http://localhost:3000", "https://127.0.0.1", "file://")))
    assert not any(map(local_origin, ("https://evil.example", "null", "http://localhost.evil.example", "")))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), (0, 0.0), ("5m", 300.0), ("1h30m", 5400.0), (-1, -1.0), ("-1", -1.0), ("-1m", -60.0),
     ("300", 300.0), ("1.5s", 1.5), ("100ms", 0.1)],
)  # fmt: skip
def test_keep_alive(value: Any, seconds: float | None) -> None:
    """Go's duration syntax, and bare seconds."""
    assert keep_alive_seconds(value) == seconds


def test_names_that_are_one() -> None:
    assert plain_name("Qwen3") == plain_name("library/qwen3:latest") == plain_name("registry.ollama.ai/library/qwen3")
    assert plain_name("host:5000/ns/m") == "host:5000/ns/m:latest"


JUNK: tuple[Any, ...] = (None, True, 0, -1, 1e300, "", "x", [], [1], [None], {}, {"a": {}}, [{}], [{"role": 1}])


@pytest.mark.parametrize("path", ["chat", "generate", "show", "pull", "copy", "create", "embed"])
def test_odd_bodies_are_client_errors(server: Front, path: str) -> None:
    """Any JSON in any field ends in an answer or a 4xx with a text, never in a crash."""
    keys = "messages prompt options tools format think keep_alive stream context system from files source destination"
    keys += " parameters license verbose logprobs suffix"
    bodies = [
        {"model": MODEL, "stream": False, "options": {"num_predict": 1}, key: junk}
        for key in keys.split()
        for junk in JUNK
    ]
    for body in [*JUNK, *bodies]:
        answer = server.post(f"/api/{path}", body)
        assert answer.status_code in (200, 400, 403, 404), (body, answer.text)
        if answer.status_code != 200:
            assert isinstance(answer.json()["error"], str), body
