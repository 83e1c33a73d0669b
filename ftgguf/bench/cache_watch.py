"""A server's expert cache while it is measured: its status polled, and what happened between two looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ftgguf.bench.client import RequestFailed, Target
from ftgguf.bench.report import CacheSample, Report

PERIOD_S = 1.0
"""Between two looks. The server answers between steps; one answer takes it less than a millisecond."""
PATIENCE_S = 30.0
"""A server in the middle of a long prompt answers late."""


def sample_of(document: dict[str, Any], contestant: str, run: int, at: float, label: str) -> CacheSample | None:
    """The answer of `/v1/cache/status` as a sample; None where the server has no expert cache."""
    status = document.get("experts")
    if not isinstance(status, dict) or not status.get("enabled"):
        return None
    experts, fill, cpu, prefill = (status.get(k) or {} for k in ("experts", "fill", "cpu", "prefill"))
    return CacheSample(
        contestant,
        run,
        at,
        label,
        wanted=int(experts.get("wanted", 0)),
        hits=int(experts.get("hits", 0)),
        fills=int(experts.get("fills", 0)),
        cpu=int(experts.get("cpu", 0)),
        fill_bytes=int(fill.get("bytes", 0)),
        cpu_bytes=int(cpu.get("bytes", 0)),
        prefill_bytes=int(prefill.get("copied_bytes", 0)),
        slots=int(status.get("slots", 0)),
        arena_bytes=int(status.get("arena_bytes", 0)),
    )


class CacheWatch:
    """Samples of one server's cache, added to `report.cache`; nothing where it has none. One watch a server's start."""

    def __init__(self, report: Report, contestant: str, target: Target, period: float = PERIOD_S) -> None:
        self._report = report
        self._name = contestant
        self._target = Target(target.url, target.dialect, target.model, target.api_key, min(target.timeout, PATIENCE_S))
        self._run = 1 + max((s.run for s in report.cache if s.contestant == contestant), default=-1)
        self._began = time.monotonic()
        self._label = "start"
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._period = period
        self._thread: threading.Thread | None = None
        if self._look():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(self._period):
            self._look()

    def _look(self) -> bool:
        """Take a sample. False where there is no cache, or no answer now."""
        with self._lock:
            try:
                document = self._target.get("/v1/cache/status")
            except RequestFailed:
                return False
            found = sample_of(document, self._name, self._run, time.monotonic() - self._began, self._label)
            if found is not None:
                self._report.cache.append(found)
            return found is not None

    def mark(self, label: str) -> None:
        """What is measured from here on."""
        if self._thread is not None:
            self._look()
        self._label = label

    def stop(self) -> None:
        """A last sample, then no more."""
        if self._thread is not None:
            self._look()
            self._end.set()
            self._thread.join(PATIENCE_S)
            self._thread = None


@contextmanager
def watched(report: Report, contestant: str, target: Target, period: float = PERIOD_S) -> Iterator[CacheWatch]:
    """A watch for the length of the block."""
    watch = CacheWatch(report, contestant, target, period)
    try:
        yield watch
    finally:
        watch.stop()


@dataclass(frozen=True, slots=True)
class Stretch:
    """What happened between two samples of one run. Bytes a second are of wall time."""

    contestant: str
    run: int
    label: str
    end_s: float
    seconds: float
    wanted: int
    hits: int
    fills: int
    cpu: int
    fill_bytes: int
    cpu_bytes: int
    prefill_bytes: int

    @property
    def hit_rate(self) -> float:
        """Of the experts that decode steps wanted; 0 where none was."""
        return self.hits / self.wanted if self.wanted else 0.0


_COUNTED = ("wanted", "hits", "fills", "cpu", "fill_bytes", "cpu_bytes", "prefill_bytes")


def between(a: CacheSample, b: CacheSample) -> Stretch:
    """From `a` to `b` of the same run. A counter that fell (the cache was rebuilt) counts from 0."""
    grown = {n: max(0, getattr(b, n) - (getattr(a, n) if getattr(b, n) >= getattr(a, n) else 0)) for n in _COUNTED}
    return Stretch(b.contestant, b.run, b.label, b.at_s, b.at_s - a.at_s, **grown)


def stretches(samples: list[CacheSample]) -> list[Stretch]:
    """Between neighbouring samples, run by run, in their order."""
    runs: dict[tuple[str, int], list[CacheSample]] = {}
    for s in samples:
        runs.setdefault((s.contestant, s.run), []).append(s)
    return [between(a, b) for run in runs.values() for a, b in pairwise(run)]


def by_label(samples: list[CacheSample]) -> dict[tuple[str, str], Stretch]:
    """Stretches of the same contestant and label added up over all runs, in order of appearance."""
    found: dict[tuple[str, str], Stretch] = {}
    for s in stretches(samples):
        before = found.get((s.contestant, s.label))
        if before is None:
            found[s.contestant, s.label] = s
            continue
        sums = {n: getattr(before, n) + getattr(s, n) for n in (*_COUNTED, "seconds")}
        found[s.contestant, s.label] = Stretch(s.contestant, s.run, s.label, s.end_s, **sums)
    return found
