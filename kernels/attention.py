# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over a paged KV cache: what decode and prefill share, and their launchers.

Row m attends to positions 0..position[m] of its sequence; position p of sequence s lives in cell
page_table[s, p // PAGE] * PAGE + p % PAGE. A window w keeps positions > position[m] - w (llama.cpp's standard sliding
window), a chunk c keeps those of position[m]'s own chunk of c (its chunked one).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .activations import Activations, empty_planes, quantize_block, store_block
from .device import INTERPRET, dot, tanh
from .formats import Activation
from .kvcache import PAGE, KVCache
from .overlap import after_previous, overlap

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_heads(p, scale, head, ok, i, HD: tl.constexpr, BD: tl.constexpr, QUANT: tl.constexpr, DT: tl.constexpr):
    """Tile [BN, BD] of cache heads `head` (int64 [BN]) in `DT`; zero outside `ok` [BN] and past HD."""
    inside = ok[:, None] & (i < HD)[None, :]
    x = tl.load(p + head[:, None] * HD + i[None, :], mask=inside, other=0)
    if QUANT:
        d = tl.load(scale + head[:, None] * (HD // 32) + (i // 32)[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32) * d.to(tl.float32)
    return x.to(DT)


@triton.jit
def scores(s, scale, cap, CAP: tl.constexpr):
    """Scaled scores, soft-capped as cap * tanh(s / cap)."""
    s = s * scale
    if CAP:
        s = cap * tanh(s / cap)
    return s


@triton.jit
def first_position(pos, window, WINDOW: tl.constexpr):
    """The first position that a row at `pos` sees. WINDOW: 0 none, 1 sliding, 2 chunked."""
    if WINDOW == 1:
        return tl.maximum(pos - window + 1, 0)
    elif WINDOW == 2:
        return pos // window * window
    else:
        return pos * 0


@triton.jit
def _decode(
    q, k, v, k_scale, v_scale, table, sequence, position, part, stat, table_stride, scale, cap, window,
    HQ: tl.constexpr, HK: tl.constexpr, HD: tl.constexpr, HV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, PAGE_: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, QUANT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, split): part float32 [M, HQ, SPLITS, HV] unnormalised, stat [..., 2] its (max, sum)."""
    after_previous()
    m = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    G: tl.constexpr = HQ // HK
    pos = tl.load(position + m)
    seq = tl.load(sequence + m)
    start = first_position(pos, window, WINDOW)
    b0 = start // BN
    blocks = pos // BN + 1 - b0
    each = tl.cdiv(blocks, SPLITS)
    lo = b0 + split * each
    hi = tl.minimum(lo + each, pos // BN + 1)
    g = tl.arange(0, BG)
    i = tl.arange(0, BD)
    iv = tl.arange(0, BV)
    heads = m.to(tl.int64) * HQ + h * G + g
    qt = tl.load(q + heads[:, None] * HD + i[None, :], mask=(g < G)[:, None] & (i < HD)[None, :], other=0.0).to(DT)
    top = tl.full((BG,), float("-inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, BV), tl.float32)
    for b in tl.range(lo, hi):
        at = b * BN + tl.arange(0, BN)
        ok = (at <= pos) & (at >= start)
        page = tl.load(table + seq.to(tl.int64) * table_stride + at // PAGE_, mask=ok, other=0)
        head = (page.to(tl.int64) * PAGE_ + at % PAGE_) * HK + h
        kt = load_heads(k, k_scale, head, ok, i, HD, BD, QUANT, DT)
        s = scores(dot(qt, tl.trans(kt), tl.zeros((BG, BN), tl.float32), "ieee"), scale, cap, CAP)
        s = tl.where(ok[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        old = tl.exp(top - new)
        total = total * old + tl.sum(p, 1)
        vt = load_heads(v, v_scale, head, ok, iv, HV, BV, QUANT, DT)
        acc = dot(p.to(DT), vt, acc * old[:, None], "ieee")
        top = new
    at = heads * SPLITS + split
    tl.store(part + at[:, None] * HV + iv[None, :], acc, mask=(g < G)[:, None] & (iv < HV)[None, :])
    tl.store(stat + at * 2, top, mask=g < G)
    tl.store(stat + at * 2 + 1, total, mask=g < G)


@triton.jit
def _merge(
    part, stat, sinks, out, xq, xd, xs,
    HQ: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    SINK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Join the splits of HEADS heads of a row; a sink joins the denominator as one more score without a value. The
    quantised copy is for the output projection, whose blocks of 256 may span two heads."""
    after_previous()
    pid = tl.program_id(0)
    head = pid.to(tl.int64) * HEADS + tl.arange(0, HEADS)
    s = tl.arange(0, SPLITS)
    i = tl.arange(0, BV)
    at = head[:, None] * SPLITS + s[None, :]
    top = tl.load(stat + at * 2)
    total = tl.load(stat + at * 2 + 1)
    best = tl.max(top, 1)
    if SINK:
        sink = tl.load(sinks + head % HQ)
        best = tl.maximum(best, sink)
    w = tl.exp(top - best[:, None])
    denominator = tl.sum(w * total, 1)
    if SINK:
        denominator += tl.exp(sink - best)
    used = (total > 0)[:, :, None] & (i < HV)[None, None, :]
    o = tl.load(part + at[:, :, None] * HV + i[None, None, :], mask=used, other=0.0)
    o = tl.sum(o * w[:, :, None], 1) / denominator[:, None]
    tl.store(out + head[:, None] * HV + i[None, :], o.to(out.dtype.element_ty), mask=(i < HV)[None, :])
    if KIND >= 3:
        B: tl.constexpr = 256 if KIND == 5 else 32
        R: tl.constexpr = HEADS * BV // B
        K: tl.constexpr = HQ * HV
        q, d, sums = quantize_block(tl.reshape(o, (R, B)), KIND, R, B)
        block = pid * R + tl.arange(0, R)
        row = block // (K // B)
        store_block(q, d, sums, xq, xd, xs, row, block % (K // B), row >= 0, K, KIND, R, B)


@triton.jit
def _attend(
    qt, top, total, acc, first, last, k, v, k_scale, v_scale, pages, h, pos, start, scale, cap,
    HK: tl.constexpr, HD: tl.constexpr, HV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PAGE_: tl.constexpr, CAP: tl.constexpr, QUANT: tl.constexpr, DT: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """The online softmax of a tile's rows over blocks [first, last) of BN positions; (max, sum, values) as they are
    afterwards. Without MASK every row sees every position; scores are then in units of log2 (`scale` has 1 / ln 2)."""
    i = tl.arange(0, BD)
    iv = tl.arange(0, BV)
    for b in tl.range(first, last):
        at = b * BN + tl.arange(0, BN)
        near = at <= tl.max(pos, 0) if MASK else at >= 0
        page = tl.load(pages + at // PAGE_, mask=near, other=0)
        head = (page.to(tl.int64) * PAGE_ + at % PAGE_) * HK + h
        kt = load_heads(k, k_scale, head, near, i, HD, BD, QUANT, DT)
        s = scores(dot(qt, tl.trans(kt), tl.zeros((BM, BN), tl.float32), "ieee"), scale, cap, CAP)
        if CAP:
            s *= LOG2E
        if MASK:
            seen = (at[None, :] <= pos[:, None]) & (at[None, :] >= start[:, None])
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        old = tl.exp2(top - safe)
        total = total * old + tl.sum(p, 1)
        vt = load_heads(v, v_scale, head, near, iv, HV, BV, QUANT, DT)
        acc = dot(p.to(DT), vt, acc * old[:, None], "ieee")
        top = new
    return top, total, acc


@triton.jit
def _prefill(
    q, k, v, k_scale, v_scale, table, tiles, position, sinks, out, table_stride, scale, cap, window,
    HQ: tl.constexpr, HK: tl.constexpr, HD: tl.constexpr, HV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PAGE_: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINK: tl.constexpr, QUANT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Program (tile, query head): out [M, HQ, HV] for the tile's consecutive rows of one sequence. The last tiles,
    which see the most positions, begin first."""
    t = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    first = tl.load(tiles + 3 * t)
    count = tl.load(tiles + 3 * t + 1)
    seq = tl.load(tiles + 3 * t + 2)
    r = tl.arange(0, BM)
    row = first + tl.minimum(r, count - 1)
    i = tl.arange(0, BD)
    iv = tl.arange(0, BV)
    pos = tl.load(position + row)
    start = first_position(pos, window, WINDOW)
    heads = row.to(tl.int64) * HQ + h
    qt = tl.load(q + heads[:, None] * HD + i[None, :], mask=(i < HD)[None, :], other=0.0).to(DT)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    pages = table + seq.to(tl.int64) * table_stride
    scale *= 1.0 if CAP else LOG2E
    # Blocks that every row sees whole need no mask: all but the last ones of a long prompt.
    begin = tl.min(start, 0) // BN
    whole = begin if WINDOW else (tl.min(pos, 0) + 1) // BN
    end = tl.max(pos, 0) // BN + 1
    top, total, acc = _attend(
        qt, top, total, acc, begin, whole, k, v, k_scale, v_scale, pages, h // (HQ // HK), pos, start, scale, cap,
        HK, HD, HV, BD, BV, BM, BN, PAGE_, CAP, QUANT, DT, False,
    )  # fmt: skip
    top, total, acc = _attend(
        qt, top, total, acc, whole, end, k, v, k_scale, v_scale, pages, h // (HQ // HK), pos, start, scale, cap,
        HK, HD, HV, BD, BV, BM, BN, PAGE_, CAP, QUANT, DT, True,
    )  # fmt: skip
    if SINK:
        sink = tl.load(sinks + h) * LOG2E
        best = tl.maximum(top, sink)
        old = tl.exp2(top - best)
        acc = acc * old[:, None]
        total = total * old + tl.exp2(sink - best)
    acc = acc / total[:, None]
    tl.store(out + heads[:, None] * HV + iv[None, :], acc.to(out.dtype.element_ty),
             mask=(r < count)[:, None] & (iv < HV)[None, :])  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How a layer attends: `scale` on the scores, `softcap` (0: none), `window` with `kind` `sliding` or `chunked`
    (0: none), `sinks` float32 [HQ] or None."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    kind: str = "sliding"
    sinks: torch.Tensor | None = None

    @property
    def window_code(self) -> int:
        return 0 if self.window <= 0 else 2 if self.kind == "chunked" else 1


_TL = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.int8: tl.float16}


def head_block(dim: int) -> int:
    """A head's width in a tile: the tensor cores take 16 columns at least."""
    return int(max(16, triton.next_power_of_2(dim)))


def decode_splits(rows: int, kv_heads: int, programs: int = 264) -> int:
    """Splits of the context per row: a power of two that gives about `programs` programs (two for each of 132
    multiprocessors); fixed per row count, so a captured graph serves every context length."""
    want = max(1, (4 if INTERPRET.value else programs) // max(1, rows * kv_heads))
    return int(min(64, triton.next_power_of_2(want + 1) // 2))


def attention_decode(
    q: torch.Tensor, cache: KVCache, table: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor,
    spec: AttentionSpec, *, splits: int | None = None, quantize_to: Activation | None = None,
    dtype: torch.dtype = torch.float32,
) -> Activations:  # fmt: skip
    """Attention of rows q [M, HQ, HD], each on its own; best for few rows. `table` int32 [sequences, pages],
    `sequence` and `position` int32 [M]. Returns rows [M, HQ * HV] of `dtype`, with the planes of `quantize_to` where
    its blocks fit whole heads (else they are computed on first use)."""
    m, hq, hd = q.shape
    hk, hv = cache.v.shape[1:]
    splits = splits or decode_splits(m, hk)
    part = torch.empty(m, hq, splits, hv, dtype=torch.float32, device=q.device)
    stat = torch.empty(m, hq, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(m, hq * hv, dtype=dtype, device=q.device)
    ck, cv, sk, sv = cache.tensors()
    bd, bv = head_block(hd), head_block(hv)
    _decode[(m, hk, splits)](
        q, ck, cv, sk, sv, table, sequence, position, part, stat, table.stride(0), spec.scale, spec.softcap,
        spec.window, HQ=hq, HK=hk, HD=hd, HV=hv, BD=bd, BV=bv, BG=max(16, triton.next_power_of_2(hq // hk)),
        BN=32, SPLITS=splits, PAGE_=PAGE, WINDOW=spec.window_code, CAP=spec.softcap > 0,
        QUANT=cache.quantised, DT=_TL[ck.dtype], num_warps=4, launch_pdl=overlap(),
    )  # fmt: skip
    block = 256 if quantize_to == Activation.Q8_K else 32
    heads = max(1, 256 // hv) if quantize_to == Activation.Q8_K else 1
    result = Activations(out)
    fits = quantize_to is not None and quantize_to >= Activation.Q8_0 and bv == hv and hq % heads == 0
    planes = None
    if fits and quantize_to is not None and (heads * hv) % block == 0:
        planes = empty_planes(quantize_to, m, hq * hv, q.device)
        result.put(planes)
    else:
        heads = 1
    xq, xd, xs = (out, out, out) if planes is None else (planes.q, planes.d, planes.s)
    _merge[(m * hq // heads,)](
        part, stat, part if spec.sinks is None else spec.sinks, out, xq, xd, xs, HQ=hq, HV=hv, BV=bv,
        SPLITS=splits, HEADS=heads, SINK=spec.sinks is not None, KIND=-1 if planes is None else int(planes.kind),
        num_warps=4, launch_pdl=overlap(),
    )  # fmt: skip
    return result


def prefill_tiles(rows_per_sequence: list[tuple[int, int, int]], bm: int = 64) -> list[tuple[int, int, int]]:
    """Split runs of consecutive rows (first row, rows, sequence) into tiles of at most `bm` rows, same fields."""
    tiles = []
    for first, rows, sequence in rows_per_sequence:
        tiles += [(first + at, min(bm, rows - at), sequence) for at in range(0, rows, bm)]
    return tiles


def attention_prefill(
    q: torch.Tensor, cache: KVCache, table: torch.Tensor, tiles: torch.Tensor, position: torch.Tensor,
    spec: AttentionSpec, *, bm: int = 64, dtype: torch.dtype = torch.float32,
    config: tuple[int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of rows q [M, HQ, HD] in tiles of consecutive rows: `tiles` int32 [T, 3] from `prefill_tiles` (of at
    most `bm` rows), `position` int32 [M]; `config`: positions a block, warps, stages. Returns [M, HQ * HV] of `dtype`;
    rows in no tile stay unwritten."""
    m, hq, hd = q.shape
    hk, hv = cache.v.shape[1:]
    out = torch.empty(m, hq * hv, dtype=dtype, device=q.device)
    ck, cv, sk, sv = cache.tensors()
    bd, bv = head_block(hd), head_block(hv)
    # 8192 rows of 32 heads of 128 on an H200: 1584 us (347 TFLOP/s); tiles of 128 rows, (128, 8, 3): 1473.
    bn, warps, stages = config or (32 if bd > 128 else 64, 4, 2)
    _prefill[(tiles.shape[0], hq)](
        q, ck, cv, sk, sv, table, tiles, position, out if spec.sinks is None else spec.sinks, out, table.stride(0),
        spec.scale, spec.softcap, spec.window, HQ=hq, HK=hk, HD=hd, HV=hv, BD=bd, BV=bv, BM=bm,
        BN=bn, PAGE_=PAGE, WINDOW=spec.window_code, CAP=spec.softcap > 0,
        SINK=spec.sinks is not None, QUANT=cache.quantised, DT=_TL[ck.dtype], num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
