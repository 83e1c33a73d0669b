"""The cached store against the resident one on a tiny model, under the interpreter or on a device: placement must not
change the answer. Decode may differ by float summation order only (1e-6 asked for, about 1e-14 measured); two experts
swapped in the bank move the logits by 1e-2, so a wrong slot shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from store_helpers import TINY, CachedExecutor, Decoded, decoded, judge, load_cached, rows  # noqa: E402

from compat.synth import make  # noqa: E402
from ftgguf.engine.cuda_executor import CudaExecutor  # noqa: E402
from ftgguf.engine.elastic import Elastic  # noqa: E402
from ftgguf.engine.executor import ExecutorLost  # noqa: E402
from ftgguf.experts import arena  # noqa: E402
from ftgguf.experts import bank as banks  # noqa: E402
from ftgguf.experts.bank import LimitedPinner  # noqa: E402
from ftgguf.experts.control import Arm  # noqa: E402
from ftgguf.experts.costs import PathCosts  # noqa: E402
from ftgguf.experts.prefill import Mode  # noqa: E402
from ftgguf.experts.prefill_pass import Pending  # noqa: E402
from ftgguf.experts.promote import promote  # noqa: E402
from ftgguf.experts.residency import Stat, check  # noqa: E402
from ftgguf.experts.samples import Bandwidths, PathSample, StepSample  # noqa: E402
from ftgguf.experts.status import cache_status  # noqa: E402
from ftgguf.experts.store import CachedStore  # noqa: E402
from ftgguf.nouns import F32  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EXPERTS, LAYERS, PROMPT = 8, 2, 12
ALL = EXPERTS * LAYERS
SAME = 1e-9
FILL, CPU, MIXED = (65536, 1), (0, 0), (32768, 1)


def nmse(got: F32, want: F32) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


def decode(executor: CudaExecutor, tokens: list[int]) -> F32:
    return np.stack([executor.forward(rows([t], i, [0]))[0].copy() for i, t in enumerate(tokens)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"n_layer": LAYERS, "n_expert": EXPERTS, "n_head": 2, "n_head_kv": 1, "n_ff": 256}
    types = {"*ffn_down_exps.weight": "Q6_K", "*_exps.weight": "Q4_K", "*": "Q8_0"}
    return make("qwen3moe", tmp_path_factory.mktemp("store") / "m.gguf", types=types, **sizes)


class Resident:
    """The resident store's answers, computed once: decode with mixed types, a prompt on a smaller model."""

    def __init__(self, path: Path, small: Path) -> None:
        self.tokens = [17, 230]
        self.prompt = [int(t) for t in np.random.default_rng(5).integers(3, 300, PROMPT)]
        self.decoded = decode(load_cached(path, DEVICE, None), self.tokens)
        executor = load_cached(small, DEVICE, None)
        self.prefilled = executor.forward(rows(self.prompt, 0, list(range(PROMPT)))).copy()
        self.after = executor.forward(rows([9], PROMPT, [0])).copy()
        self.small = decode(executor, self.tokens)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts under the interpreter are slow: a quarter of the width."""
    return make("qwen3moe", tmp_path_factory.mktemp("small") / "m.gguf", types="Q8_0", **TINY)


@pytest.fixture(scope="module")
def resident(path: Path, small: Path) -> Resident:
    return Resident(path, small)


@pytest.fixture
def cached(path: Path, small: Path) -> Iterator[Callable[..., CachedExecutor]]:
    """`load_cached` on the model, or the small one; closes what it made."""
    made = []

    def get(slots: int, *, of_small: bool = False, **options: Any) -> CachedExecutor:
        made.append(load_cached(small if of_small else path, DEVICE, slots, **options))
        return made[-1]

    yield get
    for executor in made:
        executor.store.close()


@pytest.mark.parametrize(
    ("slots", "split"),
    [
        (0, FILL),
        (1, FILL),
        pytest.param(1, MIXED, marks=pytest.mark.slow),
        pytest.param(ALL // 4, FILL, marks=pytest.mark.slow),
        (ALL // 4, MIXED),
        pytest.param(ALL // 2, CPU, marks=pytest.mark.slow),
        (ALL, FILL),
    ],
)
def test_decode_is_the_same_for_every_placement(
    cached: Callable[..., CachedExecutor], resident: Resident, slots: int, split: tuple[int, int]
) -> None:
    executor = cached(slots, warm=slots == ALL)
    store = executor.store
    store.force_split(*split)
    assert nmse(decode(executor, resident.tokens), resident.decoded) < SAME
    total = store.statistics().sum(0)
    assert total[Stat.EXPERTS] == 2 * len(resident.tokens) * LAYERS
    assert total[Stat.HITS] + total[Stat.FILLS] + total[Stat.CPU] == total[Stat.EXPERTS]
    if split == CPU or not slots:
        assert total[Stat.CPU] == total[Stat.EXPERTS]
    elif slots == ALL:
        assert total[Stat.HITS] == total[Stat.EXPERTS]
    else:
        assert total[Stat.FILLS] > 0
        assert (total[Stat.CPU] > 0) == (split == MIXED or slots == 1)
    store.device_state.store(store.state)
    check(store.state)


def test_a_shared_expert_changes_nothing(cached: Callable[..., CachedExecutor], resident: Resident) -> None:
    """Gate and up on the CPU, down on the GPU, against resident experts."""
    executor = cached(ALL // 4, warm=False)
    store = executor.store
    store.force_split(32768, 0, (1, 16384))
    assert nmse(decode(executor, resident.tokens), resident.decoded) < SAME
    total = store.statistics().sum(0)
    assert total[Stat.SHARED] > 0
    assert store.mail.trace[:, 8].max() <= 1


def test_a_prompt_without_memory_takes_it_from_the_experts(
    cached: Callable[..., CachedExecutor], resident: Resident
) -> None:
    """The pass fails half way, once: the cache gives memory back, and the answer is what it was. Where nothing is
    left to give, the request is refused and the next one goes on."""
    executor = cached(ALL // 2, of_small=True)
    store, failed = executor.store, list[Pending]()
    collect = store.prefill.collect

    def short_of_memory(pending: Pending) -> Any:
        if pending.index == LAYERS - 1 and len(failed) < fails:
            failed.append(pending)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return collect(pending)

    store.prefill.collect = short_of_memory  # type: ignore[method-assign]
    fails, budget = 1, store.budget
    got = executor.forward(rows(resident.prompt, 0, list(range(PROMPT))))
    assert nmse(got, resident.prefilled) < 1e-3
    assert len(failed) == store.room_given == 1
    assert store.budget < budget
    store.device_state.store(store.state)
    check(store.state)
    fails = 100
    with pytest.raises(MemoryError, match="lower -ub"):
        executor.forward(rows(resident.prompt, 0, list(range(PROMPT))))
    fails = 0
    assert nmse(executor.forward(rows(resident.prompt, 0, list(range(PROMPT)))), resident.prefilled) < 1e-3


def test_a_swapped_expert_would_show(cached: Callable[..., CachedExecutor], small: Path) -> None:
    """And the judge of the device's tests tells it from rounding, which it lets pass."""
    tokens = [17, 230]
    want = decoded(load_cached(small, DEVICE, None), tokens)
    good = cached(4, of_small=True)
    good.store.force_split(*MIXED)
    assert judge(decoded(good, tokens), want) == ""
    assert decoded(good, tokens, replay=want).nmse(want) < SAME
    executor = cached(0, of_small=True)
    layer = executor.store.bank.layers[0]
    assert isinstance(layer, banks.Resident)
    view = layer.view
    view[:] = view[[1, 0, 3, 2, 5, 4, 7, 6]]
    bad = decoded(executor, tokens, replay=want)
    assert bad.nmse(want) > 1e-5
    assert "the same experts" in judge(bad, want)


