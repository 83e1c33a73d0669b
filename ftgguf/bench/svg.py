"""Plots as SVG text: ratios with intervals on a logarithmic axis, lines with markers, and bars side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ftgguf.bench.report import Plot
from ftgguf.bench.wording import interval_in_words

COLOURS = ("--ours", "--b", "--c", "--d", "--e", "--f")
"""Variables of the page's style, in the order of the lines."""
WIDE, NARROW = 860, 430
"""Widths of plots: alone in a row, or two of them."""
_LEFT, _UPPER = 64, 34


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and its interval."""

    label: str
    value: float
    low: float
    high: float

    @property
    def colour(self) -> str:
        """Decided by the interval, not by the value: better, worse, or not told apart."""
        if self.low == self.high:
            return "--even"  # one sample
        return "--good" if self.low > 1 else "--bad" if self.high < 1 else "--even"


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {box} role="img" aria-label="{escape(label, quote=True)}">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, more: str = 'class="grid"') -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {more}/>'


def _number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def ratio_bars(bars: Sequence[Bar], ours: str = "ftgguf") -> str:
    """Bars from 1, to the right where ours is better, with the interval as a whisker and both as figures."""
    usable = [b for b in bars if b.low > 0 and math.isfinite(b.high)]
    if not usable:
        return ""
    # one wild interval must not squeeze the others: whiskers are cut at the edge
    low = max(0.02, min(0.5, *(b.low for b in usable))) / 1.1
    high = min(50.0, max(2.0, *(b.high for b in usable))) * 1.1
    left, right, step = 250, WIDE - 150, 26

    def x(value: float) -> float:
        return left + (right - left) * math.log(min(max(value, low), high) / low) / math.log(high / low)

    height = step * len(usable) + 50
    body = [
        _text(x(1) - 8, 14, "peer is better", "end", 'class="faint"'),
        _text(x(1) + 8, 14, f"{ours} is better", more='class="faint"'),
    ]
    for tick in (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20, 50):
        if low <= tick <= high:
            body.append(_stroke(x(tick), 22, x(tick), height - 22, 'class="one"' if tick == 1 else 'class="grid"'))
            body.append(_text(x(tick), height - 6, f"{tick:g}x", "middle", 'class="faint"'))
    for i, b in enumerate(usable):
        y = 28 + step * i
        start, end = sorted((x(1), x(b.value)))
        place = f'x="{start:.1f}" y="{y}" width="{max(end - start, 1.5):.1f}" height="16" rx="2"'
        body.append(f'<rect {place} fill="var({b.colour})" fill-opacity=".75"/>')
        body.append(_stroke(x(b.low), y + 8, x(b.high), y + 8, 'class="whisker"'))
        body += [_stroke(x(end), y + 3, x(end), y + 13, 'class="whisker"') for end in (b.low, b.high)]
        interval = f" {interval_in_words(b.low, b.high)}" if b.low != b.high else ""
        body += [_text(left - 10, y + 12, b.label, "end"), _text(right + 10, y + 12, f"{b.value:.2f}{interval}")]
    return _svg(WIDE, height, "ratios with their intervals", body)


def ticks(high: float) -> list[float]:
    """Three to six round numbers from 0 to `high`."""
    step = 10 ** math.floor(math.log10(high / 4)) if high > 0 else 1.0
    step *= next((m for m in (1, 2, 5, 10) if high / (step * m) <= 6), 10)
    return [step * i for i in range(int(high / step * 1.000001) + 1)]


@dataclass(frozen=True, slots=True)
class _Area:
    """Where the points of a plot go, and what the top of its y axis stands for."""

    width: float
    top: float

    @property
    def right(self) -> float:
        return self.width - 16

    @property
    def lower(self) -> float:
        return 226 if self.width > 600 else 166

    def y(self, value: float) -> float:
        return self.lower - (self.lower - _UPPER) * value / self.top

    def svg(self, label: str, body: Sequence[str]) -> str:
        return _svg(self.width, self.lower + 42, label, body)


def draw(plot: Plot, width: float = WIDE) -> str:
    """The plot; empty without points."""
    values = [p[1] for line in plot.lines for p in line.points]
    if not values:
        return ""
    area = _Area(width, max(values) or 1.0)
    return _bars(plot, area) if plot.categories else _lines(plot, area)


def _frame(plot: Plot, area: _Area) -> list[str]:
    """The y axis with its grid, and the names of both."""
    faint = 'class="faint"'
    body = [_text(4, 14, plot.y_name, more=faint), _text(area.right, area.lower + 34, plot.x_name, "end", faint)]
    for tick in ticks(area.top):
        y = area.y(tick)
        body += [_stroke(_LEFT, y, area.right, y), _text(_LEFT - 8, y + 4, _number(tick), "end", faint)]
    return body


def _legend(plot: Plot, area: _Area) -> list[str]:
    """Labels above the plot, from the right, clear of the y axis' name; squeezed where they are many."""
    lines = plot.lines
    if len(lines) < 2:
        return []
    widths = [24 + 6.8 * len(line.label) for line in lines]
    at = max(16 + 6.6 * len(plot.y_name), area.right - sum(widths))
    squeeze = min(1.0, (area.right - at) / sum(widths))
    body = []
    for i, (line, width) in enumerate(zip(lines, widths, strict=True)):
        body.append(f'<rect x="{at:.0f}" y="5" width="10" height="10" rx="2" fill="var({_colour(i)})"/>')
        more = f'textLength="{(width - 24) * squeeze:.0f}" lengthAdjust="spacingAndGlyphs"' if squeeze < 1 else ""
        body.append(_text(at + 14, 14, line.label, more=more))
        at += width * squeeze
    return body


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _lines(plot: Plot, area: _Area) -> str:
    xs = [p[0] for line in plot.lines for p in line.points]
    x0, x1 = min(xs), max(xs)

    def x(value: float) -> float:
        share = math.sqrt(value / 100) if plot.root_x else (value - x0) / (x1 - x0) if x1 > x0 else 0.5
        return _LEFT + 8 + (area.right - _LEFT - 16) * share

    body = _frame(plot, area)
    for value in _x_ticks(plot, x0, x1, 12 if area.width > 600 else 6):
        body.append(_text(x(value), area.lower + 18, f"{value:.4g}", "middle", 'class="faint"'))
    marked = len(xs) <= 60 * len(plot.lines)
    for i, line in enumerate(plot.lines):
        for stroke in _strokes(line.points):
            places = [(f"{x(a):.1f}", f"{area.y(b):.1f}") for a, b in stroke]
            path = " ".join(f"{a},{b}" for a, b in places)
            body.append(f'<polyline points="{path}" fill="none" stroke="var({_colour(i)})" stroke-width="2"/>')
            if marked or len(stroke) == 1:
                body += [f'<circle cx="{a}" cy="{b}" r="2.6" fill="var({_colour(i)})"/>' for a, b in places]
    return area.svg(plot.title, [*body, *_legend(plot, area)])


