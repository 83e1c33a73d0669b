# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Routed pairs sorted by the expert (or slot) they go to, in tiles for the tensor cores: four launches, no host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SIZE = 256
"""Pairs a program counts or places."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Routed pairs sorted by slot, in tiles of `bm` that each belong to one slot.

    `order` int32 [P]: pairs in slot order, within a slot in any order (a tile's columns do not see each other); what
    lies behind the last tile's is not written. `tile` int32 [tiles, 3]: (slot or -1, first index into `order`, pairs).
    The number of tiles depends on shapes only, so a launch over all of them needs nothing from the device.
    """

    order: torch.Tensor
    tile: torch.Tensor
    bm: int


@triton.jit(do_not_specialize=["n"])
def _count(ids, counts, n, SIZE: tl.constexpr):
    """counts int32 [slots] += the pairs of each slot."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(ids + at, mask=at < n, other=-1)
    tl.atomic_add(counts + slot, 1, mask=slot >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["slots", "tiles", "bm"])
def _tiles(counts, cursor, tile, slots, tiles, bm, S: tl.constexpr):
    """One program: the tiles, and in `cursor` int32 [slots] where each slot's pairs begin."""
    s = tl.arange(0, S)
    count = tl.load(counts + s, mask=s < slots, other=0)
    first = tl.cumsum(count, 0) - count
    tl.store(cursor + s, first, mask=s < slots)
    of = (count + bm - 1) // bm
    begin = tl.cumsum(of, 0) - of
    for j in range(tl.max(of, 0)):
        at = tile + (begin + j) * 3
        tl.store(at, s, mask=j < of)
        tl.store(at + 1, first + j * bm, mask=j < of)
        tl.store(at + 2, tl.minimum(count - j * bm, bm), mask=j < of)
    for start in range(tl.sum(of, 0), tiles, S):
        i = start + s
        tl.store(tile + i * 3, -1, mask=i < tiles)
        tl.store(tile + i * 3 + 1, 0, mask=i < tiles)
        tl.store(tile + i * 3 + 2, 0, mask=i < tiles)


@triton.jit(do_not_specialize=["n"])
def _place(ids, cursor, order, n, SIZE: tl.constexpr):
    """Each pair takes the next place of its slot."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    slot = tl.load(ids + at, mask=at < n, other=-1)
    where = tl.atomic_add(cursor + slot, 1, mask=slot >= 0, sem="relaxed")
    tl.store(order + where, at, mask=slot >= 0)


def group_pairs(ids: torch.Tensor, slots: int, bm: int) -> Groups:
    """Sort pairs by slot. `ids` int32 [M, k] in [-1, slots); pairs with -1 belong to no tile. Nothing is copied to the
    host, so it may be captured."""
    if ids.dtype != torch.int32:
        raise ValueError(f"slot numbers must be int32, not {ids.dtype}")
    flat, device = ids.reshape(-1).contiguous(), ids.device
    pairs = flat.numel()
    tiles = min(pairs, pairs // bm + min(slots, pairs))
    counts = torch.zeros(slots, dtype=torch.int32, device=device)
    cursor, order = torch.empty_like(counts), torch.empty_like(flat)
    tile = torch.empty(tiles, 3, dtype=torch.int32, device=device)
    grid = (triton.cdiv(pairs, SIZE),)
    _count[grid](flat, counts, pairs, SIZE=SIZE, num_warps=4)
    _tiles[(1,)](counts, cursor, tile, slots, tiles, bm, S=max(16, triton.next_power_of_2(slots)), num_warps=4)
    _place[grid](flat, cursor, order, pairs, SIZE=SIZE, num_warps=4)
    return Groups(order, tile, bm)