def test_the_judge_knows_a_tie() -> None:
    """By hand: four tokens, one layer; the third goes to expert 5 instead of 2."""
    logits = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    ids = np.array([[[1, 2]]] * 4)
    weights = np.tile(np.array([0.6, 0.4], np.float32), (4, 1, 1))
    want = Decoded(logits, ids, weights)
    other = ids.copy()
    other[2, 0, 1] = 5
    later = logits.copy()
    later[2:] += 0.1
    close, far = weights.copy(), weights.copy()
    close[2, 0], far[2, 0] = (0.601, 0.399), (0.7, 0.3)
    assert judge(Decoded(later, other, close), want) == ""
    assert "no tie" in judge(Decoded(later, other, far), want)
    later[1] += 0.1
    assert "the same experts" in judge(Decoded(later, other, close), want)


@pytest.mark.parametrize(
    ("mode", "slots", "ring", "bound"),
    [
        (Mode.STREAM, 4, 4, SAME),
        pytest.param(Mode.STREAM, 4, 16, SAME, marks=pytest.mark.slow),
        pytest.param(Mode.GATHER, 1, 2, SAME, marks=pytest.mark.slow),
        (Mode.CPU, 8, 4, 1e-3),
        (Mode.SHARE, 4, 4, 1e-3),
        (None, 0, 0, 1e-3),
    ],
)
def test_prefill_is_the_same_in_every_mode(
    cached: Callable[..., CachedExecutor], resident: Resident, mode: Mode | None, slots: int, ring: int, bound: float
) -> None:
    """The device's tiles keep 16 bits of the inputs and the CPU rounds them to 8, hence the bounds with the CPU.
    A decode step afterwards sees the same cells and a whole cache."""
    executor = cached(slots, of_small=True, ring_slots=ring)
    store = executor.store
    store.prefill.force = mode
    if mode is Mode.SHARE:
        # so that both get some: an expert of 13 kB takes the link 130 us, the CPU 100 us and 13
        rates = dict.fromkeys(store.kinds, Bandwidths(1e8, 1e9))
        store.costs = PathCosts(rates, dict.fromkeys(store.kinds, 1e-9))
    got = executor.forward(rows(resident.prompt, 0, list(range(PROMPT))))
    assert nmse(got, resident.prefilled) < bound
    assert store.prefill.counts[(mode or Mode.CPU).value] == LAYERS
    assert (store.prefill_cpu_experts > 0) == (mode in (Mode.CPU, Mode.SHARE, None))
    assert (store.prefill_copied > 0) == (mode in (Mode.STREAM, Mode.GATHER, Mode.SHARE))
    # the prompt threw nothing out, and its last rows count as uses
    store.device_state.store(store.state)
    check(store.state)
    assert np.count_nonzero(store.state.slot_of >= 0) == slots
    assert (store.state.key > -(1 << 30)).any()
    assert nmse(executor.forward(rows([9], PROMPT, [0])), resident.after) < max(SAME, bound)


