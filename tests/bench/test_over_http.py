"""Comparisons over HTTP with stub servers as sides, and one with real ones."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ftgguf.bench import table
from ftgguf.bench.child import ChildError
from ftgguf.bench.client import Dialect, Target
from ftgguf.bench.contenders import Contender, Running, peer_flags
from ftgguf.bench.options import parse
from ftgguf.bench.over_http import HttpDuel
from ftgguf.bench.report import (
    NOT_COMPARABLE,
    OK,
    OURS_FAILED,
    OUTPUTS_DIFFER,
    PEER_FAILED,
    Contestant,
    Report,
)
from ftgguf.bench.servers import Server, ServerError
from ftgguf.bench.table import render
from ftgguf.bench.witness import Builds, NotInstalled
from ftgguf.bench.workloads import Plan, Source, TextSource, make_plan

from .stub_server import Script, stub

PLAN = Plan(prompts=(16,), gens=(4,), depths=(64,), context=300, streams=(1, 2))


def run(
    sides: dict[str, Script],
    dialect: Dialect = "native",
    timeout: float = 5.0,
    rounds: int = 2,
    limit: str = "1000",
    other: Script | None = None,
    report: Report | None = None,
    builds: Builds | None = None,
    up_now: set[str] | None = None,
) -> Report:
    """A comparison of stubs; the first is ours. The peers speak `dialect`; `other` is the peer's other backend,
    `builds` other builds of its library; `up_now` holds the sides that are up at any moment."""
    alive = up_now if up_now is not None else set()
    options = parse(["--against", "llama.cpp", "-r", str(rounds), "--limit", limit])
    options.workloads = ("pp", "tg", "depth", "suffix", "streams")
    report = report or Report("test", "test")
    with ExitStack() as stack:

        def contender(name: str, script: Script, dialect: Dialect, ours: bool) -> Contender:
            target = Target(stack.enter_context(stub(script)), dialect, "stub", timeout=timeout)

            @contextmanager
            def up() -> Iterator[Running]:
                alive.add(name)
                try:
                    yield Running(target)
                finally:
                    alive.discard(name)

            return Contender(Contestant(name, ours=ours), up)

        contenders = [
            contender(name, script, dialect if i else "native", not i) for i, (name, script) in enumerate(sides.items())
        ]
        extra = contender("other", other, "native", False) if other is not None else None
        HttpDuel(report, options, contenders, Source(100), dialect != "native", other=extra, builds=builds).run(PLAN)
    return report


def test_every_workload_gives_samples_of_both_sides() -> None:
    report = run({"ours": Script(), "peer": Script()})
    assert report.status == OK, report.troubles
    names = [(r.workload, r.metric) for r in report.rows]
    assert [n for n, m in names if m == "TTFT ms" and "+" in n] == [f"+{k} on 300" for k in (1, 16, 64, 256)]
    assert {"pp16", "tg4", "tg4 @ d64", "1 x tg4", "2 x tg4"} <= {n for n, _ in names}
    for row in report.rows:
        assert len(row.samples["ours"]) == len(row.samples["peer"]) >= 2, row
    assert report.outputs.divergences == []
    assert report.outputs.prompts == 8


def test_both_sides_get_the_same_token_ids() -> None:
    ours, peer = Script(), Script()
    run({"ours": ours, "peer": peer})
    sent = [[b["prompt"] for p, b in s.seen if p == "/completion" and b["n_predict"] in (1, 4)] for s in (ours, peer)]
    assert sorted(sent[0]) == sorted(sent[1])
    assert len({tuple(p) for p in sent[0]}) > len(sent[0]) / 2  # fresh ids: no prompt is answered from a cache


def test_other_outputs_are_a_fault_unless_undecided() -> None:
    sure = run({"ours": Script(), "peer": Script(token=lambda n, i: 7)}, rounds=1)
    assert sure.status == OUTPUTS_DIFFER
    tie = run({"ours": Script(gap=0.01), "peer": Script(gap=0.01, token=lambda n, i: 7)}, rounds=1)
    assert tie.status == OK


def test_tokens_that_a_stream_leaves_out_do_not_part_the_outputs() -> None:
    """llama-server sends nothing for a token that ends inside a character (server-context.cpp, process_token): the
    answer is asked for in one piece, and a prompt's only token counts as arrived with the end of its stream."""
    report = run({"ours": Script(), "peer": Script(held_back=frozenset({0, 5}))}, rounds=1)
    assert report.status == OK, report.troubles
    assert report.outputs.divergences == []
    assert all(len(row.samples["peer"]) >= 1 for row in report.rows)
    other = run({"ours": Script(), "peer": Script(token=lambda n, i: 7, held_back=frozenset({3}))}, rounds=1)
    assert other.status == OUTPUTS_DIFFER
    assert other.outputs.divergences[0].gap == 1.0


