"""What surrounds the routes: keys, CORS, loading, disconnects, pings, a dying engine, sockets, imports."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from fake_front import Front, front, script

from ftgguf.flags.config import HttpConfig
from ftgguf.server.auth import Gate
from ftgguf.server.sockets import BindError, bind_all


def wait_until(condition: object, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def test_keys_and_public_paths() -> None:
    """Bug log R58 and llama-server's table: health and preflight are open, all else needs a key."""
    with front(http={"api_keys": ("one", "two")}) as running:
        http = running.http
        for path in ("/health", "/v1/health"):
            assert http.get(path).status_code == 200
            assert http.head(path).status_code == 200
        for path in ("/v1/models", "/models", "/props", "/metrics", "/slots", "/nope"):
            response = http.get(path)
            assert response.status_code == 401
            assert response.json() == {
                "error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
            }
        good = [{"Authorization": "Bearer one"}, {"Authorization": "two"}, {"X-Api-Key": "two"}, {"x-api-key": "one"}]
        assert all(http.get("/v1/models", headers=headers).status_code == 200 for headers in good)
        bad = [{"Authorization": "Bearer no"}, {"Authorization": "bearer one"}, {"X-Api-Key": ""},
               {"Authorization": "Bearer no", "X-Api-Key": "one"}]  # fmt: skip
        assert all(http.get("/v1/models", headers=headers).status_code == 401 for headers in bad)
        assert http.options("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("origins", "credentials", "given", "sent"),
    [
        ("*", True, "http://a", "http://a"),
        ("*", False, "http://a", "*"),
        ("localhost", True, "http://localhost:3000", "http://localhost:3000"),
        ("localhost", True, "http://a", None),
        ("http://a", True, "http://b", "http://a"),
        ("http://a, http://b", True, "http://b", "http://b"),
        ("http://a,http://b", True, "http://c", None),
    ],
)
def test_cors_origins(origins: str, credentials: bool, given: str, sent: str | None) -> None:
    """Recorded from a real server, but for lists: it sends them whole, which no browser accepts."""
    gate = Gate(lambda *_: None, HttpConfig(cors_origins=origins, cors_credentials=credentials), None)  # type: ignore
    expected = [] if sent is None else [(b"access-control-allow-origin", sent.encode())]
    assert gate._origin(given) == expected


def test_cors(server: Front) -> None:
    """Recorded from a real server: the origin is echoed, a preflight is an empty text/html 200."""
    response = server.http.options("/completion", headers={"Origin": "https://a.example"})
    assert response.status_code == 200
    assert response.content == b""
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert response.headers["access-control-allow-credentials"] == "true"
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert response.headers["access-control-allow-headers"] == "*"
    assert response.headers["content-type"] == "text/html"
    assert server.http.get("/health").headers["access-control-allow-origin"] == ""
    with front(http={"cors_origins": "localhost"}) as running:
        near = running.http.get("/health", headers={"Origin": "http://localhost:3000"})
        assert near.headers["access-control-allow-origin"] == "http://localhost:3000"
        far = running.http.get("/health", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in far.headers


def test_api_prefix() -> None:
    with front(http={"api_prefix": "/api"}) as running:
        assert running.http.get("/api/health").status_code == 200
        assert running.http.get("/health").status_code == 404


def test_the_page(tmp_path: Path) -> None:
    """`/` is public also with a key; `--path` serves a folder in its place; `--no-ui` has neither."""
    with front(http={"api_keys": ("k",)}) as running:
        page = running.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "v1/chat/completions" in page.text
    with front(http={"ui": False}) as running:
        assert running.http.get("/").status_code == 404
    (tmp_path / "index.html").write_text("mine")
    with front(http={"static_path": str(tmp_path)}) as running:
        assert running.http.get("/").text == "mine"
        assert running.http.get("/none").json()["error"]["code"] == 404
        assert running.http.get("/health").status_code == 200


def test_503_while_loading() -> None:
    with front(start={"load": 1.0, "no_wait": True}) as running:
        for path in ("/health", "/v1/models"):
            response = running.http.get(path)
            assert response.status_code == 503
            assert response.json() == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
        assert wait_until(lambda: running.http.get("/health").status_code == 200)


def test_an_engine_that_cannot_start_says_why() -> None:
    with front(start={"fatal": "the file is not a model", "no_wait": True}) as running:
        assert wait_until(lambda: "not a model" in running.http.get("/health").text)
        assert running.http.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_dying_engine_fails_its_requests_and_is_restarted(stream: bool) -> None:
    with front() as running:
        body = {"prompt": script(die=2), "stream": stream}
        response = running.post("/completion", body)
        if stream:
            last = response.text.strip().splitlines()[-1].removeprefix("data: ")
            error = json.loads(last)["error"]
        else:
            assert response.status_code == 500
            error = response.json()["error"]
        assert (error["code"], error["type"]) == (500, "server_error")
        assert wait_until(lambda: running.http.get("/health").status_code == 200)
        assert running.post("/completion", {"prompt": "x"}).json()["content"] == "Hello world!"
        assert running.state.engine.restarts == 1


def test_a_client_that_leaves_cancels_its_sequence() -> None:
    """Bug log R54: while decoding, while prefilling, and while it waits for a slot; in both modes."""
    with front() as running:
        cases = [
            {"prompt": script(delay=0.05, repeat=200), "stream": True},
            {"prompt": script(delay=0.05, repeat=200)},
            {"prompt": script(prefill=30), "stream": True},
            {"prompt": script(hang=True)},
            {"prompt": script(hang=True), "stream": True},
        ]
        port = int(running.url.rsplit(":", 1)[1])
        for count, body in enumerate(cases, 1):
            data = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
                connection.sendall(head.encode() + data)
                time.sleep(0.3)
            assert wait_until(lambda n=count: len(running.control("cancelled")) == n), body


def test_headers_before_the_first_token_and_pings_in_silence() -> None:
    """Bug log R08: a slow prompt must not look like a dead server."""
    with front(http={"sse_ping_interval": 1}) as running:
        body = {"messages": [{"role": "user", "content": script(prefill=2.5)}], "stream": True}
        started = time.monotonic()
        with running.http.stream("POST", "/v1/chat/completions", json=body) as response:
            seconds_to_headers = time.monotonic() - started
            text = response.read().decode()
        assert seconds_to_headers < 2.0
        assert text.startswith(":\n\n")
        assert text.count(":\n\n") == 2
        assert text.endswith("data: [DONE]\n\n")


def test_many_streams_at_once(server: Front) -> None:
    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            async def one() -> str:
                body = {"prompt": script(repeat=20), "stream": True}
                async with http.stream("POST", "/completion", json=body) as response:
                    lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
                return "".join(json.loads(line[6:])["content"] for line in lines)

            return list(await asyncio.gather(*(one() for _ in range(32))))

    assert asyncio.run(run()) == ["Hello world!" * 20] * 32


def test_a_large_body_does_not_hold_up_the_others(server: Front) -> None:
    """A 1 MB chat body is parsed, rendered and tokenised off the event loop."""
    big = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(server.post("/v1/chat/completions", big).status_code))
    thread.start()
    assert server.http.get("/health").status_code == 200
    thread.join(30)
    assert results == [400]  # it does not fit the context of 4096


