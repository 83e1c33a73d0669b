"""The report on a terminal: what was compared, one table with wins and losses alike, the troubles."""

from __future__ import annotations

from ftgguf.bench import figures, outputs
from ftgguf.bench.headline import headline, name_of_ours
from ftgguf.bench.llama_bench import table
from ftgguf.bench.report import Contestant, Report, Row, Turn
from ftgguf.bench.stats import Ratio, deviation, mean, percentile
from ftgguf.bench.wording import ratio_in_words, value_in_words

READING = """is better: speeds divided, times inverted; of p50 where percentiles are shown, of p99 for gaps.
n: samples, and in how many rounds (or conversations) they were taken; 95 % intervals are over rounds where there are
any: that of three holds the truth only about 3 times in 4, of five 9 in 10, and below three there is no verdict. A
verdict also asks Student's t, so that of twenty rows of two equal sides one is `better` or `worse` by chance.
"""
SLOW_S = (10, 60, 120)
"""Turns longer than this are counted: patience, a client's default timeout, a proxy's."""


def render(report: Report) -> str:
    """The whole report as text; its tables are Markdown."""
    parts = [header(report), rows_table(report), memory_table(report)]
    for t in figures.tables(report):
        parts.append(f"{t.title}\n\n{table(t.columns, t.rows, t.left)}" + (f"{t.note}\n" if t.note else ""))
    if report.turns:
        parts.append(turns_table(report))
        parts.append(table(*slow_table(report), left=("",)))
    parts.append(footer(report))
    return "\n".join(part for part in parts if part)


def header(report: Report) -> str:
    """What was compared, on what, and how."""
    lines = [f"ftgguf bench: {report.kind}", f"command   {report.command}"]
    for title, facts in (("model", report.model), ("host", report.host), ("settings", report.settings)):
        if facts:
            lines.append(f"{title:<9} " + "; ".join(f"{k} {v}" for k, v in facts.items()))
    for c in report.contestants:
        lines.append(f"{c.name}: {c.build or 'build unknown'}" + (f", {c.layout} weights" if c.layout else ""))
        lines.append(f"    instruction sets: {' '.join(c.isa) or 'unknown'}")
        if c.command:
            lines.append(f"    command: {c.command}")
        lines += [f"    note: {note}" for note in c.notes]
        lines += [f"    FAILED: {error}" for error in c.errors]
    lines += [f"note: {note}" for note in report.notes]
    lines += output_lines(report)
    return "\n".join(lines) + "\n"


def output_lines(report: Report) -> list[str]:
    """How many greedy outputs agree, pair by pair, and every divergence that noise does not explain."""
    found = report.outputs
    lines = []
    for a, b in found.pairs:
        parted = [d for d in found.divergences if (d.a, d.b) == (a, b)]
        line = f"outputs: {a} and {b}: {found.prompts - len(parted)} of {found.prompts} greedy outputs of "
        line += f"{found.length} tokens equal"
        if parted:
            gaps = [d.gap for d in parted if d.gap >= 0]
            far = f"gap up to {max(gaps):.3f} nats, {sum(gaps) / len(gaps):.3f} on average" if gaps else "gaps unknown"
            line += f", {len(parted)} part ({far})"
        lines.append(line)
    lines += [f"no fault: {outputs.describe(d, found.noise)}; {d.settled}" for d in found.divergences if d.settled]
    lines += ["FAULT: " + outputs.describe(d, found.noise) for d in found.faults()]
    return lines


def percentiles(row: Row, samples: list[float]) -> list[tuple[str, float]]:
    """What is shown of pooled samples, as (name, value): the median, and what is worst for a user of one in ten and of
    one in a hundred where there are so many samples, or ratios compare it; else the worst of all."""
    last = ("min", min(samples)) if row.higher_is_better else ("max", max(samples))
    ten, hundred = (10, 1) if row.higher_is_better else (90, 99)
    found = [("p50", percentile(samples, 50))]
    if len(samples) >= 10:
        found.append((f"p{ten}", percentile(samples, ten)))
    if len(samples) >= 100:
        found.append((f"p{hundred}", percentile(samples, hundred)))
    elif len(samples) > 1 and row.compared == 99:
        found.append(("p99", percentile(samples, 99)))  # what ratios compare is shown, few samples or many
    elif len(samples) > 1:
        found.append(last)
    return found


def metric_of(row: Row) -> str:
    """The metric, with the names of the percentiles that its cells show."""
    return f"{row.metric} {'/'.join(_names(row))}".rstrip()


def _names(row: Row) -> list[str]:
    longest = max(row.samples.values(), key=len, default=[])
    return [name for name, _ in percentiles(row, longest)] if row.quantiles and longest else []


