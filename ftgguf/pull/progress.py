"""Progress on the terminal: a bar for each file with size, rate and time left, as Ollama draws it."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from typing import TextIO

from ftgguf.pull.session import Event
from ftgguf.pull.sizes import duration, human

_WINDOW = 5.0
"""Seconds over which the rate is averaged."""


class Bars:
    """A `Report` that draws on `stream` (stderr): bars that move on a terminal, a line at each tenth elsewhere.

    `rescale`: totals are parts of 1.0 without a unit, as the stages of making the demo model are.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._open = ""
        self._samples: deque[tuple[float, int]] = deque()
        self._drawn = 0.0
        self._tenth = -1

    def __call__(self, event: Event) -> None:
        if event.status != self._open:
            self._finish()
            self._open = event.status
            self._samples.clear()
            self._tenth = -1
            if not event.total and not event.completed:
                self._write(event.status, end="\n")
                self._open = ""
                return
        now = time.monotonic()
        self._samples.append((now, event.completed))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW:
            self._samples.popleft()
        done = 0 < event.total <= event.completed
        if self.live:
            if done or now - self._drawn >= 0.06:
                self._drawn = now
                self._write("\r" + self.line(event) + "\x1b[K")
        else:
            tenth = 10 * event.completed // event.total if event.total else 0
            if tenth > self._tenth:
                self._tenth = tenth
                self._write(self.line(event), end="\n")

    def line(self, event: Event) -> str:
        """`pulling 4824460d29f2:  45% ▕███   ▏  19 GB/ 42 GB   50 MB/s   7m30s`."""
        if not event.total:
            return f"{event.status}: {human(event.completed):>7}{self._rate_text(event)}"
        fraction = min(1.0, event.completed / event.total)
        left = f"{event.status}: {int(100 * fraction):>3}% "
        right = f" {human(event.completed):>6}/{human(event.total):>6}{self._rate_text(event)}"
        if not self.live:
            return left.rstrip() + " " + right
        room = max(0, shutil.get_terminal_size().columns - len(left) - len(right) - 3)
        room = min(room, 60)
        filled = int(room * fraction)
        return f"{left}▕{'█' * filled}{' ' * (room - filled)}▏{right}"

    def _rate_text(self, event: Event) -> str:
        (start, before), (now, after) = self._samples[0], self._samples[-1]
        if now - start < 0.2 or after <= before or event.completed >= event.total > 0:
            return ""
        rate = (after - before) / (now - start)
        left = f"{duration((event.total - event.completed) / rate):>8}" if event.total else ""
        return f"  {human(rate):>7}/s{left}"

    def _finish(self) -> None:
        if self._open and self.live:
            self._write("", end="\n")
        self._open = ""

    def close(self) -> None:
        """End the line that is being drawn."""
        self._finish()

    def _write(self, text: str, end: str = "") -> None:
        self.stream.write(text + end)
        self.stream.flush()
