"""How long a prompt's layers really took: what comes before the experts, and each way against its prediction.

Marks are events on the device's stream, read once the pass is done; without a device the host's clock.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ftgguf.experts.prefill import Mode

SMOOTHING = 0.5


class PrefillTimes:
    """`begin` at a layer's `place`, `end` at its `collect`, `take` when the device is known to be done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.layers: dict[str, int] = {}
        """Layers timed, by mode; `predicted` and `measured` their seconds."""
        self.predicted: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self._dense: dict[int, float] = {}
        self._marks: list[tuple[int, int, Mode, float, Any, Any]] = []
        self._open: tuple[int, int, Mode, float, Any] | None = None

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, a: Any, b: Any) -> float:
        seconds: float = b - a if self.device.type != "cuda" else a.elapsed_time(b) * 1e-3
        return seconds

    def begin(self, index: int, rows: int, mode: Mode, predicted: float) -> None:
        """Layer `index` of a chunk of `rows` rows has its experts' inputs."""
        self._open = (index, rows, mode, predicted, self._now())

    def end(self) -> None:
        """Its experts are done."""
        if self._open is not None:
            self._marks.append((*self._open, self._now()))
            self._open = None

    def take(self) -> None:
        """Read the marks of finished passes."""
        marks, self._marks = self._marks, []
        gaps: dict[int, list[float]] = {}
        before = None
        for mark in marks:
            index, rows, mode, predicted, begin, end = mark
            name = mode.value
            self.layers[name] = self.layers.get(name, 0) + 1
            self.predicted[name] = self.predicted.get(name, 0.0) + predicted
            self.measured[name] = self.measured.get(name, 0.0) + self._seconds(begin, end)
            if before is not None and before[0] == index - 1:
                gaps.setdefault(rows.bit_length(), []).append(self._seconds(before[5], begin))
            before = mark
        for size, found in gaps.items():
            mean = sum(found) / len(found)
            old = self._dense.get(size, mean)
            self._dense[size] = old + SMOOTHING * (mean - old)

    def dense(self, rows: int, guess: float) -> float:
        """Seconds of a layer besides its experts in a chunk of `rows` rows: as seen at the nearest size, or `guess`."""
        size = rows.bit_length()
        near = min(self._dense, key=lambda seen: (abs(seen - size), seen), default=None)
        return guess if near is None else self._dense[near]

    def status(self) -> dict[str, dict[str, float]]:
        """By mode: layers, and their seconds as predicted and as measured."""
        return {
            name: {"layers": n, "predicted_seconds": self.predicted[name], "seconds": self.measured[name]}
            for name, n in self.layers.items()
        }
