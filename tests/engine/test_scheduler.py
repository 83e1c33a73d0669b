"""Whole workloads through the engine against a naive one-request-at-a-time run (engine_support.naive_answer)."""

from __future__ import annotations

from dataclasses import dataclass

from engine_support import (
    N_VOCAB,
    Collector,
    check_idle,
    check_pages,
    generate,
    make_engine,
    naive_answer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.engine.messages import Generate
from ftgguf.engine.request import Sequence
from ftgguf.engine.scheduler import share_rows
from ftgguf.nouns import PAGE


@dataclass(frozen=True)
class Event:
    """A request, the step it arrives at, and how many steps later its client leaves (-1: never)."""

    request: Generate
    arrives: int
    leaves: int


_runs = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7, PAGE - 1, PAGE, PAGE + 9])), min_size=1, max_size=4
)


@st.composite
def _events(draw: st.DrawFn) -> list[Event]:
    events = []
    for id in range(draw(st.integers(1, 9))):
        prompt = [token for token, n in draw(_runs) for _ in range(n)]
        request = generate(
            id,
            prompt,
            seed=draw(st.integers(0, 2)),
            max_tokens=draw(st.sampled_from([-1, 0, 1, 2, 9, 40])),
            cache_prompt=draw(st.sampled_from([True, True, True, False])),
            id_slot=draw(st.sampled_from([-1, -1, 0, 1, 7])),
            stream=draw(st.booleans()),
        )
        events.append(Event(request, draw(st.integers(0, 30)), draw(st.sampled_from([-1, -1, -1, 0, 1, 5, 20]))))
    return events


@settings(deadline=None, max_examples=120)
@given(
    _events(),
    st.integers(1, 4),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([3, 5, 8, 40]),
    st.booleans(),
    st.data(),
)
def test_any_workload_equals_solo_runs(
    events: list[Event], n_slots: int, max_rows: int, n_pages: int, batching: bool, data: st.DataObject
) -> None:
    """Parallel requests, shared prefixes, cancels, eviction and preemption on a tiny pool never change an answer."""
    n_cells = n_pages * PAGE
    n_ctx = min(n_cells, 200)
    engine, _ = make_engine(n_cells, max_rows, n_slots=n_slots, n_ctx=n_ctx, cont_batching=batching)
    collector = Collector()
    gone: set[int] = set()
    step = 0
    while step < 40 or engine.has_work:
        for event in events:
            if event.arrives == step:
                engine.submit(event.request)
            if event.leaves >= 0 and event.arrives + event.leaves == step:
                answer = collector.answers[event.request.id]
                if answer.finished is None and answer.failed is None:
                    gone.add(event.request.id)
                engine.cancel(event.request.id)
        collector.take(engine.step())
        check_pages(engine)
        step += 1
        assert step < 50_000
        for id in gone:
            assert collector.answers[id].finished is None
    for event in events:
        request, answer = event.request, collector.answers[event.request.id]
        if len(request.prompt) >= n_ctx:
            assert answer.failed is not None or request.id in gone
            continue
        if request.id in gone:
            continue
        tokens, stop = naive_answer(request, n_ctx)
        assert answer.failed is None
        assert answer.finished is not None
        assert answer.tokens == tokens
        assert answer.finished.stop_type == stop
        assert answer.finished.predicted_n == len(tokens)
        assert answer.finished.evaluated_n == len(request.prompt)
        assert answer.finished.truncated == (
            stop == "limit" and len(request.prompt) + len(tokens) >= n_ctx and tokens != []
        )
    check_idle(engine)


def test_decode_goes_on_in_every_step_of_a_long_prefill() -> None:
    """While a 3,000-token prompt is evaluated, each step also holds one row of the running sequence, and the prompt's
    rows in it are bounded (a quarter of 256 rows here)."""
    engine, executor = make_engine(8192, 256)
    collector = Collector()
    engine.submit(generate(1, [5] * 10, max_tokens=300))
    while not collector.answers[1].tokens:
        collector.take(engine.step())
    engine.submit(generate(2, [6] * 3000, max_tokens=1))
    before = len(executor.batches)
    while 2 not in collector.answers or collector.answers[2].finished is None:
        collector.take(engine.step())
        if len(executor.batches) - before > 400:
            raise AssertionError("the prompt does not end")
    mixed = [batch for batch in executor.batches[before:] if len(batch) == 2]
    assert mixed
    assert all(batch[0][0] == 1 and batch[1][0] <= 64 for batch in mixed)
    # the first sequence ended after 300 tokens or at its end-of-generation token, and never paused before
    alone = [batch for batch in executor.batches[before:] if len(batch) == 1 and batch[0][1] < 400]
    assert not alone or collector.answers[1].finished is not None


