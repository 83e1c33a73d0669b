"""`ftgguf bench cache --trace FILE.npz`: which expert to keep, replayed on a recorded trace.

Prints hit rates and the decode rate that follows from a pair of bandwidths, for each policy of `bench.replay` and each
cache size. Traces come from `ftgguf serve --record-routing FILE`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from ftgguf.arguments import Parser, whole
from ftgguf.bench import host
from ftgguf.bench.publish import add_output_flags, publish
from ftgguf.bench.recording import command_line
from ftgguf.bench.replay import POLICIES, Machine, Result, Trace, load_trace, replay
from ftgguf.bench.report import Line, Plot, Report, Table

PERCENT = (3, 5, 11, 25, 37, 60)
GB = 1e9
_trace: Trace
_machine: Machine


def build_parser(prog: str = "ftgguf bench cache") -> argparse.ArgumentParser:
    """The command's arguments."""
    p = Parser(prog=prog, description="Replay a routing trace through expert-cache policies.")
    p.add_argument("--trace", type=Path, required=True, help="npz: experts [tokens, layers, k], offsets of sessions")
    p.add_argument("--tokens", type=int, default=1000, help="tokens to replay (default 1000; 0: all)")
    p.add_argument("--skip", type=int, default=0, help="tokens to leave out at the beginning")
    p.add_argument("--policies", default=",".join(POLICIES), help=f"comma-separated, of {', '.join(POLICIES)}")
    p.add_argument("--percent", default=",".join(map(str, PERCENT)), help="cache sizes, %% of all experts")
    p.add_argument("--bp", type=float, metavar="GB/s", help="link: experts to the GPU (assumed: 25)")
    p.add_argument("--bh", type=float, metavar="GB/s", help="CPU reading experts in place (assumed: 60)")
    p.add_argument("--dram", type=float, metavar="GB/s", help="both at once (assumed: as --bh)")
    p.add_argument(
        "--expert-bytes", type=float, metavar="N", help="bytes of an expert (the trace's, else assumed: 13.2e6)"
    )
    p.add_argument("--dense-ms", type=float, default=0.0, help="time of a token outside of misses")
    p.add_argument("--phi", type=float, help="share of the misses to fill, instead of what the bandwidths give")
    p.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    add_output_flags(p)
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


def machine_of(a: argparse.Namespace, trace: Trace) -> tuple[Machine, tuple[str, ...]]:
    """The machine that the flags describe, and the names of its figures that nobody gave. Raises ValueError."""
    given = {name: value * GB for name in ("bp", "bh", "dram") if (value := getattr(a, name)) is not None}
    size = trace.expert_bytes or None if a.expert_bytes is None else a.expert_bytes
    if size is not None:
        given["expert_bytes"] = size
    machine = Machine(**given, dense=a.dense_ms / 1000, phi=a.phi)
    if min(machine.bp, machine.bh, machine.expert_bytes) <= 0 or not 0 <= machine.share() <= 1:
        raise ValueError("--bp, --bh and --expert-bytes must be positive, --phi within 0..1")
    return machine, tuple(name for name in ("bp", "bh", "dram", "expert_bytes") if name not in given)


def fill_report(
    report: Report, trace: Trace, machine: Machine, results: Sequence[Result], assumed: Sequence[str] = ()
) -> None:
    """Three tables (hit rates, transfers a token, tokens a second; the shipped policy marked), two plots, and all of it
    as numbers. `assumed`: fields of `machine` that were neither given nor measured."""
    tokens, layers, k = trace.experts.shape
    table = _rows(results)
    percent = list(next(iter(table.values())))
    said = {name: " (assumed)" if name in assumed else "" for name in ("bp", "bh", "dram", "expert_bytes")}
    report.notes.append(
        f"{tokens} tokens in {len(trace.offsets) - 1} sessions, {layers} layers, {trace.n_experts} experts, top {k}. "
        f"Link {machine.bp / GB:g} GB/s{said['bp']}, CPU {machine.bh / GB:g} GB/s{said['bh']}, "
        f"{machine.cpu_while_filling() / GB:g} GB/s while filling{said['dram']}; share of misses filled "
        f"{machine.share():.3f}, at least one; {machine.expert_bytes / 1e6:.4g} MB an expert{said['expert_bytes']}."
    )
    rate = "Tokens a second, misses" + (" and dense part" if machine.dense else " only")
    parts: tuple[tuple[str, Callable[[Result], str]], ...] = (
        ("Hit rate", lambda r: f"{r.hit:.3f}"),
        ("Expert transfers a token", lambda r: f"{r.transfers:.2f}"),
        (rate, lambda r: f"{r.rate:.1f}"),
    )
    notes = ("", "where both paths are equally fast (the larger of both, summed over layers)", "")
    for (title, show), note in zip(parts, notes, strict=True):
        rows = [[_name(name), *(show(row[p]) for p in percent)] for name, row in table.items()]
        report.tables.append(Table(title, ["policy", *(f"{p} %" for p in percent)], rows, ["policy"], note))
    report.tables.append(
        Table("The policies", ["policy", "what"], [[_name(n), POLICIES[n].what] for n in table], ["policy", "what"])
    )
    x = "cache, % of all experts"
    report.plots += [
        Plot("Hit rate", x, "hits / routed experts", _lines(table, lambda r: r.hit), root_x=True),
        Plot("Decode rate", x, "tokens a second", _lines(table, lambda r: r.rate), root_x=True),
    ]
    head = {"tokens": tokens, "layers": layers, "experts": trace.n_experts, "k": k, "share": machine.share()}
    rows_of = [asdict(r) | {"rate": _finite(r.rate), "shipped": POLICIES[r.policy].shipped} for r in results]
    report.data = {"trace": head, "machine": asdict(machine), "assumed": list(assumed), "results": rows_of}


def _name(policy: str) -> str:
    return f"{policy} (shipped)" if POLICIES[policy].shipped else policy


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _lines(table: dict[str, dict[int, Result]], value: Callable[[Result], float]) -> list[Line]:
    """A line a policy; where nothing ever misses the rate is endless and has no point."""
    return [
        Line(_name(name), [(float(p), value(r)) for p, r in sorted(row.items()) if math.isfinite(value(r))])
        for name, row in table.items()
    ]


def _percent(text: str) -> list[int]:
    """The sizes in `--percent`. Raises ValueError."""
    try:
        percent = [whole(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--percent: {error}") from None
    if not all(0 <= p <= 100 for p in percent):
        raise ValueError("--percent: sizes are 0..100")
    return percent


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Bad input is one line on stderr and status 1."""
    given = list(sys.argv[1:] if args is None else args)
    a = build_parser().parse_args(given)
    try:
        trace = load_trace(a.trace, a.tokens or None, a.skip)
        machine, assumed = machine_of(a, trace)
        policies = [p for p in a.policies.split(",") if p]
        unknown = [p for p in policies if p not in POLICIES]
        if unknown or not policies:
            raise ValueError(f"--policies: unknown {unknown}; choose from {', '.join(POLICIES)}")
        percent = _percent(a.percent)
        results = measure(trace, machine, policies, percent, a.jobs)
    except ValueError as e:
        print(f"ftgguf bench cache: {e}", file=sys.stderr)
        return 1
    report = Report("cache", command_line(["ftgguf", "bench", "cache", *given]), host.describe())
    fill_report(report, trace, machine, results, assumed)
    publish(report, output=a.output, page=a.html, report_file=a.report)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