@pytest.mark.parametrize(("says", "apart"), [(1.0, True), (0.0, False)])
def test_a_workload_that_the_servers_clock_contradicts_is_in_no_ratio(says: float, apart: bool) -> None:
    """A stub's tokens come in no time; it reports 1 tok/s, or nothing."""
    report = run({"ours": Script(speed=0.0), "peer": Script(speed=says)}, rounds=1)
    rows = {(r.workload, r.metric): r.clocks_apart for r in report.rows}
    expected = ["peer"] if apart else []
    assert rows["tg4", "tok/s"] == rows["tg4", "gap ms"] == expected
    assert rows["pp16", "tok/s"] == []
    assert any(n.startswith("peer: tg4 is in no ratio: it reports 1.0 tok/s") for n in report.notes) == apart


def test_a_limit_ends_the_rounds_and_says_so() -> None:
    report = run({"ours": Script(), "peer": Script()}, rounds=5, limit="0.01")
    assert report.status == OK
    assert "1 of 5 rounds: there was no time for more (--limit)" in report.notes
    assert {len(row.blocks.get("ours", row.samples["ours"])) for row in report.rows} == {1}


def test_outputs_are_compared_where_an_interrupt_ends_the_first_round() -> None:
    def interrupt(n: int, i: int) -> int:
        if n == 16:  # the first workload, after the greedy outputs
            os.kill(os.getpid(), signal.SIGINT)
        return 7

    report = Report("test", "test")
    with pytest.raises(KeyboardInterrupt):
        run({"ours": Script(), "peer": Script(token=interrupt)}, rounds=2, report=report)
    assert len(report.outputs.pairs) == 1
    assert report.status == OUTPUTS_DIFFER
    assert report.progress == "0 of 2 rounds complete"
    report.interrupted = True
    assert "INTERRUPTED: what was measured until then is shown (0 of 2 rounds complete)" in render(report)


def test_what_the_peers_other_backend_says_is_asked_where_outputs_differ() -> None:
    """And bounds the noise: it parts from the peer in all eight texts at a gap of 1, as ours does. (Twice that is the
    most that the rule for many partings allows.)"""
    other = Script(token=lambda n, i: 9)
    report = run({"ours": Script(), "peer": Script(token=lambda n, i: 7)}, rounds=1, other=other)
    assert report.outputs.noise == 2.0
    assert report.status == OK
    assert ("peer", "other") in report.outputs.pairs
    assert [c.name for c in report.contestants] == ["ours", "peer"]
    agrees = Script(token=lambda n, i: 7)
    assert run({"ours": Script(), "peer": Script(token=lambda n, i: 7)}, rounds=1, other=agrees).status == (
        OUTPUTS_DIFFER
    )
    unasked = Script()
    run({"ours": Script(), "peer": Script()}, rounds=1, other=unasked)
    assert unasked.seen == []


def test_other_builds_are_asked_about_what_the_peers_other_backend_leaves() -> None:
    """Where the same program on the CPU does not part from the peer by as much as ours does, but libllama says our
    token at that very place: seen with llama-server on CUDA and a 12-layer file of random weights."""
    peer = Script(token=lambda n, i: 7 if i < 2 else 8)
    sides, cpu = {"ours": Script(token=lambda n, i: 7), "peer": peer}, Script(token=lambda n, i: 7 if i < 2 else 8)
    builds = FakeBuilds(plain=7)
    report = run(dict(sides), rounds=1, other=cpu, builds=builds)
    assert report.outputs.noise < 1
    assert report.status == OK, report.troubles
    assert all(d.settled for d in report.outputs.divergences if "ours" in (d.a, d.b))
    fault = FakeBuilds(plain=8, repacked=8)
    assert run(dict(sides), rounds=1, other=cpu, builds=fault).status == OUTPUTS_DIFFER


