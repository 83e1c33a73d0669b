"""`ftgguf serve` without a model, as a process: names load models, several at once, one engine process each.

Routes and shapes are llama-server's router mode (its server-models.cpp, as the reference notes it); the models are
stories and a second one of another architecture.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import psutil
import pytest

from compat import synth
from compat.registry import FakeSource, running
from ftgguf.flags import FlagError, parse_server
from ftgguf.pull.demo import resolve_stories
from ftgguf.server.models_catalog import Catalog, models_in

ROOT = Path(__file__).parents[2]
CODE = "import sys; from ftgguf.cli import main; sys.exit(main(sys.argv[1:]))"
SMALL = ("-c", "256", "-np", "1", "-t", "1", "--no-warmup")


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def engines(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # one that has just ended
                if "ftgguf.engine" in child.cmdline():
                    found.append(child)
        return found

    def status(self) -> dict[str, str]:
        return {each["id"]: each["status"]["value"] for each in self.http.get("/models").json()["data"]}

    def complete(self, name: str, **fields: Any) -> httpx.Response:
        body = {"model": name, "prompt": "Once upon", "n_predict": 4, "temperature": 0, **fields}
        return self.http.post("/completion", json=body)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@contextmanager
def router(home: Path, *flags: str) -> Iterator[Server]:
    command = [sys.executable, "-c", CODE, "serve", "--port", "0", *SMALL, *flags]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "OLLAMA_", "LLAMA_", "XDG_"))}
    env["HOME"] = str(home)
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )  # fmt: skip
    assert process.stdout is not None
    try:
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("Talk to it"):
                break
        found = re.search(r"address +(\S+)", text)
        assert found, text
        yield Server(process, found.group(1))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder: a qwen3moe file, a folder with a model, and files that are none."""
    folder = tmp_path_factory.mktemp("models")
    synth.make("qwen3moe", folder / "second.gguf")
    (folder / "nested").mkdir()
    (folder / "nested" / "model.gguf").write_bytes(resolve_stories().read_bytes())
    (folder / "nested" / "mmproj-model.gguf").write_bytes(b"GGUF")
    (folder / "broken.gguf").write_bytes(b"GGUF but not for long")
    (folder / "notes.txt").write_text("no model")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with router(tmp_path_factory.mktemp("home"), "--models-dir", str(folder), "--models-max", "2") as server:
        yield server


def test_models_come_by_name_and_go_for_others(server: Server) -> None:
    """Two fit; the least recently used one goes for a third; each has its own engine process."""
    assert server.status() == dict.fromkeys(("stories", "second", "nested", "broken"), "unloaded")
    first = server.complete("stories").json()
    assert first["model"] == "stories"
    assert server.complete("second").json()["model"] == "second"
    assert len(server.engines()) == 2
    chat = {"model": "nested", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=chat).json()["model"] == "nested"
    assert server.status() == {"stories": "unloaded", "second": "loaded", "nested": "loaded", "broken": "unloaded"}
    assert len(server.engines()) == 2
    assert server.complete("stories").json()["content"] == first["content"]
    assert server.http.get("/props", params={"model": "stories"}).json()["model_alias"] == "stories"
    entry = next(each for each in server.http.get("/v1/models").json()["data"] if each["id"] == "stories")
    assert entry["meta"]["n_vocab"] == 512
    assert entry["source"] == "cache"
    assert entry["can_remove"] is False


def test_what_the_router_answers_itself(server: Server) -> None:
    props = server.http.get("/props").json()
    assert (props["role"], props["max_instances"], props["model_path"]) == ("router", 2, "none")
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.head("/").status_code == 200
    assert server.http.get("/nothing").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/completion", {"prompt": "a"}, 400, "model name is missing from the request"),
        ("POST", "/completion", {"prompt": "a", "model": 3}, 400, "model name is missing from the request"),
        ("POST", "/completion", {"prompt": "a", "model": "none"}, 400, "model 'none' not found"),
        ("POST", "/v1/messages", {"messages": [], "model": "none"}, 400, "model 'none' not found"),
        ("POST", "/v1/chat/completions", [], 400, "model name is missing"),
        ("POST", "/completion", {"prompt": "a", "model": "/etc/passwd"}, 400, "not found"),
        ("POST", "/completion", {"prompt": "a", "model": "../../stories"}, 400, "not found"),
        ("POST", "/completion", {"prompt": "a", "model": "hf.co/user/repo:Q4_K_M"}, 400, "not found"),
        ("POST", "/completion", {"prompt": "a", "model": "broken"}, 500, "failed to load"),
        ("POST", "/models/load", {"model": "none"}, 404, "model is not found"),
        ("POST", "/models/unload", {"model": "broken"}, 400, "model is not running"),
        ("DELETE", "/models?model=second", None, 500, "not removable"),
        ("POST", "/models", {"model": "other.example/ns/m:latest"}, 403, "not allowed"),
        ("POST", "/models", {"model": ""}, 400, "non-empty"),
        ("GET", "/slots", None, 400, "model name is missing"),
    ],
)  # fmt: skip
def test_errors(server: Server, method: str, path: str, body: Any, status: int, words: str) -> None:
    """llama-server's words and codes; a name never opens a path or asks the network."""
    answer = server.http.request(method, path, json=body) if body is not None else server.http.request(method, path)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)  # Anthropic's envelope


