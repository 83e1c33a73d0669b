"""Memory between KV and experts on a tiny model under the interpreter, with a simulated device: logits are those of an
executor that has every cell from the start, whatever moves in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU path needs torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the GPU path needs triton")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from store_helpers import TINY, load_cached  # noqa: E402

from compat.synth import make  # noqa: E402
from ftgguf.engine import messages as m  # noqa: E402
from ftgguf.engine.cache import KvCache  # noqa: E402
from ftgguf.engine.cuda_cells import CudaCells  # noqa: E402
from ftgguf.engine.cuda_executor import CudaExecutor  # noqa: E402
from ftgguf.engine.device_memory import DeviceMemory  # noqa: E402
from ftgguf.engine.elastic import Elastic  # noqa: E402
from ftgguf.engine.request import Sequence  # noqa: E402
from ftgguf.experts import arena, boundary  # noqa: E402
from ftgguf.experts.residency import check  # noqa: E402
from ftgguf.experts.store import CachedStore  # noqa: E402
from ftgguf.kv.pages import PagePool  # noqa: E402
from ftgguf.nouns import F32, PAGE, Batch  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 8))
def test_a_pool_with_a_limit(limits: list[int], taken: int) -> None:
    """Pages beyond the limit are never handed out, and a limit never cuts off pages in use."""
    pool = PagePool(20 * PAGE)
    pool.limit(limits[0])
    pages = pool.alloc(min(taken, limits[0])) or []
    for limit in limits:
        if any(p >= limit for p in pages):
            with pytest.raises(ValueError, match="in use"):
                pool.limit(limit)
            continue
        pool.limit(limit)
        assert (pool.n_used, pool.n_free) == (len(pages), limit - len(pages))
        assert pool.alloc(pool.n_free + 1) is None
        rest = pool.alloc(pool.n_free) or []
        assert sorted(pages + rest) == list(range(limit))
        pool.release(rest)


class Attention:
    kv_heads, head_dim, v_dim = 2, 32, 64


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("room", [None, 1000])
def test_cells_keep_their_contents(kind: str, room: int | None) -> None:
    """Grown and shrunk, with room for old and new at once or by way of the host: the bytes of the cells that stay."""
    memory = DeviceMemory(torch.device("cpu"))
    cells = CudaCells(memory, [Attention()] * 3, 32, kind)  # type: ignore[list-item]
    at = np.arange(32, dtype=np.int32)
    data = np.random.default_rng(0).integers(0, 256, 32 * cells.cell_bytes, np.uint8).tobytes()
    cells.write(at, data)
    for n, keep in ((48, 32), (16, 16)):
        memory.budget = None if room is None else memory.used + max(0, n - cells.n_cells) * cells.cell_bytes + room
        cells.resize(memory, n)
        assert memory.held["KV"] == n * cells.cell_bytes == sum(p.numel() * p.element_size() for p in cells.pools)
        assert cells.read(at[:keep]) == data[: keep * cells.cell_bytes]
        assert cells.caches[2].k.data_ptr() == cells.pools[0][2].data_ptr()
    memory.budget = memory.used
    with pytest.raises(MemoryError, match="more are needed"):
        cells.resize(memory, 64)
    assert cells.read(at[:16]) == data[: 16 * cells.cell_bytes]


class Cells:
    """An executor whose cells hold the tokens that were evaluated; the same of a store, which counts bytes."""

    recurrent = False

    def __init__(self, most: int, now: int) -> None:
        self.n_cells, self.n_vocab, self.max_rows = most, 1000, most
        self.cells = self
        self.held = np.zeros(now, np.int64)
        self.budget, self.chunk, self.log = 100 * PAGE, 0, list[int]()
        self.elastic: Any = None

    cell_bytes, half, left = 1, PAGE // 2, None

    def __getattr__(self, name: str) -> Any:
        if name in ("ring", "arena", "memory"):
            return self
        raise AttributeError(name)

    def resize(self, budget: int) -> dict[str, int]:
        assert budget >= PAGE
        self.budget = budget
        return {}

    def resize_cells(self, n: int) -> None:
        kept = self.held[:n]
        self.held = np.zeros(n, np.int64)
        self.held[: len(kept)] = kept
        self.log.append(n // PAGE)

    def copy_cells(self, src: Any, dst: Any) -> None:
        self.held[dst] = self.held[src]


class Numbers(Cells):
    """`n_cells` of the executor is the most; of its `cells`, what there is."""

    @property
    def cells(self) -> Any:
        return type("C", (), {"n_cells": len(self.held), "cell_bytes": 1})()

    @cells.setter
    def cells(self, value: Any) -> None: ...


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5 * PAGE), st.booleans(), st.booleans()), max_size=25))
def test_the_tree_keeps_its_cells_through_every_move(steps: list[tuple[int, int, bool, bool]]) -> None:
    """Prompts of six sessions of any length, kept or not, some held by a running request, some after an idle minute:
    what the tree says it holds is in the cells, sums of bytes stay, a request is refused only where KV cannot grow."""
    granule, boundary.GRANULE = boundary.GRANULE, PAGE
    try:
        now, fake = [0.0], Numbers(12 * PAGE, 2 * PAGE)
        total = 102 * PAGE
        fake.elastic = Elastic(fake, fake, lambda: now[0])  # type: ignore[arg-type]
        cache = KvCache(fake)  # type: ignore[arg-type]
        held: list[Sequence] = []
        for number, (session, length, keep, hold) in enumerate(steps):
            now[0] += 40
            prompt = np.arange(length) % 900 + 10 * session
            s = Sequence(m.Generate(id=number, prompt=tuple(int(t) for t in prompt)), number, -1)
            if not cache.begin(s, cache.match(s), 0):
                assert len(fake.held) == fake.n_cells or sum(len(h.pages) for h in held) + len(prompt) // PAGE >= 8
                for old in held:
                    cache.release(old)
                held = []
                continue
            assert (fake.held[s.table[: s.n_past]] == prompt[: s.n_past]).all()
            fake.held[s.table[:length]] = prompt
            s.n_past = length
            if keep:
                cache.keep(s)
            if hold:
                held.append(s)
            else:
                cache.release(s)
            assert len(fake.held) + fake.budget == total
            assert cache.pool.usable * PAGE == len(fake.held)
            for other in held:
                assert (fake.held[other.table[: other.n_past]] == other.tokens[: other.n_past]).all()
    finally:
        boundary.GRANULE = granule


class Lender(Numbers):
    """With a device's memory that is counted: `held` by passes besides cells and experts."""

    def __init__(self, most: int, now: int, total: int) -> None:
        super().__init__(most, now)
        self.memory = DeviceMemory(torch.device("cpu"), total)
        self.memory.held |= {"experts": self.budget, "KV": now}

    def resize_cells(self, n: int) -> None:
        super().resize_cells(n)
        self.memory.held["KV"] = n

    def resize(self, budget: int) -> dict[str, int]:
        assert self.memory.left is not None
        if budget - self.budget > self.memory.left:
            raise MemoryError(f"{self.memory.left} are left")
        self.memory.held["experts"] = budget
        return super().resize(budget)


