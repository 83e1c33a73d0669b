# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The expert cache's decision for one MoE layer, in one program on the GPU, so that a captured graph needs no host.

It does what `ftgguf.experts.residency.step` does, with the same integers in the same order, on the same arrays;
that module documents the state. What is particular to the GPU:

- Work is laid out over *lanes* (an expert of the layer, padded to a power of two) and over the victim window; the
  routed entries are read in chunks and never sorted. A value is loaded before, never after, another thread may store
  it: Triton keeps small tensors in several warps, so barriers part the loads of state from its stores. Only the counts
  of launches with more than `BLOCK_ENTRIES` entries go through memory, between two barriers.
- Victims are chosen by a minimum over packed int64 (score, place in the window, owner): one reduction each.
- The cost depends on the window, the lanes and the number of fills, not on the number of slots.
- Layer number, slot counts, shares and addresses are data (`do_not_specialize`, or read from memory): a resize or a
  new split neither compiles nor captures again.

Output (`StepBuffers`), for the kernels and the CPU worker that follow; layouts as in `residency.Step`:
  header int32 [16]: experts, hits, misses, fills, CPU experts, CPU entries, entries, clock, whether the first of the
  CPU's experts is shared; zeros.
  place, place_down int32 [entries]; part_src int64 [1]; fill_expert, fill_slot int32 [max]; fill_src int64 [max, 3];
  fill_dst int64 [max]; cpu_expert int32 [max]; cpu_start int32 [max + 1]; cpu_rows int32 [entries].
Only the first `header[3]` fills and the first `header[4]` CPU experts are written. A gather kernel copies part p of
fill i, for i < header[3], from `fill_src[i, p]` to `fill_dst[i]` + the layer's offset of part p.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl

from ftgguf.experts import key as keys
from ftgguf.experts.residency import Residency, Step

from .overlap import after_previous, overlap

BLOCK_ENTRIES = 128
"""Up to this many routed entries are deduplicated by comparing with the lanes; above, by counting in memory."""
TABLE_SHIFT: tl.constexpr = tl.constexpr(6)
TABLE_LAST: tl.constexpr = tl.constexpr(1023)
NO_VICTIM: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
FREE_SCORE: tl.constexpr = tl.constexpr(-0x7FFFFFFF)
STATS: tl.constexpr = tl.constexpr(16)
"""`experts.residency.STAT_COLUMNS`."""


@triton.jit
def _log2_add(a, b, table):
    """`experts.key.log2_add`."""
    distance = tl.minimum(tl.abs(a - b) >> TABLE_SHIFT, TABLE_LAST)
    return tl.maximum(a, b) + tl.load(table + distance)


@triton.jit
def _score(fast, slow, owner_layer, clock, layer, layers, policy, table, LRU: tl.constexpr):
    """`experts.key.score`; `policy` int32 [4]: fast step, slow step, fast weight, phase step."""
    if LRU:
        value = fast + owner_layer * 0
    else:
        ahead = owner_layer > layer
        seen = clock - ahead.to(tl.int32)
        distance = owner_layer - layer - 1 + tl.where(ahead, 0, layers)
        f = fast - seen * tl.load(policy) + tl.load(policy + 2)
        s = slow - seen * tl.load(policy + 1)
        value = _log2_add(f, s, table) + (layers - distance) * tl.load(policy + 3)
    return value


@triton.jit
def _entries_per_lane(ids, counts, n, lane, E_PAD: tl.constexpr, CHUNK: tl.constexpr, COUNT_IN_MEMORY: tl.constexpr):
    """int32 [E_PAD]: how many of the `n` entries are routed to each lane."""
    total = tl.zeros([E_PAD], tl.int32)
    if COUNT_IN_MEMORY:
        tl.store(counts + lane, total)
        tl.debug_barrier()
        for start in range(0, n, E_PAD):
            at = start + lane
            e = tl.load(ids + at, at < n, -1)
            tl.atomic_add(counts + e, 1, (at < n) & (e >= 0))
        tl.debug_barrier()
        total = tl.load(counts + lane, cache_modifier=".cg")  # the additions happened in L2
    else:
        for start in range(0, n, CHUNK):
            at = start + tl.arange(0, CHUNK)
            e = tl.load(ids + at, at < n, -1)
            total += tl.sum((e[:, None] == lane[None, :]).to(tl.int32), 0)
    return total


@triton.jit
def _makespan(f, m, phi, late):
    """`experts.split._makespan`."""
    return tl.maximum(f * (65536 - phi), tl.where(f < m, (m - f) * phi + late, 0))


