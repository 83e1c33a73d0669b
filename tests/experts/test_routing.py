"""Recording and replaying routes on a tiny model under the interpreter: the file is what `ftgguf bench cache` reads; a
replayed trace decides what the cache holds."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from store_helpers import TINY, load_cached, rows  # noqa: E402

from compat.synth import make  # noqa: E402
from ftgguf import _ggml_cpu as native  # type: ignore[attr-defined]  # noqa: E402
from ftgguf.bench.replay import load_trace  # noqa: E402
from ftgguf.engine.cuda_executor import CudaExecutor  # noqa: E402
from ftgguf.engine.ggml_executor import GgmlExecutor  # noqa: E402
from ftgguf.engine.ggml_weights import GgmlSource  # noqa: E402
from ftgguf.engine.layout import Layout  # noqa: E402
from ftgguf.experts.residency import Stat  # noqa: E402
from ftgguf.experts.routing import RoutingRecorder, RoutingReplay  # noqa: E402
from ftgguf.experts.trace import RoutingTrace, open_trace, pool_bytes  # noqa: E402
from ftgguf.flags.config import ContextConfig  # noqa: E402
from ftgguf.gguf.reader import open_gguf  # noqa: E402
from ftgguf.models.config import ModelError, read_numbers  # noqa: E402
from ftgguf.models.registry import family  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LAYERS, EXPERTS, K = 2, 8, 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3moe", tmp_path_factory.mktemp("routing") / "m.gguf", types="Q8_0", **TINY)


def record(executor: CudaExecutor, file: Path) -> RoutingRecorder:
    trace = RoutingTrace(file, LAYERS, K, EXPERTS)
    executor.store.hook = hook = RoutingRecorder(trace, sorted(executor.store.specs), 4, DEVICE)
    return hook


def test_decode_is_recorded_and_a_prompt_begins_a_session(path: Path, tmp_path: Path) -> None:
    """The routed experts of the file are those that the cache counted."""
    executor = load_cached(path, DEVICE, 4)
    store = executor.store
    hook = record(executor, tmp_path / "t.npz")
    for i in range(3):
        executor.forward(rows([40 + i], i, [0]))
    executor.forward(rows([5, 6, 7, 8, 9, 10], 3, [5]))
    executor.forward(rows([50], 9, [0]))
    got = hook.trace.arrays()
    assert got["experts"].shape == (4, LAYERS, K)
    assert got["experts"].dtype == np.uint8
    assert got["offsets"].tolist() == [0, 3, 4]
    assert (np.sort(got["experts"], -1)[..., 0] < np.sort(got["experts"], -1)[..., 1]).all()
    assert got["probs"].sum(-1) == pytest.approx(1, abs=2e-3)
    # the last layer of a prompt runs for its one wanted row only, and so as decode does
    assert store.statistics()[:, Stat.EXPERTS].tolist() == [4 * K, 5 * K]
    store.close()
    trace = load_trace(tmp_path / "t.npz")
    np.testing.assert_array_equal(trace.experts, got["experts"])
    assert trace.offsets == (0, 3, 4)


def on_cpu(path: Path) -> GgmlExecutor:
    gguf = open_gguf(path)
    source = GgmlSource(gguf, native.Backend(1), Layout.PLAIN)
    model = family(gguf.architecture)(source, read_numbers(gguf), ContextConfig())
    return GgmlExecutor(source, model, n_cells=256, max_rows=16, threads=1, threads_batch=1)


def test_both_executors_record_the_same(path: Path, tmp_path: Path) -> None:
    """Three decode steps, a prompt and one more: the CPU's graph and the device's kernels route alike; weights to what
    float16 holds."""
    cpu, gpu = on_cpu(path), load_cached(path, DEVICE, None)
    plain = on_cpu(path)
    hook = record(gpu, tmp_path / "gpu.npz")
    cpu.trace = open_trace(str(tmp_path / "cpu.npz"), cpu.model.blocks)
    cpu.warm_up()
    plain.warm_up()
    for batch in (rows([40], 0, [0]), rows([41], 1, [0]), rows([5, 6, 7, 8, 9, 10], 2, [5]), rows([50], 8, [0])):
        got = cpu.forward(batch).copy()
        np.testing.assert_array_equal(got, plain.forward(batch))  # reading the routes changes nothing
        gpu.forward(batch)
    a, b = cpu.trace.arrays(), hook.trace.arrays()
    np.testing.assert_array_equal(a["experts"], b["experts"])
    np.testing.assert_array_equal(a["offsets"], b["offsets"])
    assert a["offsets"].tolist() == [0, 2, 3]
    np.testing.assert_allclose(a["probs"].astype(float), b["probs"].astype(float), atol=2e-3)
    cpu.trace.save()
    assert load_trace(tmp_path / "cpu.npz").experts.shape == (3, LAYERS, K)


def test_a_recorded_trace_knows_the_size_of_an_expert(path: Path, tmp_path: Path) -> None:
    """Gate, up and down of one expert of one layer, as the file's header has them; all layers are of one type here."""
    gguf, file = open_gguf(path), tmp_path / "t.npz"
    parts = [gguf.tensors[f"blk.0.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")]
    blocks = on_cpu(path).model.blocks
    assert open_trace(str(file), blocks).arrays()["expert_bytes"] == 0
    trace = open_trace(str(file), blocks, pool_bytes(gguf.tensors))
    trace.add(np.zeros((LAYERS, 1, K), np.int64), np.ones((LAYERS, 1, K)))
    trace.save()
    assert load_trace(file).expert_bytes == sum(part.nbytes for part in parts) / EXPERTS


def test_what_cannot_be_recorded_is_refused(path: Path, tmp_path: Path) -> None:
    model = on_cpu(path).model
    with pytest.raises(ModelError, match="--record-routing"):
        open_trace(str(tmp_path / "no" / "such" / "folder.npz"), model.blocks)
    with pytest.raises(ModelError, match="no routed experts"):
        open_trace(str(tmp_path / "x.npz"), ())


def test_a_replayed_trace_decides_what_is_used(path: Path, tmp_path: Path) -> None:
    """Tokens alternate between two sets of experts: after the first of each the cache of 8 slots has them all."""
    executor = load_cached(path, DEVICE, 8, warm=False)
    store = executor.store
    ids = np.array([[[0, 1], [2, 3]], [[6, 7], [4, 5]]], np.uint8)
    store.force_split(65536, 1)
    store.hook = RoutingReplay(ids, sorted(store.specs), 4, EXPERTS, DEVICE)
    for i in range(4):
        executor.forward(rows([40 + i], i, [0]))
    total = store.statistics().sum(0)
    assert total[Stat.HITS] == total[Stat.FILLS] == 8
    store.device_state.store(store.state)
    assert sorted(np.flatnonzero(store.state.slot_of[0, :EXPERTS] >= 0)) == [0, 1, 6, 7]
    assert sorted(np.flatnonzero(store.state.slot_of[1, :EXPERTS] >= 0)) == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="does not fit a model"):
        RoutingReplay(ids + 4, sorted(store.specs), 4, EXPERTS, DEVICE)
    store.close()
