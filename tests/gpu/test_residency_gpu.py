"""The Triton residency kernel on a CUDA device against the NumPy mirror, bit for bit, outputs and the whole state."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from ftgguf.experts import key, residency, synthetic  # noqa: E402
from ftgguf.kernels import residency as kernel  # noqa: E402

pytestmark = pytest.mark.gpu
MIXED = [(1 << 16, 1), (0, 0), (0, 1), (16000, 1), (32768, 1), (50000, 0)]


def run_both(
    state: residency.Residency, steps: int, rows: int, k: int, exponent: float, every: int, num_warps: int = 4
) -> None:
    rng = np.random.default_rng(steps + rows)
    state.slot_addr[:] = rng.permutation(len(state.slot_addr)) * 4096 + (1 << 40)
    state.host_base[:] = rng.integers(0, 1 << 46, state.host_base.shape)
    state.host_stride[:] = rng.integers(0, 1 << 24, state.host_stride.shape)
    weights = [synthetic.zipf_weights(state.experts, exponent, rng) for _ in range(state.layers)]
    device = kernel.DeviceResidency.of(state, "cuda")
    out = kernel.StepBuffers.allocate(rows * k, state.experts, "cuda")
    for t in range(steps):
        state.split[:] = [MIXED[rng.integers(len(MIXED))] for _ in range(state.layers)]
        device.arrays["split"].copy_(torch.from_numpy(state.split))
        for layer, w in enumerate(weights):
            ids = synthetic.route(rows, k, w, rng)
            ids[rng.random(rows) < 0.05] = -1
            ours = residency.step(state, layer, ids, int(layer == 0))
            on_device = torch.from_numpy(ids).cuda()
            kernel.residency_step(device, layer, on_device, out, int(layer == 0), num_warps=num_warps)
            theirs = out.result(ids.shape)
            for f in fields(residency.Step):
                np.testing.assert_array_equal(
                    getattr(ours, f.name), getattr(theirs, f.name), f"step {t}, layer {layer}: {f.name}"
                )
        if t % every == 0 or t == steps - 1:
            for name in kernel.STATE:
                np.testing.assert_array_equal(
                    getattr(state, name), device.arrays[name].cpu().numpy(), f"after step {t}: {name}"
                )
            residency.check(state)


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("slots", [0, 1, 30, 700, 3000])
def test_small_model(slots: int, num_warps: int) -> None:
    """24 layers of 128 experts, top 8: no slots, one, fewer than layers x k, a quarter, nearly all."""
    run_both(residency.create(24, 128, [slots]), 60, 1, 8, 1.0, 10, num_warps)


@pytest.mark.parametrize("rows", [2, 4, 16, 17, 64])
def test_batches(rows: int) -> None:
    """Up to 128 entries by comparing, above by counting in memory; heavy skew, so many duplicates."""
    run_both(residency.create(12, 256, [900]), 30, rows, 8, 1.5, 10)


def test_large_cache() -> None:
    """32k slots, 256 experts in 160 layers: the window is a sample, the hand wraps."""
    run_both(residency.create(160, 256, [32768]), 30, 4, 8, 0.3, 10)


def test_two_classes_and_lru() -> None:
    """Two size classes with spare capacity, evicting by recency."""
    layer_class = [int(i % 3 == 0) for i in range(24)]
    state = residency.create(24, 100, [300, 500], layer_class, key.LRU, capacity=[400, 1000])
    run_both(state, 100, 2, 6, 0.8, 20)


def test_replay_in_a_graph() -> None:
    """A captured step of all layers, replayed: the state equals the mirror's after as many steps."""
    rng = np.random.default_rng(5)
    state = residency.create(16, 64, [300])
    device = kernel.DeviceResidency.of(state, "cuda")
    out = kernel.StepBuffers.allocate(8, 64, "cuda")
    ids = torch.zeros(16, 1, 8, dtype=torch.int32, device="cuda")
    weights = synthetic.zipf_weights(64, 0.7, rng)
    for layer in range(16):  # compile before capture
        kernel.residency_step(device, layer, ids[layer], out, int(layer == 0))
    device.load(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(16):
            kernel.residency_step(device, layer, ids[layer], out, int(layer == 0))
    for _ in range(50):
        routed = np.stack([synthetic.route(1, 8, weights, rng) for _ in range(16)])
        ids.copy_(torch.from_numpy(routed))
        graph.replay()
        for layer in range(16):
            residency.step(state, layer, routed[layer], int(layer == 0))
    for name in kernel.STATE:
        np.testing.assert_array_equal(getattr(state, name), device.arrays[name].cpu().numpy(), name)
