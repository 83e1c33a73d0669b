"""The Triton residency kernel under the interpreter against the NumPy mirror: every output and the whole state, bit
for bit, after each step of long, skewed, duplicate-laden sequences. tests/gpu has the same on a CUDA device."""

from __future__ import annotations

import os
from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("the interpreter's tests need TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from ftgguf.experts import key, residency, synthetic  # noqa: E402
from ftgguf.experts.residency import Residency, Step  # noqa: E402
from ftgguf.experts.split import LATE_MOST  # noqa: E402
from ftgguf.kernels import residency as kernel  # noqa: E402


def assert_equal(mirror: Residency, device: kernel.DeviceResidency, ours: Step, theirs: Step, where: str) -> None:
    for f in fields(Step):
        np.testing.assert_array_equal(getattr(ours, f.name), getattr(theirs, f.name), f"{where}: {f.name}")
    for name in kernel.STATE:
        np.testing.assert_array_equal(getattr(mirror, name), device.arrays[name].numpy(), f"{where}: {name}")


def run_both(state: Residency, steps: int, rows: int, k: int, seed: int, splits: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(seed)
    state.slot_addr[:] = rng.permutation(len(state.slot_addr)) * 4096 + (1 << 40)
    state.host_base[:] = rng.integers(0, 1 << 46, state.host_base.shape)
    state.host_stride[:] = rng.integers(0, 1 << 24, state.host_stride.shape)
    weights = [synthetic.zipf_weights(state.experts, 1.3, rng) for _ in range(state.layers)]
    device = kernel.DeviceResidency.of(state, "cpu")
    out = kernel.StepBuffers.allocate(rows * k, state.experts, "cpu")
    for t in range(steps):
        state.split[:] = [splits[rng.integers(len(splits))] for _ in range(state.layers)]
        state.part[:] = [PARTS[rng.integers(len(PARTS))] for _ in range(state.layers)]
        state.late[:] = [LATE[rng.integers(len(LATE))] for _ in range(state.layers)]
        for name in ("split", "late", "part"):
            device.arrays[name].copy_(torch.from_numpy(getattr(state, name)))
        for layer, w in enumerate(weights):
            ids = synthetic.route(rows, k, w, rng)
            ids[rng.random(rows) < 0.1] = -1
            advance = int(layer == 0)
            may = bool(rng.random() < 0.8)
            ours = residency.step(state, layer, ids, advance, may)
            kernel.residency_step(device, layer, torch.from_numpy(ids), out, advance, may)
            assert_equal(state, device, ours, out.result(ids.shape), f"step {t}, layer {layer}")
        residency.check(state)


PARTS = [(0, 0), (1, 30000), (9000, 12000), (20000, 20000)]
LATE = [0, 0, -LATE_MOST, LATE_MOST, 40_000, -9_000]
MIXED = [(1 << 16, 1), (0, 0), (0, 1), (16000, 1), (32768, 1), (50000, 0)]


@pytest.mark.parametrize("policy", [key.DECAY, key.LRU], ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("slots", "rows"), [(0, 1), (1, 1), (3, 2), (11, 1), (11, 4), (40, 1), (64, 8)], ids=lambda v: str(v)
)
def test_one_class(policy: key.KeyPolicy, slots: int, rows: int) -> None:
    """Caches of 0 and 1 slot, fewer than layers x k, about half, and all 64 experts; window smaller than the cache."""
    run_both(residency.create(4, 16, [slots], policy=policy, window=16), 8, rows, 3, slots, MIXED)


def test_two_classes_with_spare_capacity() -> None:
    """Victims come from the layer's own class; slot numbers are not contiguous over classes."""
    state = residency.create(5, 20, [7, 13], [0, 1, 1, 0, 1], capacity=[10, 20], window=8)
    run_both(state, 10, 2, 4, 7, MIXED)


@pytest.mark.parametrize("rows", [32, 40])
def test_many_rows(rows: int) -> None:
    """128 entries are compared in registers, 160 counted in memory: the same outcome."""
    run_both(residency.create(2, 30, [25], window=32), 3, rows, 4, rows, MIXED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_long(seed: int) -> None:
    """A longer sequence, with keys rebased half way."""
    state = residency.create(6, 32, [50], window=32)
    run_both(state, 40, 1, 4, seed, MIXED)
    residency.rebase(state)
    run_both(state, 40, 2, 4, seed + 10, MIXED)


def test_bad_ids_are_refused() -> None:
    """int64 ids and more entries than the buffers hold, against the wrapper's documented errors."""
    state = kernel.DeviceResidency.of(residency.create(1, 16, [4]), "cpu")
    out = kernel.StepBuffers.allocate(4, 16, "cpu")
    with pytest.raises(ValueError, match="int32"):
        kernel.residency_step(state, 0, torch.zeros(4, dtype=torch.int64), out, 1)
    with pytest.raises(ValueError, match="at most 4"):
        kernel.residency_step(state, 0, torch.zeros(8, dtype=torch.int32), out, 1)