def test_what_a_pass_borrowed_comes_back() -> None:
    """By hand: lent at once; back at a request's beginning after an idle minute, not before; twice as long once it was
    wanted again; not while something else has it; and not after a size from outside."""
    now, fake = [0.0], Lender(4 * PAGE, 4 * PAGE, 110 * PAGE)
    fake.elastic = elastic = Elastic(fake, fake, lambda: now[0])  # type: ignore[arg-type]
    cache = KvCache(fake)  # type: ignore[arg-type]

    def begun(at: float) -> int:
        now[0] = at
        s = Sequence(m.Generate(id=1, prompt=(1, 2, 3)), 1, -1)
        assert cache.begin(s, cache.match(s), 0)
        cache.release(s)
        b = elastic.boundary.budget
        assert (b.experts, b.total) == (fake.budget, fake.budget + 4 * PAGE)
        return fake.budget // PAGE

    elastic.lend(20 * PAGE)
    elastic.lend(10 * PAGE)
    assert elastic.status()["lent_bytes"] == 30 * PAGE
    assert [begun(59), begun(60), begun(61)] == [70, 100, 100]
    assert (elastic.lent, elastic.returns) == (0, 1)
    elastic.lend(20 * PAGE)
    assert [begun(180), begun(181)] == [80, 100]
    elastic.lend(20 * PAGE)
    fake.memory.held["workspace"] = 25 * PAGE
    assert begun(181 + 240) == 80
    assert "still in use" in elastic.refused
    fake.memory.held["workspace"] = 0
    assert [begun(181 + 479), begun(181 + 480)] == [80, 100]
    assert elastic.refused == ""
    elastic.lend(20 * PAGE)
    elastic.resize(50 * PAGE)
    assert [begun(10_000), elastic.lent] == [50, 0]


