"""The report of a proxied session: which conversation a request belongs to, and both sides' times."""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ftgguf.bench.client import BURST_S
from ftgguf.bench.report import NOT_COMPARABLE, Contestant, Report, Turn
from ftgguf.bench.tracefile import Message, common, continues
from ftgguf.proxy.meter import Meter

MAX_SESSIONS = 256
"""Conversations remembered for grouping."""
SHOWN_PARTED = 20
"""Requests whose greedy texts part that are named."""
BUSY = (408, 429)
"""Statuses below 500 that speak of the server, not of the request."""
Samples = dict[str, float]
"""By metric: milliseconds, tokens a second."""


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


@dataclass(frozen=True, slots=True)
class Half:
    """One side's answer to a mirrored request. `prompt_n` is 0 where it cannot be compared."""

    side: Contestant
    prompt_n: int
    figures: Samples


@dataclass(frozen=True, slots=True)
class Refusal:
    """One side's refusal of a mirrored request that the other has not answered yet: its fault only if that one does
    otherwise."""

    side: Contestant
    status: int
    turn: Turn


@dataclass(slots=True)
class Ledger:
    """Books of both sides. `a` and `b` are contestants of `report`.

    Rows, and so ratios, hold what was the same for both: of mirrored requests those that both answered. Where
    conversations are dealt out instead, each is one sample of its side.
    """

    report: Report
    a: Contestant
    b: Contestant
    conversations: list[Conversation] = field(default_factory=list)
    equal: int = 0
    compared: int = 0
    mirrored: bool = True
    _half: dict[tuple[str, int], Half] = field(default_factory=dict)
    """Mirrored requests that one side has answered."""
    _dealt: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    """(metric, contestant) -> conversation -> figures, where conversations are dealt out."""
    _spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """When each side was at work, by the proxy's clock."""
    _answers: dict[tuple[str, int], str] = field(default_factory=dict)
    _parted: list[str] = field(default_factory=list)
    """Requests whose greedy texts part, and where."""
    _refused: dict[tuple[str, int], Refusal] = field(default_factory=dict)
    """Mirrored requests that one side has refused and the other not answered."""
    _done: set[tuple[str, int]] = field(default_factory=set)
    """Mirrored requests that one side has answered, well or not, other than with a refusal."""
    _alike: list[str] = field(default_factory=list)
    """Requests that both refused with the same status."""
    _left: dict[tuple[str, int], float] = field(default_factory=dict)
    """Requests whose client went away before the answer ended, and after how many seconds."""
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

    def answered(
        self,
        asked: Asked,
        side: Contestant,
        meter: Meter,
        total: float,
        error: str = "",
        sent: float = -1.0,
        status: int = 200,
    ) -> None:
        """A side's answer of that HTTP `status` is complete, or failed with `error`; it was asked at `sent` (default:
        when the proxy was)."""
        sent = asked.at if sent < 0 else sent
        self._spans.setdefault(side.name, []).append((sent, sent + total))
        if (asked.conversation.name, asked.turn) in self._left:
            return  # the other side's answer to what the client did not wait for
        if status >= 400 and meter.error:
            error = f"status {status}: {meter.error}"
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
            -1.0 if meter.whole else max(meter.first, 0.0) * 1e3,
            total * 1e3,
            meter.n_gen,
            asked.at - c.began,
            asked.kind,
            error,
            sent - self._began,
        )
        if self.mirrored and self._alike_so_far(asked, side, turn, status):
            return
        self._book(side, turn)
        if error:
            return
        found = _samples(meter, total)
        if self.mirrored:
            counted = 0 if meter.evaluated_only else max(meter.prompt_n, 0)
            self._pair(asked, Half(side, counted, found))
        else:
            self._deal(asked, side, found)
        self._compare(asked, side, meter.text)

    def left(self, asked: Asked, waited: float) -> None:
        """The client went away after `waited` seconds, before the answer ended: no side's failure and in no figure. A
        client that gave up on a slow side shows by the longest wait, which is named."""
        self._left[asked.conversation.name, asked.turn] = waited

    def _book(self, side: Contestant, turn: Turn) -> None:
        self.report.turns.append(turn)
        if turn.error:
            self.report.turn_failed(side, f"{turn.session} turn {turn.turn}: {turn.error}")

    def _alike_so_far(self, asked: Asked, side: Contestant, turn: Turn, status: int) -> bool:
        """Whether `turn` is a refusal that the other side shares, or still may: the client's fault, not a failure."""
        key = (turn.session, turn.turn)
        refused = 400 <= status < 500 and status not in BUSY
        first = self._refused.pop(key, None)
        if first is not None:
            if refused and first.status == status:
                self._alike.append(f"{turn.session} turn {turn.turn} ({turn.error})"[:300])
                return True
            self._book(first.side, first.turn)
        elif key in self._done:
            self._done.discard(key)
        elif refused:
            self._refused[key] = Refusal(side, status, turn)
            return True
        else:
            self._done.add(key)
        return False

    def _pair(self, asked: Asked, two: Half) -> None:
        """Rows get a mirrored request once both have answered it."""
        key = (asked.conversation.name, asked.turn)
        one = self._half.pop(key, None)
        if one is None or one.side is two.side:
            self._half[key] = two
            return
        if one.prompt_n and two.prompt_n and one.prompt_n != two.prompt_n:
            self._other_prompt(asked, one, two)
        for name in [n for n in two.figures if n in one.figures]:
            row = self.report.row("requests", name, higher_is_better=name == "tok/s", paired=True, quantiles=True)
            for half in (one, two):
                row.samples.setdefault(half.side.name, []).append(half.figures[name])

    def _other_prompt(self, asked: Asked, one: Half, two: Half) -> None:
        """The sides counted other numbers of tokens of the same request: they do not do the same work. Said once."""
        peer = two.side if one.side.ours else one.side
        if not peer.unlike:
            peer.unlike = "it makes other tokens of the same requests: its chat template or tokeniser is another"
            text = f"{asked.conversation.name} turn {asked.turn} has {one.prompt_n} tokens for {one.side.name} and "
            text += f"{two.prompt_n} for {two.side.name}: their templates or tokenisers differ, no ratio is given"
            self.report.trouble(NOT_COMPARABLE, text)

    def _deal(self, asked: Asked, side: Contestant, found: Samples) -> None:
        """Rows get the figures conversation by conversation: turns of one are no independent witnesses."""
        for name, value in found.items():
            by_conversation = self._dealt.setdefault((name, side.name), {})
            by_conversation.setdefault(asked.conversation.name, []).append(value)
            row = self.report.row("requests", name, higher_is_better=name == "tok/s", quantiles=True)
            row.samples[side.name] = [x for values in by_conversation.values() for x in values]
            row.blocks[side.name] = [len(values) for values in by_conversation.values()]
            row.unit = "conversations"

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
        if other != text:
            at = next((i for i, (x, y) in enumerate(zip(other, text, strict=False)) if x != y), None)
            at = min(len(other), len(text)) if at is None else at
            self._parted.append(f"{key[0]} turn {key[1]} at character {at + 1}")

    def close(self) -> Report:
        """`finish`, once no more comes: a session that compared nothing is no success."""
        names = {self.a.name, self.b.name}
        if not any(names <= row.samples.keys() for row in self.report.rows):
            if self._began < 0:
                why = "no request came that generates"
            elif self._left and not self.report.turns:
                why = "the client waited for no answer"
            elif self._alike and not self.report.turns:
                why = "both sides refused every request"
            else:
                why = "no request was answered by both" if self.mirrored else "a side has answered no conversation"
            self.report.trouble(NOT_COMPARABLE, f"nothing was compared: {why}")
        return self.finish()

    def finish(self) -> Report:
        """The report with its closing notes; may be called again later."""
        kept = [n for n in self.report.notes if not n.startswith(("greedy requests", "requests that", "answers that"))]
        if self.compared:
            kept.append(f"greedy requests answered by both: {self.compared}, with equal texts: {self.equal}")
        if self._parted:
            more = f" and {len(self._parted) - SHOWN_PARTED} more" if len(self._parted) > SHOWN_PARTED else ""
            kept.append(f"greedy requests whose texts part: {'; '.join(self._parted[:SHOWN_PARTED])}{more}")
        if self._alike:
            kept.append(f"requests that both refused alike, no failure: {len(self._alike)}, first {self._alike[0]}")
        if self._left:
            waited = f"{len(self._left)}, after {max(self._left.values()):.1f} s at most"
            kept.append(f"requests whose client went away before the answer ended, in no figure: {waited}")
        if self._refused:
            kept.append(f"requests that one side refused and the other has not answered: {len(self._refused)}")
        if self._half:
            kept.append(f"requests that one side alone has answered, in no row and no ratio: {len(self._half)}")
        together = self._overlaps()
        if together:
            kept.append(
                f"answers that {self.a.name} gave while {self.b.name} was at work, which slows both if they share a "
                f"machine: {together} of {len(self._spans[self.a.name])}"
            )
        self.report.notes = kept
        return self.report

    def _overlaps(self) -> int:
        """Answers of A that were under way while one of B was."""
        theirs = sorted(self._spans.get(self.b.name, []))
        starts, latest = [x for x, _ in theirs], list(accumulate((y for _, y in theirs), max))
        found = 0
        for begin, end in self._spans.get(self.a.name, []):
            before = bisect_left(starts, end)  # those that began before this one ended
            found += before > 0 and latest[before - 1] > begin
        return found


def _samples(meter: Meter, total: float) -> Samples:
    found = {"request ms": total * 1e3}
    if meter.whole:
        return found
    found = {"TTFT ms": meter.first * 1e3} | found
    # tokens that came all at once were not made in no time
    if meter.n_gen > 1 and meter.last - meter.first > (meter.n_gen - 1) * BURST_S:
        found["tok/s"] = (meter.n_gen - 1) / (meter.last - meter.first)
    return found


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
