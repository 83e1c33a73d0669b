"""`ftgguf ps` and `stop`: which server is asked, and the words of the table (those of Ollama)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ftgguf.terminal.remote import address, processor, ps, remaining


@pytest.mark.parametrize(
    ("host", "port", "env", "url"),
    [
        ("", 0, "", "http://127.0.0.1:8080"),
        ("", 9000, "", "http://127.0.0.1:9000"),
        ("", 0, "box:1234", "http://box:1234"),
        ("other", 0, "box:1234", "http://other:8080"),
        ("http://box", 0, "", "http://box:80"),
        ("https://box/ollama/", 0, "", "https://box:443/ollama"),
        ("0.0.0.0", 0, "", "http://127.0.0.1:8080"),
        ("::1", 0, "", "http://[::1]:8080"),
        ("[::1]:77", 0, "", "http://[::1]:77"),
        ("::", 0, "", "http://[::1]:8080"),
        ("", 0, " '127.0.0.1:5' ", "http://127.0.0.1:5"),
    ],
)
def test_address(monkeypatch: pytest.MonkeyPatch, host: str, port: int, env: str, url: str) -> None:
    monkeypatch.setenv("OLLAMA_HOST", env)
    assert address(host, port) == url


def test_processor() -> None:
    assert processor(100, 0) == "100% CPU"
    assert processor(100, 100) == processor(100, 120) == "100% GPU"
    assert processor(100, 52) == "48%/52% CPU/GPU"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "Stopping..."), (0.5, "Less than a second from now"), (1, "1 second from now"), (299, "4 minutes from now"),
     (3600, "1 hour from now"), (86400 * 3, "3 days from now"), (86400 * 365 * 50, "Forever")],
)  # fmt: skip
def test_remaining(seconds: float, words: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert remaining((now + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z"), now) == words


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Port 9 of this machine has none."""
    assert ps(["--port", "9"]) == 1
    assert "no ftgguf server at http://127.0.0.1:9" in capsys.readouterr().err
    assert ps(["--host", "127.0.0.1:notaport"]) == 1
    assert "is no address" in capsys.readouterr().err
