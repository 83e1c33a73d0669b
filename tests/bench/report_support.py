"""A report with three sides, as the tests of what it concludes want it."""

from __future__ import annotations

from ftgguf.bench.report import (
    Contestant,
    Report,
)


def make_report() -> Report:
    """A win, a loss and a draw; two peers."""
    report = Report("against llama.cpp", "ftgguf bench")
    report.contestants = [Contestant("ftgguf", ours=True), Contestant("A", ours=False), Contestant("B", ours=False)]
    row = report.row("pp512", "tok/s", paired=True)
    row.samples = {"ftgguf": [150.0, 151.0, 149.0], "A": [100.0, 101.0, 99.0], "B": [120.0, 119.0, 121.0]}
    row = report.row("tg128", "tok/s", paired=True)
    row.samples = {"ftgguf": [10.0, 10.1, 9.9], "A": [20.0, 20.8, 19.2]}
    row.failures = {"B": "it was killed by SIGSEGV"}
    row = report.row("tg128", "gap ms", higher_is_better=False, quantiles=True)
    row.samples = {"ftgguf": [1.0, 2.0, 3.0], "A": [1.0, 2.0, 3.0]}
    return report


def said(*tokens: int, gap: float = 1.0) -> list[tuple[int, float]]:
    """A greedy text: tokens, each `gap` nats before the next best."""
    return [(t, gap) for t in tokens]
