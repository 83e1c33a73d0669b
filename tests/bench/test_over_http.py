"""Comparisons over HTTP with stub servers as sides, and one with real ones."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

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
) -> Report:
    """A comparison of stubs; the first is ours. The peers speak `dialect`; `other` is the peer's other backend."""
    options = parse(["--against", "llama.cpp", "-r", str(rounds), "--limit", limit])
    options.workloads = ("pp", "tg", "depth", "suffix", "streams")
    report = report or Report("test", "test")
    with ExitStack() as stack:

        def contender(name: str, script: Script, dialect: Dialect, ours: bool) -> Contender:
            target = Target(stack.enter_context(stub(script)), dialect, "stub", timeout=timeout)

            @contextmanager
            def up() -> Iterator[Running]:
                yield Running(target)

            return Contender(Contestant(name, ours=ours), up)

        contenders = [
            contender(name, script, dialect if i else "native", not i) for i, (name, script) in enumerate(sides.items())
        ]
        extra = contender("other", other, "native", False) if other is not None else None
        HttpDuel(report, options, contenders, Source(100), dialect != "native", other=extra).run(PLAN)
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


def test_what_the_peers_other_backend_says_is_asked_where_outputs_differ() -> None:
    """And bounds the noise: it parts from the peer at a gap of 1, as ours does."""
    other = Script(token=lambda n, i: 9)
    report = run({"ours": Script(), "peer": Script(token=lambda n, i: 7)}, rounds=1, other=other)
    assert report.outputs.noise == 1.0
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