@triton.jit
def _balanced_fills(m, phi, least, late):
    """`experts.split.balanced_fills`."""
    low = tl.minimum(tl.maximum((m * phi + late) >> 16, 0), m)
    high = tl.minimum(low + 1, m)
    cost_low = _makespan(low, m, phi, late)
    cost_high = _makespan(high, m, phi, late)
    q = tl.where(cost_low <= cost_high, low, high)
    q = tl.where(m * (65536 - phi) < tl.minimum(cost_low, cost_high), m, q)
    return tl.minimum(m, tl.maximum(q, least))


@triton.jit
def _split_misses(m, phi, least, late, link, cpu):
    """`experts.split.split_misses`: (fills, 1 where an expert is shared)."""
    q = _balanced_fills(m, phi, least, late)
    low = tl.minimum(tl.maximum((m * phi + late - link - cpu) >> 16, least), m - 1)
    high = tl.minimum(low + 1, m - 1)
    cost_low = tl.maximum(low * (65536 - phi) + link, (m - low) * phi + late - cpu)
    cost_high = tl.maximum(high * (65536 - phi) + link, (m - high) * phi + late - cpu)
    f = tl.where(cost_low <= cost_high, low, high)
    better = tl.minimum(cost_low, cost_high) < _makespan(q, m, phi, late)
    shared = (link > 0) & (m > least) & better
    return tl.where(shared, f, q), shared.to(tl.int32)


