"""Another size of the cache, or another use of its memory, at a safe point: nothing is loaded again, no graph is
captured again (kernels take a slot's address from a table)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftgguf.experts import key, residency, slots

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore

SLABS_AT_ONCE = 4
"""Slabs that change their class at one safe point: what they held must be fetched again."""


def resize(store: CachedStore, budget: int) -> dict[str, int]:
    """Give the cache `budget` bytes: the best experts stay, memory beyond goes back to the driver.

    Raises ValueError below the ring's size, MemoryError where the device has no room (the cache is as before).
    """
    room = budget - 2 * store.ring.half
    if room < 0:
        raise ValueError(f"{budget} bytes do not hold the prefill ring of {2 * store.ring.half}")
    store.wait()
    store.device_state.store(store.state)
    old = store.arena.plan
    new = slots.resize(old, room)
    if len(new.offsets()) > len(store.state.owner_of):
        raise ValueError("more slots than there are experts")
    grown, left = new.bytes - store.arena.bytes, store.memory.left  # the last chunk may be longer than its plan
    if left is not None and grown > left:
        raise MemoryError(f"no room on the GPU for {budget} bytes of experts: {grown} more are needed, {left} are left")
    moves = slots.rescue(old, new, store.state) if new.bytes < old.bytes else []
    offsets = old.offsets()
    for source, target in moves:
        size = store.order[int(store.state.owner_of[source]) // store.state.e_pad].slot_bytes
        store.arena.slot(int(offsets[target]), size).copy_(store.arena.slot(int(offsets[source]), size))
    store.wait()
    before = store.arena.bytes
    store.arena.fit(new)
    slots.renumber(store.state, old, new, 0, moves)
    publish(store)
    store.budget = budget
    store.rebuilds += 1
    return {"bytes_before": before, "bytes": store.arena.bytes, "slots": sum(new.counts()), "moved": len(moves)}


def rebalance(store: CachedStore) -> int:
    """Let slabs go to the size classes that need them most by use; how many went. The mirror is the device's state
    already, and stays so."""
    moved = 0
    while moved < SLABS_AT_ONCE and (found := slots.move_slab(store.arena.plan, store.state)) is not None:
        new, _ = found
        if len(new.offsets()) > len(store.state.owner_of):
            break
        slots.renumber(store.state, store.arena.plan, new, 0)
        store.arena.plan = new
        moved += 1
    if moved:
        publish(store)
        store.slabs_moved += moved
    return moved


def rebuild(store: CachedStore) -> dict[str, int]:
    """Empty every slot and fill them anew from host memory with the experts that are worth most now."""
    store.wait()
    store.device_state.store(store.state)
    s = store.state
    s.owner_of[:] = residency.FREE
    s.slot_of[:] = residency.FREE
    s.hand[:] = 0
    store.fill_free_slots(np.argsort(-worth(store), kind="stable").tolist())
    publish(store)
    store.rebuilds += 1
    filled = int(np.count_nonzero(s.owner_of >= 0))
    return {"bytes_before": store.arena.bytes, "bytes": store.arena.bytes, "slots": filled, "moved": 0}


def worth(store: CachedStore) -> np.ndarray:
    """int64 [layers * e_pad]: every expert's score at a safe point."""
    s = store.state
    flat = np.arange(s.layers * s.e_pad)
    fast, slow = (plane.reshape(-1)[flat] for plane in s.key)
    value: np.ndarray = key.score(
        s.policy, fast, slow, flat // s.e_pad, int(s.clock[0]), s.layers - 1, s.layers
    ).astype(np.int64)
    return value


def publish(store: CachedStore) -> None:
    """The mirror, with the arena's addresses, to the device."""
    store.set_addresses()
    store.device_state.load(store.state)
    store.wait()
