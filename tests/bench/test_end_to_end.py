"""The commands as a user types them, on the stories model and small: what continuous integration runs of them.

The peers are real: libllama of llama-cpp-python, and llama-server itself out of the xllamacpp wheel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest

from ftgguf.bench.report import INTERRUPTED, NOT_COMPARABLE, OK, Report, from_json

SMALL = ["-m", "stories", "-t", "1", "-p", "24", "-n", "8"]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks nesting; what would be fetched, and which tags there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole(path: Path) -> Page:
    """The page, which must be complete, fetch nothing and run nothing."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert "script" not in page.tags
    assert "url(" not in text
    assert text.rstrip().endswith("</html>")
    return page


def command(*words: str, path: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The command, and an environment whose PATH has no llama-server, or begins with `path`."""
    clean = os.pathsep.join(d for d in os.environ["PATH"].split(os.pathsep) if not (Path(d) / "llama-server").exists())
    env = os.environ | {"PATH": clean if path is None else path + os.pathsep + clean}
    return [sys.executable, "-m", "ftgguf", "bench", *words], env


def ran(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    line, env = command(*words, path=path)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def llama_server(tmp_path: Path) -> str:
    """A folder with a `llama-server` to put on PATH."""
    pytest.importorskip("xllamacpp")
    file = tmp_path / "bin" / "llama-server"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ftgguf.bench.xllamacpp_server "$@"\n')
    file.chmod(0o755)
    return str(file.parent)


def test_against_llama_cpp_in_process(tmp_path: Path) -> None:
    """Without a llama-server: libllama, the same kernels and instruction sets, so a ratio is given; outputs agree. ggml
    has no repacked kernels for the rows of 64 in stories, so there is one peer."""
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    done = ran(*SMALL, "--against", "llama.cpp", "-r", "2", "--report", str(saved), "--html", str(page))
    report = from_json(saved.read_bytes())
    assert done.returncode == OK, report.troubles
    headline = done.stdout.split("ftgguf against the best of its peers, above 1 is better")[1]
    assert re.search(r"reading prompts: pp24 \d\.\d\d \(too few samples\) of llama.cpp", headline)
    assert "better" not in headline
    assert "worse" not in headline
    assert [c.name for c in report.contestants] == ["ftgguf", "llama.cpp plain"]
    assert all(c.build and c.isa and c.command for c in report.contestants)
    assert [c.layout for c in report.peers] == ["plain"]
    assert all(c.rss_peak >= c.rss_steady > 10 << 20 for c in report.contestants)
    assert all(len(s) == 2 for r in report.rows for s in r.samples.values())
    assert len(report.model["sha256"]) == 64
    assert report.outputs.prompts == 8
    document = json.loads(saved.read_bytes())
    assert len(document["ratios"]) == 2
    assert {r["test"] for r in document["llama_bench"]} == {"pp24", "tg8"}
    shown = whole(page)
    assert shown.tags.count("svg") == 1 + 2  # ratios of the peer, two rows over the rounds
    assert report.model["sha256"] in page.read_text()


def test_against_a_llama_server_on_path(tmp_path: Path, llama_server: str) -> None:
    """Every workload over HTTP. It is built for AVX2: where ours use more no ratio is given, and that is said."""
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    words = [*SMALL, "--against", "llama.cpp", "-r", "1", "-d", "256", "--report", str(saved), "--html", str(page)]
    done = ran(*words, path=llama_server)
    report = from_json(saved.read_bytes())
    lower = bool(report.peers[0].lower_isa)
    assert done.returncode == (NOT_COMPARABLE if lower else OK), report.troubles
    assert ("against the best of its peers" in done.stdout) is not lower
    assert report.outputs.faults() == []
    assert {"pp24", "tg8", "tg8 @ d256", "+1 on 256", "+256 on 256", "1 x tg8", "4 x tg8"} <= {
        r.workload for r in report.rows
    }
    for row in report.rows:
        assert len(row.samples) == 3, row
        assert row.failures == {}
    assert all(c.build and c.isa and c.rss_peak for c in report.contestants)
    assert any("same file" in note for note in report.peers[0].notes)
    shown = whole(page)
    assert ("no ratio is given" in page.read_text()) is lower
    assert shown.tags.count("table") >= 2


def test_sessions_are_replayed(tmp_path: Path) -> None:
    """Real sessions, clipped to what the model holds: appended turns take their prefix from the cache."""
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    words = ["trace", "-m", "stories", "-t", "1", "-r", "1", "-n", "4", "--report", str(saved), "--html", str(page)]
    done = ran(*words)
    assert done.returncode == OK
    report = from_json(saved.read_bytes())
    appended = [t for t in report.turns if t.kind == "append"]
    assert len(appended) > 20
    assert sum(t.cached_n for t in appended) > 0.5 * sum(t.prompt_n for t in appended)
    assert "over 120 s" in done.stdout
    shown = whole(page)
    assert shown.tags.count("svg") == 5 + 1  # a plot a session, speed over time


# ------------------------------------------------------------------------------------------------------- interrupts


@contextlib.contextmanager
def started(until: str, *words: str, path: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A running command that has said a line with `until` in it."""
    line, env = command(*words, path=path)
    process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for said in process.stderr:
            if until in said:
                break
        yield process
    finally:
        process.kill()
        process.wait()


def interrupted(process: subprocess.Popen[str], number: int, saved: Path, page: Path) -> tuple[Report, str]:
    """Send the signal; the report, once the command has ended and all that it started with it."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    whole(page)
    assert not list(saved.parent.glob(".*.part"))
    report = from_json(saved.read_bytes())
    assert report.interrupted
    assert "INTERRUPTED" in out
    assert "Interrupted" in page.read_text()
    return report, out


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_in_process_keeps_what_was_measured(tmp_path: Path, number: int) -> None:
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    words = [*SMALL, "--against", "llama.cpp", "-r", "1000", "--report", str(saved), "--html", str(page)]
    with started("pp24 round 3", *words) as process:
        report, out = interrupted(process, number, saved, page)
        assert process.returncode == INTERRUPTED
    assert all(len(s) >= 2 for s in report.rows[0].samples.values())
    assert "| pp24 " in out


def test_an_interrupt_over_http_keeps_what_was_measured(tmp_path: Path, llama_server: str) -> None:
    """In the peer's first round: ours is there whole; both servers are gone."""
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    words = [*SMALL, "--against", "llama.cpp", "-r", "1000", "--workload", "pp,tg"]
    words += ["--report", str(saved), "--html", str(page)]
    with started("round 1: llama-server: tg8", *words, path=llama_server) as process:
        report, _ = interrupted(process, signal.SIGINT, saved, page)
        assert process.returncode in (INTERRUPTED, NOT_COMPARABLE)  # the latter where its instruction sets are fewer
    assert report.rows[0].samples["ftgguf"]
