"""Do two sides say the same? Greedy outputs side by side, and where they part how undecided each side was."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from ftgguf.bench.client import Answer
from ftgguf.bench.report import NOISE_NATS, NOT_COMPARABLE, OUTPUTS_DIFFER, Divergence, Outputs, Report

ENOUGH = 8
"""Partings of the peers among themselves whose mean gap says how far noise goes."""
RARE = 0.01
"""How often two equal sides may be called different; it comes to twice that, as the mean is of few partings."""
FARTHEST = 2.0
"""No gap beyond so many times the largest that was seen passes for noise, whatever the tail says."""

Greedy = list[tuple[int, float]]
"""(token, gap to the second best in nats, -1 where unknown) for each step."""


def first_difference(a: Greedy, b: Greedy) -> int | None:
    """Index of the first token that differs, None if none does in the common length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x[0] != y[0]), None)


Settle = Callable[[Divergence, Sequence[int]], str]
"""(a fault between ours and a peer, the peer's tokens) -> why it is none after all, or an empty string."""
Witness = Callable[[Sequence[tuple[Divergence, Sequence[int]]]], None]
"""Sets `settled` of those of the faults (each with the peer's tokens) that another build of the peer explains."""


def compare(
    report: Report,
    said: Mapping[str, Sequence[Greedy]],
    settle: Settle = lambda fault, tokens: "",
    others: Callable[[], Mapping[str, Sequence[Greedy]]] = dict,
    witness: Witness = lambda faults: None,
) -> None:
    """Fill `report.outputs` from what each contestant said to the same prompts, and note a fault as trouble, unless
    `settle` or then `witness` explains it.

    Peers are compared with each other too (weight layouts of one library): what they differ by among themselves is
    noise by definition, and raises the bound where it is more than NOISE_NATS (see `_noise`). Where there is a fault,
    `others` gives what the peers say on other backends of theirs, which counts the same.
    """
    ours = report.ours
    names = [c.name for c in report.contestants if c.name in said]
    peers = {p.name for p in report.peers}
    outputs = Outputs(noise=NOISE_NATS)
    for a, b in combinations(names, 2):
        _pair(outputs, a, said[a], b, said[b])
    outputs.prompts = max((len(s) for s in said.values()), default=0)
    outputs.length = max((len(g) for s in said.values() for g in s), default=0)
    outputs.noise = _noise(outputs, peers)
    if outputs.faults():
        for name, theirs in others().items():
            for peer in (n for n in names if n in peers):
                _pair(outputs, peer, said[peer], name, theirs)
            peers.add(name)
        outputs.noise = _noise(outputs, peers)
    report.outputs = outputs
    if ours is None:
        return
    left = []
    for fault in outputs.faults():
        if ours.name in (fault.a, fault.b):
            tokens = [token for token, _ in said[fault.b if fault.a == ours.name else fault.a][fault.prompt]]
            fault.settled = settle(fault, tokens)
            left += [] if fault.settled else [(fault, tokens)]
    if left:
        witness(left)
    for fault, _ in left:
        if not fault.settled:
            report.trouble(OUTPUTS_DIFFER, describe(fault, outputs.noise))


def _pair(outputs: Outputs, a: str, x_all: Sequence[Greedy], b: str, y_all: Sequence[Greedy]) -> None:
    """Add the pair and where it parts."""
    outputs.pairs.append((a, b))
    for i, (x, y) in enumerate(zip(x_all, y_all, strict=True)):
        at = first_difference(x, y)
        if at is not None:
            outputs.divergences.append(Divergence(a, b, i, at, x[at][0], y[at][0], x[at][1], y[at][1]))


def _noise(outputs: Outputs, peers: set[str]) -> float:
    """Nats that are noise: what `peers` differ by among themselves, NOISE_NATS at least.

    The most that they were seen to differ by is no bound where many texts part: of two equal sets of partings the
    largest gap is in either as likely. Gaps fall off exponentially (one CPU engine with six ways of rounding, random
    routers: 108 partings, mean 0.160 nats, largest 0.979; by that rule the largest is some 5.3 means), so with ENOUGH
    partings of theirs the bound is what as many as ours exceed in one comparison of a hundred.
    """
    between = [d.gap for d in outputs.divergences if d.a in peers and d.b in peers]
    seen = max([NOISE_NATS, *between])
    known = [gap for gap in between if gap >= 0]
    ours = len(outputs.divergences) - len(between)
    if len(known) < ENOUGH or not ours:
        return seen
    return max(seen, min(FARTHEST * seen, math.log(ours / RARE) * sum(known) / len(known)))


def describe(d: Divergence, noise: float) -> str:
    """One line about a divergence."""
    gaps = "gaps unknown" if d.gap < 0 else f"gaps {d.gap_a:.3f} and {d.gap_b:.3f} nats"
    return (
        f"greedy outputs of {d.a} and {d.b} part at token {d.index} of prompt {d.prompt} ({d.token_a} and {d.token_b}, "
        f"{gaps}; up to {noise:.3f} is noise)"
    )


def compare_tokens(report: Report, tokens: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Each contestant's token ids of the same texts: a difference makes the sides incomparable."""
    ours = report.ours
    if ours is None or ours.name not in tokens:
        return
    for name, theirs in tokens.items():
        differ = sum(list(a) != list(b) for a, b in zip(tokens[ours.name], theirs, strict=True))
        if differ:
            report.trouble(
                NOT_COMPARABLE, f"{name} tokenises {differ} of {len(theirs)} texts otherwise than {ours.name}"
            )


def compare_texts(report: Report, ours: str, own: Sequence[Answer], peer: str, theirs: Sequence[Answer]) -> None:
    """Add to `report.outputs` a peer whose stream names no tokens: texts are compared, and where they part the gap is
    that of our token there. A shorter text that agrees as far as it goes is equal (the peer may stop early)."""
    found = report.outputs
    found.pairs.append((ours, peer))
    for i, (a, b) in enumerate(zip(own, theirs, strict=True)):
        same = next((k for k, (x, y) in enumerate(zip(a.text, b.text, strict=False)) if x != y), None)
        if same is None:
            continue
        # the peer's chunk that brought the difference may have begun earlier, with a token of which ours is the start
        at, (_, end) = _tokens_at(a, _chunk_start(b, same))[0], _tokens_at(a, same)
        gap = min((g for g in a.gaps[at:end] if g >= 0), default=-1.0)
        fault = Divergence(ours, peer, i, at, a.tokens[at] if at < len(a.tokens) else -1, -1, gap, -1.0)
        found.divergences.append(fault)
        if fault in found.faults():
            report.trouble(OUTPUTS_DIFFER, describe(fault, found.noise))


def _chunk_start(answer: Answer, char: int) -> int:
    """Where in the text the chunk with character `char` begins."""
    start = 0
    for piece in answer.pieces:
        if char < start + len(piece):
            break
        start += len(piece)
    return start


def _tokens_at(answer: Answer, char: int) -> tuple[int, int]:
    """The tokens [start, end) of the chunk that holds character `char` of the text: which of them is not known."""
    length = start = 0
    for piece, tokens in zip(answer.pieces, answer.piece_tokens, strict=True):
        length += len(piece)
        if char < length:
            return start, start + tokens
        start += tokens
    return start, start
