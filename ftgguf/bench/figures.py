"""Which plots a report has, from its raw samples, turns, paces and cache samples, and how each is read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ftgguf.bench.cache_watch import Stretch, by_label, stretches
from ftgguf.bench.report import Line, Plot, Report, Table
from ftgguf.bench.stats import mean
from ftgguf.bench.wording import in_words

GB = 1e9


@dataclass(frozen=True, slots=True)
class Section:
    """Plots under one heading. `text` tells what they show."""

    title: str
    text: str
    plots: list[Plot]


def sections(report: Report) -> list[Section]:
    """Those that have something to show."""
    found = [_turns(report), _speed_over_time(report), _rounds(report), _cache(report)]
    if report.plots:
        found.append(Section("Plots", "", report.plots))
    return [s for s in found if s is not None and s.plots]


def _turns(report: Report) -> Section | None:
    """Time to the first token by turn, a plot a session."""
    plots = []
    for session in dict.fromkeys(t.session for t in report.turns):
        lines = []
        for c in report.contestants:
            mine = [t for t in report.turns if (t.session, t.contestant) == (session, c.name) and not t.error]
            turns = [t for t in mine if t.ttft_ms >= 0]
            numbers = sorted({t.turn for t in turns})
            points = [(float(n), mean([t.ttft_ms for t in turns if t.turn == n])) for n in numbers]
            lines.append(Line(c.name, points))
        if any(line.points for line in lines):
            plots.append(Plot(session, "turn", "TTFT ms", lines))
    text = "How long a user waits for an answer to begin, turn by turn; lower is better. The mean over the rounds."
    return Section("Time to the first token by turn", text, plots)


def _speed_over_time(report: Report) -> Section | None:
    """Over the time of the sessions, or within single generations."""
    if report.turns:
        lines = [Line(c.name, _session_speeds(report, c.name)) for c in report.contestants]
        plot = Plot("All answers", "seconds", "tok/s", [x for x in lines if x.points])
        text = "Speed of each answer at the time when it ended; higher is better. A new stroke is a new round."
        return Section("Generation speed over time", text, [plot] if plot.lines else [])
    plots = []
    for workload in dict.fromkeys(p.workload for p in report.paces):
        lines = []
        for c in report.contestants:
            rounds = [p for p in report.paces if (p.workload, p.contestant) == (workload, c.name)]
            lines.append(Line(c.name, [point for p in rounds for point in p.points]))
        title = f"{workload}: {in_words(workload)}"
        plots.append(Plot(title, "seconds since the request", "tok/s", [x for x in lines if x.points]))
    text = "How fast tokens came as each generation went on; higher is better. One stroke a round."
    return Section("Generation speed over time", text, plots)


def _session_speeds(report: Report, name: str) -> list[tuple[float, float]]:
    mine = [t for t in report.turns if t.contestant == name and not t.error and t.n_gen > 1]
    turns = [t for t in mine if 0 <= t.ttft_ms < t.total_ms]
    if report.kind == "proxy":  # answers end in any order; a replay's rounds begin again at 0
        turns = sorted(turns, key=lambda t: t.at_s + t.total_ms / 1e3)
    return [(t.at_s + t.total_ms / 1e3, (t.n_gen - 1) / (t.total_ms - t.ttft_ms) * 1e3) for t in turns]


def _rounds(report: Report) -> Section | None:
    plots = []
    for row in report.rows:
        by_round = row.paired and not row.quantiles and row.metric.startswith("tok/s")
        if by_round and max((len(s) for s in row.samples.values()), default=0) > 1:
            lines = [
                Line(c.name, [(float(i), v) for i, v in enumerate(row.samples.get(c.name, []), start=1)])
                for c in report.contestants
            ]
            plots.append(Plot(f"{row.workload}: {in_words(row.workload)}", "round", row.metric, lines))
    text = "Whether the machine stayed the same while it was measured: lines that drift apart or jump say no."
    return Section("Speed over the rounds", text, plots)


# -------------------------------------------------------------------------------------------------- the expert cache


def _laid_out(report: Report) -> dict[str, list[tuple[float, Stretch]]]:
    """Stretches with the time at their end, the runs of a server laid end to end, by contestant."""
    found: dict[str, list[tuple[float, Stretch]]] = {}
    for (name, _), run in groupby(stretches(report.cache), key=lambda s: (s.contestant, s.run)):
        line = found.setdefault(name, [])
        offset = line[-1][0] if line else 0.0
        line += [(offset + s.end_s, s) for s in run]
    return found


def _cache(report: Report) -> Section | None:
    laid = _laid_out(report)
    paths = (
        ("over PCIe into slots", "fill_bytes"),
        ("computed in place by the CPU", "cpu_bytes"),
        ("copied for prompts", "prefill_bytes"),
    )
    plots = []
    for name, line in laid.items():
        hits = [(at, 100 * s.hit_rate) for at, s in line if s.wanted]
        plots.append(Plot(f"{name}: experts found on the GPU", "seconds of its service", "%", [Line("hit rate", hits)]))
        moved = [
            Line(what, [(at, getattr(s, field) / s.seconds / GB) for at, s in line if s.seconds > 0])
            for what, field in paths
        ]
        plots.append(Plot(f"{name}: expert data by path", "seconds of its service", "GB/s", moved))
    text = "Of the experts that generation wanted, the share that was in a slot already, and how much expert data went "
    text += "which way, from the server's own counters. Waiting times count, so these are no bandwidths."
    return Section("The expert cache", text, [p for p in plots if any(line.points for line in p.lines)])


def cache_table(report: Report) -> Table | None:
    """What the expert cache did, workload by workload; None without one."""
    found = by_label(report.cache)
    rows = []
    for (name, label), s in found.items():
        if not (s.wanted or s.prefill_bytes or s.cpu_bytes):
            continue
        rate = f"{100 * s.hit_rate:.1f}" if s.wanted else "-"
        sizes = [f"{x / GB:.2f}" for x in (s.fill_bytes, s.cpu_bytes, s.prefill_bytes)]
        rows.append([name, label, f"{s.seconds:.1f}", str(s.wanted), rate, *sizes])
    if not rows:
        return None
    columns = ["side", "while", "s", "experts wanted", "hit %", "GB over PCIe", "GB by the CPU", "GB for prompts"]
    last = report.cache[-1]
    note = (
        f"{last.slots} slots in {last.arena_bytes / GB:.2f} GB at the end; counted by the server, all rounds together"
    )
    return Table("The expert cache", columns, rows, ["side", "while"], note)


def tables(report: Report) -> list[Table]:
    """The report's own tables, and that of the expert cache."""
    cache = cache_table(report)
    return [*report.tables, *([cache] if cache else [])]
