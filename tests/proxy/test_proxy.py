"""The proxy between a client and two stub servers, over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from ftgguf.bench import html
from ftgguf.bench.client import Target
from ftgguf.bench.headline import headline
from ftgguf.bench.report import NOT_COMPARABLE, OK, OURS_FAILED, PEER_FAILED, Contestant, Report, from_json
from ftgguf.bench.servers import free_port
from ftgguf.bench.table import turn_rows
from ftgguf.proxy.app import Proxy, Side
from ftgguf.proxy.ledger import Asked, Ledger
from ftgguf.proxy.meter import Meter
from ftgguf.proxy.sameness import compare_models
from tests.bench.stub_server import Script, stub


class Setting:
    """A running proxy with what it keeps books in."""

    def __init__(self, url: str, ledger: Ledger, a_url: str) -> None:
        self.url, self.report, self.a_url, self.ledger = url, ledger.report, a_url, ledger

    def wait(self, turns: int) -> None:
        """Until so many answers are in the report."""
        end = time.monotonic() + 10
        while len(self.report.turns) < turns:
            assert time.monotonic() < end, self.report.turns
            time.sleep(0.01)


@contextmanager
def running(a: Script, b: Script, **fields: object) -> Iterator[Setting]:
    """A proxy of two stubs."""
    with stub(a) as a_url, stub(b) as b_url:
        report = Report("proxy", "test")
        report.contestants = [Contestant("A", ours=True), Contestant("B", ours=False)]
        sides = [
            Side(url, side, keeps_credentials=side.ours)
            for url, side in zip((a_url, b_url), report.contestants, strict=True)
        ]
        ledger = Ledger(report, *report.contestants)
        proxy = Proxy(*sides, ledger, **fields)  # type: ignore[arg-type, call-arg]
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(proxy.app(), host="127.0.0.1", port=port, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Setting(f"http://127.0.0.1:{port}", ledger, a_url)
        finally:
            server.should_exit = True
            thread.join(10)


def chat(*texts: str, **more: object) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]
    return {"messages": messages, "stream": True, "max_tokens": 4, "temperature": 0, **more}


def test_the_clients_bytes_are_as_bytes_and_b_sees_the_same_request() -> None:
    a, b = Script(), Script()
    with running(a, b) as s:
        direct = httpx.post(s.a_url + "/v1/chat/completions", json=chat("hi"))
        through = httpx.post(s.url + "/v1/chat/completions", json=chat("hi"))
        assert through.content == direct.content
        s.wait(2)
    assert b.seen == [a.seen[0]]
    assert [(t.contestant, t.n_gen, t.cached_n) for t in s.report.turns] == [("A", 4, 2), ("B", 4, 2)]
    assert s.report.status == OK


def test_a_streams_while_it_generates() -> None:
    """The first token reaches the client long before the last is made: 0.1 s a token by the stub's clock."""
    with running(Script(delay=0.1), Script()) as s, _open(s.url) as r:
        started = time.perf_counter()
        arrivals = [time.perf_counter() - started for _ in r.iter_raw()]
    assert arrivals[0] < arrivals[-1] - 0.2


def _open(url: str) -> AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", url + "/completion", json={"prompt": [1]})