def test_layers_that_are_not_pinned_run_on_the_cpu(
    small: Path, resident: Resident, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banks, "PIECE", 1)  # a piece for each layer
    probe = load_cached(small, DEVICE, 0)
    assert isinstance(probe.store.bank, banks.Bank)
    limit = probe.store.bank._pieces[0][1]
    probe.store.close()
    executor = load_cached(small, DEVICE, ALL, pinner=LimitedPinner(limit), warm=False)
    store = executor.store
    store.force_split(*FILL)
    assert list(store.bank.pinned.values()) == [True, False]
    assert nmse(decode(executor, resident.tokens), resident.small) < SAME
    stats = store.statistics().copy()
    assert stats[0, Stat.CPU] == 0
    assert stats[1, Stat.CPU] == stats[1, Stat.EXPERTS]
    assert "1 of 2 layers run on the CPU" in cache_status(store)["bank"]["line"]
    # the host brings what was used into slots at a safe point, and nothing of the layer that fetches for itself
    assert promote(store) == stats[1, Stat.CPU] - repeats(store)
    check(store.state)
    assert nmse(decode(executor, resident.tokens), resident.small) < SAME
    assert (store.statistics() - stats)[1, Stat.HITS] == stats[1, Stat.EXPERTS]
    store.close()


def repeats(store: CachedStore) -> int:
    """Uses of layer 1 beyond each expert's first."""
    used = store.state.key[0, 1] > -(1 << 30)
    return int(store.statistics()[1, Stat.EXPERTS] - used.sum())


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.SHARE])
def test_experts_on_disk(
    small: Path, resident: Resident, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Mode
) -> None:
    """Host memory too small: refused with the numbers, or read from the file with the same answers, in decode on the
    CPU and from slots, and in prompts through the ring."""
    monkeypatch.setattr(banks, "available_memory", lambda: 1 << 16)
    with pytest.raises(banks.BankError, match=r"need 0\.0 GB of host memory and .* free.*--expert-disk"):
        load_cached(small, DEVICE, 4)
    executor = load_cached(small, DEVICE, 4, disk=True, decode_rows=1, warm=mode is Mode.STREAM)
    store = executor.store
    status = cache_status(store)
    assert status["fallbacks"]["experts_on_disk"] == LAYERS
    assert "they stay in the mapped file" in status["bank"]["line"]
    store.prefill.force = mode
    got = executor.forward(rows(resident.prompt, 0, list(range(PROMPT))))
    assert nmse(got, resident.prefilled) < (SAME if mode is Mode.STREAM else 1e-3)
    assert nmse(executor.forward(rows([9], PROMPT, [0])), resident.after) < (1e-9 if mode is Mode.STREAM else 1e-3)
    promote(store)
    check(store.state)
    assert np.count_nonzero(store.state.owner_of >= 0) == 4
    assert nmse(executor.forward(rows([9], PROMPT, [0])), resident.after) < (1e-9 if mode is Mode.STREAM else 1e-3)
    store.close()


