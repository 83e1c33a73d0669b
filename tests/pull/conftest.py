"""One fake registry and Hub for all tests here, and a home folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compat.registry import FAST, FakeSource, Running, running
from ftgguf.pull.client import NetOptions
from ftgguf.pull.session import Event, Session
from ftgguf.pull.store import Store

_VARIABLES = (
    *("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH"),
    *("MODEL_ENDPOINT", "HF_ENDPOINT", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def source(server: Running, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    """The fake registry and Hub, emptied, every fault off; also the Hub of this test's process."""
    server.source.reset()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server.source


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder; nothing of the machine's caches or settings is seen."""
    folder = tmp_path / "home"
    folder.mkdir()
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home / "store")


@pytest.fixture
def session(store: Store) -> Iterator[Callable[..., Session]]:
    """`session(report=..., options=..., **fields)`: a session on `store`, closed at the end."""
    opened: list[Session] = []

    def make(report: Callable[[Event], None] | None = None, options: NetOptions = FAST, **fields: object) -> Session:
        opened.append(Session(store, options, report or (lambda _event: None), **fields))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for each in opened:
        each.client.close()
