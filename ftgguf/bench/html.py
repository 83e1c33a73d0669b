"""The report as one self-contained page: tables and plots as inline SVG, no script, nothing fetched.

Written for a reader who was not there: the answer first, then how to read it, then everything it rests on.
"""

from __future__ import annotations

from html import escape

from ftgguf.bench import figures, headline, svg, table
from ftgguf.bench.headline import FIRST_TOKEN, Item
from ftgguf.bench.report import Plot, Report, Row, Table
from ftgguf.bench.stats import Ratio
from ftgguf.bench.style import STYLE
from ftgguf.bench.wording import in_words, interval_in_words

Cell = str | tuple[str, tuple[str, ...]]
MANY_ROWS = 40
"""Tables with more rows are folded."""

_LEGEND = """<b>A ratio above 1 means {} is better</b>: speeds are divided, times inverted (of the median where
percentiles are shown, as for the time to the first token, TTFT; of the 99th percentile for gaps between tokens, since a
user feels the longest). The brackets hold a 95 % bootstrap interval: where it lies wholly above 1 that side is better,
wholly below 1 it is worse, if Student's t test of the rounds agrees; otherwise this measurement cannot tell the two
apart. Fewer than three samples of a side, or three rounds where a round gives several, give no interval and no
verdict. An interval of three holds the truth only about three times in four, of five nine times in ten, which is why
the test is asked as well: of twenty rows of two equal sides one would look better or
worse by chance. Nothing is left out because it was lost."""
_HOW = {
    "against": "The same work was given to each side in rounds in which the sides took turns, on the same machine.",
    "trace": "The same agent sessions were replayed against each side, in rounds in which the sides took turns.",
    "proxy": "A client's own requests went to the two servers, with its own sampling, at the times when it sent them.",
}
"""By the first word of the report's kind."""


def page(report: Report) -> str:
    """The page."""
    parts = [_title(report), _verdict(report), _ratio_plots(report), _rows(report)]
    # what compares no sides has its answer in the plots
    parts += [_tables(report), _plots(report)] if report.rows else [_plots(report), _tables(report)]
    parts += [_turns(report), _outputs(report), _sides(report), _facts(report), _notes(report)]
    body = "\n".join(part for part in parts if part)
    title = escape(_name(report))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n'


_NAMES = {
    "bw": "ftgguf bench bw: how fast experts reach the GPU and the CPU",
    "cache": "ftgguf bench cache: which experts to keep",
    "proxy": "ftgguf proxy: two servers on real traffic",
    "speed": "ftgguf bench: speed of this engine alone",
}


def _name(report: Report) -> str:
    return _NAMES.get(report.kind) or "ftgguf " + report.kind.replace("trace", "on agent sessions", 1)


def _title(report: Report) -> str:
    file = report.model.get("file", "").rsplit("/", 1)[-1]
    what = [file, report.model.get("type", ""), report.host.get("cpu", ""), report.host.get("gpu", "")]
    known = [w for w in [*what, report.host.get("date", "")[:16]] if w and w != "none"]
    return f'<h1>{escape(_name(report))}</h1><p class="sub">{escape(" · ".join(known))}</p>'


def _call(text: str, *, wrong: bool = False) -> str:
    return f'<p class="call{" wrong" if wrong else ""}">{escape(text)}</p>'


def _verdict(report: Report) -> str:
    """Troubles, then the ratios against the best peer as tiles."""
    parts = []
    if report.interrupted:
        parts.append(_call(f"Interrupted: {report.interruption}.", wrong=True))
    parts += [_call(f"{t.text} (exit status {t.status})", wrong=True) for t in report.troubles]
    if not report.quiet and report.kind != "cache":  # a replay of a trace takes no times
        meaning = "intervals do not cover that" if report.peers else "the figures may be too low"
        parts.append(_call(f"The machine was busy with other work ({report.host['other load']}): {meaning}."))
    parts.append(_headline(report))
    if report.ours is not None and report.peers:
        who = escape(headline.name_of_ours(report))
        parts.append(f"<p>{_HOW.get(report.kind.split()[0], '')} {_LEGEND.format(who)}</p>")
    return "".join(parts)


