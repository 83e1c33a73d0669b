"""Large grammars are compiled beside the engine's steps; small ones, known ones and cancelled requests do not wait."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from ftgguf.engine import messages as m
from ftgguf.engine.grammar import GrammarCompiler
from ftgguf.engine.grammar_source import GrammarError
from ftgguf.engine.precompile import SMALL, Precompiler
from tests.vocabs import vocab

LARGE = m.Grammar(kind="gbnf", text='root ::= "' + "a" * SMALL + '"')
BAD = m.Grammar(kind="gbnf", text='root ::= "' + "a" * SMALL)


def request(id: int, grammar: m.Grammar | None) -> m.Generate:
    return m.Generate(id=id, prompt=(1,), sampling=m.SamplingParams(grammar=grammar))


class Slow(GrammarCompiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(vocab("gpt-2"))
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: m.Grammar) -> Any:
        assert self.go.wait(30)
        self.compiled.append(grammar.text)
        return super().compile(grammar)


def test_a_large_grammar_waits_beside_the_engine() -> None:
    slow, back = Slow(), queue.SimpleQueue[m.Generate]()
    waiting = Precompiler(slow, back.put)
    assert waiting.hold(request(1, LARGE))
    assert not waiting.hold(request(2, None))
    assert not waiting.hold(request(3, m.Grammar(kind="gbnf", text='root ::= "a"')))
    assert back.empty()
    slow.go.set()
    ready = back.get(timeout=60)
    assert ready.id == 1
    assert not waiting.hold(ready)
    assert not waiting.hold(request(4, LARGE))  # known by now
    assert slow.compiled == [LARGE.text]


def test_a_bad_grammar_comes_back_and_its_error_is_kept() -> None:
    slow, back = Slow(), queue.SimpleQueue[m.Generate]()
    slow.go.set()
    waiting = Precompiler(slow, back.put)
    assert waiting.hold(request(1, BAD))
    assert not waiting.hold(back.get(timeout=60))
    with pytest.raises(GrammarError):
        slow.compile(BAD)


def test_a_cancelled_request_does_not_come_back_to_life() -> None:
    slow, back = Slow(), queue.SimpleQueue[m.Generate]()
    waiting = Precompiler(slow, back.put)
    assert not waiting.forget(1)
    assert waiting.hold(request(1, LARGE))
    assert waiting.hold(request(2, BAD))
    assert waiting.forget(1)
    assert waiting.forget(2)
    slow.go.set()
    for _ in range(2):
        assert waiting.hold(back.get(timeout=60))
    assert not waiting.forget(1)
    assert BAD.text not in slow.compiled


def test_without_grammars_nothing_waits() -> None:
    assert not Precompiler(None, lambda _: None).hold(request(1, LARGE))