def test_what_kv_gives_up_and_another_program_takes_is_the_experts_later() -> None:
    """By hand: KV has grown by 8 pages and needs them no more. They leave it although the experts cannot have them, KV
    can grow again meanwhile, and the experts have all again when the other program has ended."""
    granule, boundary.GRANULE = boundary.GRANULE, PAGE
    try:
        now, fake = [0.0], Lender(12 * PAGE, 2 * PAGE, 102 * PAGE)
        fake.elastic = elastic = Elastic(fake, fake, lambda: now[0])  # type: ignore[arg-type]
        cache = KvCache(fake)  # type: ignore[arg-type]

        def begun(at: float, length: int) -> tuple[int, int]:
            now[0] = at
            s = Sequence(m.Generate(id=1, prompt=(1,) * length), 1, -1)
            assert cache.begin(s, cache.match(s), 0)
            cache.release(s)
            b = elastic.boundary.budget
            assert (b.kv, b.experts, b.total) == (len(fake.held), fake.budget, len(fake.held) + fake.budget)
            return len(fake.held) // PAGE, fake.budget // PAGE

        assert begun(0, 8 * PAGE) == (10, 92)
        fake.memory.held["another program"] = 8 * PAGE
        assert [begun(1, 3), begun(60, 3)] == [(10, 92), (10, 92)]
        assert begun(62, 3) == (2, 92)
        assert elastic.lent == 8 * PAGE
        assert elastic.refused
        assert begun(63, 4 * PAGE) == (5, 89)
        assert begun(123, 3) == (5, 89)
        del fake.memory.held["another program"]
        assert [begun(182, 3), begun(184, 3), begun(245, 3)] == [(5, 89), (5, 97), (2, 100)]
        assert (elastic.lent, elastic.refused) == (0, "")
    finally:
        boundary.GRANULE = granule