def test_every_completion_ends_in_one_error_object(server: Front) -> None:
    for body in (b"null", b'"x"', b"\xff\xfe", b'{"prompt": {"prompt_string": 5}}', b'{"prompt": "x", "stop": {}}'):
        response = server.http.post("/v1/chat/completions", content=body)
        assert response.status_code in (400, 500)
        assert set(response.json()["error"]) >= {"code", "message", "type"}


def test_sockets(tmp_path: Path) -> None:
    """Bug log R59: brackets in the URL, port 0, a port in use, several hosts, UNIX sockets."""
    (one,) = bind_all(HttpConfig(hosts=("127.0.0.1",), port=0))
    port = one.socket.getsockname()[1]
    assert one.url == f"http://127.0.0.1:{port}"
    with pytest.raises(BindError, match=r"couldn't bind HTTP server socket, hostname: 127\.0\.0\.1, port"):
        bind_all(HttpConfig(hosts=("127.0.0.1",), port=port))
    one.socket.close()
    with pytest.raises(BindError, match="--port 0 is not supported with multiple"):
        bind_all(HttpConfig(hosts=("127.0.0.1", "127.0.0.2"), port=0))
    (local,) = bind_all(HttpConfig(hosts=("localhost",), port=0))
    local.socket.close()
    path = str(tmp_path / "s.sock")
    (unix,) = bind_all(HttpConfig(hosts=(path,)))
    assert unix.url == f"unix://{path}"
    with pytest.raises(BindError):
        bind_all(HttpConfig(hosts=(path,)))
    unix.socket.close()
    (again,) = bind_all(HttpConfig(hosts=(path,)))  # the file of a server that is gone is replaced
    again.socket.close()
    if socket.has_ipv6:
        try:
            (six,) = bind_all(HttpConfig(hosts=("::1",), port=0))
        except BindError:
            return
        assert six.url.startswith("http://[::1]:")
        six.socket.close()


def test_the_front_imports_no_torch() -> None:
    code = "import sys, ftgguf.server.process; assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_requests_are_logged_but_not_a_monitors(server: Front, caplog: pytest.LogCaptureFixture) -> None:
    """A line with method, path, client and status, as llama-server's; none for what is asked again and again."""
    with caplog.at_level("INFO", "ftgguf.server"):
        server.http.get("/health")
        server.http.get("/v1/models")
        server.post("/tokenize", {"content": "a"})
        server.post("/nowhere", {})
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request:")]
    assert lines == ["request: POST /tokenize 127.0.0.1 200", "request: POST /nowhere 127.0.0.1 404"]
