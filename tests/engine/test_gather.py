"""Waiting for requests that come together: who is alone never waits, and nobody waits long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftgguf.engine.gather import GAP_S, MEMORY_S, MOST_S, SHARE, TOGETHER_S, Gather

PASS = 0.04


def pair(gather: Gather, at: float) -> None:
    """Two requests that came together."""
    gather.arrived(at, busy=False)
    gather.arrived(at + TOGETHER_S / 2, busy=True)
    gather.began()


GAPS = st.one_of(
    st.tuples(st.floats(TOGETHER_S * 1.01, 100), st.booleans()),
    st.tuples(st.floats(0, 100), st.just(False)),
)


@given(st.lists(GAPS, max_size=20), st.floats(0, 10))
def test_who_is_alone_never_waits(gaps: list[tuple[float, bool]], pass_seconds: float) -> None:
    """Whatever the times, as long as none came right after another that was still running (the module's rule): a client
    whose short turns follow one another is alone."""
    gather, now = Gather(4), 1000.0
    for gap, busy in gaps:
        now += gap
        gather.arrived(now, busy)
        assert gather.pause(now, pass_seconds) == 0
        gather.began()


def test_requests_that_came_together_are_waited_for_again() -> None:
    """The first of the next ones waits a gap, each further one another, in all a tenth of a pass."""
    gather = Gather(4)
    pair(gather, 0.0)
    gather.arrived(5.0, busy=False)
    assert abs(gather.pause(5.0, PASS) - GAP_S) < 1e-9
    gather.arrived(5.0 + GAP_S, busy=True)
    assert abs(gather.pause(5.0 + GAP_S, PASS) - (SHARE * PASS - GAP_S)) < 1e-9
    assert gather.pause(5.0 + SHARE * PASS, PASS) == 0


def test_a_full_house_and_a_quiet_time_end_the_waiting() -> None:
    gather = Gather(2)
    pair(gather, 0.0)
    gather.arrived(5.0, busy=False)
    gather.arrived(5.001, busy=True)
    assert gather.pause(5.001, PASS) == 0, "both slots are taken"
    gather.began()
    gather.arrived(6.0 + MEMORY_S, busy=False)
    assert gather.pause(6.0 + MEMORY_S, PASS) == 0, "it was long ago"


@given(st.lists(st.floats(0, 0.01), min_size=1, max_size=30), st.floats(0, 100))
def test_nobody_waits_longer_than_the_bound(gaps: list[float], pass_seconds: float) -> None:
    """Asked again and again with whatever arrives in between, the waiting of the first ends within MOST_S."""
    gather = Gather(100)
    pair(gather, 0.0)
    first = now = 10.0
    for gap in gaps:
        gather.arrived(now, busy=True)
        pause = gather.pause(now, pass_seconds)
        assert now + pause <= max(now, first + min(MOST_S, SHARE * pass_seconds)) + 1e-9
        if pause == 0 or gap > pause:
            break
        now += gap


def test_one_slot_has_nobody_to_wait_for() -> None:
    gather = Gather(1)
    pair(gather, 0.0)
    gather.arrived(1.0, busy=False)
    assert gather.pause(1.0, PASS) == 0
