"""The comparison itself on made-up answers, and the whole request set on two real llama-servers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from compat.differential import Answer, Request, Rule, ask, compare, connect, parse_events, run, summarise
from compat.peer import PeerError, peer_server
from compat.requests import REQUESTS
from ftgguf.pull.demo import resolve_stories

pytest.importorskip("xllamacpp", reason="the peer is the llama-server inside xllamacpp")
REQUEST = Request("r", "GET", "/", rules={"body.noise": Rule.IGNORE})
ARGS = ["-c", "1024", "-t", "1", "-a", "stories"]


def differing(ours: Any, peer: Any) -> list[str]:
    """Paths that differ between two bodies."""
    return [
        d.path for d in compare(REQUEST, Answer(200, "application/json", ours), Answer(200, "application/json", peer))
    ]


@pytest.mark.parametrize(
    ("ours", "peer", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["body.a"]),
        ({"a": 1}, {"a": True}, ["body.a"]),
        ({"a": 1}, {"a": "1"}, ["body.a"]),
        ({"a": None}, {}, ["body.a"]),
        ({}, {"a": None}, ["body.a"]),
        ({"a": 0.1}, {"a": 0.10000000149011612}, []),
        ({"a": [1, 2]}, {"a": [1]}, ["body.a (length)"]),
        ({"id": "x"}, {"id": "y"}, []),
        ({"id": "x"}, {"id": 3}, ["body.id"]),
        ({"timings": {"prompt_ms": 1}}, {"timings": {"prompt_ms": 2.5}}, []),
        ({"timings": {}}, {"timings": {"prompt_ms": 2.5}}, ["body.timings.prompt_ms"]),
        ({"noise": 1}, {"noise": [2]}, []),
        ({"p": [{"id": 5, "logprob": -1.0}]}, {"p": [{"id": 5, "logprob": -1.01}]}, []),
        ({"p": [{"id": 5, "logprob": -1.0}]}, {"p": [{"id": 6, "logprob": -1.2}]}, ["body.p.0.id", "body.p.0.logprob"]),
    ],
)
def test_compare(ours: Any, peer: Any, paths: list[str]) -> None:
    """Each rule on a case decided by hand."""
    assert differing(ours, peer) == paths


def test_status_and_type_count() -> None:
    """The envelope is compared too."""
    found = compare(REQUEST, Answer(200, "text/html", ""), Answer(404, "application/json", ""))
    assert [d.path for d in found] == ["status", "content_type"]


def test_streams_are_alike_however_they_are_cut() -> None:
    """The same text in two and in three chunks; other text, a missing [DONE] and an odd field in between show."""

    def stream(pieces: list[str], done: bool = True, **extra: Any) -> Any:
        events = [f'data: {{"choices": [{{"index": 0, "text": "{p}"}}]}}\n\n' for p in pieces]
        if extra:
            events.insert(2, 'data: {"choices": [{"index": 0, "text": ""}], "odd": 1}\n\n')
        end = 'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
        return summarise(parse_events(":\n\n" + "".join(events) + end + ("data: [DONE]\n\n" if done else "")))

    base = stream(["a", "b", "c", "d"])
    assert differing(stream(["ab", "c", "", "d"]), base) == []
    assert differing(stream(["a", "b", "c", "x"]), base) == ["body.text.0.text"]
    assert differing(stream(["a", "b", "c", "d"], done=False), base) == ["body.done"]
    assert differing(stream(["a", "b", "c", "d"], odd=1), base)[0] == "body.between (length)"


@pytest.fixture(scope="module")
def peer() -> Iterator[str]:
    with peer_server(resolve_stories(), ARGS) as url:
        yield url


def test_two_peers_are_alike(peer: str) -> None:
    """llama-server against itself: what differs by nature is covered by the rules, and answers are deterministic."""
    with peer_server(resolve_stories(), ARGS) as other:
        assert [str(d) for d in run(other, peer, REQUESTS)] == []


def test_a_changed_answer_is_found(peer: str) -> None:
    """Every request's answer, with one value changed where no rule allows it."""
    with connect(peer) as client:
        for request in REQUESTS:
            answer = ask(client, request)
            changed = copy.deepcopy(answer.body)
            if not isinstance(changed, dict) or not changed:
                continue
            changed["one_more"] = 1
            found = compare(request, Answer(answer.status, answer.content_type, changed), answer)
            assert [d.path for d in found] == ["body.one_more"], request.name


def test_the_peer_dies_with_its_context() -> None:
    """The port is closed after the block, and errors carry llama-server's own words."""
    with peer_server(resolve_stories(), ARGS) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    with pytest.raises(PeerError, match="does not know flag --no-such-flag"), peer_server("x.gguf", ["--no-such-flag"]):
        pass
    with pytest.raises(PeerError, match=r"failed to load model"), peer_server(__file__):
        pass
