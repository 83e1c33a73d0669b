"""A prompt chunk through the cache: each layer's missing experts streamed, gathered, shared with the CPU, or all there.

`experts/prefill.py` predicts which is cheapest; this runs it. `place` decides, begins the first copies and the CPU's
part and computes the experts in slots, which stay there; `collect` computes the others as their pieces come through the
ring, into rows of the same products (the pairs were sorted by expert once), and gives the CPU's share. Streamed layers
need no look at the routing: the next layer's first pieces are copied meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftgguf.engine.cuda_experts import ExpertSpec, Placement
from ftgguf.experts.prefill import Choice, Layer, Mode, UnionEstimate, cpu_share, plan_chunk
from ftgguf.experts.prefill_times import PrefillTimes
from ftgguf.experts.residency import seed
from ftgguf.experts.ring import Buffer
from ftgguf.kernels.activations import Activations
from ftgguf.kernels.linear import ExpertPieces
from ftgguf.nouns import F32, I32

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore

SEED_ROWS = 32
"""A chunk's last rows count as uses of their experts: decode begins with their keys."""


@dataclass(slots=True)
class Pending:
    """What a layer has begun and `collect` ends: `parts` are the experts of each piece, the first `len(issued)` of them
    being copied; `job` the CPU's part."""

    index: int
    mode: Mode
    x: Activations
    ids: torch.Tensor
    weights: torch.Tensor
    products: ExpertPieces
    parts: list[list[int]] = field(default_factory=list)
    issued: deque[Buffer] = field(default_factory=deque)
    begun: int = 0
    job: Future[tuple[I32, F32]] | None = None