@pytest.mark.parametrize("comes_up", [True, False])
def test_a_first_start_is_no_part_of_the_rounds(comes_up: bool) -> None:
    """One that fails is left to the first round, which reports it."""
    starts: list[str] = []

    @contextmanager
    def up() -> Iterator[Running]:
        starts.append("up")
        if not comes_up:
            raise ServerError("no memory")
        yield Running(Target("http://127.0.0.1:1", "native", "", timeout=1.0))
        starts.append("down")

    report = Report("test", "test")
    options = parse(["--against", "llama.cpp"])
    duel = HttpDuel(report, options, [Contender(Contestant("ours", ours=True), up)], Source(100), False)
    duel.start_ours_once()
    assert starts == (["up", "down"] if comes_up else ["up"])
    assert any("started once before the rounds" in note for note in report.notes) is comes_up
    assert not report.troubles
    assert not duel.sides[0].lost


class FakeBuilds:
    """Builds of llama.cpp that say `tokens[layout]` wherever they are asked, `gap` before the next; those without a
    token fail to load. Notes what was asked, and which sides were up then."""

    def __init__(self, gap: float = 1.0, **tokens: int) -> None:
        self.gap, self.tokens = gap, tokens
        self.up_now: set[str] = set()
        self.asked: list[tuple[str, list[int], list[int]]] = []
        self.up_then: list[set[str]] = []
        self.loaded = ""

    def load(self, layout: str) -> str:
        self.up_then.append(set(self.up_now))
        if layout not in self.tokens:
            raise NotInstalled("none is here") if not self.tokens else ChildError("it was killed")
        self.loaded = layout
        return f"libllama 9, {layout} weights, instruction sets avx512"

    def next_token(self, prompt: Sequence[int], forced: Sequence[int]) -> tuple[int, float]:
        self.asked.append((self.loaded, list(prompt), list(forced)))
        return self.tokens[self.loaded], self.gap

    def end(self) -> None:
        self.loaded = ""


def parted(builds: FakeBuilds, rounds: int = 1) -> Report:
    """Ours says 7 everywhere, the peer and its other layout say so twice and then 8, both a nat before the next."""
    peer = {"peer": Script(token=lambda n, i: 7 if i < 2 else 8), "peer plain": Script(token=lambda n, i: 7 + (i >= 2))}
    sides = {"ours": Script(token=lambda n, i: 7), **peer}
    return run(sides, rounds=rounds, builds=builds, up_now=builds.up_now)


def test_no_fault_where_another_build_of_llama_cpp_says_our_token() -> None:
    """It is asked at that very place, once for both layouts of the peer, while no side is up."""
    builds = FakeBuilds(plain=7)
    report = parted(builds, rounds=2)
    assert report.status == OK, report.troubles
    assert report.outputs.noise == 0.05
    assert len(report.outputs.divergences) == 16
    text = table.render(report)
    assert text.count("libllama with plain weights, llama.cpp too, says 7 there as ours does") == 16
    assert "not measured: libllama 9, plain weights, instruction sets avx512" in text
    assert report.ratio(report.rows[0], report.peers[0]) is not None
    assert [(layout, forced) for layout, _, forced in builds.asked] == [("plain", [7, 7])] * 8
    assert builds.up_then == [set()]
    assert builds.loaded == ""


def test_a_fault_stays_where_other_builds_agree_with_the_peer() -> None:
    """And ours does not, however much these builds differ from each other elsewhere."""
    builds = FakeBuilds(plain=8, repacked=8)
    report = parted(builds)
    assert report.status == OUTPUTS_DIFFER
    assert len(report.outputs.faults()) == 16
    assert {layout for layout, *_ in builds.asked} == {"plain", "repacked"}
    assert "says 8 at token 2 of prompt 0, peer 8, ours 7: this explains nothing" in " ".join(report.notes)
    assert report.ratio(report.rows[0], report.peers[0]) is None


def test_the_second_layout_is_asked_where_the_first_explains_nothing() -> None:
    report = parted(FakeBuilds(plain=8, repacked=7))
    assert report.status == OK
    assert {d.settled[:30] for d in report.outputs.divergences} == {"libllama with repacked weights"[:30]}


