"""libllama as a witness: what it says at a place is what it says there when it generates."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from compat.synth import make
from ftgguf.bench import witness
from ftgguf.bench.child import Child, ChildError
from ftgguf.bench.stepper import Stepper, Timer
from ftgguf.bench.witness import InProcess, NotInstalled
from ftgguf.nouns import F32


def test_it_says_at_a_place_what_it_says_when_it_generates(tmp_path: Path) -> None:
    """Oracle: libllama's own greedy output on random Q4_K experts, each token asked for after those before it."""
    path = make("qwen3moe", tmp_path / "m.gguf", types="Q4_K", n_layer=2, n_embd=256, n_ff_expert=256)
    argv, prompt = ["-m", str(path), "-t", "1", "-c", "128"], [5, 9, 17, 4, 30, 8, 21]
    peer = Child(120, ours=False)
    peer.ask("load", engine="plain", argv=argv)
    tokens = peer.ask("greedy", prompt=prompt, n=8, ignore_ends=True)["tokens"]
    peer.end()
    builds = InProcess(argv, path.stat().st_size, 120)
    try:
        assert "libllama of llama-cpp-python" in (what := builds.load("plain"))
        assert "plain weights, instruction sets " in what
        ids = [int(t) for t, _ in tokens]
        for i in (0, 3, 7):
            token, gap = builds.next_token(prompt, ids[:i])
            assert token == ids[i]
            assert gap == pytest.approx(tokens[i][1], abs=1e-6)
    finally:
        builds.end()


class Loud:
    """A stepper whose most probable token ends the text; ids are 0 to 4, the later the more probable."""

    def __init__(self) -> None:
        self.stepped: list[int] = []

    def rewind(self, length: int) -> None: ...
    def prefill(self, tokens: list[int]) -> None: ...
    def step(self, token: int) -> None:
        self.stepped.append(token)

    def logits(self) -> F32:
        return np.array([0.0, 1.0, 2.0, 4.0, 9.0], np.float32)

    def ends(self) -> list[int]:
        return [4]


def test_ends_are_ignored_as_the_servers_ignore_them() -> None:
    """llama-server's `ignore_eos` takes every token that ends a text out of the choice: so the next best counts."""
    stepper = Loud()
    timer = Timer(cast(Stepper, stepper))
    assert timer.greedy([1], 1, ignore_ends=True) == [(3, 2.0)]
    assert timer.greedy([1], 1, [2, 0]) == [(4, 5.0)]
    assert stepper.stepped == [3, 2, 0, 4]


def test_where_it_is_not_installed_or_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repacked copy must not push the file out of memory; nothing is started then."""
    monkeypatch.setattr(witness, "available_memory", lambda: 3 << 30)
    builds = InProcess(["-m", "/nowhere"], 1 << 30, 5)
    with pytest.raises(ChildError, match="memory does not hold a repacked copy"):
        builds.load("repacked")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match="pip install llama-cpp-python"):
        builds.load("plain")
    assert builds._child is None