@triton.jit
def _window(
    owner_of, key, key_plane, begin, count, hand, used, lane, clock, layer, layers, policy, table,
    E_PAD: tl.constexpr, E_BITS: tl.constexpr, WINDOW: tl.constexpr, LRU: tl.constexpr,
):  # fmt: skip
    """Candidates as packed int64 [WINDOW]: score << 32 | place << 20 | owner + 1; NO_VICTIM where there is none."""
    place = tl.arange(0, WINDOW)
    at = hand + place
    slot = begin + tl.where(at >= count, at - count, at)
    inside = place < tl.minimum(count, WINDOW)
    owner = tl.load(owner_of + slot, inside, -1)
    taken = inside & (owner >= 0)
    flat = tl.where(taken, owner, 0)
    owner_layer = flat >> E_BITS
    owner_lane = flat & (E_PAD - 1)
    fast = tl.load(key + flat, taken, 0)
    slow = tl.load(key + key_plane + flat, taken, 0)
    value = _score(fast, slow, owner_layer, clock, layer, layers, policy, table, LRU)
    value = tl.where(owner < 0, FREE_SCORE, value)
    # Whether the owner is used in this step, from bits in registers: 32 lanes a word.
    word = tl.zeros([WINDOW], tl.int32)
    for w in tl.static_range((E_PAD + 31) // 32):
        bits = tl.sum(tl.where((lane >> 5) == w, used << (lane & 31), 0), 0)
        word = tl.where((owner_lane >> 5) == w, bits, word)
    in_use = taken & (owner_layer == layer) & (((word >> (owner_lane & 31)) & 1) != 0)
    packed = (value.to(tl.int64) << 32) | (place.to(tl.int64) << 20) | (owner + 1).to(tl.int64)
    return tl.where(inside & (in_use == 0), packed, NO_VICTIM)


@triton.jit
def _fill(
    q, slot, miss, fast, slow, used, begin, count, hand, cls, clock, layer, layers, lane,
    slot_of, owner_of, key, key_plane, hand_at, slot_addr, host_base, host_stride, policy, table,
    fill_expert, fill_slot, fill_src, fill_dst,
    E_PAD: tl.constexpr, E_BITS: tl.constexpr, WINDOW: tl.constexpr, LRU: tl.constexpr,
):  # fmt: skip
    """Give the `q` most wanted missing lanes the least valued slots of the window; write the maps and the fill list.

    Returns `slot` (int32 [E_PAD]) as it is afterwards, and how many were filled.
    """
    row = layer * E_PAD
    victims = _window(
        owner_of, key, key_plane, begin, count, hand, used, lane, clock, layer, layers, policy, table,
        E_PAD, E_BITS, WINDOW, LRU,
    )  # fmt: skip
    q = tl.minimum(q, tl.sum((victims != NO_VICTIM).to(tl.int32), 0))
    worth = _score(fast, slow, lane * 0 + layer, clock, layer, layers, policy, table, LRU)
    wanted = tl.where(miss, (worth.to(tl.int64) << 32) | (E_PAD - 1 - lane).to(tl.int64), -NO_VICTIM)
    tl.debug_barrier()
    passed = hand + tl.minimum(count, WINDOW)
    tl.store(hand_at + cls, tl.where(passed >= count, passed - count, passed))
    for i in range(q):
        victim = tl.min(victims, 0)
        victims = tl.where(victims == victim, NO_VICTIM, victims)
        best = tl.max(wanted, 0)
        wanted = tl.where(wanted == best, -NO_VICTIM, wanted)
        e = E_PAD - 1 - (best & 0xFFFFF).to(tl.int32)
        old = (victim & 0xFFFFF).to(tl.int32) - 1
        at = hand + ((victim >> 20) & 0xFFF).to(tl.int32)
        v = begin + tl.where(at >= count, at - count, at)
        slot = tl.where(row + lane == old, -1, slot)
        slot = tl.where(lane == e, v, slot)
        # Lanes of this layer are stored together below; a second store to them could come out of order.
        tl.store(slot_of + old, -1, (old >= 0) & ((old >> E_BITS) != layer))
        tl.store(owner_of + v, row + e)
        tl.store(fill_expert + i, e)
        tl.store(fill_slot + i, v)
        tl.store(fill_dst + i, tl.load(slot_addr + v))
        for p in tl.static_range(3):
            source = tl.load(host_base + layer * 3 + p) + e.to(tl.int64) * tl.load(host_stride + layer * 3 + p)
            tl.store(fill_src + i * 3 + p, source)
    tl.store(slot_of + row + lane, slot)
    return slot, q


@triton.jit
def _emit_places(ids, n, lane, slot, shared_lane, shared_slot, place_out, place_down, CHUNK: tl.constexpr):
    """Write each entry's slot, or -1; for the down product `shared_slot` in place of the shared expert's -1."""
    slot_down = tl.where(lane == shared_lane, shared_slot, slot)
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        e = tl.load(ids + at, at < n, -1)
        match = (e[:, None] == lane[None, :]).to(tl.int32)
        tl.store(place_out + at, tl.sum(match * (slot + 1)[None, :], 1) - 1, at < n)
        tl.store(place_down + at, tl.sum(match * (slot_down + 1)[None, :], 1) - 1, at < n)


@triton.jit
def _emit_cpu(ids, n, lane, entries, on_cpu, cpu_expert, cpu_start, cpu_rows, CHUNK: tl.constexpr):
    """Write the CPU's experts and their entries, grouped by expert; returns the number of entries."""
    rank = tl.cumsum(on_cpu, 0) - on_cpu
    mine = entries * on_cpu
    first = tl.cumsum(mine, 0) - mine
    tl.store(cpu_expert + rank, lane, on_cpu != 0)
    tl.store(cpu_start + rank, first, on_cpu != 0)
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        e = tl.load(ids + at, at < n, -1)
        match = (e[:, None] == lane[None, :]).to(tl.int32) * on_cpu[None, :]
        order = tl.cumsum(match, 0) - match + first[None, :]
        tl.store(cpu_rows + tl.sum(match * order, 1), at, (tl.sum(match, 1) > 0) & (at < n))
        first += tl.sum(match, 0)
    return tl.sum(mine, 0)


@triton.jit
def _emit_counts(header, stats, experts, hits, misses, fills, cpu, cpu_entries, entries, clock, shared):
    """The header (see above), and `Stat`'s columns added up."""
    i = tl.arange(0, 16)
    both = tl.where(i == 2, misses, tl.where(i == 3, fills, tl.where(i == 4, cpu, cpu_entries)))
    head = tl.where(i == 0, experts, tl.where(i == 1, hits, tl.where(i == 6, entries, tl.where(i == 7, clock, both))))
    tl.store(header + i, tl.where(i < 8, head, tl.where(i == 8, shared, 0)))
    stat = tl.where(i == 4, misses, tl.where(i == 5, fills, tl.where(i == 6, cpu, cpu_entries)))
    more = tl.where(i == 0, 1, tl.where(i == 1, entries, tl.where(i == 2, experts, tl.where(i == 3, hits, stat))))
    total = tl.load(stats + i) + tl.where(i < 8, more, tl.where(i == 8, shared, 0)).to(tl.int64)
    tl.debug_barrier()
    tl.store(stats + i, total)


@triton.jit(do_not_specialize=["n", "layer", "layers", "advance", "may_share", "shared_slot", "key_plane"])
def residency_kernel(
    ids, n, layer, layers, advance, may_share, shared_slot,
    slot_of, owner_of, key, key_plane, clock_at, class_begin, class_count, hand_at, layer_class, split,
    late, part, slot_addr, host_base, host_stride, stats, policy, table, counts,
    header, place_out, fill_expert, fill_slot, fill_src, fill_dst, cpu_expert, cpu_start, cpu_rows, place_down,
    part_src, E_PAD: tl.constexpr, E_BITS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    COUNT_IN_MEMORY: tl.constexpr, LRU: tl.constexpr,
):  # fmt: skip
    """One program. `ids` int32 [n], negative is padding; the rest as in the module's docstring."""
    after_previous()
    lane = tl.arange(0, E_PAD)
    row = layer * E_PAD
    clock = tl.load(clock_at) + advance
    entries = _entries_per_lane(ids, counts, n, lane, E_PAD, CHUNK, COUNT_IN_MEMORY)
    is_used = entries > 0
    used = is_used.to(tl.int32)
    slot = tl.load(slot_of + row + lane)
    fast = tl.load(key + row + lane)
    slow = tl.load(key + key_plane + row + lane)
    cls = tl.load(layer_class + layer)
    begin = tl.load(class_begin + cls)
    count = tl.load(class_count + cls)
    hand = tl.load(hand_at + cls)
    miss = is_used & (slot < 0)
    n_used = tl.sum(used, 0)
    m = tl.sum(miss.to(tl.int32), 0)
    if LRU:
        fast = tl.where(is_used, clock * layers + layer, fast)
        slow = tl.where(is_used, clock * layers + layer, slow)
    else:
        fast = tl.where(is_used, _log2_add(fast, clock * tl.load(policy), table), fast)
        slow = tl.where(is_used, _log2_add(slow, clock * tl.load(policy + 1), table), slow)
    # Small tensors are held by several warps at once: all must have loaded before any stores.
    tl.debug_barrier()
    tl.store(clock_at, clock)
    tl.store(key + row + lane, fast, is_used)
    tl.store(key + key_plane + row + lane, slow, is_used)

    q, shared = _split_misses(
        m, tl.load(split + 2 * layer), tl.load(split + 2 * layer + 1), tl.load(late + layer),
        tl.load(part + 2 * layer) * may_share, tl.load(part + 2 * layer + 1),
    )  # fmt: skip
    q = tl.where(count > 0, q, 0)
    shared = tl.where(count > 0, shared, 0)
    if q > 0:
        slot, q = _fill(
            q, slot, miss, fast, slow, used, begin, count, hand, cls, clock, layer, layers, lane,
            slot_of, owner_of, key, key_plane, hand_at, slot_addr, host_base, host_stride, policy, table,
            fill_expert, fill_slot, fill_src, fill_dst, E_PAD, E_BITS, WINDOW, LRU,
        )  # fmt: skip
    n_cpu = m - q
    n_rows = 0
    shared = tl.where(n_cpu > 0, shared, 0)
    if n_cpu > 0:
        on_cpu = (is_used & (slot < 0)).to(tl.int32)
        n_rows = _emit_cpu(ids, n, lane, entries, on_cpu, cpu_expert, cpu_start, cpu_rows, CHUNK)
    tl.store(cpu_start + n_cpu, n_rows)
    first = tl.min(tl.where(is_used & (slot < 0), lane, E_PAD - 1), 0)
    source = tl.load(host_base + layer * 3) + first.to(tl.int64) * tl.load(host_stride + layer * 3)
    tl.store(part_src, tl.where(shared != 0, source, 0))
    _emit_places(ids, n, lane, slot, tl.where(shared != 0, first, -1), shared_slot, place_out, place_down, CHUNK)
    n_valid = tl.sum(entries, 0)
    _emit_counts(header, stats + layer * STATS, n_used, n_used - m, m, q, n_cpu, n_rows, n_valid, clock, shared)


STATE = (
    "slot_of", "owner_of", "key", "clock", "class_begin", "class_count", "hand", "layer_class", "split",
    "late", "part", "slot_addr", "host_base", "host_stride", "stats",
)  # fmt: skip
"""The arrays of `experts.residency.Residency` that live on the device, in the order of the kernel's arguments."""


@dataclass(frozen=True, slots=True)
class DeviceResidency:
    """`Residency` on a device: one tensor for each name in `STATE`, and what the kernel needs besides."""

    experts: int
    lru: bool
    window: int
    arrays: dict[str, torch.Tensor]
    policy: torch.Tensor
    table: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, state: Residency, device: torch.device | str) -> DeviceResidency:
        """A copy of the mirror's state on `device`."""
        p = state.policy
        row = [p.fast_step, p.slow_step, p.fast_weight, p.phase_step(state.layers)]
        return cls(
            experts=state.experts,
            lru=p.lru,
            window=state.window,
            arrays={name: torch.tensor(getattr(state, name), device=device) for name in STATE},
            policy=torch.tensor(row, dtype=torch.int32, device=device),
            table=torch.tensor(keys.TABLE, device=device),
            counts=torch.zeros(state.e_pad, dtype=torch.int32, device=device),
        )

    def store(self, state: Residency) -> None:
        """Copy the device's arrays into the mirror (a safe point: waits for the device)."""
        for name in STATE:
            getattr(state, name)[...] = self.arrays[name].cpu().numpy()

    def load(self, state: Residency) -> None:
        """Copy the mirror's arrays into the device's, in place: sizes and addresses stay, a captured graph holds."""
        for name in STATE:
            self.arrays[name].copy_(torch.from_numpy(getattr(state, name)))


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Where one layer step's decision is written. Allocate once per graph; layers may share one if used in order."""

    header: torch.Tensor
    place: torch.Tensor
    fill_expert: torch.Tensor
    fill_slot: torch.Tensor
    fill_src: torch.Tensor
    fill_dst: torch.Tensor
    cpu_expert: torch.Tensor
    cpu_start: torch.Tensor
    cpu_rows: torch.Tensor
    place_down: torch.Tensor
    part_src: torch.Tensor

    @classmethod
    def allocate(cls, entries: int, experts: int, device: torch.device | str) -> StepBuffers:
        """Buffers for up to `entries` = rows * k routed entries."""
        most = min(entries, experts)

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            header=new(16),
            place=new(entries),
            fill_expert=new(most),
            fill_slot=new(most),
            fill_src=new(most, 3, dtype=torch.int64),
            fill_dst=new(most, dtype=torch.int64),
            cpu_expert=new(most),
            cpu_start=new(most + 1),
            cpu_rows=new(entries),
            place_down=new(entries),
            part_src=new(1, dtype=torch.int64),
        )

    def result(self, shape: tuple[int, int]) -> Step:
        """The decision as the mirror's `Step`, on the host; `shape` is that of the ids."""
        head = self.header.tolist()
        fills, cpu, rows = head[3], head[4], head[5]

        def host(tensor: torch.Tensor, count: int) -> Any:
            return tensor[:count].cpu().numpy()

        return Step(
            place=host(self.place, shape[0] * shape[1]).reshape(shape),
            hits=head[1],
            fill_expert=host(self.fill_expert, fills),
            fill_slot=host(self.fill_slot, fills),
            fill_src=host(self.fill_src, fills),
            fill_dst=host(self.fill_dst, fills),
            cpu_expert=host(self.cpu_expert, cpu),
            cpu_start=host(self.cpu_start, cpu + 1),
            cpu_rows=host(self.cpu_rows, rows),
            shared=head[8] != 0,
            place_down=host(self.place_down, shape[0] * shape[1]).reshape(shape),
            part_src=int(self.part_src[0]),
        )


