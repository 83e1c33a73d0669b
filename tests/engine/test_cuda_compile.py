"""Helper processes that compile kernels: how many, and that each has another share. No kernel is compiled here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ftgguf.engine import cuda_compile
from ftgguf.engine.cuda_compile import HELPERS, Helpers, Job, helper_count
from ftgguf.flags.machine import Machine

JOB = Job("model.gguf", 90, 0, 512, 512, 2, "f16")


def machine(cpus: int, quota: float | None = None) -> Machine:
    return Machine(tuple(range(cpus)), {i: (0, i) for i in range(cpus)}, quota=quota)


@pytest.mark.parametrize(
    ("cpus", "quota", "count"),
    [(16, None, HELPERS), (6, None, 5), (3, None, 2), (2, None, 1), (1, None, 1), (64, 4.0, 3), (64, 0.5, 1)],
)
def test_as_many_as_there_are_cpus_for(
    cpus: int, quota: float | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that the affinity mask and the container's quota allow, one less; what -t says does not matter."""
    monkeypatch.setattr(cuda_compile, "read_machine", lambda: machine(cpus, quota))
    assert helper_count() == count


def test_each_has_its_share_and_a_complete_cache_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def popen(command: list[str], env: dict[str, str], **_: Any) -> Any:
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        started.append(command)
        return object()

    mark = tmp_path / "cache" / "all.complete"
    monkeypatch.setattr(cuda_compile, "_mark", lambda job, survey: mark)
    monkeypatch.setattr(cuda_compile, "read_machine", lambda: machine(5))
    monkeypatch.setattr(subprocess, "Popen", popen)
    survey: Any = None
    helpers = Helpers(JOB, survey)
    assert [line[-1] for line in started] == ["0/4", "1/4", "2/4", "3/4"]
    assert {Job.of(line[-2]) for line in started} == {JOB}
    helpers.complete()
    assert Helpers(JOB, survey).wait() == "kernels found in the cache"
    assert len(started) == 4


HELPER = """
import sys, time
from ftgguf.engine import cuda_compile
cuda_compile._compile = lambda *_: (print("compiling", flush=True), time.sleep(100))
cuda_compile.main()
"""
ENGINE = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_helpers_end_with_the_engine() -> None:
    """The engine is killed (its server was stopped): the pipe that both write to is closed at once, by both."""
    line = [sys.executable, "-c", ENGINE, HELPER, json.dumps(asdict(JOB)), "0/1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "compiling\n"
        engine.kill()
        rest, _ = engine.communicate(timeout=50)
    assert rest == ""
