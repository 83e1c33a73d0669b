"""Replaying agent sessions: for each turn the time to the first token, and what the prefix cache gave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftgguf.bench.cache_watch import CacheWatch, watched
from ftgguf.bench.client import GREEDY, Answer, RequestFailed, Target
from ftgguf.bench.contenders import Contender, Running
from ftgguf.bench.in_process import say
from ftgguf.bench.options import Options
from ftgguf.bench.report import NOT_COMPARABLE, OURS_FAILED, PEER_FAILED, Contestant, Report, Turn, missing_isa
from ftgguf.bench.servers import ServerError
from ftgguf.bench.tracefile import Request, Session, flattened

ENOUGH = 8
"""Tokens after an answer's first piece that make a speed: a few may reach the client in one moment."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn ready to send: token ids where all sides take them, else messages."""

    session: str
    number: int
    kind: str
    n_gen: int
    ids: tuple[int, ...]
    request: Request


class Replay:
    """All sessions against each contender in turns. `n_gen`: tokens generated for a turn at most."""

    def __init__(
        self, report: Report, options: Options, sides: list[Contender], sessions: Sequence[Session], n_gen: int
    ) -> None:
        self.report = report
        self.options = options
        self.sides = sides
        self.sessions = sessions
        self.n_gen = n_gen
        self._flat: set[str] = set()
        self.prepared: list[Prepared] = []
        report.contestants = [side.contestant for side in sides]
        turns = sum(len(s.requests) for s in sessions)
        report.notes.append(f"{len(sessions)} sessions of {turns} turns: {', '.join(s.name for s in sessions)}")

    def run(self) -> None:
        """All rounds that `--limit` has time for, order rotated."""
        for r in range(self.options.repetitions):
            began = time.monotonic()
            n = r % len(self.sides)
            for side in self.sides[n:] + self.sides[:n]:
                if not side.lost:
                    self._round(r, side)
            rounds = self.options.repetitions
            if r + 1 < rounds and not self.options.time_for(time.monotonic() - began):
                self.report.notes.append(f"{r + 1} of {rounds} rounds: there was no time for more (--limit)")
                break

    def _round(self, r: int, side: Contender) -> None:
        c = side.contestant
        say(f"round {r + 1} of {self.options.repetitions}: starting {c.name}")
        try:
            with side.up() as running, watched(self.report, c.name, running.target) as watch:
                if not self.prepared:
                    self._prepare(running.target)
                if r == 0:
                    self._check(side, running.target)
                self._replay(side, running, watch)
        except (ServerError, RequestFailed) as error:
            side.lost = True
            c.errors.append(str(error))
            self.report.row("server", "up").failures[c.name] = str(error)
            self.report.trouble(OURS_FAILED if c.ours else PEER_FAILED, f"{c.name}: {error}")

    # ------------------------------------------------------------------------------------------------- preparing

    def _prepare(self, target: Target) -> None:
        """Templates and token ids of every turn, from the first side that is up (ours): the same go to all."""
        plain = False
        for session in self.sessions:
            for number, request in enumerate(session.requests):
                sent, ids = _render(target, request)
                plain = plain or sent is not request
                reply = len(target.tokenize(request.reply)) if request.reply else request.n_gen
                n = max(1, min(self.n_gen, reply))
                self.prepared.append(Prepared(session.name, number, request.kind, n, tuple(ids), sent))
        if plain:
            self.report.notes.append("tool calls and results are sent as plain text where the template knows no tools")

    def _check(self, side: Contender, target: Target) -> None:
        """Whether this side would have made the same prompt of the first turns, and has our instruction sets."""
        c = side.contestant
        if c.ours:
            return
        c.lower_isa = missing_isa(self.sides[0].contestant.isa, c.isa)
        if c.lower_isa:
            sets = ", ".join(c.lower_isa)
            self.report.trouble(NOT_COMPARABLE, f"{c.name} does not use {sets}, which ours does: no ratio is given")
        if target.dialect != "native":
            c.notes.append("it takes no token ids: it gets the messages and applies its own template")
            return
        sample = [p for p in self.prepared if p.kind == "first"]
        differ = sum(tuple(_render(target, p.request)[1]) != p.ids for p in sample)
        if differ:
            text = f"{c.name} makes other token ids than ours of the first turn of {differ} of {len(sample)} sessions"
            self.report.trouble(NOT_COMPARABLE, text)

    # ------------------------------------------------------------------------------------------------- replaying

    def _replay(self, side: Contender, running: Running, watch: CacheWatch) -> None:
        c = side.contestant
        started = began = time.perf_counter()
        session = ""
        for p in self.prepared:
            if p.session != session:
                began, session = time.perf_counter(), p.session
                say(f"{c.name}: {session}")
                watch.mark(session)
            now = time.perf_counter()
            turn = Turn(
                c.name, p.session, p.number, len(p.ids), -1, 0.0, 0.0, 0, now - began, p.kind, at_s=now - started
            )
            self.report.turns.append(turn)
            try:
                answer = self._asked(c, running.target, p)
            except RequestFailed as error:
                turn.error = str(error)
                self.report.turn_failed(c, f"{p.session} turn {p.number}: {error}")
                running.check()
                if "hangs" in turn.error:
                    raise
                continue
            self._record(turn, answer)

    def _asked(self, c: Contestant, target: Target, p: Prepared) -> Answer:
        """The turn's answer. A peer that refuses messages with tool calls in them gets them as text from then on."""
        if c.name in self._flat:
            p = replace(p, request=flattened(p.request))
        try:
            return self._send(target, p)
        except RequestFailed as error:
            if target.dialect == "native" or c.name in self._flat or " answered " not in str(error):
                raise
            answer = self._send(target, replace(p, request=flattened(p.request)))
        self._flat.add(c.name)
        c.notes.append("it refused messages with tool calls: it gets them as plain text")
        return answer

    def _send(self, target: Target, p: Prepared) -> Answer:
        if target.dialect == "native":
            return target.complete(p.ids, p.n_gen, cache=True)
        body = {
            "model": target.model,
            "messages": list(p.request.messages),
            "max_tokens": p.n_gen,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": 1,
        }
        body |= ({"tools": list(p.request.tools)} if p.request.tools else {}) | ({} if target.strict else GREEDY)
        # Ollama has OpenAI's endpoint too, and its stream is read alike
        return Target(target.url, "openai", target.model, target.api_key, target.timeout).stream(
            "/v1/chat/completions", body
        )

    def _record(self, turn: Turn, answer: Answer) -> None:
        turn.ttft_ms, turn.total_ms = answer.ttft * 1e3, answer.total * 1e3
        turn.n_gen, turn.cached_n = answer.n_gen, answer.cached_n
        if answer.prompt_n:
            turn.prompt_n = answer.prompt_n
        for metric, value in (("TTFT ms", turn.ttft_ms), ("turn ms", turn.total_ms)):
            row = self.report.row(f"turns: {turn.kind}", metric, higher_is_better=False, quantiles=True)
            row.samples.setdefault(turn.contestant, []).append(value)
        if answer.n_gen - answer.first_piece >= ENOUGH:
            row = self.report.row("turns: decode", "tok/s", quantiles=True)
            row.samples.setdefault(turn.contestant, []).append(answer.decode_rate)


def _render(target: Target, request: Request) -> tuple[Request, list[int]]:
    """The request as the server's template takes it (plain if it refuses tools), and its token ids."""
    if target.dialect != "native":
        return request, []
    try:
        return request, _ids(target, request)
    except RequestFailed:
        plain = flattened(request)
        return plain, _ids(target, plain)


def _ids(target: Target, request: Request) -> list[int]:
    body = {"messages": list(request.messages)} | ({"tools": list(request.tools)} if request.tools else {})
    prompt = str(target.post("/apply-template", body)["prompt"])
    return [int(t) for t in target.post("/tokenize", {"content": prompt, "add_special": True})["tokens"]]
