"""Flags that change how the whole server runs, on the model in the package: sleep, records, slots on disk, TLS."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from compat.server import ROOT, ServerError, our_server
from ftgguf.pull.demo import resolve_stories

MODEL = resolve_stories()
BASE = ["-c", "512", "-np", "2", "-t", "1"]
ASK: dict[str, Any] = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def metric(text: str, name: str) -> float:
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))


def engines() -> int:
    """How many engine processes run under this one."""
    count = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            count += "ftgguf.engine" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
    return count


def test_sleep_and_wake() -> None:
    """As llama-server's test_sleep: read-only routes do not wake the model, a completion does, counters go on."""
    before = engines()
    with (
        our_server(MODEL, [*BASE, "--metrics", "--sleep-idle-seconds", "1"]) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        first = http.post("/completion", json=ASK).json()
        assert http.get("/props").json()["is_sleeping"] is False
        assert wait_for(lambda: http.get("/props").json()["is_sleeping"])
        assert wait_for(lambda: engines() == before)
        for path in ("/health", "/v1/health", "/models", "/v1/models"):
            assert http.get(path).status_code == 200
        assert metric(http.get("/metrics").text, "llamacpp:tokens_predicted_total") == 8
        assert http.post("/tokenize", json={"content": "Once"}).json()["tokens"]
        time.sleep(0.3)
        assert http.get("/props").json()["is_sleeping"] is True
        assert http.post("/completion", json=ASK).json()["content"] == first["content"]
        assert http.get("/props").json()["is_sleeping"] is False
        assert metric(http.get("/metrics").text, "llamacpp:tokens_predicted_total") == 16
        assert metric(http.get("/metrics").text, "ftgguf_engine_restarts_total") == 0
        assert engines() == before + 1


def test_a_running_request_keeps_the_model_awake(tmp_path: Path) -> None:
    script = {"vocab": str(MODEL), "delay_ms": 15, "scripts": [{"text": " on", "loop": True}]}
    (tmp_path / "slow.json").write_text(json.dumps(script))
    body = {**ASK, "n_predict": 120, "stream": True}
    with our_server(f"scripted:{tmp_path}/slow.json", [*BASE, "--sleep-idle-seconds", "1"]) as url:
        started = time.monotonic()
        text = httpx.post(f"{url}/completion", json=body, timeout=30).text
        assert time.monotonic() - started > 1.5
    assert json.loads(text.strip().rpartition("data: ")[2])["tokens_predicted"] == 120


def test_prompts_and_requests_are_written_down(tmp_path: Path) -> None:
    """`--log-prompts-dir` has each rendered prompt; `--record` a line per request, with the times, secrets masked."""
    record, prompts = tmp_path / "r.jsonl", tmp_path / "deep" / "prompts"
    with our_server(MODEL, [*BASE, "--record", str(record), "--log-prompts-dir", str(prompts)]) as url:
        httpx.post(f"{url}/completion", json={**ASK, "prompt": "Once password=hunter22x"}, timeout=30)
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
        httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30)
        httpx.post(f"{url}/v1/messages", json={**chat, "stream": False}, timeout=30)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["path"] for line in lines] == ["/completion", "/v1/chat/completions", "/v1/messages"]
    assert "hunter22x" not in record.read_text()
    assert lines[1]["body"] == chat
    assert [line["predicted_n"] for line in lines] == [8, 4, 4]
    assert all(0 < line["ttft_ms"] <= line["total_ms"] for line in lines)
    assert all(line["prompt_n"] > line["cached_n"] >= 0 for line in lines)
    texts = [path.read_text() for path in sorted(prompts.iterdir())]
    assert texts[0] == "<s> Once password=hunter22x"
    assert len(texts) == 3


def test_slots_on_disk(tmp_path: Path) -> None:
    """llama-server's test_slot_save: a restored slot really reuses its tokens, in another server too."""
    args = [*BASE, "--slot-save-path", str(tmp_path)]
    ask = {**ASK, "id_slot": 1, "cache_prompt": True}
    with our_server(MODEL, args) as url, httpx.Client(base_url=url, timeout=30) as http:
        first = http.post("/completion", json=ask).json()
        saved = http.post("/slots/1?action=save", json={"filename": "a.bin"}).json()
        assert saved["id_slot"] == 1
        assert saved["filename"] == "a.bin"
        assert saved["n_saved"] == first["tokens_cached"]
        assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
        assert saved["timings"]["save_ms"] > 0
        assert http.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": saved["n_saved"]}
        assert http.post("/completion", json=ask).json()["timings"]["cache_n"] == 0
        for bad in ("../a", "", "a/b", "x:y"):
            assert http.post("/slots/1?action=save", json={"filename": bad}).status_code == 400
        assert http.post("/slots/9?action=erase").status_code == 400
        assert http.post("/slots/1?action=dance").json()["error"]["message"] == "Invalid action"
        assert http.post("/slots/0?action=restore", json={"filename": "nothing.bin"}).status_code == 400
    with our_server(MODEL, args) as url, httpx.Client(base_url=url, timeout=30) as http:
        restored = http.post("/slots/0?action=restore", json={"filename": "a.bin"}).json()
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        again = http.post("/completion", json={**ask, "id_slot": 0}).json()
        assert again["content"] == first["content"]
        assert again["timings"]["cache_n"] == again["tokens_evaluated"] - 1


def test_prefix_and_several_hosts() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = [*BASE, "--api-prefix", "/llm", "--host", "127.0.0.1,127.0.0.2", "--port", str(port)]
    with our_server(MODEL, args):
        for host in ("127.0.0.1", "127.0.0.2"):
            base = f"http://{host}:{port}"
            assert httpx.get(f"{base}/llm/health").json() == {"status": "ok"}
            assert httpx.post(f"{base}/llm/completion", json=ASK, timeout=30).json()["tokens_predicted"] == 8
            assert httpx.get(f"{base}/health").status_code == 404


