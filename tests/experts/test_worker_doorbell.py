"""The doorbell with a test in the GPU's place: it writes jobs and numbers into the mailbox and waits for the answers.

Expected shares come from a direct call of the worker on the same lists (test_worker.py holds that against ggml).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]

D, F, EXPERTS, ROWS, K = 64, 96, 4, 3, 2


class Gpu:
    """One mailbox, its doorbell, and random Q8_0-free float experts of layers 0 and 1."""

    def __init__(self, timeout: float = 20.0) -> None:
        rng = np.random.default_rng(3)
        self.worker = native.ExpertWorker([-1, -1])
        self.tensors = []
        for layer in (0, 1):
            up, down = (rng.standard_normal((EXPERTS, n, k)).astype(np.float32) for n, k in ((F, D), (D, F)))
            self.tensors += [up, down]
            made = [native.ExpertMatrix.make(0, t.ctypes.data, t[0].nbytes, *t.shape[1:]) for t in (up, down)]
            self.worker.add_layer(layer, EXPERTS, "relu_sqr", None, *made)
        entries = ROWS * K
        self.words = np.zeros(native.DOORBELL_WORDS, np.int64)
        self.header = np.zeros(native.DOORBELL_HEADER, np.int32)
        self.expert, self.start = np.zeros(entries, np.int32), np.zeros(entries + 1, np.int32)
        self.rows_of = np.zeros(entries, np.int32)
        self.weights = np.zeros((ROWS, K), np.float32)
        self.x, self.y = np.zeros((ROWS, D), np.float32), np.zeros((ROWS, D), np.float32)
        self.hidden = np.zeros((ROWS, F), np.float32)
        self.parts = (
            self.words, self.header, self.expert, self.start, self.rows_of, self.weights, self.x, self.y, self.hidden,
        )  # fmt: skip
        self.bell = self.doorbell(timeout)

    def doorbell(self, timeout: float) -> Any:
        return native.Doorbell(
            self.worker, *(a.ctypes.data for a in self.parts), rows=ROWS, k=K, width=F, layers=2, timeout=timeout
        )

    def ask(
        self, layer: int, x: np.ndarray, weights: np.ndarray, lists: tuple[Any, Any, Any], shared: bool = False
    ) -> int:
        """Write a job, ring, and return its number."""
        self.x[: len(x)], self.weights[: len(x)] = x, weights
        for target, values in zip((self.expert, self.start, self.rows_of), lists, strict=True):
            target[: len(values)] = values
        self.header[:5] = layer, len(x), len(lists[0]), len(lists[2]), shared
        number = int(self.words[native.DOORBELL_REQUEST]) + 1
        self.words[native.DOORBELL_REQUEST] = number
        return number

    def wait(self, number: int, limit: float = 30.0) -> str:
        """`done`, or `abort` where the watchdog released the wait."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self.words[native.DOORBELL_DONE] >= number:
                return "done"
            if self.words[native.DOORBELL_ABORT] >= number:
                return "abort"
            time.sleep(0.0005)
        raise AssertionError("neither answered nor released")


def job(seed: int) -> tuple[np.ndarray, np.ndarray, tuple[Any, Any, Any]]:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, ROWS + 1))
    ids = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(rows)]).reshape(-1)
    expert = np.unique(ids[rng.random(len(ids)) < 0.7]).astype(np.int32)
    groups = [np.flatnonzero(ids == e).astype(np.int32) for e in expert]
    start = np.concatenate(([0], np.cumsum([len(g) for g in groups]))).astype(np.int32)
    rows_of = np.concatenate([*groups, np.empty(0, np.int32)]).astype(np.int32)
    x = rng.standard_normal((rows, D)).astype(np.float32)
    return x, rng.random((rows, K)).astype(np.float32), (expert, start, rows_of)