def cut(experts: Sequence[int], size: int) -> list[list[int]]:
    """`experts` in as few pieces of at most `size` as there can be, as equal as they can be."""
    count = -(-len(experts) // size) if experts else 0
    edges = [round(i * len(experts) / count) for i in range(count + 1)] if count else []
    return [list(experts[a:b]) for a, b in pairwise(edges)]


def cpu_list(ids: I32, chosen: Sequence[int]) -> tuple[I32, I32, I32]:
    """(expert, start, rows_of) for the `chosen` experts that are routed to; layouts as in residency.Step."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    ranked = flat[order]
    experts = sorted(set(chosen))
    first = np.searchsorted(ranked, experts, "left")
    last = np.searchsorted(ranked, experts, "right")
    used = [i for i in range(len(experts)) if last[i] > first[i]]
    rows = [order[first[i] : last[i]] for i in used]
    start = np.concatenate(([0], np.cumsum([len(r) for r in rows]))).astype(np.int32)
    rows_of = np.concatenate([*rows, np.empty(0, np.int32)]).astype(np.int32)
    return np.array([experts[i] for i in used], np.int32), start, rows_of


class PrefillPass:
    """Serves the passes of more rows than decode takes. One at a time; used by CachedStore."""

    def __init__(self, store: CachedStore) -> None:
        self.store = store
        self.unions = UnionEstimate()
        self.times = PrefillTimes(store.memory.device)
        self.force: Mode | None = None
        """One mode for every layer (tests, `--moe-mode`)."""
        self.choices: list[Choice] = []
        self.counts: dict[str, int] = dict.fromkeys((m.value for m in Mode), 0)
        self._pool = ThreadPoolExecutor(1)
        self._rows = 0
        self._absent: list[list[int]] = []
        self._ahead: deque[Buffer] = deque()
        self._seeds: list[torch.Tensor] = []
        self._last = -1

    # ------------------------------------------------------------------------------------------------- a pass

    def _begin(self, rows: int) -> None:
        """Look at the cache (waits for the device) and choose each layer's mode."""
        s = self.store
        s.device_state.store(s.state)
        self.times.take()
        experts = s.state.experts
        self._rows = rows
        self._absent = [np.flatnonzero(s.state.slot_of[i, :experts] < 0).tolist() for i in range(s.state.layers)]
        smallest = min(s.ring.capacity(spec.slot_bytes) for spec in s.order)
        layers = [self._layer(i, len(self._absent[i])) for i in range(s.state.layers)]
        self.choices = plan_chunk(layers, rows, self.unions, 2 * smallest)
        self._ahead.clear()
        self._seeds = []

    def _layer(self, index: int, absent: int) -> Layer:
        s = self.store
        spec = s.order[index]
        return Layer(
            experts=spec.experts,
            k=s.top_k,
            expert_bytes=spec.slot_bytes,
            resident=spec.experts - absent,
            dense=self.times.dense(self._rows, s.costs.dense),
            costs=s.costs.of(s.kinds[index], spec.slot_bytes, pinned=s.reachable(index)),
        )

    def _mode(self, index: int) -> Mode:
        s = self.store
        if not self._absent[index]:
            return Mode.RESIDENT
        if s.ring.capacity(s.order[index].slot_bytes) < 1:
            return Mode.CPU
        mode = self.force or self.choices[index].mode
        # Planned from an estimate: the layer may need copies although none were expected.
        return Mode.GATHER if mode is Mode.RESIDENT else mode

    def place(self, index: int, x: Activations, ids: torch.Tensor, weights: torch.Tensor) -> Placement:
        """See ExpertStore.place. The placement's ticket is for `collect`."""
        s = self.store
        if index <= self._last or not self.choices:
            self._begin(ids.shape[0])
        self._last = index
        mode = self._mode(index)
        self.counts[mode.value] += 1
        self.times.begin(index, ids.shape[0], mode, self.choices[index].alternatives.get(mode, 0.0))
        self._seeds.append(ids[-SEED_ROWS:])
        products = ExpertPieces(ids, s.state.experts, s.order[index].weights)
        pending = Pending(index, mode, x, ids, weights, products)
        counted = ids
        if mode is Mode.STREAM:
            self._issue(pending, self._absent[index])
        elif mode is not Mode.RESIDENT:
            counted = self._look(pending)
        parts = products.parts
        if len(self._absent[index]) < s.state.experts:
            parts = products.add(x, s.device_state.arrays["slot_of"][index], s.addresses)
        return Placement(ids, s.addresses, pending, down=counted, parts=parts)

    def collect(self, pending: Pending) -> torch.Tensor | None:
        """The weighted sum of the experts on the CPU; None for none."""
        self._pieces(pending)
        share: torch.Tensor | None = None
        if pending.job is not None:
            ids = pending.ids
            rows, part = pending.job.result()
            width = self.store.order[pending.index].weights.down.n
            share = torch.zeros(ids.shape[0], width, dtype=torch.float32, device=ids.device)
            at = torch.from_numpy(rows.astype(np.int64)).to(ids.device)
            share = share.index_add_(0, at, torch.from_numpy(part).to(ids.device))
        self._look_ahead(pending.index + 1)
        self.times.end()
        return share

    def end(self) -> None:
        """A pass is done: keys of the last rows' experts, as decode would have left them."""
        if not self._seeds:
            return
        s = self.store
        sizes = [t.numel() for t in self._seeds]
        last = np.split(torch.cat([t.reshape(-1) for t in self._seeds]).cpu().numpy(), np.cumsum(sizes)[:-1])
        self.times.take()
        s.device_state.store(s.state)
        for i, ids in enumerate(last):
            seed(s.state, i, np.unique(ids))
        s.device_state.arrays["key"].copy_(torch.from_numpy(s.state.key))
        self._seeds = []
        self._last = -1
        self.choices = []

    # ------------------------------------------------------------------------------------------------- the ways

    def _look(self, pending: Pending) -> torch.Tensor:
        """The modes that need the routing on the host; the ids, negative where the CPU computes them."""
        s, index = self.store, pending.index
        spec = s.order[index]
        routed: I32 = pending.ids.cpu().numpy()
        count = np.bincount(routed.reshape(-1), minlength=spec.experts)
        self.unions.observe(spec.experts, s.top_k, len(routed), int(np.count_nonzero(count)))
        missing = [e for e in self._absent[index] if count[e]]
        copied = 0
        if pending.mode is Mode.GATHER:
            copied = len(missing)
        elif pending.mode is Mode.SHARE:
            missing.sort(key=lambda e: (int(count[e]), e))
            entries = [float(count[e]) for e in missing]
            copied, _ = cpu_share(len(missing), entries, self._layer(index, len(self._absent[index])))
        on_cpu = missing[: len(missing) - copied]
        if on_cpu:
            pending.job = self._start_cpu(spec, on_cpu, routed, pending.x, pending.weights)
        self._issue(pending, sorted(missing[len(on_cpu) :]))
        if not on_cpu:
            return pending.ids
        kept = np.where(np.isin(routed, on_cpu), -1, routed)
        return torch.from_numpy(np.ascontiguousarray(kept, np.int32)).to(pending.ids.device)

    def _start_cpu(
        self, spec: ExpertSpec, experts: list[int], ids: I32, x: Activations, weights: torch.Tensor
    ) -> Future[tuple[I32, F32]]:
        """Begin `experts` on the CPU; the result is (rows, their share). Only the rows they need are copied."""
        s = self.store
        rows = np.flatnonzero(np.isin(ids, experts).any(1)).astype(np.int32)
        at = torch.from_numpy(rows.astype(np.int64)).to(x.x.device)
        inputs = np.ascontiguousarray(x.x.index_select(0, at).float().cpu().numpy())
        gates = np.ascontiguousarray(weights.index_select(0, at).cpu().numpy())
        lists = cpu_list(ids[rows], experts)
        s.prefill_cpu_experts += len(lists[0])

        def run() -> tuple[I32, F32]:
            y = np.empty((len(inputs), spec.weights.down.n), np.float32)
            s.worker.compute(s.index[spec.layer], inputs, gates, *lists, y)
            return rows, y

        return self._pool.submit(run)

    def _issue(self, pending: Pending, experts: list[int]) -> None:
        """Begin to copy `experts`, as far as the ring goes; the first pieces may be under way already."""
        spec = self.store.order[pending.index]
        pending.parts = cut(experts, self.store.ring.capacity(spec.slot_bytes)) if experts else []
        pending.issued = deque(b for b in self._ahead if b.layer == spec.layer)
        pending.begun = len(pending.issued)
        self._ahead.clear()
        self._top_up(pending)

    def _top_up(self, pending: Pending) -> None:
        spec = self.store.order[pending.index]
        resident = self.store.bank.layers[spec.layer]
        while pending.begun < len(pending.parts) and len(pending.issued) < 2:
            part = pending.parts[pending.begun]
            pending.issued.append(self.store.ring.copy(resident, spec.layer, part, self.store.bank.pinned[spec.layer]))
            pending.begun += 1

    def _pieces(self, pending: Pending) -> None:
        """The products of the pieces as they arrive."""
        ring, spec = self.store.ring, self.store.order[pending.index]
        for part in pending.parts:
            self._top_up(pending)
            buffer = pending.issued.popleft()
            ring.use(buffer)
            assert buffer.table is not None
            pending.products.add(pending.x, buffer.table, buffer.addresses[spec.slot_bytes])
            ring.done(buffer)
            self.store.prefill_copied += len(part)

    def _look_ahead(self, index: int) -> None:
        """Begin the next layer's copies if it is to be streamed. Not the last layer's: it runs for the wanted rows,
        mostly one."""
        s = self.store
        if index >= s.state.layers - 1 or self._mode(index) is not Mode.STREAM:
            return
        spec = s.order[index]
        for part in cut(self._absent[index], s.ring.capacity(spec.slot_bytes))[:2]:
            resident, pinned = s.bank.layers[spec.layer], s.bank.pinned[spec.layer]
            self._ahead.append(s.ring.copy(resident, spec.layer, part, pinned))

    def abandon(self) -> None:
        """A pass ended in an error: nothing of it goes on."""
        self._pool.submit(lambda: None).result()
        self.store.wait()
        self._ahead.clear()
        self._seeds, self.choices, self._last = [], [], -1

    def close(self) -> None:
        self._pool.shutdown()
