"""Grammars are compiled beside the engine's steps: a large one takes a second, and others generate meanwhile.

A request whose grammar is new and not small waits here; when a thread has compiled it (or knows that it cannot be), the
request goes to the engine as if it had just come.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ftgguf.engine import messages as m
from ftgguf.engine.grammar import GrammarCompiler
from ftgguf.engine.grammar_source import GrammarError

SMALL = 1000
"""Characters of a grammar that is compiled at once: a few milliseconds at most."""


class Precompiler:
    """`hold` and `forget` belong to the engine's thread; `ready` is called by another one."""

    def __init__(self, grammars: GrammarCompiler | None, ready: Callable[[m.Generate], None]) -> None:
        self._grammars = grammars
        self._ready = ready
        self._held: set[int] = set()
        self._gone: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "grammar")

    def hold(self, request: m.Generate) -> bool:
        """Whether `request` must wait (or is not wanted any more); else the engine can have it."""
        self._held.discard(request.id)
        if request.id in self._gone:
            self._gone.discard(request.id)
            return True
        grammar = request.sampling.grammar
        grammars = self._grammars
        if grammar is None or grammars is None or len(grammar.text) <= SMALL or grammars.knows(grammar):
            return False
        self._held.add(request.id)
        self._thread.submit(self._compile, grammars, grammar, request)
        return True

    def forget(self, id: int) -> bool:
        """A request was cancelled; whether it is one that waits here."""
        if id not in self._held:
            return False
        self._gone.add(id)
        return True

    def _compile(self, grammars: GrammarCompiler, grammar: m.Grammar, request: m.Generate) -> None:
        try:
            if request.id not in self._gone:
                grammars.compile(grammar)
        except GrammarError:
            pass  # known by now; the engine tells it
        finally:
            self._ready(request)