def cell(row: Row, c: Contestant) -> str:
    """One side's figures: mean ± sd (one sample has none), or its percentiles."""
    if c.name in row.failures:
        return "failed"
    samples = row.samples.get(c.name, [])
    if not samples:
        return "-"
    if row.quantiles:
        shown = percentiles(row, samples)
        usual = [name for name, _ in shown] == _names(row)
        return " / ".join(value_in_words(x) if usual else f"{name} {value_in_words(x)}" for name, x in shown)
    spread = f" ± {value_in_words(deviation(samples))}" if len(samples) > 1 else ""
    return value_in_words(mean(samples)) + spread


def ratio_cell(ratio: Ratio | None) -> str:
    """`ratio_in_words`, or that there is none."""
    return "-" if ratio is None else ratio_in_words(ratio)


def count_cell(row: Row) -> str:
    """How many samples the sides have, `3-5` where not all have as many, and of how many rounds."""

    def span(counts: list[int]) -> str:
        low, high = min(counts, default=0), max(counts, default=0)
        return f"{high}" if low == high else f"{low}-{high}"

    several = any(n > 1 for counts in row.blocks.values() for n in counts)
    rounds = f" in {span([len(b) for b in row.blocks.values()])}" if several else ""
    return span([len(x) for x in row.samples.values()]) + rounds


def rows_table(report: Report) -> str:
    """Every row, wins and losses alike."""
    if not report.rows:
        return ""
    compared = report.ours is not None and report.peers
    columns = ["workload", "metric", "n", *(c.name for c in report.contestants)]
    if compared:
        columns += [f"ours / {p.name} [95 %]" for p in report.peers]
    lines = []
    for row in report.rows:
        line = [row.workload, metric_of(row), count_cell(row), *(cell(row, c) for c in report.contestants)]
        if compared:
            line += [ratio_cell(report.ratio(row, p)) for p in report.peers]
        lines.append(line)
    note = f"ratios above 1 mean {name_of_ours(report)} {READING}" if compared else ""
    return table(columns, lines, left=("workload", "metric")) + note


def memory_table(report: Report) -> str:
    """Resident sets and loading."""
    known = [c for c in report.contestants if c.rss_peak or c.load_seconds]
    if not known:
        return ""
    rows = []
    for c in known:
        sizes = [f"{size / 2**20:.0f}" if size else "-" for size in (c.rss_peak, c.rss_steady, c.vram_peak)]
        rows.append([c.name, *sizes, f"{c.load_seconds:.1f}" if c.load_seconds else "-"])
    return table(["", "RSS peak MiB", "RSS steady MiB", "VRAM peak MiB", "load s"], rows, left=("",))


def turns_table(report: Report) -> str:
    """Sessions turn by turn: the prompt, and for each side what was cached and the time to the first token."""
    columns, rows = turn_rows(report)
    return table(columns, rows, left=("session", "kind"))


def turn_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of `turns_table`: means over the rounds; a turn that failed in any round says so."""
    names = [c.name for c in report.contestants]
    grouped: dict[tuple[str, int, str], dict[str, list[Turn]]] = {}
    for turn in report.turns:
        grouped.setdefault((turn.session, turn.turn, turn.kind), {}).setdefault(turn.contestant, []).append(turn)
    rows = []
    for (session, number, kind), sides in grouped.items():
        row = [session, str(number), kind, str(max(t.prompt_n for turns in sides.values() for t in turns))]
        for name in names:
            turns = sides.get(name, [])
            if not turns or any(t.error for t in turns):
                row += ["-", "failed" if turns else "-"]
                continue
            cached = min(t.cached_n for t in turns)
            waits = [t.ttft_ms for t in turns if t.ttft_ms >= 0]
            row += [str(cached) if cached >= 0 else "-", value_in_words(mean(waits)) if waits else "-"]
        rows.append(row)
    columns = ["session", "turn", "kind", "prompt"]
    for name in names:
        columns += [f"cached {name}", f"TTFT ms {name}"]
    return columns, rows


def slow_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: for each side how many turns took longer than SLOW_S, and how many failed."""
    rows = []
    for c in report.contestants:
        turns = [t for t in report.turns if t.contestant == c.name]
        over = [str(sum(t.total_ms > s * 1e3 for t in turns)) for s in SLOW_S]
        rows.append([c.name, str(len(turns)), *over, str(sum(bool(t.error) for t in turns))])
    return ["", "turns", *(f"over {s} s" for s in SLOW_S), "failed"], rows


def footer(report: Report) -> str:
    """Headline, troubles and the exit status."""
    lines = headline(report)
    if report.interrupted:
        lines.append(f"INTERRUPTED: {report.interruption}")
    lines += [f"TROUBLE (exit status {t.status}): {t.text}" for t in report.troubles]
    return "\n".join(lines) + ("\n" if lines else "")
