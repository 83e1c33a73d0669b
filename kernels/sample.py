# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Sampling prefilter: the k largest logits of a row and the log of the sum of exponentials, so that only a few numbers
leave the device.

A logit and its index become one int64 key whose order is (logit descending, index ascending). Each program sorts a
block of keys and keeps k; the same kernel runs again on what was kept until one block is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import INTERPRET

BLOCK = 128 if INTERPRET.value else 2048
"""Keys that one program sorts, if k is at most half of it (sorting is slow under the interpreter)."""
MAX_K = 1024


@triton.jit
def _keys(x, index):
    """Order-preserving int64 keys: the float's bits made monotonic above, the complement of the index below."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _first(logits, out, stat, V, blocks, B: tl.constexpr, KEEP: tl.constexpr):
    """Program (row, block): out int64 [M, blocks, KEEP] best keys of the block, stat [M, blocks, 2] (max, sum)."""
    m = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    i = b * B + tl.arange(0, B)
    x = tl.load(logits + m * V + i, mask=i < V, other=float("-inf"))
    top = tl.max(x, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = m * blocks + b
    tl.store(stat + at * 2, top)
    tl.store(stat + at * 2 + 1, tl.sum(tl.exp(x - safe), 0))
    tl.store(out + at * KEEP + tl.arange(0, KEEP), tl.topk(_keys(x, i), KEEP))


@triton.jit
def _again(keys, out, count, blocks, B: tl.constexpr, KEEP: tl.constexpr):
    """Program (row, block): best KEEP of a block of B keys; keys int64 [M, count], out [M, blocks, KEEP]."""
    m = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    i = b * B + tl.arange(0, B)
    v = tl.topk(tl.load(keys + m * count + i, mask=i < count, other=-(2**63)), KEEP)
    tl.store(out + (m * blocks + b) * KEEP + tl.arange(0, KEEP), v)


@triton.jit
def _finish(
    keys, stat, values, ids, lse, count, blocks, K: tl.constexpr, BK: tl.constexpr, BB: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BK)
    key = tl.load(keys + m * count + r, mask=r < K, other=0)
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(values + m * K + r, bits.to(tl.float32, bitcast=True), mask=r < K)
    tl.store(ids + m * K + r, 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32), mask=r < K)
    b = tl.arange(0, BB)
    top = tl.load(stat + (m * blocks + b) * 2, mask=b < blocks, other=float("-inf"))
    total = tl.load(stat + (m * blocks + b) * 2 + 1, mask=b < blocks, other=0.0)
    best = tl.max(top, 0)
    tl.store(lse + m, best + tl.log(tl.sum(tl.where(total > 0, total * tl.exp(top - best), 0.0), 0)))


def prefilter(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values float32 [M, k], ids int32 [M, k], logsumexp float32 [M]) of float32 logits [M, V]: the k largest, best
    first, equal ones by index. k up to 1024 and at most V."""
    m, v = logits.shape
    if not 1 <= k <= min(v, MAX_K):
        raise ValueError(f"k must be 1 to {min(v, MAX_K)}, not {k}")
    device = logits.device
    keep = max(2, triton.next_power_of_2(k))  # tl.topk cannot keep one
    block = max(BLOCK, 2 * keep)
    blocks = triton.cdiv(v, block)
    keys = torch.empty(m, blocks * keep, dtype=torch.int64, device=device)
    stat = torch.empty(m, blocks, 2, dtype=torch.float32, device=device)
    _first[(m, blocks)](logits.contiguous(), keys, stat, v, blocks, B=block, KEEP=keep, num_warps=8)
    count = blocks * keep
    while count > keep:
        left = triton.cdiv(count, block)
        out = torch.empty(m, left * keep, dtype=torch.int64, device=device)
        _again[(m, left)](keys, out, count, left, B=block, KEEP=keep, num_warps=8)
        keys, count = out, left * keep
    values = torch.empty(m, k, dtype=torch.float32, device=device)
    ids = torch.empty(m, k, dtype=torch.int32, device=device)
    lse = torch.empty(m, dtype=torch.float32, device=device)
    _finish[(m,)](
        keys, stat, values, ids, lse, count, blocks, K=k, BK=keep, BB=triton.next_power_of_2(blocks), num_warps=4
    )
    return values, ids, lse
