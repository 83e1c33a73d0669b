"""Checks of one kernel call against its reference, shared by the interpreter tests and the CUDA tests."""

from __future__ import annotations

import math

import numpy as np
import torch
from kernel_cases import (
    DEVICE,
    ExpertCase,
    activation_reference,
    bounds,
    dequantized,
    matrix,
    nmse,
    product,
    rows,
)

from ftgguf.kernels.activations import Activations
from ftgguf.kernels.attention import AttentionSpec, attention_decode, attention_prefill, prefill_tiles
from ftgguf.kernels.formats import FORMATS, Activation, Type
from ftgguf.kernels.kvcache import PAGE, KVCache, make_cache
from ftgguf.kernels.linear import ExpertBatch, expert_down, expert_gate_up, linear
from ftgguf.kernels.norm import combine
from ftgguf.kernels.rope import qk_norm_rope_write


def check_linear(type_: Type, m: int, n: int, k: int, seed: int = 0) -> None:
    """`linear` into a NaN-poisoned output equals the float64 product with the gguf package's dequantised weights."""
    rng = np.random.default_rng(seed)
    w, raw = matrix(type_, n, k, rng)
    x = Activations(rows(m, k, seed))
    out = torch.full((m, n), float("nan"), device=DEVICE)
    linear(x, w, out=out)
    f = FORMATS[type_]
    error = nmse(out, product(x, f, dequantized(type_, raw), m <= 8))
    assert error <= bounds(f, m), f"{type_.name} M={m} N={n} K={k}: NMSE {error:.3g}"


