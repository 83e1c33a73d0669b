"""What each test said, in a file as it happens: a run that is cut still tells which tests failed, and why.

FTGGUF_TEST_REPORT=FILE makes pytest write it (conftest.py), all workers of pytest-xdist into one; `gpu_report.py FILE`
prints a short table. A line for each test that begins and each result, indented lines under it what it failed with.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

TEXT = 12_000
"""Characters of one failure that are kept: its end, where the exception is."""


class Report:
    """The pytest plugin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")

    def write(self, *lines: str) -> None:
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write("".join(f"{line}\n" for line in lines))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(f"began {self.worker} {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        lines = [f"{outcome} {report.duration:.1f} {report.nodeid}"]
        if report.failed:
            sections = [f"{name}\n{text}" for name, text in report.sections if text.strip()]
            text = "\n".join([*sections, report.longreprtext])[-TEXT:]
            lines += [f"    {line}" for line in text.splitlines()]
        self.write(*lines)


def register(config: pytest.Config) -> None:
    """Write the report where one is asked for: the process that runs the tests does, not xdist's controller."""
    path = os.environ.get("FTGGUF_TEST_REPORT")
    runs = "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None)
    if path and runs:
        config.pluginmanager.register(Report(Path(path).absolute()), "ftgguf-report")


def table(text: str) -> list[str]:
    """Counts; then each test that failed with its last lines, and those that had begun and said nothing."""
    results: dict[str, list[str]] = {}
    said: dict[str, list[str]] = {}
    begun: list[str] = []
    test = ""
    for line in text.splitlines():
        if line.startswith("    "):
            said.setdefault(test, []).append(line)
            continue
        word, value, test = line.split(" ", 2)
        if word == "began":
            begun.append(test)
        else:
            results.setdefault(test, []).append(f"{word} {value}")
    counts = Counter(r.split()[0] for each in results.values() for r in each)
    lines = [", ".join(f"{n} {word}" for word, n in sorted(counts.items())) or "no test has ended"]
    for test, each in results.items():
        for result in each:
            if result.startswith(("failed", "error")):
                lines.append(f"{result} s  {test}")
        # the exceptions' own lines, else the last ones: a text that is cut has none
        told = said.get(test, [])
        lines += [line[:240] for line in ([t for t in told if t.startswith("    E  ")] or told)[-8:]]
    return lines + [f"cut  {test}" for test in begun if test not in results]


def main() -> None:
    """Print the table of a report."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        raise SystemExit("usage: gpu_report.py FILE, one that FTGGUF_TEST_REPORT named")
    print("\n".join(table(Path(sys.argv[1]).read_text(errors="replace"))))


if __name__ == "__main__":
    main()