def test_b_never_gets_the_clients_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [("Authorization", "Bearer secret"), ("x-api-key", "k"), ("Cookie", "c"), ("X-Other", "1"), ("Host", "h")]
    a = Side("http://a", Contestant("A", ours=True), keeps_credentials=True)
    b = Side("http://b", Contestant("B", ours=False))
    keyed = Side("http://b", Contestant("B", ours=False), api_key="mine")
    assert dict(a.headers(given))["Authorization"] == "Bearer secret"
    assert dict(b.headers(given)) == {"X-Other": "1", "accept-encoding": "identity"}
    assert dict(keyed.headers(given))["authorization"] == "Bearer mine"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failing_b_is_only_a_row(at_once: bool) -> None:
    with running(Script(), Script(status=500), at_once=at_once) as s:
        assert httpx.post(s.url + "/v1/chat/completions", json=chat("hi")).status_code == 200
        s.wait(2)
    assert s.report.status == PEER_FAILED
    assert [bool(t.error) for t in sorted(s.report.turns, key=lambda t: t.contestant)] == [False, True]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_stops_reading_is_nobodys_failure(at_once: bool) -> None:
    """As agents do all day: the request is in no figure of either side, and one note counts it."""
    with running(Script(delay=0.1), Script(delay=0.2), at_once=at_once) as s:
        with httpx.stream("POST", s.url + "/v1/chat/completions", json=chat("hi")) as r:
            next(r.iter_raw())
        assert httpx.post(s.url + "/v1/chat/completions", json=chat("other")).status_code == 200
        s.wait(2)
    s.ledger.finish()
    assert {t.session for t in s.report.turns} == {"conversation 1"}
    assert s.report.status == OK, s.report.troubles
    (note,) = [note for note in s.report.notes if "went away before the answer ended, in no figure: 1, after" in note]
    assert "after 0.0 s" not in note  # the stub's first token takes 0.1 s


def test_as_errors_reach_the_client_as_they_are() -> None:
    with running(Script(status=503), Script()) as s:
        reply = httpx.post(s.url + "/v1/chat/completions", json=chat("hi"))
    assert (reply.status_code, reply.json()) == (503, {"error": {"message": "stub says no"}})


def test_nobody_at_a_is_502() -> None:
    with running(Script(), Script()) as s:
        pass
    gone = Side(s.a_url, Contestant("A", ours=True))
    report = Report("proxy", "t", contestants=[gone.contestant])
    proxy = Proxy(gone, gone, Ledger(report, gone.contestant, gone.contestant), mode="split")
    from starlette.testclient import TestClient

    with TestClient(proxy.app()) as client:
        reply = client.post("/v1/chat/completions", json=chat("hi"))
    assert reply.status_code == 502
    assert "A at" in reply.json()["error"]["message"]
    assert report.turns[0].error


def test_split_deals_out_conversations_and_keeps_them() -> None:
    a, b = Script(), Script()
    with running(a, b, mode="split") as s:
        for texts in (("one",), ("two",), ("one", "x", "more"), ("two", "y", "more")):
            httpx.post(s.url + "/v1/chat/completions", json=chat(*texts))
        s.wait(4)
    first = [[body["messages"][0]["content"] for _, body in script.seen] for script in (a, b)]
    assert first == [["one", "one"], ["two", "two"]]
    assert [(t.contestant, t.session[-1], t.turn) for t in s.report.turns] == [
        ("A", "0", 0),
        ("B", "1", 0),
        ("A", "0", 1),
        ("B", "1", 1),
    ]


def test_conversations_are_recognised_and_edits_named() -> None:
    a, b = Contestant("A", ours=True), Contestant("B", ours=False)
    ledger = Ledger(Report("proxy", "t"), a, b)

    def ask(*texts: str) -> tuple[str, int, str]:
        asked = ledger.ask(chat(*texts), 0.0)
        return asked.conversation.name[-1], asked.turn, asked.kind

    assert ask("sys", "a", "q") == ("0", 0, "first")
    assert ask("other", "b", "q") == ("1", 0, "first")
    assert ask("sys", "a", "q", "r", "s") == ("0", 1, "append")
    assert ask("sys", "a", "changed") == ("0", 2, "edited")
    assert ledger.ask({"prompt": "x"}, 0.0).kind == "first"


def greet(s: Setting, *texts: str) -> None:
    assert httpx.post(s.url + "/v1/chat/completions", json=chat(*texts)).status_code == 200


def test_rows_hold_what_both_have_answered() -> None:
    """B refuses what A answers: no figure of A's stands in a row against others of B's."""
    with running(Script(), Script(status=500)) as s:
        greet(s, "hi")
        s.wait(2)
    assert s.report.rows == []
    with running(Script(), Script()) as s:
        for text in ("hi", "you", "there"):
            greet(s, text)
        s.wait(6)
    counts = {row.metric: {name: len(x) for name, x in row.samples.items()} for row in s.report.rows}
    assert counts["request ms"] == {"A": 3, "B": 3}
    # tokens that arrive at once are no speed: such a request has none in either side's row
    assert all(set(each) == {"A", "B"} and len(set(each.values())) == 1 for each in counts.values())
    assert all(row.paired for row in s.report.rows)


