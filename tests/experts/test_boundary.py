"""The boundary between KV and experts, against invariants and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.experts.boundary import GRANULE, IDLE_SECONDS, Boundary, Budget, BudgetError, Move

MB = 1 << 20
START = Budget(total=8192 * MB, kv=2048 * MB, experts=6144 * MB, kv_floor=512 * MB, experts_floor=128 * MB)


def test_kv_takes_from_the_experts_when_it_needs() -> None:
    """3 GiB needed of 2: 3.75 GiB are taken, experts get the rest; within what it has nothing moves."""
    b = Boundary(START)
    assert b.poll(2048 * MB, 0) is None
    move = b.poll(3072 * MB, 1)
    assert move is not None
    assert (move.kv, move.experts) == (3840 * MB, 4352 * MB)
    b.moved(move)
    assert b.poll(3072 * MB, 2) is None


def test_the_experts_keep_their_floor() -> None:
    """All but the floor goes to KV at most; asking for more then waits."""
    b = Boundary(START)
    move = b.poll(9000 * MB, 0)
    assert move == Move(8064 * MB, 128 * MB, move.reason if move else "")
    b.moved(move)
    assert b.poll(9000 * MB, 1) is None


def test_idle_kv_is_given_back_after_a_minute() -> None:
    """Needs 600 MB of 2 GiB, with a peak of 800 in between: after 60 s KV keeps 1000 MB in whole granules. A need
    above half on the way starts the minute anew."""
    b = Boundary(START)
    assert b.poll(600 * MB, 0) is None
    assert b.poll(1500 * MB, 50) is None
    assert b.poll(600 * MB, 55) is None
    assert b.poll(800 * MB, 70) is None
    assert b.poll(600 * MB, 110) is None
    move = b.poll(600 * MB, 55 + IDLE_SECONDS)
    assert move is not None
    assert move.kv == 1024 * MB
    assert move.experts == 7168 * MB


def test_never_below_the_floor() -> None:
    b = Boundary(START)
    b.poll(0, 0)
    move = b.poll(0, 100)
    assert move is not None
    assert move.kv == START.kv_floor
    b.moved(move)
    b.poll(0, 101)
    assert b.poll(0, 500) is None


def test_another_program_needs_the_card() -> None:
    """6 GiB less: the experts give all of it down to their floor, KV the rest, never pages in use; 8 GiB more goes to
    the experts. What cannot be is refused with the numbers."""
    b = Boundary(START)
    move = b.retarget(2048 * MB, 1000 * MB)
    assert (move.kv, move.experts) == (1920 * MB, 128 * MB)
    b.moved(move)
    back = b.retarget(10240 * MB, 1000 * MB)
    assert (back.kv, back.experts) == (1920 * MB, 8320 * MB)
    with pytest.raises(BudgetError, match="KV in use"):
        b.retarget(1024 * MB, 1000 * MB)
    with pytest.raises(BudgetError):
        Boundary(Budget(100, 90, 90, 0, 0))


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 90)), max_size=30))
def test_invariants(needs: list[tuple[int, int]]) -> None:
    """Over any history: parts sum to the total, floors hold, need is met wherever it can be, moves are granules."""
    b, now = Boundary(START), 0.0
    for need, wait in needs:
        now += wait
        move = b.poll(need * MB, now)
        if move is not None:
            assert abs(move.kv - b.budget.kv) >= GRANULE
            b.moved(move)
        got = b.budget
        assert got.kv + got.experts == got.total
        assert got.kv >= got.kv_floor
        assert got.experts >= got.experts_floor
        assert got.kv >= min(need * MB, got.total - got.experts_floor)