def _headline(report: Report) -> str:
    """Tiles by what they are about, gains and losses alike, and how all rows went; or why there are none."""
    parts = []
    why = headline.withheld(report)
    if why and not any(t.text.startswith(why) for t in report.troubles):  # what is a trouble stands above
        parts.append(_call(f"No headline ratio: {why}.", wrong=True))
    parts += [_call(f"{line}.", wrong=True) for line in headline.ahead_all_the_same(report)]
    found = headline.groups(report)
    for title, some in found:
        parts.append(f'<h3>{escape(title.capitalize())}</h3><div class="tiles">{"".join(map(_tile, some))}</div>')
    if len(report.peers) > 1 and found:
        parts.append('<p class="faint">Each against the best of the peers at that work.</p>')
    said = [line[:1].upper() + line[1:] for line in (headline.tally(report), headline.besides(report)) if line]
    return "".join([*parts, *(f"<p>{escape(line)}.</p>" for line in said)])


_SAID = {
    "better": ("good", "faster than"),
    "worse": ("bad", "slower than"),
    "even": ("even", "not told apart from"),
}


def _tile(item: Item) -> str:
    ratio = item.ratio
    kind, said = _SAID.get(ratio.verdict, ("even", f"too few {ratio.unit} to judge against"))
    interval = "" if ratio.verdict == "too few" else f" {interval_in_words(ratio.low, ratio.high)}"
    words = in_words(item.row.workload) or item.row.workload
    if headline.kind(item.row) == FIRST_TOKEN:
        words = f"first token: {words}"
    return (
        f'<div class="tile {kind}"><small>{escape(words)}</small><b>{ratio.value:.2f}x</b>'
        f"<i>{said} {escape(item.peer.name)}{interval}</i></div>"
    )


