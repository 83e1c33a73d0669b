"""`ftgguf bench cache --trace FILE.npz`: which expert to keep, replayed on a recorded trace.

Prints hit rates and the decode rate that follows from a pair of bandwidths, for each policy of `bench.replay` and each
cache size. Traces come from `ftgguf serve --record-routing FILE`.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from ftgguf.bench.replay import POLICIES, Machine, Result, Trace, load_trace, replay

PERCENT = (3, 5, 11, 25, 37, 60)
GB = 1e9
_trace: Trace
_machine: Machine


def build_parser(prog: str = "ftgguf bench cache") -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(prog, description="Replay a routing trace through expert-cache policies.")
    p.add_argument("--trace", type=Path, required=True, help="npz: experts [tokens, layers, k], offsets of sessions")
    p.add_argument("--tokens", type=int, default=1000, help="tokens to replay (default 1000; 0: all)")
    p.add_argument("--skip", type=int, default=0, help="tokens to leave out at the beginning")
    p.add_argument("--policies", default=",".join(POLICIES), help=f"comma-separated, of {', '.join(POLICIES)}")
    p.add_argument("--percent", default=",".join(map(str, PERCENT)), help="cache sizes, %% of all experts")
    p.add_argument("--bp", type=float, default=25.0, metavar="GB/s", help="link: experts to the GPU (default 25)")
    p.add_argument("--bh", type=float, default=60.0, metavar="GB/s", help="CPU reading experts in place (default 60)")
    p.add_argument("--dram", type=float, default=0.0, metavar="GB/s", help="both at once (default: as --bh)")
    p.add_argument("--expert-bytes", type=float, default=13.2e6, metavar="N", help="bytes of an expert")
    p.add_argument("--dense-ms", type=float, default=0.0, help="time of a token outside of misses")
    p.add_argument("--phi", type=float, help="share of the misses to fill, instead of what the bandwidths give")
    p.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    p.add_argument("-o", "--output", choices=("md", "json"), default="md")
    p.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    return p


def _init(trace: Trace, machine: Machine) -> None:
    global _trace, _machine
    _trace, _machine = trace, machine


def _job(job: tuple[str, int]) -> Result:
    return replay(_trace, job[0], job[1], _machine)


def measure(
    trace: Trace, machine: Machine, policies: Sequence[str], percent: Sequence[int], jobs: int = 1
) -> list[Result]:
    """One `Result` for each policy and size, in that order."""
    todo = [(name, pct) for name in policies for pct in percent]
    if jobs <= 1:
        return [replay(trace, name, pct, machine) for name, pct in todo]
    with ProcessPoolExecutor(jobs, initializer=_init, initargs=(trace, machine)) as pool:
        return list(pool.map(_job, todo))


def _rows(results: Iterable[Result]) -> dict[str, dict[int, Result]]:
    table: dict[str, dict[int, Result]] = {}
    for r in results:
        table.setdefault(r.policy, {})[r.percent] = r
    return table


def to_markdown(trace: Trace, machine: Machine, results: Sequence[Result]) -> str:
    """Three tables: hit rates, transfers a token, tokens a second; the shipped policy in bold."""
    tokens, layers, k = trace.experts.shape
    table = _rows(results)
    percent = list(next(iter(table.values())))
    lines = [
        f"{tokens} tokens in {len(trace.offsets) - 1} sessions, {layers} layers, {trace.n_experts} experts, top {k}. "
        f"Link {machine.bp / GB:g} GB/s, CPU {machine.bh / GB:g} GB/s, {machine.cpu_while_filling() / GB:g} GB/s while "
        f"filling; share of misses filled {machine.share():.3f}, at least one; {machine.expert_bytes / 1e6:g} MB an "
        "expert.",
        "",
    ]
    parts: tuple[tuple[str, Callable[[Result], str]], ...] = (
        ("Hit rate", lambda r: f"{r.hit:.3f}"),
        ("Expert transfers a token, where both paths are equally fast (the larger of both, summed over layers)",
         lambda r: f"{r.transfers:.2f}"),
        ("Tokens a second, misses" + (" and dense part" if machine.dense else " only"), lambda r: f"{r.rate:.1f}"),
    )  # fmt: skip
    for title, show in parts:
        lines += [title, "", "| policy | " + " | ".join(f"{p} %" for p in percent) + " |"]
        lines += ["|---|" + "---|" * len(percent)]
        for name, row in table.items():
            shown = f"**{name}**" if POLICIES[name].shipped else name
            lines.append(f"| {shown} | " + " | ".join(show(row[p]) for p in percent) + " |")
        lines.append("")
    lines += [f"- {name}: {POLICIES[name].what}" for name in table]
    return "\n".join(lines)


def to_json(trace: Trace, machine: Machine, results: Sequence[Result]) -> str:
    """Everything, with the machine and the trace's shape."""
    tokens, layers, k = trace.experts.shape
    head = {"tokens": tokens, "layers": layers, "experts": trace.n_experts, "k": k, "share": machine.share()}
    rows = [asdict(r) | {"rate": r.rate, "shipped": POLICIES[r.policy].shipped} for r in results]
    return json.dumps({"trace": head, "machine": asdict(machine), "results": rows}, indent=1)


COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#5d3a9b", "#00798c", "#8d5a2b", "#777777", "#c2185b", "#2e7d32",
           "#000000")  # fmt: skip


def plot(title: str, series: dict[str, list[tuple[float, float]]], top: float, unit: str) -> str:
    """An SVG line plot: x is the cache size in percent (0..100 by square root), y 0..`top`."""
    w, h, left, bottom = 640, 360, 56, 40

    def x(p: float) -> float:
        return left + (w - left - 150) * math.sqrt(p / 100)

    def y(v: float) -> float:
        return (h - bottom) - (h - bottom - 30) * min(v, top) / top

    out = [f'<svg viewBox="0 0 {w} {h}" width="{w}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"']
    out += [f'font-size="12"><text x="{left}" y="18" font-weight="bold">{html.escape(title)}</text>']
    for i in range(6):
        v = top * i / 5
        out.append(f'<line x1="{left}" x2="{x(100)}" y1="{y(v)}" y2="{y(v)}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y(v) + 4}" text-anchor="end">{v:.3g}</text>')
    for p in (1, 3, 5, 11, 25, 37, 60, 100):
        out.append(f'<text x="{x(p)}" y="{h - bottom + 16}" text-anchor="middle">{p}</text>')
    out.append(f'<text x="{left}" y="{h - 6}">cache, % of all experts; {html.escape(unit)}</text>')
    for i, (name, points) in enumerate(series.items()):
        colour, bold = COLOURS[i % len(COLOURS)], POLICIES[name].shipped
        path = " ".join(f"{x(p):.1f},{y(v):.1f}" for p, v in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{3 if bold else 1.3}"/>')
        weight = ' font-weight="bold"' if bold else ""
        out.append(f'<text x="{x(100) + 8}" y="{34 + 16 * i}" fill="{colour}"{weight}>{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>"])


def to_html(trace: Trace, machine: Machine, results: Sequence[Result]) -> str:
    """A page with both plots and the tables' text."""
    table = _rows(results)
    hits = {n: [(float(p), r.hit) for p, r in row.items()] for n, row in table.items()}
    rates = {n: [(float(p), r.rate) for p, r in row.items()] for n, row in table.items()}
    top = max((v for points in rates.values() for _, v in points if v != float("inf")), default=1.0)
    body = plot("Hit rate", hits, 1.0, "hits / routed experts") + plot("Decode rate", rates, top, "tokens a second")
    text = html.escape(to_markdown(trace, machine, results))
    return f'<!doctype html><meta charset="utf-8"><title>Expert cache</title>{body}<pre>{text}</pre>'


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Bad input is one line on stderr and status 2."""
    a = build_parser().parse_args(args)
    try:
        trace = load_trace(a.trace, a.tokens or None, a.skip)
        rates = {"bp": a.bp * GB, "bh": a.bh * GB, "dram": a.dram * GB}
        machine = Machine(**rates, expert_bytes=a.expert_bytes, dense=a.dense_ms / 1000, phi=a.phi)
        if min(machine.bp, machine.bh, machine.expert_bytes) <= 0 or not 0 <= machine.share() <= 1:
            raise ValueError("--bp, --bh and --expert-bytes must be positive, --phi within 0..1")
        policies = [p for p in a.policies.split(",") if p]
        unknown = [p for p in policies if p not in POLICIES]
        if unknown or not policies:
            raise ValueError(f"--policies: unknown {unknown}; choose from {', '.join(POLICIES)}")
        percent = [int(p) for p in a.percent.split(",")]
        if not all(0 <= p <= 100 for p in percent):
            raise ValueError("--percent: sizes are 0..100")
        results = measure(trace, machine, policies, percent, a.jobs)
    except ValueError as e:
        print(f"ftgguf bench cache: {e}", file=sys.stderr)
        return 2
    print(to_json(trace, machine, results) if a.output == "json" else to_markdown(trace, machine, results))
    if a.html:
        a.html.write_text(to_html(trace, machine, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
