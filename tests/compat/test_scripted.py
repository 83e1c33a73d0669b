"""The scripted model says its script: in libllama greedily, and in llama-server with sampling over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from compat.differential import ask, connect, run
from compat.oracle import Oracle
from compat.peer import peer_server
from compat.requests import SCRIPT, SCRIPTED
from compat.scripted import cut, make_scripted


@pytest.mark.parametrize(("arch", "n_expert"), [("llama", 0), ("llama", 4), ("qwen3moe", 8), ("granitemoe", 4)])
def test_libllama_says_the_script(tmp_path: Path, arch: str, n_expert: int) -> None:
    """Greedy text after two prompts, and a logit gap that no temperature overcomes."""
    pieces = make_scripted(tmp_path / "m.gguf", SCRIPT, arch=arch, n_expert=n_expert)
    assert b"".join(pieces) == SCRIPT.encode()
    with Oracle(tmp_path / "m.gguf", n_ctx=512) as oracle:
        for prompt in ("Hi", "<|im_start|>user\nagain and again<|im_end|>\n<|im_start|>assistant\n"):
            said = oracle.greedy(oracle.tokenize(prompt), 500)
            assert said.text == SCRIPT.encode()
            assert [oracle.piece(t) for t in said.tokens] == pieces
            assert min(said.gaps) > 5


def test_characters_are_cut_between_tokens() -> None:
    """Some piece must end inside a UTF-8 character, or the model would not test the holding back of bytes."""

    def whole(piece: bytes) -> bool:
        try:
            piece.decode()
        except UnicodeDecodeError:
            return False
        return True

    assert not all(whole(piece) for piece in cut("a\U0001f600\U0001f601\U0001f602 b\u00e9\u00e8"))
    with pytest.raises(ValueError, match="different pieces"):
        cut("<think>a long text<think>")


def test_llama_server_says_the_script(tmp_path: Path) -> None:
    """Sampled at temperature 1, with marked tokens left out as llama-server does, and cut at a stop string."""
    pytest.importorskip("xllamacpp")
    make_scripted(tmp_path / "m.gguf", SCRIPT)
    with peer_server(tmp_path / "m.gguf", ["-c", "1024", "-t", "1"]) as url:
        body = {"prompt": "x", "temperature": 1.0, "n_predict": 300}
        answer = httpx.post(f"{url}/completion", json=body, timeout=60).json()
        assert answer["stop_type"] == "eos"
        assert "Hello there." in answer["content"]
        stopped = httpx.post(f"{url}/completion", json={**body, "stop": ["there"]}, timeout=60).json()
        assert stopped["content"].endswith("Hello ")


def test_llama_server_parses_thinking_and_the_call(tmp_path: Path) -> None:
    """The template and the script are such that llama-server finds both, so that the model can test ours."""
    pytest.importorskip("xllamacpp")
    make_scripted(tmp_path / "m.gguf", SCRIPT)
    asked = {r.name: r for r in SCRIPTED}
    with peer_server(tmp_path / "m.gguf", ["-c", "1024", "-t", "1"]) as url, connect(url) as client:
        answer = ask(client, asked["scripted tools"]).body["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["reasoning_content"].startswith("The user wants a caf\u00e9 \U0001f600;")
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        stream = ask(client, asked["scripted tools stream"]).body["text"]
        assert stream["0.reasoning_content"] == answer["message"]["reasoning_content"]
        assert stream["0.content"] == answer["message"]["content"]
        assert stream["0.tool_calls.0.arguments"] == answer["message"]["tool_calls"][0]["function"]["arguments"]


def test_two_peers_are_alike_on_the_script(tmp_path: Path) -> None:
    """llama-server against itself, on every scripted request."""
    pytest.importorskip("xllamacpp")
    make_scripted(tmp_path / "m.gguf", SCRIPT)
    args = ["-c", "2048", "-t", "1"]
    with peer_server(tmp_path / "m.gguf", args) as ours, peer_server(tmp_path / "m.gguf", args) as peer:
        assert [str(d) for d in run(ours, peer, SCRIPTED)] == []