def check_experts(case: ExpertCase, m: int, top_k: int, experts: int, seed: int, missing: bool = True) -> None:
    """Routed experts (skewed, some not on the device) equal the same experts in float64; slots that are not used and
    pairs that are not here hold NaN."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(m)]).int()
    if m > 1:
        ids[: m // 2, 0] = ids[0, 0]  # skew; a row may hold an expert twice, which the kernels do not mind
    here = ids.clone()
    if missing:
        here[torch.rand(m, top_k, generator=g) < 0.2] = -1
    w = case.weights
    batch = ExpertBatch(case.slots(here.to(DEVICE)), ids.to(DEVICE), case.slot_addr)
    x = Activations(rows(m, w.up.k, seed))
    h = Activations(expert_gate_up(x, batch, w))
    y = expert_down(h, batch, w)
    few = m <= 8
    weights = torch.rand(m, top_k, generator=g).to(DEVICE)
    total = combine(y, batch.ids, weights)

    def seen(a: Activations, kind: Activation) -> np.ndarray:
        return (a.rounded(kind) if few else a.x).double().cpu().numpy()

    valid = (here >= 0).reshape(-1).numpy()
    want_h = np.full((m * top_k, w.up.n), np.nan)
    xu = seen(x, w.up.format.activation)
    xg = seen(x, (w.gate or w.up).format.activation)
    flat = ids.reshape(-1).tolist()
    for p in np.flatnonzero(valid):
        u = case.product("up", flat[p], xu[p // top_k])
        gate = u if w.gate is None else case.product("gate", flat[p], xg[p // top_k])
        want_h[p] = activation_reference(w.activation, gate, u, w.limit, w.limit2)
    if not valid.any():
        assert torch.equal(total, torch.zeros_like(total))
        return
    error = nmse(h.x[torch.from_numpy(valid)], want_h[valid])
    assert error <= (1e-7 if few else 2e-4), f"gate/up {error:.3g}"
    # Unwritten pairs may be NaN, and quantising their rows must not touch the others.
    safe = Activations(torch.where(torch.from_numpy(valid)[:, None].to(DEVICE), h.x.float(), 0.0))
    hd = seen(safe, w.down.format.activation)
    want = np.stack([case.product("down", flat[p], hd[p]) for p in np.flatnonzero(valid)])
    error = nmse(y[torch.from_numpy(valid)], want)
    assert error <= (1e-7 if few else 5e-5), f"down {error:.3g}"
    sums = np.zeros((m, w.down.n))
    yv = y.double().cpu().numpy()
    for p in np.flatnonzero(valid):
        sums[p // top_k] += weights[p // top_k, p % top_k].item() * yv[p]
    assert nmse(total, sums) <= 1e-11


def attention_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, spec: AttentionSpec) -> np.ndarray:
    """One row [HQ, HD] against the keys [L, HK, HD] of its sequence, in float64."""
    hq, hk = q.shape[0], k.shape[1]
    at = np.arange(k.shape[0])
    seen = at <= position
    if spec.window:
        seen &= at > position - spec.window if spec.kind == "sliding" else at >= position // spec.window * spec.window
    out = np.zeros((hq, v.shape[2]))
    for h in range(hq):
        s = k[:, h // (hq // hk)] @ q[h] * spec.scale
        if spec.softcap:
            s = spec.softcap * np.tanh(s / spec.softcap)
        s = np.where(seen, s, -np.inf)
        top = max(s.max(), -np.inf if spec.sinks is None else spec.sinks[h].item())
        p = np.exp(s - top)
        total = p.sum() + (0 if spec.sinks is None else math.exp(spec.sinks[h].item() - top))
        out[h] = p @ v[:, h // (hq // hk)] / total
    return out


def fill_cache(
    lengths: list[int], heads: int, size: tuple[int, int], kind: str, seed: int
) -> tuple[KVCache, torch.Tensor, list[np.ndarray], list[np.ndarray]]:
    """A cache with sequences in shuffled pages, written by the kernel under test, all other cells NaN (f16, bf16).

    Returns (cache, page table, keys and values of each sequence in float64 as the cache holds them).
    """
    rng = np.random.default_rng(seed)
    need = [-(-n // PAGE) for n in lengths]
    pages = rng.permutation(sum(need) + 2)
    cache = make_cache(len(pages), heads, size, kind, DEVICE)
    if not cache.quantised:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    table = np.full((len(lengths), max(need) + 1), len(pages) - 1, np.int32)
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    at = 0
    for s, n in enumerate(lengths):
        table[s, : need[s]] = pages[at : at + need[s]]
        at += need[s]
        p = np.arange(n)
        cell = torch.from_numpy((table[s, p // PAGE] * PAGE + p % PAGE).astype(np.int32)).to(DEVICE)
        k, v = (rows(n, heads * d, seed + 10 * s + i) for i, d in enumerate(size))
        position = torch.arange(n, dtype=torch.int32, device=DEVICE)
        qk_norm_rope_write(k, k, v, None, position, cache=cache, cell=cell, heads=(heads, heads), head_size=size)
        for out, t, sc in ((keys, cache.k, cache.k_scale), (values, cache.v, cache.v_scale)):
            x = t[cell.long()].double()
            if sc is not None:
                x = (x.view(*x.shape[:2], -1, 32) * sc[cell.long()].double()[..., None]).view(x.shape)
            out.append(x.cpu().numpy())
    return cache, torch.from_numpy(table).to(DEVICE), keys, values


def check_attention(
    lengths: list[int], new: list[int], heads: tuple[int, int], size: tuple[int, int], kind: str, spec: AttentionSpec,
    *, decode: bool, seed: int = 0,
) -> None:  # fmt: skip
    """The last `new[s]` rows of each sequence attend as the float64 reference does (operands rounded to the cache's
    type: NMSE 1e-5 for f16, 1e-3 for bf16)."""
    hq, hk = heads
    cache, table, keys, values = fill_cache(lengths, hk, size, kind, seed)
    position = [p for n, m in zip(lengths, new, strict=True) for p in range(n - m, n)]
    sequence = [s for s, m in enumerate(new) for _ in range(m)]
    q = rows(len(position), hq * size[0], seed + 99).view(-1, hq, size[0]) * 0.5
    q = q.half().float() if kind != "bf16" else q.bfloat16().float()
    pos = torch.tensor(position, dtype=torch.int32, device=DEVICE)
    seq = torch.tensor(sequence, dtype=torch.int32, device=DEVICE)
    if decode:
        y = attention_decode(q, cache, table, seq, pos, spec).x
    else:
        runs, at = [], 0
        for s, m in enumerate(new):
            runs.append((at, m, s))
            at += m
        bm = 16 if DEVICE == "cpu" else 64
        tiles = torch.tensor(prefill_tiles(runs, bm), dtype=torch.int32, device=DEVICE)
        y = attention_prefill(q, cache, table, tiles, pos, spec, bm=bm)
    qn = q.double().cpu().numpy()
    want = np.stack(
        [
            attention_reference(qn[i], keys[s], values[s], p, spec)
            for i, (s, p) in enumerate(zip(sequence, position, strict=True))
        ]
    )
    error = nmse(y, want.reshape(len(position), -1))
    assert error <= (1e-3 if kind == "bf16" else 1e-5), f"NMSE {error:.3g}"