def answer(ledger: Ledger, side: Contestant, asked: Asked, prompt_n: int, ttft: float = 1.0, sent: float = 0.0) -> None:
    meter = Meter(first=ttft, last=ttft + 1, prompt_n=prompt_n, predicted_n=11, events=11, text="x")
    ledger.answered(asked, side, meter, ttft + 1, sent=sent)


def books() -> tuple[Report, Ledger, Contestant, Contestant]:
    a, b = Contestant("A", ours=True), Contestant("B", ours=False)
    report = Report("proxy", "t", contestants=[a, b])
    return report, Ledger(report, a, b), a, b


def test_prompts_that_the_sides_count_otherwise_are_not_the_same_work() -> None:
    """Another template or tokeniser shows in the numbers of tokens of one request; then there is no ratio."""
    report, ledger, a, b = books()
    for i, n in enumerate((40, 40, 43, 43)):
        asked = ledger.ask(chat(f"question {i}"), float(i))
        answer(ledger, a, asked, 40)
        answer(ledger, b, asked, n)
        assert (report.status == OK) == (i < 2)
        assert (report.ratio(report.rows[0], b) is None) == (i >= 2)
    assert [t.text for t in report.troubles] == [
        "conversation 2 turn 0 has 40 tokens for A and 43 for B: their templates or tokenisers differ, "
        "no ratio is given"
    ]
    assert headline(report) == [f"no headline ratio: {report.troubles[0].text.removesuffix(', no ratio is given')}"]


def test_tokens_that_came_at_once_are_no_speed() -> None:
    """Eleven tokens within 0.1 ms: they waited for each other on the way; the times stand."""
    report, ledger, a, b = books()
    asked = ledger.ask(chat("hi"), 0.0)
    for side in (a, b):
        meter = Meter(first=1.0, last=1.0001, prompt_n=4, predicted_n=11, events=11, text="x")
        ledger.answered(asked, side, meter, 1.1)
    assert [row.metric for row in report.rows] == ["TTFT ms", "request ms"]


def test_unstreamed_answers_have_no_time_to_the_first_token() -> None:
    """A whole answer of 100 ms says when it was complete; the streamed one alone has a first token (50 ms)."""
    report, ledger, a, b = books()
    whole = json.dumps({"choices": [{"message": {"content": "Hello"}}], "usage": {"completion_tokens": 2}}).encode()
    for text, body in (("one", whole), ("two", b'data: {"choices": [{"text": "Hello"}]}\n\n')):
        asked = ledger.ask(chat(text), 0.0)
        for side in (a, b):
            meter = Meter()
            meter.feed(body, 0.05)
            meter.end(0.1)
            ledger.answered(asked, side, meter, 0.1)
    assert {row.metric: row.samples["A"] for row in report.rows} == {"TTFT ms": [50.0], "request ms": [100.0, 100.0]}
    shown = [row[-2:] for row in turn_rows(report)[1]]
    assert shown == [["-", "-"], ["-", "50.0"]]
    assert "nan" not in html.page(report)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("a", "b", "failed"), [(400, 400, ""), (400, 422, "AB"), (400, 200, "A"), (429, 429, "AB")])
def test_a_bad_request_that_both_refuse_is_no_failure(a: int, b: int, failed: str, at_once: bool) -> None:
    """It is counted apart; a refusal that the other side does not share, and `too many requests`, are failures."""
    scripts = Script(status=a), Script(status=b)
    with running(*scripts, at_once=at_once) as s:
        assert httpx.post(s.url + "/v1/chat/completions", json=chat("hi")).status_code == a
        s.wait(2 if failed else 0)
        end = time.monotonic() + 10
        while not failed and not any("refused alike" in n for n in s.ledger.finish().notes):
            assert time.monotonic() < end
            time.sleep(0.01)
    report = s.ledger.close()
    assert "".join(sorted(t.contestant for t in report.turns if t.error)) == failed
    assert sorted(c.name for c in report.contestants if c.errors) == list(failed)
    alike = "requests that both refused alike, no failure: 1, first conversation 0 turn 0 (status 400: stub says no)"
    assert (alike in report.notes) == (not failed)
    assert report.status == (OURS_FAILED if failed else NOT_COMPARABLE)
    nothing = "nothing was compared: both sides refused every request"
    assert (nothing in [t.text for t in report.troubles]) == (not failed)