@pytest.mark.parametrize("chunk", [1, pytest.param(64 << 20, marks=pytest.mark.slow)])
def test_a_resize_keeps_the_best_experts_and_the_answer(
    cached: Callable[..., CachedExecutor], resident: Resident, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """With a chunk for each slot, and with one for all: memory goes back chunk by chunk."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", chunk)
    executor = cached(ALL, of_small=True)
    store = executor.store
    decode(executor, resident.tokens)
    store.device_state.store(store.state)
    used = store.state.key[0] > -(1 << 30)
    size = store.order[0].slot_bytes
    ring = 2 * store.ring.half
    for slots in (int(used.sum()), 12):
        done = store.resize(ring + slots * size)
        assert done["slots"] == slots
        assert store.memory.held["experts"] == done["bytes"] == (slots if chunk == 1 else ALL) * size
        check(store.state)
        if slots == used.sum():
            assert (store.state.slot_of[used] >= 0).all()
        assert nmse(decode(executor, resident.tokens), resident.small) < SAME
    assert cache_status(store)["rebuilds"] == 2
    with pytest.raises(ValueError, match="ring"):
        store.resize(0)


@pytest.mark.parametrize("slots", [6, pytest.param(5, id="5, the last chunk is cut short")])
def test_growth_that_the_device_refuses_changes_nothing(
    cached: Callable[..., CachedExecutor], resident: Resident, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Chunks of two slots; the device is full at the n-th new chunk, for each n, for that one alone or from then on.
    Bits are those of the passes before: every miss is filled, so all products are the same kernels' over the same
    bytes."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1)
    size = cached(1, of_small=True).store.order[0].slot_bytes
    monkeypatch.setattr(arena, "CHUNK_BYTES", 2 * size)
    executor = cached(slots, of_small=True)
    store, empty = executor.store, torch.empty
    ring, whole = 2 * store.ring.half, 2 * store.ring.half + ALL * size
    store.force_split(*FILL)
    want = decode(executor, resident.tokens)
    assert nmse(want, resident.small) < SAME
    assert store.statistics()[:, Stat.CPU].sum() == 0

    def seen() -> tuple[Any, ...]:
        s = store.state
        where = [c.data_ptr() for c in store.arena.chunks], store.arena.addresses().tolist()
        return dict(store.memory.held), store.budget, store.arena.plan, where, s.slot_of.tolist(), s.owner_of.tolist()

    def refuse(first: int, last: int) -> int:
        """A resize to all experts whose allocations from `first` to `last` fail; how many were tried."""
        made = 0

        def full(*shape: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if first <= made <= last:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return empty(*shape, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            with pytest.raises(MemoryError, match="no room on the GPU for experts"):
                store.resize(whole)
        return made

    chunks = -(-(ALL - slots) // 2)
    for n in range(1, chunks + 1):
        store.device_state.store(store.state)
        before = seen()
        assert [refuse(n, n), refuse(n, chunks)] == [n, n]
        assert seen() == before
        check(store.state)
        if n in (1, chunks):
            assert (decode(executor, resident.tokens) == want).all()
    assert store.resize(whole)["slots"] == ALL
    assert store.memory.held["experts"] == store.arena.bytes == ALL * size
    assert len({*store.arena.addresses().tolist()}) == ALL
    for _ in range(2):
        assert (decode(executor, resident.tokens) == want).all()
    store.device_state.store(store.state)
    check(store.state)
    assert store.resize(ring + 3 * size)["bytes"] == 4 * size
    assert (decode(executor, resident.tokens) == want).all()


def test_the_end_of_a_chunk_that_a_smaller_plan_left_is_there_for_a_larger_one(
    cached: Callable[..., CachedExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is free: to half a chunk and back, and not further."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1)
    size = cached(1, of_small=True).store.order[0].slot_bytes
    monkeypatch.setattr(arena, "CHUNK_BYTES", 4 * size)
    store = cached(8, of_small=True).store
    store.memory.budget, whole = store.memory.used, store.budget
    assert store.resize(whole - 6 * size)["bytes"] == 4 * size
    with pytest.raises(MemoryError, match=f"{5 * size} more are needed, {4 * size} are left"):
        store.resize(whole + size)
    assert store.resize(whole)["bytes"] == 8 * size
    assert (store.memory.left, store.budget) == (0, whole)


def test_a_stuck_cpu_ends_the_pass_with_an_error(cached: Callable[..., CachedExecutor], resident: Resident) -> None:
    executor = cached(0, timeout=0.3)
    executor.store.mail.doorbell.stall(1.0)
    with pytest.raises(ExecutorLost, match="did not finish request"):
        decode(executor, resident.tokens)


@pytest.mark.slow
def test_keys_are_rebased_at_a_safe_point(cached: Callable[..., CachedExecutor], resident: Resident) -> None:
    executor = cached(4)
    store = executor.store
    decode(executor, resident.tokens)
    store.device_state.arrays["clock"].fill_(store.policy.clock_limit(LAYERS) // 2)
    store.rebase()
    assert int(store.device_state.arrays["clock"]) == 1
    assert nmse(decode(executor, resident.tokens), resident.decoded) < SAME


@pytest.mark.parametrize("elastic", [False, True])
def test_room_is_made_until_nothing_is_left(
    cached: Callable[..., CachedExecutor], resident: Resident, monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """Chunks of three slots and a cache of eight: after the first time a chunk is longer than its plan. The ring stays,
    the numbers of the boundary are the store's, and all misses are the CPU's at the end."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1)
    size = cached(1, of_small=True).store.order[0].slot_bytes
    monkeypatch.setattr(arena, "CHUNK_BYTES", 3 * size)
    executor = cached(8, of_small=True)
    store = executor.store
    executor.elastic = moving = Elastic(executor, store) if elastic else None
    sizes = []
    while executor._make_room(1):
        sizes.append((store.arena.bytes // size, (store.budget - 2 * store.ring.half) // size))
        if moving is not None:
            b = moving.boundary.budget
            assert (b.experts, b.total) == (store.budget, b.kv + store.budget)
    assert sizes == [(3, 2), (0, 0)]
    assert store.memory.held["experts"] == 0
    assert nmse(decode(executor, resident.tokens), resident.small) < SAME
    assert store.statistics()[:, Stat.CPU].sum() == store.statistics()[:, Stat.EXPERTS].sum() > 0


def test_a_steps_sample_has_the_arm_that_it_ran_with(cached: Callable[..., CachedExecutor], resident: Resident) -> None:
    """The learning is a step late and the split another one: what is recorded names the arm on the device. The first
    step's sums have the warm-up's work in them and are left out."""
    executor = cached(4, of_small=True)
    store, seen = executor.store, list[Arm | None]()
    sample = StepSample(1e-3, 1e-4, 1, {kind: PathSample(0, 0.0, 0, 0.0) for kind in store.kinds})
    store.meter.read = lambda seconds, rows: sample  # type: ignore[method-assign]

    def record(taken: StepSample, arm: Arm | None) -> None:
        seen.append(arm)

    store.controller.record = record  # type: ignore[method-assign, assignment]
    for i, token in enumerate((8, 17)):
        executor.forward(rows([token], i, [0]))
    store.controller.arm = Arm.CPU  # as `record` would have found
    executor.forward(rows([230], 2, [0]))
    store.splits.due = True
    for i, token in enumerate((5, 9)):
        executor.forward(rows([token], 3 + i, [0]))
    assert seen == [Arm.SPLIT, Arm.SPLIT, Arm.CPU]