def _x_ticks(plot: Plot, x0: float, x1: float, most: int) -> list[float]:
    if plot.root_x:
        return [v for v in (1.0, 3.0, 5.0, 11.0, 25.0, 37.0, 60.0, 100.0) if v <= max(x1, 1.0) * 1.2]
    if x1 <= x0:
        return [x0]
    if all(p[0] == int(p[0]) for line in plot.lines for p in line.points):
        step = math.ceil((x1 - x0 + 1) / most)
        return [float(v) for v in range(int(x0), int(x1) + 1, step)]
    return [v for v in ticks(x1) if v >= x0]


def _strokes(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """A point whose x is not above the one before starts a new stroke."""
    found: list[list[tuple[float, float]]] = []
    for p in points:
        if found and p[0] > found[-1][-1][0]:
            found[-1].append(p)
        else:
            found.append([p])
    return found


def _bars(plot: Plot, area: _Area) -> str:
    """Bars side by side, a group for each category."""
    group = (area.right - _LEFT) / len(plot.categories)
    width = min(48.0, group * 0.8 / len(plot.lines))
    body = _frame(plot, area)
    for i, name in enumerate(plot.categories):
        body.append(_text(_LEFT + group * (i + 0.5), area.lower + 18, name, "middle"))
    for k, line in enumerate(plot.lines):
        for at, value in line.points:
            left, y = _LEFT + group * (at + 0.5) + width * (k - len(plot.lines) / 2), area.y(value)
            place = f'x="{left + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{max(0.0, area.lower - y):.1f}"'
            body.append(f'<rect {place} fill="var({_colour(k)})"/>')
            body.append(_text(left + width / 2, y - 4, _number(value), "middle"))
    return area.svg(plot.title, [*body, *_legend(plot, area)])
