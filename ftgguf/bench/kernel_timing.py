"""What `ftgguf.bench.kernels` times: graph timing, random weights, one function per kind of kernel.

Every function takes a Timer; with `dry` it runs on CPU tensors once, in a process where launches only compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from ftgguf.kernels import expert_gemv
from ftgguf.kernels import gemm as tiles
from ftgguf.kernels.activations import Activations, quantize
from ftgguf.kernels.attention import AttentionSpec, attention_decode, attention_prefill, prefill_tiles
from ftgguf.kernels.formats import FORMATS, Activation, Type
from ftgguf.kernels.gemv import gemv
from ftgguf.kernels.group import group_pairs
from ftgguf.kernels.kvcache import PAGE, make_cache
from ftgguf.kernels.linear import linear, linear_many
from ftgguf.kernels.matrix import ExpertMatrix, ExpertWeights, QuantMatrix
from ftgguf.kernels.norm import combine, norm
from ftgguf.kernels.rope import Rope, qk_norm_rope_write
from ftgguf.kernels.router import route
from ftgguf.kernels.rows import dequantize
from ftgguf.kernels.sample import prefilter

TUNED = (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q8_0, Type.Q4_0, Type.MXFP4, Type.IQ4_XS)
BIG = (65536, 2048)
SMALL = (4096, 2048)
EXPERT = (768, 2048)
EXPERTS = 128
TOP_K = 8
SPAN = 256 << 20
"""Bytes that one graph reads at least: several times the second-level cache of any GPU so far."""


@dataclass(frozen=True, slots=True)
class Timer:
    """Medians of graph replays. `dry` only calls once (to compile)."""

    replays: int = 15
    dry: bool = False

    def us(self, calls: list[Callable[[], object]]) -> float:
        """Microseconds per call when `calls` run back to back in one graph."""
        if self.dry:
            calls[0]()
            return 1.0
        try:
            for c in calls[:2]:
                c()
        except OutOfResources:  # a configuration of the sweep that this GPU's shared memory does not hold
            return float("inf")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for c in calls:
                c()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(self.replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times) / len(calls) * 1e3


def random_weights(type_: Type, n: int, k: int, device: str, dry: bool) -> torch.Tensor:
    """Random bytes in which every f16 is small enough to stay finite (the top exponent bits cleared)."""
    size = n * FORMATS[type_].row_bytes(k)
    if dry:
        return torch.empty(size, dtype=torch.uint8)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) & 0xBB


def copies(size: int) -> int:
    return max(1, min(64, SPAN // size))


def copy_bandwidth(timer: Timer) -> float:
    """GB/s read plus written of a large device copy. Not in a graph: a captured copy is a memcpy node, which an H200
    ran at 2.7 TB/s where the same copy by itself reached 4.2."""
    if timer.dry:
        return 1.0
    a, b = (torch.empty(1 << 28, dtype=torch.float32, device="cuda").random_() for _ in range(2))
    times = []
    for _ in range(timer.replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * a.nbytes / statistics.median(times) / 1e6


def matmul_rate(timer: Timer) -> float:
    """TFLOP/s of a large bfloat16 product through torch."""
    if timer.dry:
        return 1.0
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / timer.us([lambda: a @ b]) / 1e6


def gemv_us(
    type_: Type, shape: tuple[int, int], m: int, timer: Timer, configs: list[tuple[int, int, int] | None]
) -> dict[str, float]:
    """Microseconds of `gemv` with each config, activations already quantised."""
    n, k = shape
    device = "cpu" if timer.dry else "cuda"
    size = n * FORMATS[type_].row_bytes(k)
    ws = [QuantMatrix(type_, n, k, random_weights(type_, n, k, device, timer.dry)) for _ in range(copies(size))]
    x = Activations(torch.randn(m, k, device=device))
    out = [torch.empty(m, n, device=device)]
    result = {}
    for c in configs:
        calls = [lambda w=w, c=c: gemv(x, [w], out=out, config=c) for w in ws]  # type: ignore[misc]
        result[str(c)] = timer.us(list(calls))
    return result


@dataclass(slots=True)
class ExpertBench:
    """128 experts of one layer in slabs; each call takes another eight."""

    weights: ExpertWeights
    arena: torch.Tensor
    slots: torch.Tensor
    ids: list[torch.Tensor]

    @staticmethod
    def make(gate: Type, down: Type, timer: Timer) -> ExpertBench:
        f, d = EXPERT
        device = "cpu" if timer.dry else "cuda"
        g, dn = ExpertMatrix(gate, f, d, 0), ExpertMatrix(down, d, f, 0)
        g_size, stride = g.size, 2 * g.size + dn.size
        w = ExpertWeights(g, ExpertMatrix(gate, f, d, g_size), ExpertMatrix(down, d, f, 2 * g_size))
        arena = torch.empty(16 if timer.dry else stride * EXPERTS, dtype=torch.uint8, device=device)
        if not timer.dry:
            arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8, device=device) & 0xBB)
        slots = torch.arange(EXPERTS, device=device) * stride + arena.data_ptr()
        order = torch.randperm(EXPERTS).to(torch.int32).to(device)
        return ExpertBench(w, arena, slots, [order[i : i + TOP_K][None] for i in range(0, EXPERTS, TOP_K)])

    def few_us(self, timer: Timer, config: tuple[int, int] | None) -> tuple[float, float]:
        """Microseconds of gate+up+activation and of down for one row."""
        f, d = EXPERT
        x = Activations(torch.randn(1, d, device=self.slots.device))
        h = Activations(torch.randn(TOP_K, f, device=self.slots.device))
        a = torch.empty(TOP_K, f, device=self.slots.device)
        b = torch.empty(TOP_K, d, device=self.slots.device)
        up = [lambda i=i: expert_gemv.gate_up(x, i, i, self.slots, self.weights, a, config) for i in self.ids]  # type: ignore[misc]
        dn = [lambda i=i: expert_gemv.down(h, i, i, self.slots, self.weights.down, b, config) for i in self.ids]  # type: ignore[misc]
        return timer.us(list(up)), timer.us(list(dn))

    def tile_us(self, m: int, timer: Timer, c: tiles.TileConfig, pair: bool) -> float:
        """Microseconds of one grouped product for m rows, routed uniformly: gate+up if `pair`, else down."""
        f, d = EXPERT
        device = self.slots.device
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(m)]).int().to(device)
        g = group_pairs(ids, EXPERTS, c.bm)
        x = Activations(torch.randn(m if pair else m * TOP_K, d if pair else f, device=device))
        x.tile(torch.bfloat16)
        if pair:
            return timer.us([lambda: tiles.gate_up(x, g, ids, self.slots, self.weights, TOP_K, c)])
        return timer.us([lambda: tiles.down(x, g, ids, self.slots, self.weights.down, c)])


def gemm_us(type_: Type, m: int, n: int, k: int, timer: Timer, config: tiles.TileConfig | None) -> float:
    device = "cpu" if timer.dry else "cuda"
    w = QuantMatrix(type_, n, k, random_weights(type_, n, k, device, timer.dry))
    x = Activations(torch.randn(m, k, device=device))
    x.tile(tiles.tile_dtype(type_))
    out = torch.empty(m, n, device=device)
    return timer.us([lambda: tiles.gemm(x, w, out=out, config=config)])


def dequantise_us(type_: Type, n: int, k: int, timer: Timer) -> float:
    """Microseconds to write a matrix out as bfloat16 (what a library product would need first)."""
    device = "cpu" if timer.dry else "cuda"
    w = QuantMatrix(type_, n, k, random_weights(type_, n, k, device, timer.dry))
    return timer.us([lambda: dequantize(w)])


def step_rows(timer: Timer) -> dict[str, float]:
    """Microseconds of the rest of a decode step at the shapes of Qwen3-30B-A3B, one row."""
    d = "cpu" if timer.dry else "cuda"
    x, add, w = torch.randn(1, 2048, device=d), torch.randn(1, 2048, device=d), torch.randn(2048, device=d)
    q, kv = torch.randn(1, 4096, device=d), torch.randn(1, 512, device=d)
    qw = torch.randn(128, device=d)
    rope = Rope(torch.rand(64, device=d), True)
    pages = 1200
    cache = make_cache(pages, 4, (128, 128), "f16", d)
    table = torch.randperm(pages, device=d).int()[None]
    pos = {n: torch.tensor([n - 1], dtype=torch.int32, device=d) for n in (512, 4096, 32768)}
    zero = torch.zeros(1, dtype=torch.int32, device=d)
    logits, ids = torch.randn(1, 128, device=d), torch.arange(TOP_K, dtype=torch.int32, device=d)[None]
    parts, gate = torch.randn(TOP_K, 2048, device=d), torch.rand(1, TOP_K, device=d)
    h, vocab = torch.randn(TOP_K, 768, device=d), torch.randn(1, 151936, device=d)
    heads, size = (32, 4), (128, 128)
    q3 = torch.randn(1, 32, 128, device=d).half()

    def plain(t: Type, n: int, k: int) -> QuantMatrix:
        return QuantMatrix(t, n, k, random_weights(t, n, k, d, timer.dry))

    qkv = [plain(Type.Q4_K, 4096, 2048), plain(Type.Q4_K, 512, 2048), plain(Type.Q6_K, 512, 2048)]
    o, gate_inp = plain(Type.Q4_K, 2048, 4096), plain(Type.F32, 128, 2048)
    xa, oa = Activations(x), Activations(torch.randn(1, 4096, device=d))
    calls: dict[str, Callable[[], object]] = {
        "qkv Q4_K Q4_K Q6_K (in cache)": lambda: linear_many(xa, qkv),
        "out Q4_K 2048 x 4096 + residual (in cache)": lambda: linear(oa, o, residual=x),
        "router logits F32 128 x 2048": lambda: linear(xa, gate_inp),
        "quantise 1 x 4096 to q8_K": lambda: quantize(q, Activation.Q8_K),
        "norm + add + q8_K": lambda: norm(x, w, 1e-6, add=add, kinds=(Activation.Q8_K,)),
        "quantise 8 x 768 to q8_K": lambda: quantize(h, Activation.Q8_K),
        "qk norm + rope + kv write": lambda: qk_norm_rope_write(
            q, kv, kv, rope, zero, cache=cache, cell=zero, heads=heads, head_size=size, q_weight=qw, k_weight=qw),
        "router 8 of 128": lambda: route(logits, TOP_K, normalise=True),
        "combine 8 x 2048": lambda: combine(parts, ids, gate, x),
        "combine + norm + add + q8_K": lambda: norm(
            x, w, 1e-6, add=add, experts=(parts, ids, gate), kinds=(Activation.Q8_K,)),
        "prefilter top 64 of 151936": lambda: prefilter(vocab, 64),
    }  # fmt: skip
    for n, p in pos.items():
        calls[f"attention decode, {n} positions"] = lambda p=p: attention_decode(  # type: ignore[misc]
            q3, cache, table, zero, p, AttentionSpec(0.088), quantize_to=Activation.Q8_K
        )
    rows = 2048
    qp = torch.randn(rows, 32, 128, device=d).half()
    t = torch.tensor(prefill_tiles([(0, rows, 0)]), dtype=torch.int32, device=d)
    at = torch.arange(8192 - rows, 8192, dtype=torch.int32, device=d)
    calls["attention prefill, rows 6144..8191"] = lambda: attention_prefill(
        qp, cache, table, t, at, AttentionSpec(0.088), dtype=torch.bfloat16
    )
    assert pages * PAGE >= 32768
    return {name: timer.us([call] * (1 if "prefill," in name else 10)) for name, call in calls.items()}
