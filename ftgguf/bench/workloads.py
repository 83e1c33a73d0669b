"""The requests of a comparison over HTTP: prompts, generation, depth, short suffixes, parallel streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ftgguf.bench.client import BURST_S, Answer, Prompt, RequestFailed, Target, together
from ftgguf.bench.prompts import TEXTS
from ftgguf.bench.report import Contestant, Pace, Report

SUFFIXES = (1, 16, 64, 256)
STREAMS = (1, 2, 4)
FIRST = 128
"""Tokens of a long generation that are reported apart from the rest."""
SHORT = 32
"""Tokens of a prompt that is only there to start a generation."""
LONGEST_TEXT = 256
"""Tokens that hold any of the short texts, whatever the tokenizer."""
CALIBRATION = 256
"""Tokens of the prompt whose time tells which longer ones are bearable."""
PACES = 24
"""Points that a generation's pace is kept as, at most."""


class Source:
    """Prompts of a given length: uniform random ids, or text where a side takes no ids."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self.texts: Sequence[Prompt] = ()
        """Short texts of several domains, set once a tokenizer is known."""

    def make(self, n: int, seed: int) -> Prompt:
        """`n` tokens; the same for the same seed."""
        ids: list[int] = np.random.default_rng(seed).integers(0, self._n_vocab, n).tolist()
        return ids

    def text(self, which: int) -> Prompt:
        """A short text of one of several domains (`prompts.TEXTS`), random where no tokenizer is known."""
        return self.texts[which % len(self.texts)] if self.texts else self.make(SHORT, which)

    def join(self, prefix: Prompt, suffix: Prompt) -> Prompt:
        """One prompt of two."""
        if isinstance(prefix, str) or isinstance(suffix, str):
            return f"{prefix}{suffix}"
        return [*prefix, *suffix]


class TextSource(Source):
    """Shuffled words of real text, about `n` tokens long: `words_per_token` is measured with our tokenizer."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        super().__init__(0)
        self.texts = TEXTS
        self._words = " ".join(TEXTS).split()
        self._ratio = len(self._words) / max(1, len(tokenize(" ".join(self._words))))

    def make(self, n: int, seed: int) -> Prompt:
        words = random.Random(seed).choices(self._words, k=max(1, round(n * self._ratio)))
        return " " + " ".join(words)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of each side in a round; lengths in tokens."""

    prompts: tuple[int, ...]
    gens: tuple[int, ...]
    depths: tuple[int, ...]
    context: int
    """Length of the context that short suffixes are added to; 0 leaves them out."""
    streams: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens the longest single sequence needs."""
        gen = max(self.gens, default=0)
        lengths = [*self.prompts, *(d + SHORT + gen for d in self.depths), LONGEST_TEXT + gen, 512]
        return max([*lengths, self.context + max(SUFFIXES) if self.context else 0])

    @property
    def cells(self) -> int:
        """Cells of a pool that holds the longest sequence, a cached context and all streams."""
        gen = max(self.gens, default=0)
        return max(self.longest, max(self.streams, default=1) * (SHORT + gen)) + 256

    def tokens(self) -> tuple[int, int]:
        """Prompt tokens and generated tokens of one side's round."""
        read = (
            sum(self.prompts) + len(self.gens) * sum(self.depths) + (self.context + sum(SUFFIXES)) * bool(self.context)
        )
        return read, sum(self.gens) * (1 + len(self.depths) + len(self.streams))

    def within(self, rate: float, seconds: float, report: Report) -> Plan:
        """Without prompts and contexts that would take longer than `seconds` each at `rate` tok/s: noted. The shortest
        prompt stays."""
        most = rate * seconds
        keep = tuple(n for n in self.prompts if n <= max(most, min(self.prompts)))
        depths = tuple(n for n in self.depths if n <= most)
        context = self.context if self.context <= most else int(most)
        context = context if context >= 256 else 0
        left = [f"pp{n}" for n in self.prompts if n not in keep] + [f"@ d{n}" for n in self.depths if n not in depths]
        if left:
            report.notes.append(
                f"left out, as ours reads {rate:.0f} tok/s and one prompt may take {seconds:.0f} s (--longest): "
                + ", ".join(left)
            )
        if context != self.context:
            what = f"on a context of {context} tokens" if context else "left out"
            report.notes.append(f"short suffixes are {what} instead of {self.context}, for the same reason")
        return replace(self, prompts=keep, depths=depths, context=context)