def test_load_and_unload_with_events(server: Server) -> None:
    """/models/load returns at once, /models/sse tells the rest; the autoload switch of a request."""
    server.http.post("/models/unload", json={"model": "second"})
    wait_for(lambda: server.status()["second"] == "unloaded")
    refused = server.http.post("/completion", params={"autoload": "false"}, json={"model": "second", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "model is not loaded")
    seen: list[Any] = []
    opened = threading.Event()

    def read() -> None:
        with httpx.stream("GET", f"{server.url}/models/sse", timeout=30) as response:
            for line in response.iter_lines():
                opened.set()
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                    if seen[-1].get("data", {}).get("status") == "unloaded" and seen[-1]["model"] == "second":
                        return

    reader = threading.Thread(target=read)
    reader.start()
    assert opened.wait(10)
    assert server.http.post("/models/load", json={"model": "second"}).json() == {"success": True}
    (loading,) = server.http.get("/health").json()["loading"]
    assert (loading["model"], 0 <= loading["progress"] <= 1) == ("second", True)
    assert server.http.post("/models/load", json={"model": "second"}).status_code == 400
    wait_for(lambda: server.status()["second"] == "loaded")
    assert server.http.post("/models/unload", json={"model": "second"}).json() == {"success": True}
    reader.join(20)
    told = [event["data"]["status"] for event in seen if event["model"] == "second"]
    assert told[0] == "loading"
    assert told[-2:] == ["loaded", "unloaded"]


def test_ollama_client(server: Server) -> None:
    """Lists everything, loads by any spelling, keeps alive as asked, unloads with 0."""
    client = ollama.Client(host=server.url)
    listed = {model.model: model for model in client.list().models}
    assert {"stories", "second", "nested"} <= set(listed)
    assert listed["second"].details.family == "qwen3moe"
    assert listed["stories"].details.quantization_level == "Q8_0"
    answer = client.generate("Stories:latest", "Once", options={"num_predict": 3, "temperature": 0}, keep_alive="1h")
    assert answer.eval_count == 3
    (loaded,) = [model for model in client.ps().models if model.model == "stories"]
    assert loaded.expires_at is not None
    assert 3500 < loaded.expires_at.timestamp() - time.time() < 3601
    assert client.show("nested").modelinfo["general.architecture"] == "llama"
    assert client.generate("stories", keep_alive=0).done_reason == "unload"
    wait_for(lambda: server.status()["stories"] == "unloaded")
    began = time.monotonic_ns()
    answer = client.chat("stories", [{"role": "user", "content": "hi"}], options={"num_predict": 1})
    assert 0 < answer.load_duration <= answer.total_duration < time.monotonic_ns() - began + 10**9
    client.generate("stories", "x", options={"num_predict": 1}, keep_alive=0)
    wait_for(lambda: server.status()["stories"] == "unloaded")
    with pytest.raises(ollama.ResponseError, match="model 'none' not found") as error:
        client.chat("none")
    assert error.value.status_code == 404


def test_an_engine_that_dies_does_not_take_the_others(server: Server) -> None:
    server.complete("stories")
    server.complete("nested")
    victims = server.engines()
    assert len(victims) == 2
    victims[0].kill()
    wait_for(lambda: victims[0] not in server.engines())
    assert server.http.get("/health").status_code == 200
    for name in ("stories", "nested"):  # the first request may still meet the end of the old process
        wait_for(lambda name=name: server.complete(name).status_code == 200)
    assert victims[1] in server.engines()


def test_a_file_of_the_models_folder_is_not_deleted(server: Server, folder: Path) -> None:
    """Only what was pulled can be; the answer says why."""
    answer = server.http.request("DELETE", "/api/delete", json={"model": "second"})
    assert answer.status_code == 400
    assert "remove the file" in answer.json()["error"]
    assert (folder / "second.gguf").exists()


def test_ps_and_stop_commands(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    from ftgguf.terminal.remote import ps, stop

    server.complete("nested")
    assert ps(["--host", server.url]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"]
    (row,) = [line for line in rows if line.startswith("nested ")]
    assert "100% CPU" in row
    assert "minutes from now" in row
    assert stop(["nested", "--host", server.url]) == 0
    wait_for(lambda: server.status()["nested"] == "unloaded")
    assert stop(["none", "--host", server.url]) == 1
    assert capsys.readouterr().err == "Error: model 'none' not found\n"


def test_pulled_models_presets_and_keys(folder: Path, tmp_path: Path) -> None:
    """A model that is pulled while the server runs is served at once, with its system prompt; presets have flags of
    their own; a key guards all of it."""
    preset = tmp_path / "models.ini"
    preset.write_text(
        f"[*]\nctx-size = 128\n[tuned]\nmodel = {folder}/second.gguf\nalias = quick, fast\nload-on-startup = true\n"
        "temp = 0.25\n"
    )
    with running(FakeSource()) as registry:
        registry.source.add_model(
            "library/tiny:latest", [("model", resolve_stories().read_bytes()), ("system", b"Hm.")]
        )
        name = f"{registry.host}/library/tiny:latest"
        flags = ("--models-preset", str(preset), "--pull-hosts", registry.host, "--keep-alive", "1")
        with router(tmp_path, *flags, "--api-key", "k", "--allow-pull", "on") as server:
            assert server.http.get("/models").status_code == 401
            server.http.headers["authorization"] = "Bearer k"
            wait_for(lambda: server.status()["tuned"] == "loaded")
            props = server.http.get("/props", params={"model": "fast"}).json()["default_generation_settings"]
            assert props["params"]["temperature"] == 0.25
            client = ollama.Client(host=server.url, headers={"authorization": "Bearer k"})
            client.pull(name, insecure=True)
            messages = [{"role": "user", "content": "hi"}]
            options = {"num_predict": 1, "temperature": 0}
            with_system = client.chat(name, messages, options=options)
            messages.insert(0, {"role": "system", "content": "Hm."})
            assert client.chat(name, messages, options=options).prompt_eval_count == with_system.prompt_eval_count
            client.delete(name)
            assert name not in server.status()
            wait_for(lambda: server.status()["tuned"] == "unloaded")


def test_folder_layout(folder: Path) -> None:
    """Files and one-model folders; projectors, later shards and other files are none (llama-server's rules)."""
    assert [name for name, _ in models_in(folder)] == ["broken", "nested", "second"]


def test_arguments_of_a_model(folder: Path, tmp_path: Path) -> None:
    """The section's, then the command line's, which win; unknown keys are named."""
    preset = tmp_path / "p.ini"
    preset.write_text("[*]\ntop-k = 5\ntemp = 0.1\n[second]\ntemp = 0.2\nstop-timeout = 3\n")
    argv = ["--models-dir", str(folder), "--models-preset", str(preset), "--top-p", "0.5", "--store", str(tmp_path)]
    catalog = Catalog(parse_server(argv, {}, ()), argv, {"HOME": str(tmp_path)})
    catalog.reload()
    found = catalog.find("SECOND")
    assert found is not None
    config = catalog.config_of(found)
    assert (config.sampling.top_k, config.sampling.temperature, config.sampling.top_p) == (5, 0.2, 0.5)
    assert config.model.path == str(folder / "second.gguf")
    assert config.model.aliases == ("second",)
    assert found.kind == "preset"
    assert found.stop_timeout == 3
    nested = catalog.find("nested")
    assert nested is not None
    assert nested.stop_timeout == 10
    preset.write_text("[*]\nstop-timeout = 7\n[other]\nmodel = x.gguf\n")
    catalog.reload()
    assert {source.stop_timeout for source in catalog.sources()} == {7}
    for text, words in (("no-such-flag = 1", "no-such-flag"), ("stop-timeout = soon", "give seconds")):
        preset.write_text(f"[second]\n{text}\n")
        with pytest.raises(FlagError, match=words):
            catalog.reload()


def test_stop_timeout_ends_a_request_that_runs_on(folder: Path, tmp_path: Path) -> None:
    """/models/unload of a busy model: the stream ends in an error event, the engine's process is gone."""
    preset = tmp_path / "models.ini"
    preset.write_text(f"[slow]\nmodel = {folder}/second.gguf\nctx-size = 4096\nstop-timeout = 0.5\n")
    body = {"model": "slow", "prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": True}
    with router(tmp_path, "--models-preset", str(preset), "--context-shift") as server:
        lines = []
        with server.http.stream("POST", "/completion", json=body) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 5:
                    assert server.http.post("/models/unload", json={"model": "slow"}).json() == {"success": True}
        assert any("the model was unloaded" in line for line in lines[-4:])
        wait_for(lambda: server.status()["slow"] == "unloaded" and not server.engines())
