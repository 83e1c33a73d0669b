"""The report of a proxied session: which conversation a request belongs to, and both sides' times."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from ftgguf.bench.report import Contestant, Report, Turn
from ftgguf.bench.tracefile import Message, common, continues
from ftgguf.proxy.meter import Meter

MAX_SESSIONS = 256
"""Conversations remembered for grouping."""


@dataclass(slots=True)
class Conversation:
    """Requests that continue each other. `side` is where split mode sends them."""

    name: str
    messages: list[Message]
    began: float
    side: str
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its place in a conversation, and when it came (seconds of the proxy's clock)."""

    conversation: Conversation
    turn: int
    kind: str
    at: float
    greedy: bool


@dataclass(slots=True)
class Ledger:
    """Books of both sides. `a` and `b` are contestants of `report`."""

    report: Report
    a: Contestant
    b: Contestant
    conversations: list[Conversation] = field(default_factory=list)
    equal: int = 0
    compared: int = 0
    _answers: dict[tuple[str, int], str] = field(default_factory=dict)
    _count: int = 0
    _began: float = -1.0
    """When the first request came, by the proxy's clock."""

    def ask(self, body: dict[str, Any], at: float) -> Asked:
        """Place a request: it continues the conversation with which it shares most messages, if any."""
        self._began = at if self._began < 0 else self._began
        messages = _messages(body)
        found = max(self.conversations, key=lambda c: common(c.messages, messages), default=None)
        kind = "first" if found is None else continues(found.messages, messages)
        if found is None or kind == "first":
            # a new conversation; split mode deals them out in turns
            side = (self.a, self.b)[self._count % 2].name
            found = Conversation(f"conversation {self._count}", messages, at, side)
            self._count += 1
            self.conversations = [*self.conversations[-MAX_SESSIONS + 1 :], found]
        found.messages = messages
        asked = Asked(found, found.turns, kind, at, body.get("temperature") == 0)
        found.turns += 1
        return asked

    def answered(self, asked: Asked, side: Contestant, meter: Meter, total: float, error: str = "") -> None:
        """A side's answer is complete, or failed with `error`."""
        error = error or meter.error
        if not error and meter.first < 0:
            error = "the answer holds no text"
        c = asked.conversation
        turn = Turn(
            side.name,
            c.name,
            asked.turn,
            max(meter.prompt_n, 0),
            meter.cached_n,
            max(meter.first, 0.0) * 1e3,
            total * 1e3,
            meter.n_gen,
            asked.at - c.began,
            asked.kind,
            error,
            asked.at - self._began,
        )
        self.report.turns.append(turn)
        if error:
            self.report.turn_failed(side, f"{c.name} turn {asked.turn}: {error}")
            return
        self._samples(side, meter, total)
        self._compare(asked, side, meter.text)

    def _samples(self, side: Contestant, meter: Meter, total: float) -> None:
        for metric, value in (("TTFT ms", meter.first * 1e3), ("request ms", total * 1e3)):
            row = self.report.row("requests", metric, higher_is_better=False, quantiles=True)
            row.samples.setdefault(side.name, []).append(value)
        if meter.n_gen > 1 and meter.last > meter.first:
            rate = (meter.n_gen - 1) / (meter.last - meter.first)
            self.report.row("requests", "tok/s", quantiles=True).samples.setdefault(side.name, []).append(rate)

    def _compare(self, asked: Asked, side: Contestant, text: str) -> None:
        """Texts of greedy requests that both sides answered."""
        if not asked.greedy:
            return
        key = (asked.conversation.name, asked.turn)
        other = self._answers.pop(key, None)
        if other is None:
            self._answers[key] = text
            return
        self.compared += 1
        self.equal += other == text

    def finish(self) -> Report:
        """The report with its closing notes; may be called again later."""
        kept = [n for n in self.report.notes if not n.startswith("greedy requests")]
        if self.compared:
            kept.append(f"greedy requests answered by both: {self.compared}, with equal texts: {self.equal}")
        self.report.notes = kept
        return self.report


def _messages(body: dict[str, Any]) -> list[Message]:
    """The conversation as messages: Anthropic's system, Responses' input and plain prompts included."""
    found: list[Message] = []
    if body.get("system"):
        found.append({"role": "system", "content": json.dumps(body["system"])})
    listed = body.get("messages", body.get("input"))
    if isinstance(listed, list):
        found += [m if isinstance(m, dict) else {"role": "user", "content": str(m)} for m in listed]
    elif listed is not None or "prompt" in body:
        found.append({"role": "user", "content": listed if listed is not None else body["prompt"]})
    return found


def say(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)
