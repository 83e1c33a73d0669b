"""The answer of a comparison in a few lines: ratios against the best peer, losses as plainly as gains, or why none."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ftgguf.bench.report import NOT_COMPARABLE, OUTPUTS_DIFFER, Contestant, Report, Row
from ftgguf.bench.stats import Ratio
from ftgguf.bench.wording import ratio_in_words, value_in_words

READING, WRITING, FIRST_TOKEN = "reading prompts", "writing", "time to the first token"


@dataclass(frozen=True, slots=True)
class Item:
    """One row against the peer that is best at it."""

    row: Row
    peer: Contestant
    ratio: Ratio


def name_of_ours(report: Report) -> str:
    """Whose ratios they are: a proxy may compare two servers of other makes."""
    return report.ours.name if report.ours is not None else "ftgguf"


def withheld(report: Report) -> str:
    """Why there is no headline although there are two sides; empty where there is one, or nothing to compare."""
    if report.ours is None or not report.peers:
        return ""
    reasons = [t.text for t in report.troubles if t.status in (OUTPUTS_DIFFER, NOT_COMPARABLE)]
    reasons += [f"{p.name}: {why}" for p in report.peers if (why := report.no_ratio(p))]
    # the reasons of troubles say what follows from them already
    return reasons[0].split(": no ratio is given")[0].removesuffix(", no ratio is given") if reasons else ""


def items(report: Report) -> list[Item]:
    """Every row that has a fair ratio; none where the headline is withheld."""
    if report.ours is None or withheld(report):
        return []
    found = []
    for row in report.rows:
        peer = report.best_peer(row)
        ratio = report.ratio(row, peer) if peer is not None else None
        if ratio is not None and peer is not None:
            found.append(Item(row, peer, ratio))
    return found


def kind(row: Row) -> str:
    """What of the headline the row belongs to: speeds and times to the first token, those of whole prompts left out
    where they are its speed once more. Empty for other rows, which are counted only."""
    reads = re.fullmatch(r"pp\d+(?: @ d\d+)?", row.workload) is not None
    if row.metric.startswith("tok/s"):
        return READING if reads else WRITING
    return FIRST_TOKEN if row.metric == "TTFT ms" and not reads else ""


def groups(report: Report) -> list[tuple[str, list[Item]]]:
    """The headline's items by `kind`, in the order in which a user meets them: wait, read, write."""
    every = items(report)
    found = [(title, [i for i in every if kind(i.row) == title]) for title in (READING, FIRST_TOKEN, WRITING)]
    return [(title, some) for title, some in found if some]


def tally(report: Report) -> str:
    """How all rows went, those that the headline does not name included."""
    every = items(report)
    if not every:
        return ""
    said = [i.ratio.verdict for i in every]
    us = name_of_ours(report)
    words = {"better": f"{us} better", "worse": f"{us} worse", "even": "not told apart", "too few": "too few samples"}
    counts = [f"{text} in {said.count(verdict)}" for verdict, text in words.items() if verdict in said]  # type: ignore[arg-type]
    ours = report.ours
    lost = [r.workload for r in report.rows if ours is not None and ours.name in r.failures]
    failed = f"; {us} failed at {', '.join(lost)}" if lost else ""
    return f"of all {len(every)} rows of figures, each against the best peer there: {', '.join(counts)}{failed}"


def besides(report: Report) -> str:
    """Memory and loading, ours and the least of any peer's: a speed may have been bought with them."""
    ours = report.ours
    if ours is None or not items(report):
        return ""
    parts = []
    for name, field, unit in (
        ("RSS peak", "rss_peak", 2**20),
        ("VRAM peak", "vram_peak", 2**20),
        ("loading", "load_seconds", 1.0),
    ):
        own, theirs = getattr(ours, field), [x for p in report.peers if (x := getattr(p, field))]
        if own and theirs:
            shown = [f"{x / unit:.1f} s" if unit == 1.0 else f"{x / unit:.0f} MiB" for x in (own, min(theirs))]
            parts.append(f"{name} {shown[0]} (the least of a peer: {shown[1]})")
    return "; ".join(parts)


def ahead_all_the_same(report: Report) -> list[str]:
    """A line for each peer whose lesser instruction sets forbid a ratio, with what it is better at even so: that is
    lost in any case."""
    lines = []
    for peer in report.peers:
        if not peer.lower_isa or report.ours is None or report.outputs.faults():
            continue
        lost = []
        for row in report.rows:
            if row.metric == "TTFT ms" and not kind(row):
                continue  # its speed once more
            ratio = report.bare_ratio(row, peer)
            if ratio is None or not (ratio.verdict == "worse" or (ratio.verdict == "too few" and ratio.value < 1)):
                continue
            own, theirs = (value_in_words(row.statistic(row.samples[n])) for n in (report.ours.name, peer.name))
            shown = f"{row.metric} p{row.compared}" if row.compared else row.metric
            few = f", too few {ratio.unit}" if ratio.verdict == "too few" else ""
            lost.append(f"{row.workload} {shown} ({theirs}, ours {own}{few})")
        if lost:
            lines.append(f"{peer.name} is ahead all the same in: {'; '.join(lost)}")
        apart = [f"{r.workload} {r.metric}" for r in report.rows if {peer.name, report.ours.name} & {*r.clocks_apart}]
        if apart:
            lines.append(f"{peer.name}: left out, as a side's clock and the client's disagree: {', '.join(apart)}")
    return lines


def _in_words(item: Item) -> str:
    joint = "than" if item.ratio.verdict in ("better", "worse") else "of"
    return f"{item.row.workload} {ratio_in_words(item.ratio)} {joint} {item.peer.name}"


def headline(report: Report) -> list[str]:
    """All of it as lines of text; empty where nothing is compared."""
    why = withheld(report)
    lines = [f"no headline ratio: {why}"] if why else []
    found = groups(report)
    if found:
        busy = "" if report.quiet else " (the machine was busy with other work: intervals do not cover that)"
        lines.append(f"{name_of_ours(report)} against the best of its peers, above 1 is better{busy}:")
        for title, some in found:
            lines.append(f"  {title}: {'; '.join(map(_in_words, some))}")
        lines += [f"  {line}" for line in (tally(report), besides(report)) if line]
    return lines + ahead_all_the_same(report)
