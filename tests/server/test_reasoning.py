"""Reasoning budgets and their control over HTTP, on a model that thinks for ever unless it is stopped.

What a budget makes of an answer is compared with llama-server in tests/compat/test_known.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compat.requests import SCRIPT
from compat.scripted import make_scripted
from compat.server import our_server

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 300}
MESSAGE = " Time is up."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("thinking")
    make_scripted(folder / "vocab.gguf", SCRIPT)
    script = {
        "vocab": "vocab.gguf",
        "delay_ms": 10,
        "scripts": [
            {"when": "</think>", "text": "Because.<|im_end|>"},
            {"pieces": ["<think>", *" and on" * 500], "loop": True},
        ],
    }
    (folder / "script.json").write_text(json.dumps(script))
    args = ["-c", "2048", "--reasoning-budget", "40", "--reasoning-budget-message", MESSAGE]
    with our_server(f"scripted:{folder / 'script.json'}", args) as address:
        yield address


def test_the_server_budget_ends_thinking(url: str) -> None:
    message = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=30).json()["choices"][0]["message"]
    assert message["reasoning_content"].endswith(MESSAGE)
    assert message["content"] == "Because."


def test_a_request_overrides_budget_and_message(url: str) -> None:
    body = {**ASK, "thinking_budget_tokens": 5, "reasoning_budget_message": "!"}
    message = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()["choices"][0]["message"]
    assert message["reasoning_content"] == " and !"  # five tokens of a character each


def control(url: str, id: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(
        f"{url}/v1/chat/completions/control", json={"id": id, "action": "reasoning_end"}
    ).json()
    return answer


@pytest.mark.parametrize("enabled", [True, False])
def test_thinking_is_ended_from_outside(url: str, enabled: bool) -> None:
    body = {**ASK, "stream": True, "reasoning_control": enabled, "reasoning_budget_tokens": 200}
    reasoning, content, answer = "", "", {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            delta = chunk["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            if len(reasoning) > 10 and not answer:
                answer = control(url, chunk["id"])
                if not enabled:
                    break
    if enabled:
        assert answer == {"success": True}
        assert reasoning.endswith(MESSAGE)
        assert len(reasoning) < 150
        assert content == "Because."
    else:
        assert answer == {"success": False, "message": "reasoning control not enabled for this completion"}
    assert control(url, "chatcmpl-gone") == {"success": False, "message": "no active completion for this id"}


@pytest.mark.slow
def test_a_silent_answer_takes_longer_than_a_connection_is_kept(tmp_path: Path) -> None:
    """Bug log R11: nothing is sent for more than the 5 s that idle connections are kept."""
    make_scripted(tmp_path / "vocab.gguf", SCRIPT)
    script = {"vocab": "vocab.gguf", "delay_ms": 700, "scripts": [{"pieces": list("Late, but here.")}]}
    (tmp_path / "slow.json").write_text(json.dumps(script))
    with our_server(f"scripted:{tmp_path / 'slow.json'}") as url, httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(2):
            assert (
                http.post("/completion", json={"prompt": "x", "n_predict": 20}).json()["content"] == "Late, but here."
            )
