"""One engine, in process: lengths, ends, cancels, errors, slots, timings and metrics. Expectations are llama-server's
(its server-context.cpp, by reading) and the naive answers of engine_support."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from engine_support import (
    EOG,
    PIECES,
    Collector,
    ask,
    check_idle,
    check_pages,
    generate,
    make_engine,
    naive_answer,
    run_all,
)

from ftgguf.engine.config import EngineConfig
from ftgguf.engine.executor import Executor, ExecutorLost
from ftgguf.engine.messages import Control, Delta, Finished, Generate, SamplingParams
from ftgguf.nouns import PAGE

LONG = [5] * 10
"""A prompt whose answer with seed 0 is longer than 300 tokens (engine_support's function)."""


def test_executor_protocol() -> None:
    """The checking executor is an Executor as the protocol says."""
    _, executor = make_engine()
    assert isinstance(executor, Executor)


@pytest.mark.parametrize("n", [0, 1, 2, 25])
def test_max_tokens_is_exact(n: int) -> None:
    """Asking for n tokens gives n; 0 evaluates the prompt only."""
    engine, executor = make_engine()
    answer = ask(engine, generate(1, LONG, max_tokens=n))
    assert len(answer.tokens) == n
    assert answer.finished is not None
    assert (answer.finished.stop_type, answer.finished.truncated) == ("limit", False)
    assert answer.finished.predicted_n == n
    assert sum(executor.rows) == 10 + max(0, n - 1)
    assert answer.finished.cached_n == 10 + max(0, n - 1)


def test_server_wide_limit() -> None:
    """-n on the command line limits requests that give none, and only those."""
    engine, _ = make_engine(n_predict=7)
    assert len(ask(engine, generate(1, LONG)).tokens) == 7
    assert len(ask(engine, generate(2, LONG, max_tokens=9)).tokens) == 9


@pytest.mark.parametrize("n_prompt", [1, 150, 254, 255])
def test_context_full(n_prompt: int) -> None:
    """Without context shift a sequence ends when prompt and answer fill n_ctx: truncated, `limit`."""
    engine, _ = make_engine(1024, n_ctx=256)
    answer = ask(engine, generate(1, [5] * n_prompt, seed=1))
    tokens, stop = naive_answer(generate(1, [5] * n_prompt, seed=1), 256)
    assert answer.tokens == tokens
    assert answer.finished is not None
    assert answer.finished.stop_type == stop
    if stop == "limit":
        assert len(tokens) == 256 - n_prompt
        assert answer.finished.truncated


def test_prompt_too_long() -> None:
    """llama-server's words and fields, and the engine serves on."""
    engine, _ = make_engine(1024, n_ctx=256)
    answer = ask(engine, generate(1, [5] * 256))
    assert answer.failed is not None
    assert (answer.failed.code, answer.failed.type) == (400, "exceed_context_size_error")
    assert answer.failed.message == (
        "request (256 tokens) exceeds the available context size (256 tokens), try increasing it"
    )
    assert answer.failed.extra == {"n_prompt_tokens": 256, "n_ctx": 256}
    assert ask(engine, generate(2, [5] * 255, max_tokens=1)).finished is not None


@pytest.mark.parametrize("prompt", [[], [24], [-1], [5, 1 << 40]])
def test_bad_prompt(prompt: list[int]) -> None:
    """No token, or one outside the vocabulary, is this request's error."""
    engine, executor = make_engine()
    answer = ask(engine, generate(1, prompt))
    assert answer.failed is not None
    assert (answer.failed.code, answer.failed.type) == (400, "invalid_request_error")
    assert executor.rows == []
    assert ask(engine, generate(2, LONG, max_tokens=3)).finished is not None


def test_end_of_generation() -> None:
    """The end token counts as generated, has no text, and is not evaluated."""
    engine, _ = make_engine()
    for token in range(1, 24):
        request = generate(1, [token] * 10)
        tokens, stop = naive_answer(request, 4096)
        if stop == "eos" and len(tokens) < 200:
            break
    answer = ask(engine, request)
    assert answer.tokens == tokens
    assert tokens[-1] == EOG
    assert answer.text == "".join(PIECES[token] for token in tokens[:-1])
    assert answer.finished is not None
    assert answer.finished.stop_type == "eos"
    assert answer.finished.cached_n == 10 + len(tokens) - 1


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings(stream: bool) -> None:
    """A stop string over several tokens ends the text before it, streamed or not, and never leaks in part."""
    engine, _ = make_engine()
    full = ask(engine, generate(1, LONG, max_tokens=60)).text
    for id, (start, n) in enumerate(itertools.product((0, 7, 20), (1, 4)), start=2):
        stop = full[start : start + n]
        request = generate(id, LONG, max_tokens=60, stop=("zzz", stop), stream=stream)
        answer = ask(engine, request)
        assert answer.text == full[: full.index(stop)]
        assert answer.finished is not None
        assert (answer.finished.stop_type, answer.finished.stopping_word) == ("word", stop)
        assert len(answer.deltas) == 1 or stream


def test_joined_deltas_equal_the_whole_answer() -> None:
    """Streamed and whole answers have the same text, tokens and ends, with text held back at the limit too."""
    engine, _ = make_engine()
    full = ask(engine, generate(0, LONG, max_tokens=40)).text
    stop = full[39] + "never"
    streamed = ask(engine, generate(1, LONG, max_tokens=40, stop=(stop,)))
    whole = ask(engine, generate(2, LONG, max_tokens=40, stop=(stop,), stream=False))
    assert streamed.text == whole.text == full
    assert streamed.tokens == whole.tokens
    assert len(whole.deltas) == 1
    assert len(streamed.deltas) > 20


def test_cancel() -> None:
    """A cancelled request says nothing more, its slot is idle before the next step, and what it evaluated is kept."""
    engine, executor = make_engine(8192, 64, n_slots=1)
    prompt = [5, 6] * 500
    for id, steps in ((1, 0), (2, 3), (3, 30)):
        engine.submit(generate(id, prompt, max_tokens=500))
        engine.submit(generate(id + 100, [9] * 5, max_tokens=500))  # queued behind it
        for _ in range(steps):
            engine.step()
        engine.cancel(id + 100)
        engine.cancel(id)
        assert not engine.has_work
        assert engine.step() == []
        check_idle(engine)
    before = sum(executor.rows)
    answer = ask(engine, generate(4, prompt, max_tokens=1))
    assert answer.started is not None
    assert answer.started.cached == 999
    assert sum(executor.rows) - before == 1
    engine.cancel(12345)


def test_one_bad_sampler_harms_nobody_else() -> None:
    """A sampler that is refused (400) or breaks in service (500) fails its own request only."""
    engine, _ = make_engine(fail_sampler={2: 5, 3: -1})
    requests = [generate(id, [id + 4] * 10, max_tokens=20) for id in range(4)]
    for request in requests:
        engine.submit(request)
    answers = run_all(engine).answers
    assert answers[2].failed is not None
    assert answers[2].failed.code == 500
    assert answers[2].tokens == naive_answer(requests[2], 4096)[0][:5]
    assert answers[3].failed is not None
    assert (answers[3].failed.code, answers[3].failed.message) == (400, "bad grammar")
    for id in (0, 1):
        assert answers[id].tokens == naive_answer(requests[id], 4096)[0]
    check_idle(engine)


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    """An exception in forward is a 500 for the requests in that step; later ones are served, and right."""
    engine, _ = make_engine(fail_at={6: RuntimeError("boom")}, n_slots=2)
    for id in range(3):
        engine.submit(generate(id, [id + 4] * 10, max_tokens=20))
    answers = run_all(engine).answers
    for id in (0, 1):
        failed = answers[id].failed
        assert failed is not None
        assert (failed.code, failed.type) == (500, "server_error")
        assert "boom" in failed.message
    assert answers[2].tokens == naive_answer(generate(2, [6] * 10, max_tokens=20), 4096)[0]
    assert engine.metrics.n_failed_steps == 1
    check_idle(engine)


def test_a_lost_executor_ends_the_engine() -> None:
    """ExecutorLost fails every request and is raised to the caller."""
    engine, _ = make_engine(fail_at={3: ExecutorLost("gone")}, n_slots=1)
    for id in range(2):
        engine.submit(generate(id, LONG, max_tokens=20))
    for _ in range(3):
        engine.step()
    with pytest.raises(ExecutorLost):
        engine.step()
    failed = {message.id for message in engine.drain() if not isinstance(message, Delta | Finished)}
    assert failed == {0, 1}


def test_cache_prompt_off() -> None:
    """llama-server: such a request reuses nothing, but what it leaves can be reused."""
    engine, executor = make_engine()
    prompt = [5, 6, 7] * 30
    for id in (1, 2):
        before = sum(executor.rows)
        answer = ask(engine, generate(id, prompt, max_tokens=1, cache_prompt=False))
        assert answer.started is not None
        assert answer.started.cached == 0
        assert sum(executor.rows) - before == 90
    answer = ask(engine, generate(3, prompt, max_tokens=1))
    assert answer.started is not None
    assert answer.started.cached == 89


def test_edit_in_the_middle_and_return() -> None:
    """History rewritten in the middle is reused up to the edit; the earlier branch is still there afterwards."""
    engine, _ = make_engine()
    first = [5] * 50 + [6] * 50
    edited = [5] * 50 + [7] * 50
    cached = []
    for id, prompt in enumerate((first, edited, first, edited)):
        answer = ask(engine, generate(id, prompt, max_tokens=2))
        assert answer.tokens == naive_answer(generate(id, prompt, max_tokens=2), 4096)[0]
        assert answer.started is not None
        cached.append(answer.started.cached)
    assert cached == [0, 50, 99, 99]


def test_conversation_evaluates_only_the_new_turn() -> None:
    """The next turn re-sends prompt and answer: all but the last answer token (never evaluated) is reused."""
    engine, executor = make_engine()
    prompt = [5] * 20
    answer = ask(engine, generate(1, prompt, max_tokens=30))
    before = sum(executor.rows)
    follow = ask(engine, generate(2, prompt + answer.tokens + [8] * 10, max_tokens=1))
    assert follow.started is not None
    assert follow.started.cached == 49
    assert sum(executor.rows) - before == 11


def test_slot_choice() -> None:
    """llama-server: the slot asked for, else the most similar idle one, else the longest unused (last of equals)."""
    engine, _ = make_engine(n_slots=3)

    def slot_of(id: int, prompt: list[int], id_slot: int = -1) -> int:
        answer = ask(engine, generate(id, prompt, max_tokens=1, id_slot=id_slot))
        assert answer.started is not None
        return answer.started.slot

    assert slot_of(1, [5] * 20) == 2
    assert slot_of(2, [6] * 20) == 1
    assert slot_of(3, [5] * 15 + [9] * 5) == 2
    assert slot_of(4, [7] * 20) == 0
    assert slot_of(5, [8] * 20) == 1
    assert slot_of(6, [8] * 20, id_slot=0) == 0
    assert slot_of(7, [5] * 20, id_slot=99) == 2


def test_pinned_requests_wait_for_their_slot() -> None:
    """A request for a busy slot waits although another one is free; later ones pass it."""
    engine, _ = make_engine(n_slots=2)
    engine.submit(generate(1, LONG, max_tokens=30, id_slot=0))
    engine.submit(generate(2, [6] * 10, max_tokens=2, id_slot=0))
    engine.submit(generate(3, [7] * 10, max_tokens=2))
    collector = Collector()
    order = []
    while engine.has_work:
        messages = engine.step()
        order += [message.id for message in messages if isinstance(message, Finished)]
        collector.take(messages)
    assert order == [3, 1, 2]
    finished = collector.answers[2].finished
    assert finished is not None
    assert finished.slot == 0


def test_timings_and_progress() -> None:
    """The first token belongs to the prompt; one progress message at the start and one for each prompt batch."""
    engine, _ = make_engine(4096, 64)
    prompt = [5, 6] * 75
    ask(engine, generate(1, prompt[:20], max_tokens=1))
    answer = ask(engine, generate(2, prompt, max_tokens=4, return_progress=True))
    assert answer.finished is not None
    timings = answer.finished.timings
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (20, 130, 4)
    assert timings["prompt_ms"] > 0
    assert timings["predicted_ms"] > 0
    assert [(p.total, p.cache, p.processed) for p in answer.progress] == [
        (150, 20, 20),
        (150, 20, 84),
        (150, 20, 148),
        (150, 20, 150),
    ]
    one = ask(engine, generate(3, prompt, max_tokens=1, return_progress=True, stream=False))
    assert one.progress == []
    assert one.finished is not None
    assert 0 < one.finished.timings["predicted_ms"] <= 0.001


def control(engine: Any, id: int, action: str, **arguments: Any) -> Any:
    engine.control(Control(id=id, action=action, arguments=arguments))
    reply = run_all(engine).replies[id]
    assert reply.ok, reply.message
    return reply.value


def test_metrics() -> None:
    """llama-server's counters: cached prompt tokens apart, rates without first tokens, windows that reset."""
    engine, executor = make_engine(4096, 64)
    for id in (1, 2):
        ask(engine, generate(id, [5] * 100, max_tokens=5))
    value = control(engine, 9, "metrics")
    assert value["prompt_tokens_total"] == 101
    assert value["prompt_tokens_cached_total"] == 99
    assert value["tokens_predicted_total"] == 10
    assert value["n_decode_total"] == len(executor.rows) == 2 + 4 + 1 + 4
    assert value["n_tokens_max"] == 104
    assert value["n_busy_slots_per_decode"] == 1
    assert value["predicted_tokens_seconds"] > 0
    assert value["prompt_tokens_seconds"] > 0
    assert (value["requests_processing"], value["requests_deferred"]) == (0, 0)
    again = control(engine, 10, "metrics")
    assert again["prompt_tokens_total"] == 101
    assert (again["predicted_tokens_seconds"], again["prompt_tokens_seconds"]) == (0, 0)


def test_slots_view() -> None:
    """The shape of /slots: four fields before the first task, the rest after it."""
    engine, _ = make_engine(n_slots=2, n_ctx=512)
    assert control(engine, 1, "slots")[0] == {"id": 0, "n_ctx": 512, "speculative": False, "is_processing": False}
    engine.submit(generate(5, LONG, max_tokens=20, details={"seed": 7}))
    engine.step()
    engine.step()
    engine.control(Control(id=3, action="slots"))
    messages = engine.step()
    reply = next(message for message in messages if getattr(message, "id", 0) == 3)
    busy = reply.value[1]  # type: ignore[union-attr]
    assert busy["is_processing"]
    assert busy["id_task"] == 5
    assert busy["params"] == {"seed": 7}
    assert busy["n_prompt_tokens_processed"] == 10
    assert busy["next_token"] == [{"has_next_token": True, "has_new_line": False, "n_remain": 18, "n_decoded": 2}]
    while engine.has_work:
        engine.step()
    idle = control(engine, 4, "slots")[1]
    assert not idle["is_processing"]
    assert idle["next_token"][0]["n_decoded"] == 20


def test_context_shift() -> None:
    """With context shift a sequence goes on past n_ctx; every shift drops half of what follows n_keep, and the cells
    are where the page table says (the executor checks positions). Two at once do as one alone does."""

    def run(n_slots: int, ids: list[int]) -> list[list[int]]:
        engine, _ = make_engine(8 * PAGE, 32, n_ctx=100, ctx_shift=True, n_slots=n_slots)
        for id in ids:
            request = generate(id, [5 + id] * 40, seed=id, max_tokens=300, n_keep=10 * id)
            engine.submit(request)
        answers = run_all(engine).answers
        for id in ids:
            finished = answers[id].finished
            assert finished is not None
            assert finished.truncated
        assert engine.metrics.n_context_shifts >= 4
        check_idle(engine)
        return [answers[id].tokens for id in ids]

    # Only with as many rows in the same chunks are the hashes after a shift comparable, so: same slots, one by one.
    together = run(2, [0, 1])
    assert together == [run(2, [0])[0], run(2, [1])[0]]
    assert [len(tokens) for tokens in together] == [300, 300]


def test_shift_leaves_shared_cells_alone() -> None:
    """A shift copies what others share before it writes: a later request still finds the prompt's own cells."""
    engine, _ = make_engine(8 * PAGE, 32, n_ctx=100, ctx_shift=True, n_slots=1)
    prompt = [5] * 60
    ask(engine, generate(1, prompt, max_tokens=200, n_keep=7))
    answer = ask(engine, generate(2, prompt, max_tokens=30))
    assert answer.tokens == naive_answer(generate(2, prompt, max_tokens=30), 100)[0]


def test_nothing_behind_a_shift_is_reused() -> None:
    """Cells that were computed before a shift saw tokens that are gone: only what n_keep kept may be matched."""
    engine, _ = make_engine(16 * PAGE, 32, n_ctx=100, ctx_shift=True, n_slots=1)
    ask(engine, generate(1, [5] * 60, max_tokens=70, n_keep=7))
    assert engine.metrics.n_context_shifts == 1
    left = engine.scheduler.slots[0].tokens.tolist()
    request = generate(2, left[:70], max_tokens=20)
    answer = ask(engine, request)
    assert answer.tokens == naive_answer(request, 100)[0]
    assert answer.started is not None
    assert answer.started.cached == 7 + sum(1 for _ in itertools.takewhile(lambda token: token == 5, left[7:60]))


def test_equal_sequences_end_up_on_one_set_of_pages() -> None:
    """Two that computed the same prompt apart (cache_prompt off) share its pages afterwards and stay right."""
    engine, _ = make_engine(64 * PAGE, 64)
    requests = [generate(id, [5, 6] * 200, seed=id, max_tokens=40, cache_prompt=False) for id in range(2)]
    for request in requests:
        engine.submit(request)
    collector = Collector()
    while not all(collector.answers[id].tokens for id in range(2)):
        collector.take(engine.step())
    first, second = engine.scheduler.active
    assert first.pages[:12] == second.pages[:12]
    check_pages(engine)
    run_all(engine, collector)
    for request in requests:
        assert collector.answers[request.id].tokens == naive_answer(request, 64 * PAGE)[0]


def test_shift_on_a_full_pool() -> None:
    """The pool holds exactly one context: the shift works in place."""
    engine, _ = make_engine(4 * PAGE, 32, n_ctx=4 * PAGE, ctx_shift=True, n_slots=1)
    answer = ask(engine, generate(1, [5] * 60, max_tokens=400))
    assert len(answer.tokens) == 400 or answer.tokens[-1] == EOG
    assert answer.finished is not None
    assert answer.finished.truncated
    check_idle(engine)


def test_config_is_checked() -> None:
    """Nonsense is refused with its reason."""
    with pytest.raises(ValueError, match="slot"):
        EngineConfig(n_ctx=10, n_slots=0)
    with pytest.raises(ValueError, match="context"):
        EngineConfig(n_ctx=0, n_slots=1)


def test_request_ids_are_unique() -> None:
    """Two live requests with one id would mix their texts."""
    engine, _ = make_engine()
    engine.submit(generate(1, LONG, max_tokens=2))
    with pytest.raises(ValueError, match="in use"):
        engine.submit(generate(1, LONG, max_tokens=2))


def test_messages_sent_within_a_step_are_the_same_messages() -> None:
    """With `send_now`, first tokens and ends leave before the engine's own work on the tree; nothing is said twice, in
    another order, or not at all, and as much is kept for later requests."""
    requests = [generate(i, [*LONG, 7, i], max_tokens=n) for i, n in enumerate((1, 2, 9, 40, 0), start=1)]
    again = [generate(i + 10, [*LONG, 7, i, 3], max_tokens=2) for i in range(1, 6)]

    def run(early: bool) -> tuple[dict[int, Any], list[int]]:
        engine, executor = make_engine()
        collector, sent = Collector(), list[int]()

        def take(messages: list[Any]) -> None:
            sent.append(len(messages))
            collector.take(messages)

        engine.send_now = take if early else None
        for batch in (requests, again):
            for request in batch:
                engine.submit(request)
            run_all(engine, collector)
        check_pages(engine)
        check_idle(engine)
        assert bool(sent) == early
        seen = {
            id: (answer.text, answer.tokens, answer.finished and answer.finished.cached_n)
            for id, answer in collector.answers.items()
        }
        return seen, executor.rows

    assert run(early=True) == run(early=False)


def test_the_first_token_leaves_before_its_prompt_is_kept() -> None:
    """The tree does not hold the prompt yet when the token goes out, and does when the step is over."""
    engine, _ = make_engine()
    held = []
    engine.send_now = lambda messages: held.append((messages, len(list(engine.cache.tree.nodes()))))
    engine.submit(generate(1, LONG, max_tokens=5))
    assert engine.step() == []
    ((messages, nodes),) = held
    assert [type(message).__name__ for message in messages] == ["Started", "Delta"]
    assert nodes == 0
    assert len(list(engine.cache.tree.nodes())) == 1


def test_a_packed_prompt_is_served_and_checked_like_any_other() -> None:
    """The front packs its prompts; limits, errors and answers are those of the same ids one by one."""
    long = [5] * 300
    for prompt in (LONG, [5, -1], [5, 10**6], long, []):
        packed = Generate(id=1, packed=np.array(prompt, "<i4").tobytes(), sampling=SamplingParams(seed=0), max_tokens=4)
        answers = [ask(make_engine()[0], request) for request in (packed, generate(1, prompt, max_tokens=4))]
        assert answers[0].tokens == answers[1].tokens
        assert answers[0].failed == answers[1].failed
    torn = ask(make_engine()[0], Generate(id=1, packed=b"\x01\x02\x03\x04\x05"))
    assert torn.failed is not None
    assert torn.failed.code == 400
