"""`ftgguf bench --against llama.cpp` in process, end to end on the stories model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from compat.synth import make
from ftgguf.bench import in_process
from ftgguf.bench.against import shared_flags
from ftgguf.bench.child import Child
from ftgguf.bench.main import main
from ftgguf.bench.options import parse
from ftgguf.bench.report import INTERRUPTED, PEER_FAILED, Divergence, Report, from_json

ARGV = ["-m", "stories", "--against", "llama.cpp", "--in-process", "-t", "1", "-p", "24", "-n", "4", "-r", "2"]


@pytest.fixture(autouse=True)
def short_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "GREEDY_TOKENS", 8)


def test_a_peer_that_dies_is_a_row_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repacked peer is killed at its first timed run. (Files of Q4_0 have both layouts.)"""
    ask, path = Child.ask, make("llama", tmp_path / "m.gguf", types="Q4_0")

    def dying(self: Child, do: str, **fields: Any) -> dict[str, Any]:
        if do == "load":
            self.__dict__["engine"] = fields["engine"]
        if do == "run" and self.__dict__["engine"] == "repacked":
            os.kill(self.pid, signal.SIGKILL)
        return ask(self, do, **fields)

    monkeypatch.setattr(Child, "ask", dying)
    saved = tmp_path / "r.json"
    assert main(["-m", str(path), *ARGV[2:], "--report", str(saved)]) == PEER_FAILED
    report = from_json(saved.read_bytes())
    row = next(r for r in report.rows if r.workload == "pp24")
    assert "SIGKILL" in row.failures["llama.cpp repacked"]
    assert {k: len(v) for k, v in row.samples.items()} == {"ftgguf": 2, "llama.cpp plain": 2}


def test_a_file_without_repacked_kernels_has_one_peer(tmp_path: Path) -> None:
    """ggml repacks no F16: llama.cpp by default and with --no-repack is the same program on the same bytes, and is
    measured once."""
    path, saved = make("llama", tmp_path / "m.gguf", types="F16"), tmp_path / "r.json"
    main(["-m", str(path), *ARGV[2:], "--report", str(saved)])
    report = from_json(saved.read_bytes())
    assert [c.name for c in report.contestants] == ["ftgguf", "llama.cpp plain"]
    assert any("two weight layouts are one, measured once: ggml has no repacked" in note for note in report.notes)
    row = next(r for r in report.rows if r.workload == "pp24")
    assert {k: len(v) for k, v in row.samples.items()} == {"ftgguf": 2, "llama.cpp plain": 2}


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the fourth timed run: three samples are in the report."""
    ask, runs = Child.ask, iter(range(100))

    def interrupted(self: Child, do: str, **fields: Any) -> dict[str, Any]:
        if do == "run" and next(runs) == 3:
            raise KeyboardInterrupt
        return ask(self, do, **fields)

    monkeypatch.setattr(Child, "ask", interrupted)
    saved = tmp_path / "r.json"
    assert main([*ARGV, "--report", str(saved)]) == INTERRUPTED
    report = from_json(saved.read_bytes())
    assert report.interrupted
    assert report.progress == "pp24: 1 of 2 rounds, tg4: 0 of 2 rounds"
    assert sum(len(s) for r in report.rows for s in r.samples.values()) == 3


@pytest.mark.slow
def test_one_at_a_time_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never two loaded: counted at every load."""
    monkeypatch.setattr(in_process, "available_memory", lambda: 1 << 20)
    alive: set[int] = set()
    most = 0
    start, end = Child.__init__, Child.end

    def counted_start(self: Child, timeout: float, **fields: Any) -> None:
        nonlocal most
        start(self, timeout, **fields)
        alive.add(self.pid)
        most = max(most, len(alive))

    def counted_end(self: Child) -> None:
        end(self)
        alive.discard(self.pid)

    monkeypatch.setattr(Child, "__init__", counted_start)
    monkeypatch.setattr(Child, "end", counted_end)
    saved = tmp_path / "r.json"
    argv = [*ARGV[:-1], "1", "--report", str(saved)]
    assert main(argv) == 0
    assert most == 1
    assert not alive
    assert all(c.rss_steady for c in from_json(saved.read_bytes()).contestants)


def test_no_peer_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["-m", "stories", "--against", "llama.cpp"]) == PEER_FAILED
    assert "pip install llama-cpp-python" in capsys.readouterr().err
    assert main(["-m", "stories", "--against", "llama.cpp", "--peer", "xllamacpp"]) == PEER_FAILED
    assert "pip install xllamacpp" in capsys.readouterr().err
    assert main(["-m", "stories", "--against", "llama.cpp", "--llama-server", "/nowhere/x"]) == PEER_FAILED
    assert "does not exist" in capsys.readouterr().err


def test_only_settings_that_libllama_has_reach_it() -> None:
    argv = ["-m", "f", "-c", "512", "-np", "1", "--weights-layout", "plain", "-t", "2", "-ctk", "q8_0", "--no-repack"]
    assert shared_flags(argv) == ["-m", "f", "-c", "512", "-t", "2", "-ctk", "q8_0"]


def test_in_a_peers_layout_ours_says_its_tokens(tmp_path: Path) -> None:
    """Oracle: libllama in both layouts on random Q4_K experts, 12 greedy tokens; a token changed shows."""
    path = make("qwen3moe", tmp_path / "m.gguf", types="Q4_K", n_layer=2, n_embd=256, n_ff_expert=256)
    argv, prompts = ["-m", str(path), "-t", "1", "-c", "128"], [[1, 2], [5, 9, 17, 4, 30, 8, 21]]
    again = in_process.SameLayout(120, argv, prompts, "both")
    try:
        for name, engine in in_process.ENGINES.items():
            if name == "ftgguf":
                continue
            peer = Child(120, ours=False)
            peer.ask("load", engine=engine, argv=argv)
            tokens = [int(t) for t, _ in peer.ask("greedy", prompt=prompts[1], n=12)["tokens"]]
            peer.end()
            fault = Divergence("ftgguf", name, 1, 3, 0, 1, 0.5, 0.5)
            assert again(fault, tokens, lambda: None) == f"with {engine} weights ours says the same tokens as {name}"
            assert again(fault, [*tokens[:-1], tokens[-1] ^ 1], lambda: None) == ""
        assert in_process.SameLayout(120, argv, prompts, "plain")(fault, tokens, lambda: None) == ""
    finally:
        again.end()


@pytest.mark.parametrize("together", [True, False])
def test_a_limit_leaves_one_round_of_each_test(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second round is begun where none has time, and the report says so."""
    options = parse(["--against", "llama.cpp", "--in-process", "-p", "8,16", "-n", "4", "-r", "3", "--limit", "5"])
    options.started -= 10  # the time is up
    report = Report("test", "test")
    monkeypatch.setattr(in_process, "available_memory", lambda: 1 << 50 if together else 0)
    duel = in_process.Duel(report, options, [], [], 1)
    done = [(r, side.contestant.name, test.name) for r, side, test in duel._schedule()]
    assert len(done) == len(set(done)) == 9
    assert {r for r, _, _ in done} == {0}
    notes = [note for note in report.notes if "1 of 3 rounds: there was no time for more (--limit)" in note]
    assert len(notes) == (3 if together else 1)