def test_a_third_token_explains_as_much_as_it_parts_by() -> None:
    """The peer was a nat before its next token, and the other build says neither: llama.cpp's builds differ by that
    there. But where ours was surer than both of them it is no excuse."""
    assert parted(FakeBuilds(plain=9)).status == OK
    builds = FakeBuilds(plain=9, repacked=9, gap=0.1)
    sides = {"ours": Script(token=lambda n, i: 7, gap=3.0), "peer": Script(token=lambda n, i: 8, gap=0.2)}
    assert run(sides, rounds=1, builds=builds).status == OUTPUTS_DIFFER


def test_without_another_build_the_fault_stays_and_the_cure_is_named() -> None:
    report = parted(FakeBuilds())
    assert report.status == OUTPUTS_DIFFER
    assert [n for n in report.notes if "to tell noise from faults" in n] == [
        "no other build of llama.cpp was asked where outputs part, to tell noise from faults: none is here"
    ]
    dying = parted(FakeBuilds(repacked=8))
    assert dying.status == OUTPUTS_DIFFER
    assert "libllama with plain weights, to tell noise from faults: it was killed" in dying.notes


def test_nobody_is_asked_where_outputs_agree() -> None:
    builds = FakeBuilds(plain=7)
    assert run({"ours": Script(), "peer": Script()}, rounds=1, builds=builds).status == OK
    assert builds.up_then == []
    assert builds.asked == []


def test_other_token_ids_are_stated() -> None:
    report = run({"ours": Script(), "peer": Script(tokenize=lambda text: [9])}, rounds=1)
    assert report.status == NOT_COMPARABLE
    assert "tokenises 8 of 8 texts" in report.troubles[0].text


def test_a_peer_that_fails_is_rows_and_ours_is_measured() -> None:
    report = run({"ours": Script(), "peer": Script(fail_after=1)}, rounds=1)
    assert report.status == PEER_FAILED
    assert all(row.samples.get("ours") for row in report.rows if row.workload != "server")
    assert any("peer" in row.failures for row in report.rows)


def test_a_peer_that_hangs_is_given_up() -> None:
    report = run({"ours": Script(), "peer": Script(hang=True)}, timeout=0.3, rounds=2)
    assert report.status == PEER_FAILED
    assert "hangs" in report.contestants[1].errors[0]
    assert len(report.contestants[1].errors) == 1


def test_our_own_failure_is_status_1() -> None:
    assert run({"ours": Script(status=500), "peer": Script()}, rounds=1).status == OURS_FAILED


@pytest.mark.parametrize("dialect", ["openai", "ollama"])
def test_text_peers_get_text_and_texts_are_compared(dialect: Dialect) -> None:
    same = run({"ours": Script(), "peer": Script()}, dialect, rounds=1)
    assert same.status == OK, same.troubles
    assert "prompts are text" in " ".join(same.notes)
    other = run({"ours": Script(), "peer": Script(token=lambda n, i: 7)}, dialect, rounds=1)
    assert other.status == OUTPUTS_DIFFER


def test_what_the_models_context_cannot_hold_is_left_out_and_said() -> None:
    report = Report("t", "t")
    plan = make_plan(("pp", "tg", "depth", "suffix", "streams"), [512, 8192], [128], [], 2048, report)
    assert plan.prompts == (512,)
    assert plan.depths == ()
    assert plan.context == 2048 - 256 - 8
    assert plan.longest <= 2048
    assert [n.split(": ")[1] for n in report.notes] == ["prompts of 8192", "depths of 8192, 32768"]


def test_text_of_about_n_tokens() -> None:
    source = TextSource(lambda text: list(range(2 * len(text.split()))))  # two tokens a word
    text = source.make(100, 1)
    assert isinstance(text, str)
    assert len(text.split()) == 50
    assert text == source.make(100, 1) != source.make(100, 2)


def test_only_llama_servers_flags_reach_the_peer() -> None:
    flags = ["-m", "f", "-c", "512", "--weights-layout", "plain", "-kvu", "--debug-eager", "-t", "2"]
    assert peer_flags(flags) == ["-m", "f", "-c", "512", "-kvu", "-t", "2"]


def test_a_server_that_ends_or_does_not_answer(tmp_path: Path) -> None:
    dead = Server([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], tmp_path / "a", 30)
    with pytest.raises(ServerError, match=r"ended with status 3: no such model"), dead:
        pass
    deaf = Server([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "b", 1)
    with pytest.raises(ServerError, match="no answer at /health within 1 s"), deaf:
        pass
    assert deaf._process is not None
    assert deaf._process.poll() is not None