def _table(columns: list[str], rows: list[list[Cell]], left: int = 1) -> str:
    """The first `left` columns are left-aligned; cells that speak of failure or loss are marked. A cell may have
    smaller lines below."""
    head = "".join(f"<th{_kind(i < left)}>{escape(c)}</th>" for i, c in enumerate(columns))

    def cell(i: int, value: Cell) -> str:
        text, more = value if isinstance(value, tuple) else (value, ())
        small = "".join(f"<small{_kind(False, line)}>{escape(line)}</small>" for line in more if line)
        return f"<td{_kind(i < left, text)}>{escape(text)}{small}</td>"

    lines = "".join("<tr>" + "".join(cell(i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    text = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    if len(rows) > MANY_ROWS:
        return f"<details><summary>{len(rows)} rows</summary>{text}</details>"
    return text


def _kind(is_text: bool, value: str = "") -> str:
    kinds = ["text"] if is_text else []
    kinds += ["bad"] if "failed" in value or "worse" in value else ["good"] if value.endswith("better") else []
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _ratio_plots(report: Report) -> str:
    parts = []
    for peer in report.peers:
        bars = []
        for row in report.rows:
            ratio = report.ratio(row, peer)
            if ratio is not None:
                name = f"{row.workload}  {row.metric}" + (f" p{row.compared}" if row.compared else "")
                bars.append(svg.Bar(name, ratio.value, ratio.low, ratio.high))
        if bars:
            image = svg.ratio_bars(bars, headline.name_of_ours(report))
            parts.append(f"<figure><h3>Against {escape(peer.name)}</h3>{image}</figure>")
    return "<h2>Ratios with their 95 % intervals</h2>" + "".join(parts) if parts else ""


def _rows(report: Report) -> str:
    if not report.rows:
        return ""
    columns = ["workload", "metric", "n", *(c.name for c in report.contestants)]
    names = ["", *(r.workload for r in report.rows)]
    rows = [_row(report, row, new=row.workload != before) for before, row in zip(names, report.rows, strict=False)]
    text = "<p>Means ± standard deviation, or the median of n values and below it percentiles, or the worst where they "
    text += (
        "are too few for these; `n in r`: in r rounds. In the last line of a peer's cell the ratio of ours to it.</p>"
    )
    return "<h2>All figures</h2>" + text + _table(columns, rows, 2) + _failures(report)


def _row(report: Report, row: Row, *, new: bool) -> list[Cell]:
    """`new`: the first of its workload, which is put into words."""
    metric, *names = table.metric_of(row).rsplit(" ", 1) if row.quantiles else [row.metric]
    cells: list[Cell] = [(row.workload, (in_words(row.workload) if new else "",))]
    cells += [(metric, tuple(n.replace("/", "; ", 1).replace("/", ", ") for n in names)), table.count_cell(row)]
    for c in report.contestants:
        figure, *tail = table.cell(row, c).split(" / ")
        more = ", ".join(tail)
        cells.append((figure, (more, "" if c.ours else _against(report.ratio(row, c)))))
    return cells


def _against(ratio: Ratio | None) -> str:
    return f"ours {table.ratio_cell(ratio)}" if ratio is not None else ""


def _failures(report: Report) -> str:
    lines = [f"{row.workload}, {name}: {why}" for row in report.rows for name, why in row.failures.items()]
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _tables(report: Report) -> str:
    parts = []
    for t in figures.tables(report):
        note = f'<p class="faint">{escape(t.note)}</p>' if t.note else ""
        parts.append(f"<h2>{escape(t.title)}</h2>{_of(t)}{note}")
    return "".join(parts)


def _of(t: Table) -> str:
    left = next((i for i, c in enumerate(t.columns) if c not in t.left), len(t.columns))
    return _table(t.columns, _plain(t.rows), left)


def _plain(rows: list[list[str]]) -> list[list[Cell]]:
    return [list(row) for row in rows]


def _plots(report: Report) -> str:
    parts = []
    for section in figures.sections(report):
        few = len(section.plots) < 3
        drawn = [_figure(p, svg.draw(p, svg.WIDE if few else svg.NARROW)) for p in section.plots]
        shown = "".join(drawn) if few else f'<div class="pairs">{"".join(drawn)}</div>'
        text = f"<p>{escape(section.text)}</p>" if section.text else ""
        parts.append(f"<h2>{escape(section.title)}</h2>{text}{shown}")
    return "".join(parts)


def _figure(plot: Plot, image: str) -> str:
    note = f"<figcaption>{escape(plot.note)}</figcaption>" if plot.note else ""
    return f"<figure><h3>{escape(plot.title)}</h3>{image}{note}</figure>" if image else ""


def _turns(report: Report) -> str:
    if not report.turns:
        return ""
    columns, rows = table.slow_table(report)
    slow = _table(columns, _plain(rows))
    columns, rows = table.turn_rows(report)
    text = "<p>`cached` are the prompt's tokens that the server says it had already; TTFT is the time to the first "
    text += "token. Means over the rounds.</p>"
    return "<h2>Turn by turn</h2>" + slow + text + _table(columns, _plain(rows), 3)


def _outputs(report: Report) -> str:
    lines = table.output_lines(report)
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    text = (
        "<p>Greedy outputs side by side. Sides may part where their two best tokens are nearly even, which is noise; "
    )
    text += "parting where both are sure is a fault, and then no speed counts.</p>"
    return f"<h2>Do they say the same?</h2>{text}<ul>{items}</ul>"


def _sides(report: Report) -> str:
    if not report.contestants:
        return ""
    rows: list[list[Cell]] = []
    for c in report.contestants:
        sizes = [f"{x / 2**20:.0f}" if x else "-" for x in (c.rss_peak, c.rss_steady, c.vram_peak)]
        load = f"{c.load_seconds:.1f}" if c.load_seconds else "-"
        rows.append([c.name, c.build or "unknown", c.layout or "-", *sizes, load])
    columns = ["side", "build", "weights", "RSS peak MiB", "RSS steady MiB", "VRAM peak MiB", "load s"]
    more = ""
    for c in report.contestants:
        sets = " ".join(c.isa) or "unknown"
        more += f'<h3>{escape(c.name)}</h3><p class="faint">instruction sets: {escape(sets)}</p>'
        more += f"<pre>{escape(c.command)}</pre>" if c.command else ""
        lines = [*c.notes, *(f"failed: {error}" for error in c.errors)]
        more += "<ul>" + "".join(f"<li>{escape(x)}</li>" for x in lines) + "</ul>" if lines else ""
    return f"<h2>The sides</h2>{_table(columns, rows, left=3)}{more}"


def _facts(report: Report) -> str:
    items = [*report.model.items(), *report.host.items(), *report.settings.items()]
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in items)
    return f"<h2>Model, machine, settings</h2><pre>{escape(report.command)}</pre><dl>{facts}</dl>"


def _notes(report: Report) -> str:
    return (
        "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(x)}</li>" for x in report.notes) + "</ul>" if report.notes else ""
    )
