"""Sessions: reading, fitting, replaying, recording."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.bench import tracefile
from ftgguf.bench.client import Dialect, Target
from ftgguf.bench.contenders import Contender, Running
from ftgguf.bench.options import parse
from ftgguf.bench.recording import MASK, Recorder, mask, mask_text
from ftgguf.bench.report import OK, PEER_FAILED, Contestant, Report
from ftgguf.bench.table import slow_table
from ftgguf.bench.trace import Replay
from ftgguf.bench.tracefile import Request, Session, TraceError

from .stub_server import Script, stub


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def talk(n: int) -> list[dict[str, Any]]:
    """A system prompt, then n questions with answers."""
    found = [message("system", "be brief")]
    for i in range(n):
        found += [message("user", f"question {i}"), message("assistant", f"answer {i}")]
    return found


def write(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return str(path)


def test_the_packages_sessions() -> None:
    """Five sessions of real agents; each turn continues the one before, but for the two made to differ."""
    sessions = tracefile.load([])
    assert len(sessions) == 5
    for session in sessions:
        kinds = [r.kind for r in session.requests]
        assert kinds[0] == "first"
        assert kinds.count("edited") == kinds.count("side") == 1
        whole = [r.messages for r in session.requests if r.kind in ("first", "append")]
        assert all(b[: len(a)] == a for a, b in pairwise(whole))


def test_every_answer_is_a_turn(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", {"session": "x", "messages": talk(3)})
    (session,) = tracefile.load([file])
    assert [(len(r.messages), r.kind, r.reply) for r in session.requests] == [
        (2, "first", "answer 0"),
        (4, "append", "answer 1"),
        (6, "append", "answer 2"),
    ]


def test_turns_are_bounded_with_the_variations_among_them(tmp_path: Path) -> None:
    """By counting: at most N of each session, the first ones; the side request and the edited turn are in it where four
    others are, a recorded session is cut."""
    whole = [len(s.requests) for s in tracefile.load([])]
    for n in (1, 3, 5, 6, 7, 10**6):
        sessions = tracefile.load([], turns=n)
        assert [len(s.requests) for s in sessions] == [min(n, length) for length in whole]
        for session in sessions:
            kinds = [r.kind for r in session.requests]
            assert kinds[0] == "first"
            assert kinds.count("edited") == kinds.count("side") == (1 if n >= 6 else 0)
    recorded = [{"at": i, "path": "/v1", "body": {"messages": talk(i)[:-1] or talk(1)}} for i in range(1, 6)]
    (session,) = tracefile.load([write(tmp_path / "r.jsonl", *recorded)], turns=2)
    assert [r.kind for r in session.requests] == ["first", "append"]


def test_an_edited_turn_shares_all_but_its_last_message(tmp_path: Path) -> None:
    (session,) = tracefile.load([write(tmp_path / "t.jsonl", {"messages": talk(6)})])
    i = [r.kind for r in session.requests].index("edited")
    before, edited = session.requests[i - 2], session.requests[i]
    assert session.requests[i - 1].kind == "side"
    assert before.messages[:-1] == edited.messages[:-1]
    assert before.messages[-1] != edited.messages[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON lines"),
        ('{"x": 1}', "neither a session"),
        ("3", "entry 0 is no object"),
        ('{"messages": []}', "no session with an answer"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        tracefile.load([str(path)])
    with pytest.raises(TraceError, match=r"nothing\.jsonl"):
        tracefile.load([str(tmp_path / "nothing.jsonl")])


def test_clipping_makes_sessions_fit() -> None:
    long = [message("user", "word " * 2000), message("assistant", "ok")] * 3
    session = Session("s", tuple(Request(tuple(long[: 2 * i + 1])) for i in range(3)))
    fitted, clip, longest = tracefile.fit([session], lambda text: len(text.split()), 700)
    assert clip is not None
    assert longest <= 700
    assert len(fitted[0].requests) == 3
    same, none, _ = tracefile.fit([session], lambda text: len(text.split()), 10**6)
    assert (same, none) == ([session], None)
    with pytest.raises(TraceError, match="no turn"):
        tracefile.fit([session], lambda text: len(text.split()), 5)


def test_tools_become_text_for_templates_without_them() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    plain = tracefile.flattened(Request((message("user", "q"), call, message("tool", "42")), tools=({"a": 1},)))
    assert [m["role"] for m in plain.messages] == ["user", "assistant", "user"]
    assert '"name": "f"' in plain.messages[1]["content"]
    assert plain.tools == ()


# ----------------------------------------------------------------------------------------------------- recording


@pytest.mark.parametrize(
    "secret",
    [
        "sk-abcdefghijklmnop1234",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "hf_abcdefghijklmnopqrstuv",
        "AKIAIOSFODNN7EXAMPLE00",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\ncut off",
    ],
)
def test_secrets_do_not_reach_the_file(secret: str) -> None:
    masked = mask_text(f"before {secret} after")
    assert MASK in masked
    assert secret[10:20] not in masked
    assert masked.startswith("before ")


def test_assignments_and_fields_are_masked_and_text_stays() -> None:
    assert mask_text('export DB_PASSWORD="hunter2hunter2"') == f'export DB_PASSWORD="{MASK}"'
    assert mask_text("api_key: abcdef123456, next") == f"api_key: {MASK}, next"
    assert mask_text("https://me:pa55w0rd@host/x") == f"https://{MASK}@host/x"
    assert mask({"Authorization": "x", "messages": [{"content": "hello"}]}) == {
        "Authorization": MASK,
        "messages": [{"content": "hello"}],
    }
    assert mask({"image_url": {"url": "data:..."}}) == {"image_url": MASK}
    plain = "The token budget is 512 tokens: use max_tokens=64 and temperature 0.7."
    assert mask_text(plain) == plain


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_masking_keeps_the_shape(value: Any) -> None:
    """Whatever goes in, the same keys come out, and masking twice changes nothing more."""
    once = mask(value)
    assert mask(once) == once
    if isinstance(value, dict):
        assert list(once) == list(value)


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    """Two interleaved conversations and a changed history come back as they were."""
    recorder = Recorder(tmp_path / "r.jsonl")
    other = [message("user", "something else"), message("user", "more")]
    changed = [*talk(1), message("user", "another question")]
    first, second = [*talk(0), message("user", "question 0")], [*talk(1), message("user", "question 1")]
    for messages in (first, other, second, changed):
        entry = recorder.begin("/v1/chat/completions", {"messages": messages})
        entry.end(prompt_n=10, cached_n=3, predicted_n=7, ttft_ms=1.0, total_ms=2.0)
    recorder.close()
    sessions = tracefile.load([str(tmp_path / "r.jsonl")])
    assert [[(r.kind, r.n_gen) for r in s.requests] for s in sessions] == [
        [("first", 7), ("append", 7), ("edited", 7)],
        [("first", 7)],
    ]


# ----------------------------------------------------------------------------------------------------- replaying


def replay(scripts: dict[str, Script], dialect: Dialect = "native", timeout: float = 5.0) -> Report:
    """Stubs as sides, the first ours."""
    options = parse(["-r", "2"], positional=True)
    report = Report("trace", "trace")
    sessions = [tracefile._varied(tracefile._whole(name, talk(4), ())) for name in ("a", "b")]
    with contextmanager(_sides)(scripts, dialect, timeout) as sides:
        Replay(report, options, sides, sessions, 5).run()
    return report


def _sides(scripts: dict[str, Script], dialect: Dialect, timeout: float) -> Iterator[list[Contender]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        sides = []
        for i, (name, script) in enumerate(scripts.items()):
            url = stack.enter_context(stub(script))
            target = Target(url, dialect if i else "native", "stub", timeout=timeout)

            @contextmanager
            def up(target: Target = target) -> Iterator[Running]:
                yield Running(target)

            sides.append(Contender(Contestant(name, ours=not i), up))
        yield sides


def test_replay_records_every_turn_of_every_side() -> None:
    report = replay({"ours": Script(), "peer": Script()})
    assert report.status == OK, report.troubles
    assert len(report.turns) == 2 * 2 * 2 * 6  # sides, rounds, sessions, turns with the two added
    assert {t.kind for t in report.turns} == {"first", "append", "edited", "side"}
    assert all(t.cached_n == t.prompt_n - 1 and 0 < t.ttft_ms <= t.total_ms for t in report.turns)
    assert slow_table(report)[1][0] == ["ours", "24", "0", "0", "0", "0"]


def test_sides_get_the_same_ids_and_answers_as_long_as_recorded() -> None:
    ours, peer = Script(), Script()
    replay({"ours": ours, "peer": peer})
    asked = [[(b["prompt"], b["n_predict"]) for p, b in s.seen if p == "/completion"] for s in (ours, peer)]
    assert asked[0] == asked[1]
    # "answer i" is two words, two ids of the stub's tokenizer
    assert asked[0][0][1] == 2


def test_a_chat_only_peer_gets_messages() -> None:
    peer = Script()
    report = replay({"ours": Script(), "peer": peer}, "openai")
    assert report.status == OK, report.troubles
    path, body = next((p, b) for p, b in peer.seen if "completions" in p)
    assert path == "/v1/chat/completions"
    assert body["messages"][0] == message("system", "be brief")


def test_a_failing_turn_is_a_row() -> None:
    report = replay({"ours": Script(), "peer": Script(fail_after=1)})
    assert report.status == PEER_FAILED
    failed = [t for t in report.turns if t.error]
    assert failed
    assert {t.contestant for t in failed} == {"peer"}