def test_same_prompt_at_once_is_evaluated_once() -> None:
    """Four equal prompts in one step: the shared part is computed once, as llama-server's `n` does with child slots."""
    engine, executor = make_engine(8192, 256)
    prompt = [(i * 7) % (N_VOCAB - 1) + 1 for i in range(1000)]
    for id in range(4):
        engine.submit(generate(id, prompt, seed=id, max_tokens=4))
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
    prompt_rows = sum(n for batch in executor.batches for n, end in batch if end <= 1000)
    assert prompt_rows == 1000 + 3
    for id in range(4):
        assert collector.answers[id].tokens == naive_answer(generate(id, prompt, seed=id, max_tokens=4), 8192)[0]
        started = collector.answers[id].started
        assert started is not None
        assert started.cached == (0 if id == 0 else 999)


def test_short_prompts_are_not_stuck_behind_a_long_one() -> None:
    """A 20-token question that arrives after a 4,000-token document answers before the document is read."""
    engine, _ = make_engine(8192, 128)
    engine.submit(generate(1, [5, 6] * 2000, max_tokens=1))
    engine.submit(generate(2, [7] * 20, max_tokens=1))
    collector = Collector()
    while collector.answers[2].finished is None:
        collector.take(engine.step())
    assert collector.answers[1].finished is None


def test_share_rows() -> None:
    """Worked by hand: short prompts first within half the budget, the rest to the oldest."""

    def of(*needs: int) -> list[tuple[Sequence, int]]:
        return [(Sequence(generate(i, [1]), i, -1), need) for i, need in enumerate(needs)]

    def rows(budget: int, *needs: int) -> list[tuple[int, int]]:
        return [(sequence.id, n) for sequence, n in share_rows(of(*needs), budget)]

    assert rows(64, 1000) == [(0, 64)]
    assert rows(64, 1000, 10) == [(0, 54), (1, 10)]
    assert rows(64, 1000, 16, 16, 16) == [(0, 32), (1, 16), (2, 16)]
    assert rows(64, 10, 1000) == [(0, 10), (1, 54)]
    assert rows(64, 20, 20, 20, 20) == [(0, 20), (1, 20), (2, 20), (3, 4)]
    assert rows(1, 5, 5) == [(0, 1)]


def test_more_sequences_than_rows_take_turns() -> None:
    """With 2 rows a step and 4 slots, all sequences advance and all answers are right."""
    engine, executor = make_engine(4096, 2)
    requests = [generate(id, [id + 1] * 9, max_tokens=20) for id in range(4)]
    for request in requests:
        engine.submit(request)
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
    assert max(executor.rows) == 2
    for request in requests:
        assert collector.answers[request.id].tokens == naive_answer(request, 4096)[0]


def test_full_pool_preempts_the_youngest_and_nobody_fails() -> None:
    """Two long answers on a pool for one and a half: both are right, and the older one never gave way."""
    engine, _ = make_engine(6 * PAGE, 64, n_ctx=6 * PAGE)
    requests = [generate(id, [id + 5] * 40, seed=id, max_tokens=80) for id in range(2)]
    requests = [r for r in requests if len(naive_answer(r, 6 * PAGE)[0]) > 60] or requests
    for request in requests:
        engine.submit(request)
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
    for request in requests:
        assert collector.answers[request.id].tokens == naive_answer(request, 6 * PAGE)[0]
    if len(requests) == 2:
        assert engine.metrics.n_preempted > 0
    check_idle(engine)


def test_sole_sequence_gets_the_whole_pool() -> None:
    """Prefixes of one another, one by one, on three pages: what the tree holds never keeps the last one from running
    (found by the random workloads: a page on the path of a match that the sequence does not use was pinned)."""
    engine, _ = make_engine(3 * PAGE, 1, n_slots=1, n_ctx=3 * PAGE)
    sizes = ((1, -1), (PAGE, 1), (72, 2))
    requests = [generate(id, [1] * n, max_tokens=limit) for id, (n, limit) in enumerate(sizes)]
    for request in requests:
        engine.submit(request)
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
        check_pages(engine)
    for request in requests:
        assert collector.answers[request.id].tokens == naive_answer(request, 3 * PAGE)[0]