def make_plan(
    workloads: Sequence[str], prompts: list[int], gens: list[int], depths: list[int], limit: int, report: Report
) -> Plan:
    """The plan for `workloads`, without what a context of `limit` tokens (the model's own) cannot hold: noted."""
    gen = max(gens, default=0)

    def fits(kind: str, values: Sequence[int], extra: int) -> tuple[int, ...]:
        kept = tuple(v for v in values if v and v + extra <= limit)
        left = [str(v) for v in values if v and v + extra > limit]
        if left:
            report.notes.append(f"left out, as the model's context is {limit} tokens: {kind} {', '.join(left)}")
        return kept

    room = max(0, limit - max(SUFFIXES) - 8)
    context = min(max(depths, default=0) or 8192, room) if "suffix" in workloads else 0
    if "suffix" in workloads and context < 256:
        report.notes.append(f"left out, as they go on a context of 256 tokens at least, not {context}: short suffixes")
        context = 0
    return Plan(
        prompts=fits("prompts of", prompts, 1) if "pp" in workloads else (),
        gens=fits("generations of", gens, SHORT) if {"tg", "streams", "depth"} & set(workloads) else (),
        depths=fits("depths of", depths or [8192, 32768], SHORT + gen) if "depth" in workloads else (),
        context=context,
        streams=STREAMS if "streams" in workloads else (),
    )


