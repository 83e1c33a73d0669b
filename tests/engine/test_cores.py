"""Which CPUs workers are pinned to beside other engines: on topologies made by hand, and between processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.engine import cores
from ftgguf.engine.cores import Claim, claim, core_of, ranges, spread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")


@pytest.fixture
def name() -> str:
    """A machine of its own: no engine that runs here is asked or disturbed."""
    return f"ftgguf-test-{uuid4().hex}"


@pytest.fixture
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cores, "CPUS", tmp_path)
    return tmp_path


def write(folder: Path, siblings: list[list[int]], form: str = ",") -> None:
    """Linux writes `0,8` or `0-1`."""
    for core in siblings:
        for cpu in core:
            (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
            (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(form.join(map(str, core)) + "\n")


def test_the_second_engine_takes_other_cores(topology: Path, name: str) -> None:
    """Eight cores of one thread: three, three, and then not three more; once one is gone, its cores are free."""
    write(topology, [[i] for i in range(8)])
    first, second = claim(3, range(8), name), claim(3, range(8), name)
    assert (first.cpus, first.line) == ([7, 6, 5], "")
    assert second.cpus == [4, 3, 2]
    assert second.line == "CPU workers are on CPUs 2-4: other engines have 3 of the cores"
    third = claim(3, range(8), name)
    assert third.cpus == [-1, -1, -1]
    assert "not pinned: other engines have 6 of the cores, and 3 workers need more than the 2 CPUs" in third.line
    assert claim(2, range(8), name).cpus == [1, 0], "what the third could not use is not held by it"
    first.release()
    first.release()
    assert claim(3, range(8), name).cpus == [7, 6, 5]


@pytest.mark.parametrize(
    ("siblings", "form", "first", "second"),
    [
        ([[i, i + 4] for i in range(4)], ",", [7, 6], [5, 4]),
        ([[2 * i, 2 * i + 1] for i in range(4)], "-", [7, 5], [3, 1]),
    ],
)
def test_a_cores_other_thread_is_taken_too(
    siblings: list[list[int]], form: str, first: list[int], second: list[int], topology: Path, name: str
) -> None:
    """Four cores of two threads in the two ways that Linux numbers them: workers are on different cores while there are
    any, and the other thread of a claimed core belongs to its engine."""
    write(topology, siblings, form)
    held = [claim(2, range(8), name), claim(2, range(8), name), claim(2, range(8), name)]
    assert [each.cpus for each in held] == [first, second, [-1, -1]]
    for each in held:
        each.release()
    assert sorted(claim(7, range(8), name).cpus) == list(range(1, 8))


@given(st.lists(st.integers(0, 40), unique=True, max_size=20), st.integers(1, 4))
def test_every_core_once_before_any_twice(allowed: list[int], width: int) -> None:
    """Against the definition, for cores of `width` adjacent CPUs."""
    order = spread(allowed, lambda cpu: cpu // width)
    assert sorted(order) == sorted(allowed)
    counts: dict[int, int] = {}
    ranks = []
    for cpu in order:
        ranks.append(counts.get(cpu // width, 0))
        counts[cpu // width] = ranks[-1] + 1
    assert ranks == sorted(ranks)


@given(st.lists(st.integers(0, 50), unique=True))
def test_ranges_name_every_cpu(cpus: list[int]) -> None:
    named: list[int] = []
    for part in filter(None, ranges(cpus).split(",")):
        low, _, high = part.partition("-")
        named += range(int(low), int(high or low) + 1)
    assert named == sorted(cpus)


def test_one_worker_and_one_cpu_are_not_pinned(name: str) -> None:
    assert (claim(1, range(8), name).cpus, claim(0, range(8), name).cpus, claim(5, [3], name).cpus) == ([-1],) * 3
    assert len(claim(64, range(4), name).cpus) == 4, "no more workers than CPUs"
    assert core_of(10**6) == 10**6


CHILD = """
import sys, time
from ftgguf.engine.cores import claim
found = claim(2, range(4), sys.argv[1])
print(*found.cpus, flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_no_core_taken(topology: Path, name: str) -> None:
    """Between processes, and after SIGKILL."""
    write(topology, [[i] for i in range(4)])
    program = [sys.executable, "-c", CHILD.replace("found =", f"import ftgguf.engine.cores as c, pathlib\n"
               f"c.CPUS = pathlib.Path({str(topology)!r})\nfound ="), name]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3 2\n"
        here = claim(2, range(4), name)
        assert here.cpus == [1, 0]
        here.release()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert claim(4, range(4), name).cpus == [3, 2, 1, 0]


def test_claims_that_cannot_be_made_leave_each_engine_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No abstract sockets, or forbidden: as without other engines."""

    class Forbidden(cores.socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(1, "not permitted")

    monkeypatch.setattr(cores.socket, "socket", Forbidden)
    found: list[Claim] = [claim(2, range(4), name), claim(2, range(4), name)]
    assert found[0].cpus == found[1].cpus
    assert found[0].cpus != [-1, -1]
    assert found[1].line == ""


def test_a_second_store_takes_other_cpus_and_says_so(
    name: str, topology: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `serve` makes them; the first one's are free again when it is gone."""
    torch = pytest.importorskip("torch", reason="the GPU path needs torch")
    from types import SimpleNamespace
    from typing import Any

    from ftgguf.engine.device_memory import DeviceMemory
    from ftgguf.engine.load_cached import CachePlan, make_store
    from ftgguf.flags import parse_server

    write(topology, [[i] for i in range(6)])
    monkeypatch.setattr("ftgguf.engine.load_cached.cores.claim", lambda count: claim(count, range(6), name))
    monkeypatch.setattr("ftgguf.experts.measure.stored_costs", lambda device, threads: None)
    fit: Any = SimpleNamespace(n_cells=0)
    plan, numbers = CachePlan(fit, 1 << 30, "hybrid"), SimpleNamespace(top_k=2)
    caplog.set_level("INFO", "ftgguf.engine")

    def store() -> Any:
        config = parse_server(["-m", "x.gguf", "-t", "4"], {})
        return make_store(plan, config, numbers, DeviceMemory(torch.device("cpu")))  # type: ignore[arg-type]

    first = store()
    assert (first.cpus, caplog.messages) == ([5, 4, 3], [])
    second = store()
    assert second.cpus == [2, 1, 0]
    assert caplog.messages == ["CPU workers are on CPUs 0-2: other engines have 3 of the cores"]
    del first
    assert store().cpus == [5, 4, 3]
