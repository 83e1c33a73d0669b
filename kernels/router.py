# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Expert selection: gating function, selection bias, group limit, top-k, normalisation, scale; one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .overlap import after_previous, overlap

GATING = {"softmax": 1, "sigmoid": 2, "softmax_weight": 3, "sqrt_softplus": 4}
"""`expert_gating_func` of a GGUF file; softmax_weight takes the softmax over the chosen ones only."""


@triton.jit
def _argmax(score, at, E: tl.constexpr):
    """The lowest index of the largest score."""
    best = tl.max(score, 0)
    return tl.min(tl.where(score == best, at, E), 0)


@triton.jit
def _route(
    logits, bias, ids, weights, scale,
    E: tl.constexpr, BE: tl.constexpr, TOP_K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, USED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    after_previous()
    m = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    ok = e < E
    x = tl.load(logits + m * E + e, mask=ok, other=float("-inf"))
    if GATE == 1:
        p = tl.exp(x - tl.max(x, 0))
        p = p / tl.sum(p, 0)
    elif GATE == 2:
        p = 1.0 / (1.0 + tl.exp(-x))
    elif GATE == 4:
        p = tl.sqrt(tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
    else:
        p = x
    score = p
    if BIAS:
        score += tl.load(bias + e, mask=ok, other=0.0)
    score = tl.where(ok, score, float("-inf"))
    if GROUPS > 1:
        # A group's score is the sum of its two best; experts of the groups that lose cannot be chosen.
        SIZE: tl.constexpr = E // GROUPS
        group = e // SIZE
        keep = e < 0
        total = tl.zeros((BE,), tl.float32) + float("-inf")
        for g in tl.static_range(GROUPS):
            member = tl.where((group == g) & ok, score, float("-inf"))
            first = _argmax(member, e, BE)
            two = tl.max(member, 0) + tl.max(tl.where(e == first, float("-inf"), member), 0)
            total = tl.where(e == g, two, total)
        for _ in tl.static_range(USED):
            g = _argmax(total, e, BE)
            total = tl.where(e == g, float("-inf"), total)
            keep = keep | (group == g)
        score = tl.where(keep, score, float("-inf"))
    # One reduction a rank: the score's bits made monotonic above, the complement of the index below. Experts already
    # taken become the least key, below even a score of minus infinity.
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(ok, (bits.to(tl.int64) << 32) | (BE - 1 - e).to(tl.int64), -(2**63))
    r = tl.arange(0, BK)
    chosen = tl.zeros((BK,), tl.int32)
    w = tl.zeros((BK,), tl.float32)
    for j in tl.static_range(TOP_K):
        top = tl.max(key, 0)
        key = tl.where(key == top, -(2**63), key)
        i = BE - 1 - (top & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(r == j, i, chosen)
        if BIAS or GROUPS > 1:
            w = tl.where(r == j, tl.sum(tl.where(e == i, p, 0.0), 0), w)
        else:
            high = (top >> 32).to(tl.int32)
            high = high ^ ((high >> 31) & 0x7FFFFFFF)
            w = tl.where(r == j, high.to(tl.float32, bitcast=True), w)
    if GATE == 3:
        w = tl.where(r < TOP_K, w, float("-inf"))
        w = tl.exp(w - tl.max(w, 0))
        w = w / tl.sum(w, 0)
    if NORM:
        w = w / tl.maximum(tl.sum(tl.where(r < TOP_K, w, 0.0), 0), 6.103515625e-5)
    tl.store(ids + m * TOP_K + r, chosen, mask=r < TOP_K)
    tl.store(weights + m * TOP_K + r, w * scale, mask=r < TOP_K)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    gating: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    groups_used: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int32 [M, k] by rank, weights float32 [M, k]) for float32 logits [M, E].

    llama.cpp's order (build_moe_ffn): gating, selection scores = gated + `bias` [E], groups, top-k, weights from the
    gated scores without bias, normalisation by the sum clamped to 6.1e-5, scale. Equal scores: lowest index first.
    """
    m, e = logits.shape
    if top_k > e or (groups > 1 and e % groups):
        raise ValueError(f"cannot choose {top_k} of {e} experts in {groups} groups")
    if gating not in GATING:
        raise ValueError(f"unknown gating function {gating!r}; known: {', '.join(GATING)}")
    ids = torch.empty(m, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(m, top_k, dtype=torch.float32, device=logits.device)
    _route[(m,)](
        logits, logits if bias is None else bias, ids, weights, scale if scale else 1.0,
        E=e, BE=max(16, triton.next_power_of_2(e)), TOP_K=top_k, BK=triton.next_power_of_2(top_k),
        GATE=GATING[gating], BIAS=bias is not None, GROUPS=groups, USED=groups_used, NORM=normalise,
        num_warps=1 if e <= 256 else 2, launch_pdl=overlap(),
    )  # fmt: skip
    return ids, weights
