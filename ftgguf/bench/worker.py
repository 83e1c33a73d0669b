"""A process of its own for one engine: it loads, runs tests, and answers on standard output, a JSON line each.

Whatever libraries print goes to standard error. The parent's end of standard input closing ends the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ftgguf.bench.plan import SpeedTest, Tokens
from ftgguf.bench.stepper import LibllamaStepper, OursStepper, Stepper, Timer, resident
from ftgguf.flags import parse_server

Json = dict[str, Any]
_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers requests `{"do": NAME, ...}`."""

    def __init__(self) -> None:
        self._timer: Timer | None = None

    @property
    def _loaded(self) -> Timer:
        if self._timer is None:
            raise ValueError("no engine is loaded")
        return self._timer

    def load(self, engine: str, argv: list[str]) -> Json:
        """`engine`: `ftgguf`, or libllama's layout `repacked` or `plain`; `argv`: llama-server's flags."""
        config = parse_server(argv, os.environ)
        stepper: Stepper = OursStepper(config) if engine == "ftgguf" else LibllamaStepper(config, engine)
        self._timer = Timer(stepper)
        facts = stepper.facts
        return {name: getattr(facts, name) for name in type(facts).__slots__}

    def warm_up(self, test: list[int], tokens: list[list[int]]) -> Json:
        self._loaded.warm_up(SpeedTest(*test), Tokens(*tokens))
        return {}

    def run(self, test: list[int], tokens: list[list[int]]) -> Json:
        return {"ns": self._loaded.run(SpeedTest(*test), Tokens(*tokens))}

    def greedy(self, prompt: list[int], n: int, forced: Sequence[int] = (), ignore_ends: bool = False) -> Json:
        return {"tokens": self._loaded.greedy(prompt, n, forced, ignore_ends=ignore_ends)}

    def tokenize(self, text: str) -> Json:
        return {"tokens": self._loaded.stepper.tokenize(text)}

    def resident(self) -> Json:
        return dict(resident())

    def answer(self, request: Json) -> Json:
        """The reply to one request; an exception becomes `error`."""
        method: Callable[..., Json] = getattr(self, request.pop("do"))
        try:
            return method(**request)
        except Exception as error:
            return {"error": str(error).strip() or type(error).__name__}


def _die_with_parent() -> None:
    """A parent that is killed in the middle of a long measurement must not leave 10 GB behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve standard input until it closes."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
    answers.flush()
    os._exit(0)  # freeing 10 GB of weights is nobody's business any more


if __name__ == "__main__":
    main()
