"""Two plots as SVG text: bars of ratios with intervals on a logarithmic axis, and lines with markers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("var(--ours)", "var(--b)", "var(--c)", "var(--d)")
_WIDTH = 860


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and its interval."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) of one side."""

    label: str
    points: Sequence[tuple[float, float]]


def _svg(height: float, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" role="img">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str = "currentColor", more: str = "") -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{colour}" {more}/>'


def ratio_bars(bars: Sequence[Bar]) -> str:
    """Bars from 1, to the right where ours is better, in the colour of loss to the left."""
    usable = [b for b in bars if b.low > 0 and math.isfinite(b.high)]
    if not usable:
        return ""
    low = min(0.5, *(b.low for b in usable)) / 1.1
    high = max(2.0, *(b.high for b in usable)) * 1.1
    left, right, step = 330, _WIDTH - 70, 24

    def x(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    height = step * len(usable) + 34
    body = []
    for tick in (0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100):
        if low <= tick <= high:
            faint = 'stroke-opacity=".25"' if tick != 1 else 'stroke-width="1.5"'
            body += [
                _stroke(x(tick), 4, x(tick), height - 24, more=faint),
                _text(x(tick), height - 8, f"{tick:g}", "middle"),
            ]
    for i, b in enumerate(usable):
        y = 8 + step * i
        colour = "var(--bad)" if b.value < 1 else "var(--ours)"
        start, end = sorted((x(1), x(b.value)))
        place = f'x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" height="14"'
        body.append(f'<rect {place} fill="{colour}" fill-opacity=".6"/>')
        body.append(_stroke(x(b.low), y + 7, x(b.high), y + 7, more='stroke-width="2"'))
        body += [_text(left - 8, y + 12, b.label, "end"), _text(right + 8, y + 12, f"{b.value:.2f}")]
    return _svg(height, body)


def _ticks(high: float) -> list[float]:
    """About five round numbers from 0 to `high`."""
    step = 10 ** math.floor(math.log10(high / 4)) if high > 0 else 1.0
    step *= next((m for m in (1, 2, 5, 10) if high / (step * m) <= 6), 10)
    return [step * i for i in range(int(high / step) + 1)]


def line_plot(lines: Sequence[Line], x_name: str, y_name: str) -> str:
    """Lines with markers over a linear axis from 0; empty without points."""
    points = [p for line in lines for p in line.points]
    if not points:
        return ""
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    top = max(p[1] for p in points) or 1.0
    left, right, upper, lower = 70, _WIDTH - 20, 26, 236

    def x(value: float) -> float:
        return left + (right - left) * ((value - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def y(value: float) -> float:
        return lower - (lower - upper) * value / top

    body = [_text(left, 14, y_name, "end"), _text(right, lower + 32, x_name, "end")]
    for tick in _ticks(top):
        body += [
            _stroke(left, y(tick), right, y(tick), more='stroke-opacity=".2"'),
            _text(left - 6, y(tick) + 4, f"{tick:g}", "end"),
        ]
    whole = all(p[0] == int(p[0]) for p in points)
    middle = round((x0 + x1) / 2) if whole else (x0 + x1) / 2
    for value in sorted({x0, middle, x1}):
        body.append(_text(x(value), lower + 16, f"{value:.4g}", "middle"))
    at = left + 20.0
    for line, colour in zip(lines, _COLOURS * (1 + len(lines) // len(_COLOURS)), strict=False):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        body += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="{colour}"/>' for a, b in line.points]
        body += [f'<circle cx="{at:.0f}" cy="10" r="4" fill="{colour}"/>', _text(at + 8, 14, line.label)]
        at += 30 + 7.5 * len(line.label)
    return _svg(lower + 40, body)