@dataclass(slots=True)
class Bench:
    """Runs one round's workloads against one side and adds the samples to the report."""

    report: Report
    side: Contestant
    target: Target
    source: Source
    plan: Plan
    workloads: Sequence[str]
    round: int
    salt: int = 0
    """Added to every seed: other prompts for a server that may remember the last comparison's."""
    rates: list[tuple[str, float, float]] = field(default_factory=list)
    """(workload, decode rate by the client's clock, and by the server's)."""
    prompt_ns: list[tuple[str, int]] = field(default_factory=list)
    """Prompt tokens as the server counted them, by prompt: sides must agree."""
    _there: int = 0
    """Tokens of the context that short suffixes go on, once it is cached."""

    def failed(self, workload: str, why: str) -> None:
        """That workload failed: where its first figure would have been, it says so."""
        faster = not workload.startswith("+")
        metric = "tok/s in all" if " x " in workload else "tok/s" if faster else "TTFT ms"
        row = self.report.row(workload, metric, higher_is_better=faster, paired=True, quantiles=not faster)
        row.failures[self.side.name] = why

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """(workload's name, what measures it), in order."""
        for n in self.plan.prompts:
            yield f"pp{n}", lambda n=n: self._prompt(n)  # type: ignore[misc]
        if "tg" in self.workloads:
            for n in self.plan.gens:
                yield f"tg{n}", lambda n=n: self._generate(n)  # type: ignore[misc]
        for depth in self.plan.depths:
            for n in self.plan.gens:
                yield f"tg{n} @ d{depth}", lambda n=n, d=depth: self._at_depth(n, d)  # type: ignore[misc]
        if self.plan.context:
            for n in SUFFIXES:
                yield f"+{n} on {self.plan.context}", lambda n=n: self._suffix(n)  # type: ignore[misc]
        if "streams" in self.workloads:
            for count in self.plan.streams:
                for n in self.plan.gens:
                    yield f"{count} x tg{n}", lambda n=n, c=count: self._streams(n, c)  # type: ignore[misc]

    def warm_up(self) -> None:
        """Untimed: the shortest prompt once, a few tokens, and all streams at once: what an engine builds for a shape
        when it first sees it is built."""
        self.target.complete(self.source.make(min([512, *self.plan.prompts]), self._seed(900)), 8)
        count = max(self.plan.streams, default=1)
        if count > 1:
            prompts = [self.source.make(SHORT, self._seed(901 + i)) for i in range(count)]
            together([lambda p=p: self.target.complete(p, 4) for p in prompts])  # type: ignore[misc]

    def calibrate(self) -> tuple[float, float]:
        """About how many prompt tokens a second, and how many generated ones."""
        answer = self.target.complete(self.source.make(CALIBRATION, self._seed(950)), 16)
        return (answer.prompt_n or CALIBRATION) / answer.ttft, answer.decode_rate

    def _seed(self, what: int) -> int:
        return self.salt + 100_000 * (self.round + 1) + what

    def _add(self, workload: str, metric: str, values: Sequence[float], *, faster: bool) -> None:
        """Speeds are one a round; times are pooled, so that their p50, p90 and p99 can be shown."""
        row = self.report.row(workload, metric, higher_is_better=faster, paired=True, quantiles=not faster)
        if faster:
            row.samples.setdefault(self.side.name, []).extend(values)
        elif values:
            row.add(self.side.name, list(values))

    def _ask(self, name: str, prompt: Prompt, n: int, *, cache: bool = False) -> Answer:
        answer = self.target.complete(prompt, n, cache=cache)
        self.prompt_ns.append((f"{name} round {self.round}", answer.prompt_n))
        if answer.n_gen != n:
            self._note(f"{name}: it generated {answer.n_gen} tokens where {n} were asked for")
        return answer

    def _note(self, text: str) -> None:
        if text not in self.side.notes:
            self.side.notes.append(text)

    def _prompt(self, n: int) -> None:
        answer = self._ask(f"pp{n}", self.source.make(n, self._seed(n)), 1)
        count = answer.prompt_n or n
        self._add(f"pp{n}", "tok/s", [count / answer.ttft], faster=True)
        self._add(f"pp{n}", "TTFT ms", [answer.ttft * 1e3], faster=False)

    def _generate(self, n: int) -> None:
        # another domain each round: one text that suits an expert cache would flatter it
        self._decoded(f"tg{n}", self._ask(f"tg{n}", self.source.text(self.round), n))

    def _decoded(self, name: str, answer: Answer) -> None:
        self._add(name, "tok/s", [answer.decode_rate], faster=True)
        self._add(name, "gap ms", [g * 1e3 for g in answer.token_gaps], faster=False)
        self._pace(name, answer)
        self._looped(name, answer)
        if answer.counted and len(answer.arrivals) >= 2 * FIRST:
            # an expert cache that is still warming up shows in the first tokens
            first, rest = answer.arrivals[:FIRST], answer.arrivals[FIRST - 1 :]
            for part, times in ((f"first {FIRST}", first), ("the rest", rest)):
                self._add(f"{name}, {part}", "tok/s", [(len(times) - 1) / (times[-1] - times[0])], faster=True)
        bursts = sum(g < BURST_S for g in answer.token_gaps)
        if answer.in_one_piece:
            self._note(f"{name}: the tokens came all at once: its rate counts the prompt's time too")
        elif bursts > len(answer.token_gaps) / 4:
            self._note("tokens reach the client in bursts: look at p90 and p99 of the gaps, not at p50")
        server = answer.server.get("predicted_per_second", 0.0)
        if server:
            self.rates.append((name, answer.decode_rate, server))
        if not answer.counted:
            self._note("gaps are between chunks of its stream: it does not say which tokens a chunk holds")

    def _pace(self, name: str, answer: Answer) -> None:
        """Keep how the speed went over the generation, in up to PACES stretches of equal time, of 8 tokens on average
        at least."""
        if not answer.counted or answer.in_one_piece or len(answer.arrivals) < 16:
            return
        times = np.asarray(answer.arrivals[answer.first_piece - 1 :])
        counts, ends = np.histogram(times[1:], max(2, min(PACES, len(times) // 8)), (times[0], times[-1]))
        width = float(ends[1] - ends[0])
        points = [(float(end), float(n) / width) for end, n in zip(ends[1:], counts, strict=True)]
        self.report.paces.append(Pace(self.side.name, name, self.round, points))

    def _looped(self, name: str, answer: Answer) -> None:
        tail = answer.tokens[len(answer.tokens) // 2 :]
        if len(tail) >= 32 and len(set(tail)) <= len(tail) // 4:
            text = "the text repeats itself towards its end, so routing does too: an expert cache looks better for it"
            self._note(f"{name}: {text}")

    def _at_depth(self, n: int, depth: int) -> None:
        name = f"tg{n} @ d{depth}"
        prefix = self.source.make(depth, self._seed(2))
        length = self.target.complete(prefix, 1, cache=True).prompt_n or depth
        prompt = self.source.join(prefix, self.source.make(SHORT, self._seed(3)))
        answer = self._ask(name, prompt, n, cache=True)
        self._expect_cached(name, answer, length)
        self._decoded(name, answer)

    def _suffix(self, n: int) -> None:
        length = self.plan.context
        prefix = self.source.make(length, self._seed(4))
        if not self._there:
            self._there = self.target.complete(prefix, 1, cache=True).prompt_n or length
        name = f"+{n} on {length}"
        prompt = self.source.join(prefix, self.source.make(n, self._seed(5 + n)))
        answer = self._ask(name, prompt, 1, cache=True)
        self._expect_cached(name, answer, self._there)
        self._add(name, "TTFT ms", [answer.ttft * 1e3], faster=False)

    def _expect_cached(self, name: str, answer: Answer, length: int) -> None:
        # a server may evaluate the last tokens of a prefix again; a tenth missing is another matter
        if 0 <= answer.cached_n < 0.9 * length:
            self._note(f"{name}: only {answer.cached_n} of {length} tokens came from its prefix cache")

    def _streams(self, n: int, count: int) -> None:
        prompts = [self.source.make(SHORT, self._seed(400 + i)) for i in range(count)]
        answers = together([lambda p=p: self.target.complete(p, n) for p in prompts])  # type: ignore[misc]
        name = f"{count} x tg{n}"
        seconds = max(a.arrivals[-1] for a in answers)
        self._add(name, "tok/s in all", [sum(a.n_gen for a in answers) / seconds], faster=True)
        gaps = [g * 1e3 for a in answers for g in a.token_gaps]
        self._add(name, "gap ms", gaps, faster=False)
        self._add(name, "TTFT ms", [a.ttft * 1e3 for a in answers], faster=False)


__all__ = ["Bench", "Plan", "RequestFailed", "Source", "TextSource", "make_plan"]
