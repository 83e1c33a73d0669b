"""What a decode step's misses took, for the split: the layers' traces and the CPU's sums, added up by type of expert.

Called between two steps while the GPU idles; the loop over layers is in C++ (ggml_cpu/doorbell.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftgguf.experts.samples import Moments, PathSample, StepSample

SIGNAL = 4e-6
"""Seconds that the CPU's path takes besides its work: the request's and the answer's way over the link (a flag there
and back, with both kernels, was 6.4 us on an H200)."""


class StepMeter:
    """`trace` int64 [layers, 16] (kernels.fill.TRACE_FIELDS), true after a pass; `doorbell` has the CPU's sums;
    `kinds[l]`, `expert_bytes[l]` and `part_bytes[l]` (a shared expert's down) of the layers in the order they run."""

    def __init__(
        self, trace: NDArray[np.int64], doorbell: Any, kinds: Sequence[str], expert_bytes: Sequence[int],
        part_bytes: Sequence[int],
    ) -> None:  # fmt: skip
        self.trace, self.doorbell = trace, doorbell
        self.kinds = list(dict.fromkeys(kinds))
        self._kind = np.array([self.kinds.index(k) for k in kinds], np.int32)
        self._bytes = np.asarray(expert_bytes, np.float64)
        self._parts = np.asarray(part_bytes, np.float64)
        self._sums = np.zeros((len(self.kinds), 14))
        """Bytes and seconds of the fills, of the CPU; the fills' moments, the CPU's (control.Moments)."""
        self._kept = np.zeros_like(trace)

    def sample(self, seconds: float, rows: int) -> StepSample | None:
        """The last step's sums; None where the device had no clock (the interpreter)."""
        self.take()
        return self.read(seconds, rows)

    def take(self) -> None:
        """Add up what the last step did, before the next one overwrites it: one call, since every line of Python
        between two steps finds its caches emptied by the CPU's experts."""
        self._sums[:] = 0
        self.doorbell.step_sums(self.trace, self._bytes, self._parts, self._kind, self._sums)
        self._kept[:] = self.trace

    def read(self, seconds: float, rows: int) -> StepSample | None:
        """What `take` took, as a sample of a step of `seconds` and `rows`."""
        if not self._kept[-1, 7]:
            return None
        paths = {}
        for kind, s in zip(self.kinds, self._sums.tolist(), strict=True):
            jobs, b, bb, t, bt = s[9:]
            cpu = Moments(jobs, b, bb, t + SIGNAL * jobs, bt + SIGNAL * b)
            paths[kind] = PathSample(s[0], s[1], s[2], s[3], Moments(*s[4:9]), cpu)
        exposed = int(self._kept[:, [5, 6, 9]].sum()) * 1e-9
        return StepSample(seconds, exposed, rows, paths)
