"""The engine's answers about the expert cache, without one and with one that has a store's methods, and the routes."""

from __future__ import annotations

from typing import Any

import pytest

from ftgguf.engine import cache_controls
from ftgguf.engine.segments import SegmentedExecutor
from ftgguf.server import app


class Store:
    """Takes sizes up to a limit."""

    budget = 5 << 20

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def rebuild(self) -> dict[str, int]:
        return {"bytes_before": 1, "bytes": 1, "slots": 7, "moved": 0}

    def resize(self, budget: int) -> dict[str, int]:
        if budget > 1 << 30:
            raise MemoryError("no room on the GPU")
        self.sizes.append(budget)
        return {"bytes_before": 1, "bytes": budget, "slots": 2, "moved": 0}


class Segment:
    recurrent = False
    n_vocab = n_cells = max_rows = 1

    def __init__(self, store: Any) -> None:
        self.store = store


def test_without_a_cache() -> None:
    answer = cache_controls.answer(Segment(object()), "expert_cache_status", {})
    assert answer["enabled"] is False
    assert cache_controls.metrics(object()) == {}
    with pytest.raises(ValueError, match="no expert cache"):
        cache_controls.answer(object(), "expert_cache_rebuild", {"size_mib": 1})


def test_rebuild_reaches_the_store_in_a_segment() -> None:
    store = Store()
    executor = SegmentedExecutor((Segment(object()), Segment(store)))  # type: ignore[arg-type]
    done = cache_controls.answer(executor, "expert_cache_rebuild", {"size_mib": 3})
    assert store.sizes == [3 << 20]
    assert done["bytes"] == 3 << 20
    assert cache_controls.answer(executor, "expert_cache_rebuild", {})["slots"] == 7  # the size stays
    for bad in (-1, 1.5, "8", True):
        with pytest.raises(ValueError, match="size_mib"):
            cache_controls.answer(executor, "expert_cache_rebuild", {"size_mib": bad})
    with pytest.raises(ValueError, match="no room"):
        cache_controls.answer(executor, "expert_cache_rebuild", {"size_mib": 4096})


def test_the_routes_exist() -> None:
    assert "/v1/cache/status" in dict(app.GET)
    assert "/v1/cache/rebuild" in dict(app.POST)
