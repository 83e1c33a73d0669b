"""A conversation on an in-process engine: messages in, text and reasoning out, interruptible between steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec

from ftgguf.chat.parser import OutputParser, PlainParser
from ftgguf.chat.request import ChatPlanner
from ftgguf.engine import messages as m
from ftgguf.engine.engine import Engine
from ftgguf.flags.config import ServerConfig
from ftgguf.server.adapters import Adapters
from ftgguf.vocab import Vocab


class AnswerError(RuntimeError):
    """The engine refused or failed the request; one line."""


@dataclass(slots=True)
class Answer:
    """One finished answer. `timings` are nouns.Timings' fields (milliseconds, tokens)."""

    text: str = ""
    reasoning: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    stop_type: str = ""
    full: bool = False
    """It ended because the context was full."""


Show = Callable[[str, bool], None]
"""Called with each new piece of text and whether it is reasoning."""


class Session:
    """`planner` None: the model has no chat template and continues plain text."""

    def __init__(self, engine: Engine, vocab: Vocab, planner: ChatPlanner | None, config: ServerConfig) -> None:
        self.engine = engine
        self.vocab = vocab
        self.planner = planner
        self.config = config
        self.adapters = Adapters(config.model).of_request({})
        """The scale of each --lora file."""
        self._ids = 0

    def answer(self, messages: list[dict[str, Any]], show: Show) -> Answer:
        """Generate the next assistant turn. Ctrl-C ends the answer and keeps what was said.

        Raises AnswerError, or server.errors.ApiError when the template refuses the messages.
        """
        tokens, parser = self._prompt(messages)
        if not tokens:
            raise AnswerError("the prompt is empty")
        self._ids += 1
        self.engine.submit(
            m.Generate(
                id=self._ids,
                prompt=tuple(tokens),
                sampling=msgspec.structs.replace(self.config.sampling),
                max_tokens=self.config.context.n_predict,
                stop=self.config.chat.reverse_prompt,
                special=self.config.chat.special,
                adapters=self.adapters,
            )
        )
        answer = Answer()
        with _interrupts() as interrupted:
            for message in self._messages(interrupted):
                if isinstance(message, m.Delta):
                    self._show(parser.feed(message.text), answer, show)
                    answer.timings = message.timings or answer.timings
                elif isinstance(message, m.Finished):
                    answer.timings, answer.stop_type = message.timings, message.stop_type
                    answer.full = message.truncated and message.stop_type == "limit"
                elif isinstance(message, m.Failed):
                    raise AnswerError(message.message)
            answer.interrupted = bool(interrupted)
        self._show(parser.finish(), answer, show)
        return answer

    @property
    def n_ctx(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.engine.ready().n_ctx

    def length(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of the prompt that `messages` become. Raises server.errors.ApiError."""
        return len(self._prompt(messages)[0])

    def room(self) -> int:
        """Tokens to leave for an answer: a quarter of the context, or what -n allows if that is less."""
        quarter, most = self.n_ctx // 4, self.config.context.n_predict
        return min(quarter, most) if most > 0 else quarter

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], OutputParser]:
        """Token ids, and the reader of the answer."""
        parser: OutputParser = PlainParser()
        if self.planner is None:
            prompt = "".join(message["content"] for message in messages)
        else:
            plan = self.planner.plan({"messages": messages})
            prompt, parser = plan.prompt, plan.parser()
        return list(self.vocab.tokenize(prompt, add_special=True, parse_special=True)), parser

    def _messages(self, interrupted: list[bool]) -> Iterator[m.ToFront]:
        while self.engine.has_work:
            if interrupted:
                self.engine.cancel(self._ids)
                return
            yield from self.engine.step()

    @staticmethod
    def _show(deltas: list[Any], answer: Answer, show: Show) -> None:
        for delta in deltas:
            if delta.reasoning:
                answer.reasoning += delta.reasoning
                show(delta.reasoning, True)
            if delta.content:
                answer.text += delta.content
                show(delta.content, False)


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """A list that becomes non-empty at Ctrl-C; a forward pass is never torn apart by an exception."""
    seen: list[bool] = []

    def note(signum: int, frame: FrameType | None) -> None:
        seen.append(True)

    former = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, former)


def speeds(answer: Answer) -> str:
    """`--verbose`: prompt and generation speed. The first generated token belongs to the prompt, as in llama-server."""
    t = answer.timings
    prompt_ms, predicted_ms = t.get("prompt_ms", 0.0), t.get("predicted_ms", 0.0)
    prompt_n, predicted_n = int(t.get("prompt_n", 0)), int(t.get("predicted_n", 0))
    lines = [f"prompt:     {prompt_n} tokens in {prompt_ms:.1f} ms ({_rate(prompt_n, prompt_ms)})"]
    if t.get("cache_n"):
        lines[0] += f", {int(t['cache_n'])} reused"
    lines.append(f"generation: {predicted_n} tokens in {predicted_ms:.1f} ms ({_rate(predicted_n - 1, predicted_ms)})")
    return "\n".join(lines)


def _rate(n: int, ms: float) -> str:
    return f"{n / ms * 1000:.1f} tokens/s" if ms > 0 and n > 0 else "- tokens/s"