def test_refusals_do_not_spoil_a_session() -> None:
    report, ledger, a, b = books()
    bad = ledger.ask(chat("bad"), 0.0)
    good = ledger.ask(chat("good"), 1.0)
    for side in (a, b):
        answer(ledger, side, good, 40)
        ledger.answered(bad, side, Meter(), 0.1, "no such model", status=404)
    assert ledger.close().status == OK
    assert {t.session for t in report.turns} == {"conversation 1"}


def test_it_is_said_where_greedy_texts_part() -> None:
    _, ledger, a, b = books()
    for i, (one, two) in enumerate((("same", "same"), ("abcd", "abXd"), ("ab", "abc"))):
        asked = ledger.ask(chat(f"question {i}"), 0.0)
        for side, text in ((a, one), (b, two)):
            ledger.answered(asked, side, Meter(first=1.0, last=2.0, text=text, events=2), 2.0)
    notes = ledger.finish().notes
    assert notes == ledger.finish().notes
    assert "greedy requests answered by both: 3, with equal texts: 1" in notes
    assert (
        "greedy requests whose texts part: conversation 1 turn 0 at character 3; conversation 2 turn 0 at character 3"
    ) in notes


def test_half_answered_requests_and_answers_at_the_same_time_are_counted() -> None:
    _, ledger, a, b = books()
    for i in range(3):
        asked = ledger.ask(chat(f"question {i}"), 10.0 * i)
        answer(ledger, a, asked, 40, sent=10.0 * i)
        if i < 2:
            answer(ledger, b, asked, 40, sent=10.0 * i + (9.0 if i else 5.0))  # the second is still at work at 20
    notes = ledger.finish().notes
    assert ledger.finish().notes == notes
    assert "requests that one side alone has answered, in no row and no ratio: 1" in notes
    assert [n.rsplit(": ", 1)[1] for n in notes if "share a machine" in n] == ["1 of 3"]


def test_turns_of_a_conversation_are_one_witness_where_they_are_dealt_out() -> None:
    """Forty turns of one conversation a side are no verdict, three conversations are."""
    report, ledger, a, b = books()
    ledger.mirrored = False
    talks: dict[int, list[str]] = {i: [f"start {i}"] for i in range(6)}
    for turn in range(40):
        for i, texts in talks.items():
            if turn and i >= 2:
                continue
            asked = ledger.ask(chat(*texts), 0.0)
            side = a if asked.conversation.side == "A" else b
            answer(ledger, side, asked, 40, ttft=1.0 if side is a else 2.0)
            texts += ["reply", f"more {turn}"]
        if not turn:
            row = report.row("requests", "TTFT ms")
            ratio = report.ratio(row, b)
            assert ratio is not None
            assert (ratio.n, ratio.unit, ratio.verdict) == (3, "conversations", "better")
    assert row.blocks == {"A": [40, 1, 1], "B": [40, 1, 1]}
    assert {len(x) for x in row.samples.values()} == {42}


META = {"n_params": 10, "size": 20, "n_vocab": 30}