def residency_step(
    state: DeviceResidency, layer: int, ids: torch.Tensor, out: StepBuffers, advance: int, may_share: bool = True,
    num_warps: int = 4,
) -> None:  # fmt: skip
    """Launch the decision of MoE layer `layer` on `ids` (int32, contiguous, any shape) on the current stream.

    `advance` is 1 in the step's first MoE layer and 0 in the others, `may_share` as in the mirror.
    """
    a = state.arrays
    layers, e_pad = a["slot_of"].shape
    n = ids.numel()
    if ids.dtype != torch.int32 or not ids.is_contiguous() or n > out.place.numel():
        raise ValueError(f"ids must be contiguous int32 with at most {out.place.numel()} entries, got {ids.dtype} {n}")
    residency_kernel[(1,)](
        ids, n, layer, layers, advance, int(may_share), a["owner_of"].numel(),
        a["slot_of"], a["owner_of"], a["key"], layers * e_pad, *(a[name] for name in STATE[3:]),
        state.policy, state.table, state.counts,
        *(getattr(out, f.name) for f in fields(out)),
        E_PAD=e_pad, E_BITS=e_pad.bit_length() - 1, WINDOW=state.window,
        CHUNK=min(32, max(2, triton.next_power_of_2(n))), COUNT_IN_MEMORY=n > BLOCK_ENTRIES, LRU=state.lru,
        num_warps=num_warps, launch_pdl=overlap(),
    )  # fmt: skip
