"""A client that many programs use, unmodified and streaming, through the proxy, between our server and llama-server."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ftgguf.bench.report import Report, from_json
from ftgguf.bench.servers import Server, free_port, ours_command, xllamacpp_command

openai = pytest.importorskip("openai")
pytest.importorskip("xllamacpp")
MODEL = Path(__file__).parents[2] / "ftgguf" / "data" / "stories260K-8x-top2-Q8_0.gguf"
FLAGS = ["-m", str(MODEL), "-t", "1", "-c", "2048", "-np", "2", "-kvu"]
SECRET = "sk-thisisaclientssecretkey"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    ours = Server(ours_command([*FLAGS, "--api-key", SECRET]), folder / "a.txt", 60)
    theirs = Server(xllamacpp_command(FLAGS), folder / "b.txt", 60)
    with ours, theirs:
        yield ours.url, theirs.url


@contextlib.contextmanager
def proxied(a: str, b: str, folder: Path, *words: str) -> Iterator[str]:
    """The command in a process of its own; ended by Ctrl-C."""
    port = free_port()
    argv = ["--a", a, "--a-key", SECRET, "--b", b, "--port", str(port), *words]
    argv += ["--report", str(folder / "r.json"), "--html", str(folder / "r.html")]
    line = [sys.executable, "-m", "ftgguf", "proxy", *argv]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/health").status_code == 200:
                    break
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
        assert "Traceback" not in errors, errors
        assert "over 120 s" in out
        assert SECRET not in out
    finally:
        process.kill()
        process.wait()


def talk(url: str, name: str, turns: int) -> list[str]:
    """A conversation; the answers."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="whatever the client has")
    messages = [{"role": "user", "content": f"Tell me a story about {name}"}]
    answers = []
    for _ in range(turns):
        stream = client.chat.completions.create(
            model="stories", messages=messages, stream=True, max_tokens=12, temperature=0,
            stream_options={"include_usage": True},
        )  # fmt: skip
        answers.append("".join(e.choices[0].delta.content or "" for e in stream if e.choices))
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": "and then?"}]
    return answers


def finished(folder: Path, turns: int) -> None:
    """Wait until so many answers are in the report."""
    end = time.monotonic() + 30
    while not (folder / "r.json").exists() or len(from_json((folder / "r.json").read_bytes()).turns) < turns:
        assert time.monotonic() < end
        time.sleep(0.1)


def report_of(folder: Path) -> Report:
    text = (folder / "r.json").read_text() + (folder / "r.html").read_text()
    assert SECRET not in text
    assert "<svg" in text
    return from_json((folder / "r.json").read_bytes())


@pytest.mark.slow
def test_mirrored(servers: tuple[str, str], tmp_path: Path) -> None:
    """The client gets what A alone would have said; B answers the same turns after it."""
    with proxied(*servers, tmp_path) as url:
        answers = talk(url, "Tom", 3)
        direct = openai.OpenAI(base_url=servers[0] + "/v1", api_key=SECRET)
        alone = direct.chat.completions.create(
            model="stories", messages=[{"role": "user", "content": "Tell me a story about Tom"}], max_tokens=12,
            temperature=0,
        )  # fmt: skip
        assert answers[0] == alone.choices[0].message.content
        finished(tmp_path, 6)
    report = report_of(tmp_path)
    assert {(t.contestant[0], t.turn, t.n_gen) for t in report.turns} >= {("A", i, 12) for i in range(3)}
    assert not any(t.error for t in report.turns)
    assert report.troubles == []
    appended = [t for t in report.turns if t.kind == "append" and t.contestant[0] == "A"]
    assert all(t.cached_n > 0 for t in appended)


@pytest.mark.slow
def test_split(servers: tuple[str, str], tmp_path: Path) -> None:
    """Two conversations, one for each server, with all their turns."""
    with proxied(*servers, tmp_path, "--mode", "split") as url:
        talk(url, "Tom", 2)
        talk(url, "Ann", 2)
    report = report_of(tmp_path)
    assert [(t.contestant[0], t.session[-1], t.turn) for t in report.turns] == [
        ("A", "0", 0),
        ("A", "0", 1),
        ("B", "1", 0),
        ("B", "1", 1),
    ]
