"""The streaming client against a stub that says exactly what it sends and when."""

from __future__ import annotations

import pytest

from ftgguf.bench.client import Answer, Dialect, RequestFailed, Target, identify, together

from .stub_server import Script, stub


def test_native_stream_is_read_token_by_token() -> None:
    script = Script(delay=0.02)
    with stub(script) as url:
        answer = Target(url, "native").complete([5, 6, 7], 6, cache=True, n_probs=3)
    assert answer.tokens == [(3 + 3 * i) % 50 for i in range(6)]
    assert answer.text == "".join(f" t{t}" for t in answer.tokens)
    assert answer.gaps == pytest.approx([1.0] * 6)
    assert (answer.n_gen, answer.prompt_n, answer.cached_n) == (6, 3, 2)
    assert 0.02 <= answer.ttft <= answer.total
    assert sum(answer.token_gaps) == pytest.approx(answer.arrivals[-1] - answer.arrivals[0])
    assert answer.decode_rate <= 1 / 0.02
    body = script.seen[0][1]
    assert body["prompt"] == [5, 6, 7]
    assert (body["temperature"], body["ignore_eos"], body["cache_prompt"], body["n_probs"]) == (0, True, True, 3)


def test_openai_and_ollama_streams_take_counts_from_the_server() -> None:
    with stub(Script()) as url:
        openai = Target(url, "openai", "stub").complete("a b c", 5)
        ollama = Target(url, "ollama", "stub").complete("a b c", 5)
    assert (openai.n_gen, openai.prompt_n, openai.cached_n, openai.counted) == (5, 3, 2, False)
    assert (ollama.n_gen, ollama.prompt_n, ollama.cached_n, ollama.counted) == (5, 3, -1, False)
    assert openai.text == ollama.text == " t3 t6 t9 t12 t15"


def test_excluded_tokens_above_the_chosen_one_do_not_count_as_a_gap() -> None:
    """With end of text forbidden the most probable token may not be the chosen one."""
    from ftgguf.bench.client import _gap

    top = [{"id": 2, "logprob": -0.1}, {"id": 7, "logprob": -2.0}, {"id": 8, "logprob": -2.5}]
    assert _gap({"id": 7, "logprob": -2.0, "top_logprobs": top}) == pytest.approx(0.5)
    assert _gap({"id": 7, "logprob": -2.0, "top_logprobs": top[:2]}) == -1.0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(status=500), "answered 500: .*stub says no"),
        (Script(fail_after=2), "broke off after 2 tokens|after 2 tokens"),
        (Script(hang=True), "hangs"),
        (Script(delay=0.2), "hangs after"),
    ],
)
def test_failures_say_what_happened(script: Script, words: str) -> None:
    """Refusal, a stream that breaks off, no answer, and one that trickles on past the limit."""
    with stub(script) as url, pytest.raises(RequestFailed, match=words):
        Target(url, "native", timeout=0.5).complete([1], 8)


@pytest.mark.parametrize("dialect", ["native", "openai", "ollama"])
def test_a_token_without_text_arrives_with_the_end(dialect: Dialect) -> None:
    """An only token that ends in the middle of a character: llama-server sends no text for it (process_token of its
    server-context.cpp), and its count with the end. That is no answer without a token."""
    with stub(Script(held_back=frozenset({0}), delay=0.05)) as url:
        answer = Target(url, dialect, "stub").complete([1, 2] if dialect == "native" else "a b", 1)
    assert (answer.n_gen, len(answer.arrivals), answer.text) == (1, 1, "")
    assert 0.05 <= answer.ttft <= answer.total


@pytest.mark.parametrize(("dialect", "reason"), [("native", "eos"), ("openai", ""), ("ollama", "stop")])
def test_an_answer_without_a_token_says_why(dialect: Dialect, reason: str) -> None:
    words = "the server ended its answer without having generated a token" + (f" .its reason: {reason}" * bool(reason))
    with stub(Script(ends_after=0)) as url, pytest.raises(RequestFailed, match=words):
        Target(url, dialect, "stub").complete([1, 2] if dialect == "native" else "a b", 4)


def test_nobody_there() -> None:
    with stub(Script()) as url:
        pass
    with pytest.raises(RequestFailed, match="refused"):
        Target(url, "native").complete([1], 1)


def test_servers_are_told_apart() -> None:
    with stub(Script()) as url:
        assert identify(url, "", 5) == Target(url, "native", "stub", timeout=5)
    with stub(Script(native=False)) as url:
        assert identify(url, "mine", 5) == Target(url, "openai", "mine", timeout=5)


def test_requests_run_at_once() -> None:
    """Four streams of 0.2 s each take far less than 0.8 s: by the client's own clock they overlap."""
    with stub(Script(delay=0.05)) as url:
        target = Target(url, "native")
        answers = together([lambda i=i: target.complete([1] * i, 4) for i in range(1, 5)])  # type: ignore[misc]
    assert [a.prompt_n for a in answers] == [1, 2, 3, 4]


def test_rates_of_an_answer() -> None:
    answer = Answer(arrivals=[1.0, 1.5, 2.0], n_gen=3)
    assert (answer.ttft, answer.decode_rate, answer.token_gaps) == (1.0, 2.0, [0.5, 0.5])
    assert Answer(arrivals=[1.0], n_gen=1).decode_rate == 0.0