def test_the_prefixed_health_needs_the_key() -> None:
    """Recorded from a real llama-server: the public paths are compared without the prefix."""
    args = [*BASE, "--api-prefix", "/llm", "--api-key", "secret"]
    with our_server(MODEL, args) as url:
        codes = {path: httpx.get(f"{url}{path}").status_code for path in ("/health", "/llm/health", "/llm/v1/models")}
        assert codes == {"/health": 404, "/llm/health": 401, "/llm/v1/models": 401}
        good = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/llm/health", headers=good).status_code == 200


def test_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("needs the openssl command to make a certificate")
    args = [*BASE, "--ssl-key-file", str(key), "--ssl-cert-file", str(cert)]
    with our_server(MODEL, args) as url:
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=context, timeout=30) as http:
            assert http.post("/completion", json=ASK).json()["tokens_predicted"] == 8
            with http.stream("POST", "/completion", json={**ASK, "stream": True}) as response:
                assert sum(line.startswith("data: ") for line in response.iter_lines()) == 9


def test_without_jinja() -> None:
    """llama-server's words: tools need Jinja, and a template like none of the built-in ones is refused."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with our_server(MODEL, [*BASE, "--no-jinja"]) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "this custom template is not supported, try using --jinja"
    with our_server(MODEL, [*BASE, "--no-jinja", "--chat-template", "chatml"]) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30).status_code == 200
        answer = httpx.post(f"{url}/v1/chat/completions", json={**chat, "tools": [tool]}, timeout=30)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "tools param requires --jinja flag"


def test_what_is_not_there_is_refused_by_name() -> None:
    """Flags of tier D end the start with what to use instead."""
    for flag in (["--control-vector", "x.gguf"], ["-md", "x.gguf"], ["--mmproj", "x.gguf"]):
        with pytest.raises(ServerError, match=flag[0]), our_server(MODEL, [*BASE, *flag]):
            pass


def test_a_body_that_stops_coming_ends_the_request() -> None:
    """Bug log: slow clients. `--timeout` bounds the wait for more of a body; others are served meanwhile."""
    with our_server(MODEL, [*BASE, "--timeout", "1"]) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt"')
            assert httpx.post(f"{url}/completion", json=ASK, timeout=30).status_code == 200
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_priority_and_json_logs() -> None:
    """`--prio -1` is nice 5 for the engine (llama.cpp's table); `--log-jsonl` makes standard output JSON lines."""
    command = [sys.executable, "-m", "ftgguf", "serve", "-m", str(MODEL), *BASE, "--port", "0", "--prio", "-1",
               "--log-jsonl"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            entry = json.loads(line)
            assert {"timestamp", "level", "source", "message"} <= set(entry)
            if entry["message"].startswith("Talk to it"):
                break
        (engine,) = (c for c in psutil.Process(process.pid).children() if "ftgguf.engine" in c.cmdline())
        assert engine.nice() == psutil.Process(process.pid).nice() + 5 or engine.nice() == 5
    finally:
        process.kill()
        process.wait()


def test_prompts_that_left_the_cells_come_back_from_host_memory() -> None:
    """`--cache-ram`: two conversations that do not fit together take turns without being evaluated again."""
    prompts = [[1, *(300 + (start + i) % 150 for i in range(330))] for start in (0, 70)] * 2
    flags = ["-c", "512", "-np", "2", "-kvu", "-t", "1", "--metrics"]
    greedy = {"n_predict": 6, "temperature": 0}

    def turns(*more: str) -> tuple[list[int], list[str], str]:
        with our_server(resolve_stories(), [*flags, *more]) as url, httpx.Client(base_url=url, timeout=60) as http:
            done = [http.post("/completion", json={"prompt": p, **greedy}).json() for p in prompts]
            return [d["timings"]["cache_n"] for d in done], [d["content"] for d in done], http.get("/metrics").text

    cached, texts, metrics = turns()
    assert cached[:2] == [0, 1]  # the first token
    assert min(cached[2:]) >= 320
    assert texts[:2] == texts[2:]
    recalled = next(line for line in metrics.splitlines() if line.startswith("ftgguf_host_recalled_pages_total"))
    assert int(recalled.split()[1]) >= 5
    for off in (("-cram", "0"), ("--no-cache-idle-slots",)):
        cached, again, metrics = turns(*off)
        assert max(cached) < 320
        assert again == texts
        assert "ftgguf_host_recalled" not in metrics


def test_speculation_drafts_and_says_so() -> None:
    """`--spec-type`: counts in `timings` and /metrics under llama-server's names, and in /slots that it is on."""
    flags = ["-c", "2048", "-t", "1", "--metrics", "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
    with our_server(resolve_stories(), flags) as url, httpx.Client(base_url=url, timeout=60) as http:
        request = {"prompt": "the cat and the dog and " * 8, "n_predict": 200, "temperature": 0, "ignore_eos": True}
        answer = http.post("/completion", json=request | {"repeat_penalty": 0.5}).json()
        assert answer["tokens_predicted"] == 200
        assert 0 < answer["timings"]["draft_n_accepted"] <= answer["timings"]["draft_n"]
        assert answer["generation_settings"]["speculative.types"] == "ngram-simple"
        assert all(slot["speculative"] for slot in http.get("/slots").json())
        metrics = http.get("/metrics").text
        assert f"llamacpp:spec_decode_num_draft_tokens_total {answer['timings']['draft_n']}" in metrics
        assert f"llamacpp:spec_decode_num_accepted_tokens_total {answer['timings']['draft_n_accepted']}" in metrics