def test_every_request_is_answered_in_order() -> None:
    gpu = Gpu()
    for i in range(200):
        x, weights, lists = job(i)
        assert gpu.wait(gpu.ask(i % 2, x, weights, lists)) == "done"
        want = np.empty_like(x)
        gpu.worker.compute(i % 2, x, weights, *lists, want)
        np.testing.assert_array_equal(gpu.y[: len(x)], want)
    served = gpu.bell.statistics()
    assert [s[0] for s in served] == [100, 100]
    assert served[0][1] == sum(len(job(i)[2][0]) for i in range(0, 200, 2))
    assert served[0][3] == served[0][1] * 2 * D * F * 4
    assert gpu.bell.error() == ""
    gpu.bell.close()


def test_a_shared_expert_leaves_its_down_to_the_gpu() -> None:
    """Hidden rows against NumPy's products of the same float weights; with their down added by hand the share is that
    of a job that shares nothing."""
    gpu = Gpu()
    for i in range(60):
        x, weights, (expert, start, rows_of) = job(i)
        if not len(expert):
            continue
        up, down = gpu.tensors[2 * (i % 2) : 2 * (i % 2) + 2]
        before = gpu.bell.statistics()[i % 2][3]
        number = gpu.ask(i % 2, x, weights, (expert, start, rows_of), shared=True)
        assert gpu.wait(number) == "done"
        assert gpu.words[native.DOORBELL_HIDDEN] == number
        entries = rows_of[: start[1]]
        hidden = np.maximum(x[entries // K] @ up[expert[0]].T, 0) ** 2
        np.testing.assert_allclose(gpu.hidden[: len(entries)], hidden, rtol=1e-4, atol=1e-4)
        share = gpu.y[: len(x)].copy()
        for j, entry in enumerate(entries):
            share[entry // K] += weights[entry // K, entry % K] * (down[expert[0]] @ gpu.hidden[j])
        want = np.empty_like(x)
        gpu.worker.compute(i % 2, x, weights, expert, start, rows_of, want)
        np.testing.assert_allclose(share, want, rtol=1e-3, atol=1e-2)
        assert gpu.bell.statistics()[i % 2][3] - before == (2 * len(expert) - 1) * D * F * 4
    assert gpu.bell.error() == ""
    gpu.bell.close()


def test_a_stuck_answer_is_released_and_reported() -> None:
    gpu = Gpu(timeout=0.2)
    x, weights, lists = job(1)
    gpu.bell.stall(1.5)
    number = gpu.ask(0, x, weights, lists)
    assert gpu.wait(number) == "abort"
    assert "did not finish request 1" in gpu.bell.error()
    # every later wait leaves at once: the engine ends with an error instead of hanging
    assert gpu.wait(number + 1000) == "abort"
    gpu.bell.close()


@pytest.mark.parametrize("fault", ["expert", "layer", "rows", "shared", "empty"])
def test_a_damaged_job_is_refused_not_run(fault: str) -> None:
    gpu = Gpu()
    x, weights, _ = job(1)
    expert = np.array([EXPERTS if fault == "expert" else 0], np.int32)
    nothing = np.array([], np.int32)
    lists = (nothing, np.array([0]), nothing) if fault == "shared" else (expert, np.array([0, 1]), np.array([0]))
    if fault == "empty":  # the shared expert has no rows: the next one must not be taken for it
        lists = (np.array([0, 1], np.int32), np.array([0, 0, 1]), np.array([0]))
    number = gpu.ask(9 if fault == "layer" else 0, x, weights, lists, shared=fault in ("shared", "empty"))
    if fault == "rows":  # a job in the mailbox as a wild write would leave it
        assert gpu.wait(number) == "done"
        gpu.header[1] = ROWS + 1
        gpu.words[native.DOORBELL_REQUEST] = number + 1
    assert gpu.wait(number + (fault == "rows")) == "abort"
    assert "cannot compute" in gpu.bell.error()
    gpu.bell.close()


def test_old_words_start_no_work() -> None:
    """A mailbox with leftovers: the number found at the start counts as answered."""
    gpu = Gpu()
    gpu.bell.close()
    gpu.words[native.DOORBELL_REQUEST] = 77
    bell = gpu.doorbell(5.0)
    assert gpu.words[native.DOORBELL_DONE] == 77
    x, weights, lists = job(4)
    assert gpu.wait(gpu.ask(1, x, weights, lists)) == "done"
    assert [s[0] for s in bell.statistics()] == [0, 1]
    bell.close()