@pytest.mark.parametrize(
    ("a", "b", "status", "words"),
    [
        (Script(meta=META), Script(meta=META), OK, ""),
        (Script(meta=META), Script(meta=META | {"size": 21}), NOT_COMPARABLE, "size is 20 at A and 21 at B"),
        (Script(meta=META), Script(meta=META, tokenize=lambda t: [1]), NOT_COMPARABLE, "8 of 8 texts have other"),
        (Script(meta=META), Script(), OK, "cannot be known, as B does not say its size"),
        (Script(), Script(native=False), OK, "cannot be known, as neither says its size"),
    ],
)
def test_no_ratio_between_models_that_differ_or_may(a: Script, b: Script, status: int, words: str) -> None:
    """And the report says why, in the terminal's headline and on the page."""
    report = Report("proxy", "t", contestants=[Contestant("A x", ours=True), Contestant("B y", ours=False)])
    with stub(a) as a_url, stub(b) as b_url:
        compare_models(report, Target(a_url, "native"), Target(b_url, "native"), report.contestants[1])
    row = report.row("requests", "tok/s", quantiles=True, paired=True)
    row.samples = {"A x": [10.0, 11.0, 12.0], "B y": [5.0, 5.5, 6.0]}
    assert report.status == status
    assert (report.ratio(row, report.contestants[1]) is None) == bool(words)
    said, page = "\n".join(headline(report)), html.page(report).split("</style>")[1]
    assert said.startswith("no headline ratio: " if words else "A x against the best of its peers")
    assert words in said
    assert words in page
    assert ('class="tile' in page) == (not words)
    assert ("A ratio above 1 means A x is better" in page) == ("A x is better" in page)


def test_files_on_this_machine_are_compared(tmp_path: Path) -> None:
    """By name, then by size, then by sha256: files of equal sizes may be other quantisations."""
    files = [tmp_path / name for name in "abcd"]
    for file, data in zip(files, (b"1234", b"1234", b"1235", b"12"), strict=True):
        file.write_bytes(data)
    found = []
    for other in files:
        report, _, _, peer = books()
        scripts = [Script(props={"model_path": str(f)}) for f in (files[0], other)]
        with stub(scripts[0]) as a_url, stub(scripts[1]) as b_url:
            compare_models(report, Target(a_url, "native"), Target(b_url, "native"), peer)
        found.append((report.status, peer.other_file, [n for n in report.notes if "same file" in n]))
    alike = (OK, False, ["A and B serve the same file"])
    assert found == [alike, alike, (NOT_COMPARABLE, True, []), (NOT_COMPARABLE, True, [])]


def test_other_paths_go_to_a_alone() -> None:
    a, b = Script(), Script()
    with running(a, b) as s:
        assert httpx.get(s.url + "/health").json()["status"] == "ok"
        assert httpx.post(s.url + "/tokenize", json={"content": "a bb"}).json() == {"tokens": [1, 2]}
    assert b.seen == []
    assert s.report.turns == []


def test_the_command_writes_its_report_when_interrupted(tmp_path: Path) -> None:
    """The command line in a process of its own: one request, Ctrl-C, a table, JSON and a page."""
    port, saved, page = free_port(), tmp_path / "r.json", tmp_path / "r.html"
    with stub(Script()) as a, stub(Script()) as b:
        argv = ["--a", a, "--b", b, "--port", str(port), "--report", str(saved), "--html", str(page)]
        command = [sys.executable, "-m", "ftgguf.proxy.main", *argv]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            _up(f"http://127.0.0.1:{port}", process)
            done = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat("hi"), timeout=10)
            assert done.status_code == 200
            end = time.monotonic() + 20
            while not saved.exists() or len(from_json(saved.read_bytes()).turns) < 1:
                assert time.monotonic() < end
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    report = from_json(saved.read_bytes())
    assert {t.contestant[0] for t in report.turns} == {"A", "B"}
    assert "conversation 0" in out
    assert "Traceback" not in errors
    assert process.returncode == OK
    assert "<svg" in page.read_text()
    assert json.loads(saved.read_text())["settings"]["mode"] == "mirror, B after A"


def test_a_session_without_a_request_is_no_success() -> None:
    """Status 3 of docs/bench.md: nothing was compared."""
    port = free_port()
    with stub(Script()) as a, stub(Script()) as b:
        command = [sys.executable, "-m", "ftgguf.proxy.main", "--a", a, "--b", b, "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            _up(f"http://127.0.0.1:{port}", process)
            os.kill(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == NOT_COMPARABLE
    assert "TROUBLE (exit status 3): nothing was compared: no request came that generates" in out
    assert "Traceback" not in errors


def _up(url: str, process: subprocess.Popen[str]) -> None:
    """Until the proxy passes something on."""
    end = time.monotonic() + 30
    while True:
        try:
            httpx.get(url + "/health")
            return
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