class Requests:
    """Sequences on a cache by hand: a prompt in one pass, then what the tree keeps."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.cache = KvCache(executor)
        self.number = 0

    def run(self, prompt: list[int], keep: bool = True, hold: bool = False) -> tuple[F32, int, Sequence]:
        """(logits of the last token, tokens found in the tree, the sequence)."""
        self.number += 1
        s = Sequence(m.Generate(id=self.number, prompt=tuple(prompt)), self.number, -1)
        assert self.cache.begin(s, self.cache.match(s), 0)
        cached, n = s.n_past, len(prompt)
        at = np.arange(cached, n, dtype=np.int32)
        batch = Batch(
            np.array(prompt[cached:], np.int32), at, np.zeros(n - cached, np.int32), s.table[cached:n].copy(),
            (s.table[:n].copy(),), np.array([n - cached - 1], np.int32),
        )  # fmt: skip
        logits = self.executor.forward(batch)[0].copy()
        s.n_past = n
        if keep:
            self.cache.keep(s)
        if not hold:
            self.cache.release(s)
        return logits, cached, s


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3moe", tmp_path_factory.mktemp("elastic") / "m.gguf", types="Q8_0", **TINY)


@pytest.mark.slow
def test_kv_takes_from_the_experts_and_gives_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of one page: a prompt of three is served from the experts' memory, a second takes more, its prefix survives,
    and after an idle minute the prefix moves down and the experts have their memory again."""
    monkeypatch.setattr(boundary, "GRANULE", 1 << 13)
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1)
    now = [0.0]
    n_cells = 8 * PAGE
    executor = load_cached(path, DEVICE, 16, n_cells=n_cells, max_rows=4 * PAGE, start_cells=PAGE)
    store = executor.store
    executor.elastic = Elastic(executor, store, lambda: now[0])
    requests, plain = Requests(executor), Requests(load_cached(path, DEVICE, None, n_cells=n_cells, max_rows=4 * PAGE))
    rng = np.random.default_rng(1)
    shared, filler = ([int(t) for t in rng.integers(3, 300, n)] for n in (PAGE + 5, 2 * PAGE + 1))
    start = memory(store)

    def same(prompt: list[int], cached: int, **options: Any) -> Sequence:
        want, _, _ = plain.run(prompt, keep=prompt is not filler)
        got, found, sequence = requests.run(prompt, **options)
        assert found == cached
        error = float(((got - want) ** 2).sum() / (want**2).sum())
        assert error < 1e-3, "the CPU's part of a prompt is rounded to 8 bits"
        assert memory(store) <= start
        store.device_state.store(store.state)
        check(store.state)
        return sequence

    long = same(filler, 0, keep=False, hold=True)
    assert executor.cells.n_cells >= 3 * PAGE
    same(shared, 0)
    assert min(p for node in requests.cache.tree.nodes() for p in node.pages) >= 3
    grown, slots = executor.cells.n_cells, sum(store.arena.plan.counts())
    assert slots < 16
    requests.cache.release(long)
    same([*shared, 9], PAGE + 5)
    assert executor.cells.n_cells == grown
    for _ in range(2):
        now[0] += 61
        same([*shared, 11], PAGE + 5)
    assert executor.cells.n_cells < grown
    assert sum(store.arena.plan.counts()) > slots
    assert max(p for node in requests.cache.tree.nodes() for p in node.pages) < executor.cells.n_cells // PAGE
    status = executor.elastic.status()
    assert status["moves"] >= 3
    assert status["kv_bytes"] + status["expert_bytes"] <= start
    done = executor.elastic.resize(2 * store.ring.half)
    assert done["slots"] == 0
    same([*shared, 12], PAGE + 5)
    store.close()


@pytest.mark.slow
def test_slots_that_a_pass_borrowed_are_used_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits stay those of an executor that has every expert, before, without and with them again; as many slots as at
    the start."""
    monkeypatch.setattr(arena, "CHUNK_BYTES", 1)
    now = [0.0]
    executor = load_cached(path, DEVICE, 12, n_cells=4 * PAGE, max_rows=2 * PAGE)
    store = executor.store
    executor.elastic = elastic = Elastic(executor, store, lambda: now[0])
    requests, plain = Requests(executor), Requests(load_cached(path, DEVICE, None, n_cells=4 * PAGE, max_rows=2 * PAGE))
    prompt = [int(t) for t in np.random.default_rng(2).integers(3, 300, PAGE + 3)]

    def same() -> int:
        want, got = (each.run(prompt, keep=False)[0] for each in (plain, requests))
        assert float(((got - want) ** 2).sum() / (want**2).sum()) < 1e-3
        store.device_state.store(store.state)
        check(store.state)
        return sum(store.arena.plan.counts())

    slots = same()
    elastic.lend(store.abandon())
    assert same() < slots
    now[0] += 61
    assert same() == slots
    assert (elastic.lent, elastic.returns) == (0, 1)
    store.close()


def memory(store: CachedStore) -> int:
    held = store.memory.held
    return int(held["KV"] + held["experts"] + held["prefill ring"])
