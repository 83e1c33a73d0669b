"""A worker process that fails, dies or hangs is reported as what it did."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ftgguf.bench.child import Child, ChildError, exit_reason


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(timeout=60)
    yield child
    child.end()


def test_an_error_is_an_answer_and_the_worker_lives_on(child: Child) -> None:
    with pytest.raises(ChildError, match="no engine is loaded"):
        child.ask("tokenize", text="x")
    with pytest.raises(ChildError, match=r"nothing\.gguf"):
        child.ask("load", engine="ftgguf", argv=["-m", "nothing.gguf"])
    assert child.ask("resident")["now"] > 1 << 20


def test_a_death_names_the_signal(child: Child) -> None:
    child.ask("resident")
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildError, match=r"SIGKILL \(out of memory\?\) during 'resident'"):
        child.ask("resident")


def test_a_hang_is_killed_after_the_limit(child: Child) -> None:
    child.ask("resident")
    os.kill(child.pid, signal.SIGSTOP)
    child._timeout = 0.5
    with pytest.raises(ChildError, match="no answer to 'resident' within 0 s: killed"):
        child.ask("resident")
    assert child._process.poll() == -signal.SIGKILL


def test_exit_reasons() -> None:
    assert exit_reason(3) == "ended with status 3"
    assert exit_reason(-11) == "was killed by SIGSEGV"


def test_our_openmp_setting_is_not_handed_to_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer runs as its users run it; what the user set goes to both."""
    from ftgguf.bench.child import openmp_note, peer_environment
    from ftgguf.cli import OPENMP_SPINS

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", OPENMP_SPINS)
    assert "GOMP_SPINCOUNT" not in peer_environment()
    assert openmp_note(ours=True) == f"OpenMP waiting: GOMP_SPINCOUNT={OPENMP_SPINS}"
    assert openmp_note(ours=False) == "OpenMP waiting: its default"
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert peer_environment()["GOMP_SPINCOUNT"] == "77"
