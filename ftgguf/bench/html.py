"""The report as one self-contained page: tables and plots as inline SVG, no script, nothing fetched."""

from __future__ import annotations

from html import escape

from ftgguf.bench import svg, table
from ftgguf.bench.report import Contestant, Report, Row
from ftgguf.bench.stats import mean

_STYLE = """
:root { color-scheme: light dark; --ours: #2563eb; --b: #d97706; --c: #6b7280; --d: #059669; --bad: #dc2626; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
td { text-align: right; white-space: nowrap; } td.text, th { text-align: left; }
.bad { color: var(--bad); font-weight: 600; } code { overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
dt { font-weight: 600; margin-top: .4rem; } dd { margin: 0; overflow-wrap: anywhere; }
"""


_LEGEND = """<h2>How to read this</h2><p>Each row is one kind of work, measured in rounds in which the sides take turns.
A ratio above 1 means ftgguf is better: speeds are divided, times inverted (of p50 for the time to the first token, of
p99 for gaps between tokens). The brackets are a 95 % bootstrap interval; where it lies wholly below 1 ftgguf is slower
and the row says so.</p>"""


def page(report: Report) -> str:
    """The page."""
    parts = [
        f"<h1>ftgguf bench: {escape(report.kind)}</h1>",
        _verdict(report),
        _facts(report),
        _sides(report),
        _LEGEND,
        _ratio_plot(report),
        _rows(report),
        _turn_plots(report),
        _rate_plot(report),
        _outputs(report),
        _notes(report),
    ]
    body = "\n".join(part for part in parts if part)
    title = escape(f"ftgguf bench: {report.kind}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _verdict(report: Report) -> str:
    lines = []
    if report.interrupted:
        lines.append('<p class="bad">Interrupted: what was measured until then is shown.</p>')
    lines += [f'<p class="bad">{escape(t.text)} (exit status {t.status})</p>' for t in report.troubles]
    headline = table.headline(report)
    if headline:
        lines.append(f"<p>{escape(headline)}</p>")
    return "".join(lines)


def _facts(report: Report) -> str:
    items = [("command", report.command)]
    for facts in (report.model, report.host, report.settings):
        items += list(facts.items())
    return "<h2>What was measured</h2><dl>" + "".join(_item(k, v) for k, v in items) + "</dl>"


def _item(name: str, value: str) -> str:
    return f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"


def _table(columns: list[str], rows: list[list[str]], text: int = 1) -> str:
    """The first `text` columns are left-aligned; cells that speak of failure or loss are marked."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)

    def cell(i: int, value: str) -> str:
        marks = ["text"] if i < text else []
        marks += ["bad"] if "failed" in value or "worse" in value else []
        return f'<td class="{" ".join(marks)}">{escape(value)}</td>'

    lines = "".join("<tr>" + "".join(cell(i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _sides(report: Report) -> str:
    rows = []
    for c in report.contestants:
        sizes = [f"{x / 2**20:.0f}" if x else "-" for x in (c.rss_peak, c.rss_steady, c.vram_peak)]
        rows.append([c.name, c.build or "unknown", c.layout or "-", " ".join(c.isa) or "unknown", *sizes])
    columns = ["side", "build", "weights", "instruction sets", "RSS peak MiB", "RSS steady MiB", "VRAM peak MiB"]
    commands = "".join(_item(c.name, c.command) for c in report.contestants if c.command)
    return f"<h2>The sides</h2>{_table(columns, rows, text=4)}<dl>{commands}</dl>"


def _ratio_plot(report: Report) -> str:
    bars = []
    for row in report.rows:
        for peer in report.peers:
            ratio = report.ratio(row, peer)
            if ratio is not None:
                bars.append(svg.Bar(f"{_title(row)} / {peer.name}", ratio.value, ratio.low, ratio.high))
    return "<h2>Ratios</h2>" + svg.ratio_bars(bars) if bars else ""


def _title(row: Row) -> str:
    return f"{row.workload} {row.metric}" + (f" p{row.compared}" if row.compared else "")


def _rows(report: Report) -> str:
    if not report.rows:
        return ""
    columns = ["workload", "metric", "n", *(c.name for c in report.contestants)]
    peers = report.peers if report.ours is not None else []
    columns += [f"ours / {p.name} [95 %]" for p in peers]
    rows = [_row(report, row, peers) for row in report.rows]
    return "<h2>All figures</h2>" + _table(columns, rows, text=2)


def _row(report: Report, row: Row, peers: list[Contestant]) -> list[str]:
    n = max((len(s) for s in row.samples.values()), default=0)
    cells = [row.workload, row.metric + (" p50/p90/p99" if row.quantiles else ""), str(n)]
    cells += [table.cell(row, c) for c in report.contestants]
    return cells + [table.ratio_cell(report.ratio(row, p)) for p in peers]


def _turn_plots(report: Report) -> str:
    """Time to the first token by turn, a plot a session."""
    parts = []
    for session in dict.fromkeys(t.session for t in report.turns):
        lines = []
        for c in report.contestants:
            turns = [t for t in report.turns if (t.session, t.contestant) == (session, c.name) and not t.error]
            numbers = sorted({t.turn for t in turns})
            lines.append(svg.Line(c.name, [(n, mean([t.ttft_ms for t in turns if t.turn == n])) for n in numbers]))
        parts.append(f"<h3>{escape(session)}</h3>" + svg.line_plot(lines, "turn", "TTFT ms"))
    return "<h2>Time to the first token by turn</h2>" + "".join(parts) if parts else ""


def _rate_plot(report: Report) -> str:
    """Tokens per second: over a session's time for traces, over rounds for samples."""
    if report.turns:
        lines = []
        for c in report.contestants:
            points: list[tuple[float, float]] = []
            offset, last = 0.0, ""
            for t in (t for t in report.turns if t.contestant == c.name and not t.error):
                if t.session != last:
                    offset, last = (points[-1][0] if points else 0.0), t.session
                if t.total_ms > t.ttft_ms and t.n_gen > 1:
                    rate = (t.n_gen - 1) / (t.total_ms - t.ttft_ms) * 1e3
                    points.append((offset + t.started_s + t.total_ms / 1e3, rate))
            lines.append(svg.Line(c.name, points))
        return "<h2>Generation speed over time</h2>" + svg.line_plot(lines, "s", "tok/s")
    parts = []
    for row in report.rows:
        if row.metric.startswith("tok/s") and max((len(s) for s in row.samples.values()), default=0) > 1:
            lines = [
                svg.Line(c.name, list(enumerate(row.samples.get(c.name, []), start=1))) for c in report.contestants
            ]
            parts.append(f"<h3>{escape(row.workload)}</h3>" + svg.line_plot(lines, "round", row.metric))
    return "<h2>Speed over the rounds</h2>" + "".join(parts) if parts else ""


def _outputs(report: Report) -> str:
    lines = table.output_lines(report)
    if not lines:
        return ""
    items = "".join(f"<li{' class=bad' if line.startswith('FAULT') else ''}>{escape(line)}</li>" for line in lines)
    return f"<h2>Do they say the same?</h2><ul>{items}</ul>"


def _notes(report: Report) -> str:
    lines = list(report.notes)
    for c in report.contestants:
        lines += [f"{c.name}: {note}" for note in c.notes]
        lines += [f"{c.name} failed: {error}" for error in c.errors]
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(x)}</li>" for x in lines) + "</ul>" if lines else ""
