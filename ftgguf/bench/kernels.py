"""`python -m ftgguf.bench.kernels`: how fast each kernel is on this GPU, against what the hardware can do.

Products with one row are bound by reading the weights, so they are given in GB/s of weight bytes beside the measured
device copy (bytes read plus bytes written); tiles in TFLOP/s beside a bfloat16 matrix product. Every time is the
median of replays of a CUDA graph over enough distinct buffers that the second-level cache holds none of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from ftgguf.kernels import expert_gemv
from ftgguf.kernels import gemm as tiles
from ftgguf.kernels.activations import Activations, quantize
from ftgguf.kernels.attention import AttentionSpec, attention_decode, attention_prefill, prefill_tiles
from ftgguf.kernels.formats import FORMATS, Activation, Type
from ftgguf.kernels.gemv import gemv, tile_config
from ftgguf.kernels.kvcache import PAGE, make_cache
from ftgguf.kernels.matrix import ExpertMatrix, ExpertWeights, QuantMatrix
from ftgguf.kernels.norm import combine, norm
from ftgguf.kernels.rope import Rope, qk_norm_rope_write
from ftgguf.kernels.router import route
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
        for c in calls[:2]:
            c()
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
    """GB/s read plus written of a large device copy."""
    if timer.dry:
        return 1.0
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    return 2 * a.numel() / timer.us([lambda: b.copy_(a)]) / 1e3


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

    def tile_us(self, m: int, timer: Timer, up: tiles.TileConfig, dn: tiles.TileConfig) -> tuple[float, float]:
        """Microseconds of the grouped products for m rows, routed uniformly."""
        f, d = EXPERT
        device = self.slots.device
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(m)]).int().to(device)
        x = Activations(torch.randn(m, d, device=device))
        h = Activations(torch.randn(m * TOP_K, f, device=device))
        x.tile(torch.bfloat16)
        h.tile(torch.bfloat16)
        g, g2 = (tiles.group_pairs(ids, EXPERTS, c.bm) for c in (up, dn))
        return (
            timer.us([lambda: tiles.gate_up(x, g, ids, self.slots, self.weights, TOP_K, up)]),
            timer.us([lambda: tiles.down(h, g2, ids, self.slots, self.weights.down, dn)]),
        )


def gemm_us(type_: Type, m: int, n: int, k: int, timer: Timer, config: tiles.TileConfig | None) -> float:
    device = "cpu" if timer.dry else "cuda"
    w = QuantMatrix(type_, n, k, random_weights(type_, n, k, device, timer.dry))
    x = Activations(torch.randn(m, k, device=device))
    x.tile(tiles.tile_dtype(type_))
    out = torch.empty(m, n, device=device)
    return timer.us([lambda: tiles.gemm(x, w, out=out, config=config)])


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
    calls: dict[str, Callable[[], object]] = {
        "norm + add + q8_K": lambda: norm(x, w, 1e-6, add=add, kinds=(Activation.Q8_K,)),
        "quantise 8 x 768 to q8_K": lambda: quantize(h, Activation.Q8_K),
        "qk norm + rope + kv write": lambda: qk_norm_rope_write(
            q, kv, kv, rope, zero, cache=cache, cell=zero, heads=heads, head_size=size, q_weight=qw, k_weight=qw),
        "router 8 of 128": lambda: route(logits, TOP_K, normalise=True),
        "combine 8 x 2048": lambda: combine(parts, ids, gate, x),
        "prefilter top 64 of 151936": lambda: prefilter(vocab, 64),
    }  # fmt: skip
    for n, p in pos.items():
        calls[f"attention decode, {n} positions"] = lambda p=p: attention_decode(  # type: ignore[misc]
            q3, cache, table, zero, p, AttentionSpec(0.088)
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


def gemv_configs(type_: Type, shape: tuple[int, int], sweep: bool) -> list[tuple[int, int, int] | None]:
    if not sweep or type_ not in TUNED:
        return [tile_config(type_, *shape)]
    return [(bn, g, w) for bn, g, w in (
        (1, 64, 1), (2, 64, 2), (4, 64, 4), (8, 64, 4), (2, 32, 2), (4, 32, 2), (4, 32, 4), (8, 32, 4), (16, 32, 4),
        (8, 16, 4), (16, 16, 4), (8, 8, 2), (16, 8, 4), (4, 128, 4), (2, 128, 4), (8, 128, 8),
    )]  # fmt: skip


def expert_configs(sweep: bool) -> list[tuple[int, int] | None]:
    return [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (8, 4), (8, 8), (16, 4)] if sweep else [None]


def tile_configs(sweep: bool, base: tiles.TileConfig) -> list[tiles.TileConfig]:
    if not sweep:
        return [base]
    c = tiles.TileConfig
    return [base, c(128, 128, 64, 4, 3), c(64, 128, 64, 4, 3), c(64, 128, 128, 4, 3), c(128, 128, 64, 8, 4),
            c(128, 128, 128, 8, 2), c(64, 256, 64, 8, 3), c(128, 256, 64, 8, 3), c(128, 64, 64, 4, 3)]  # fmt: skip


def best(times: dict[str, float]) -> tuple[str, float]:
    name = min(times, key=lambda c: times[c])
    return name, times[name]


def gemv_section(types: list[Type], timer: Timer, sweep: bool) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for t in types:
        row: dict[str, object] = {}
        for name, shape in (("big", BIG), ("small", SMALL)):
            times = gemv_us(t, shape, 1, timer, gemv_configs(t, shape, sweep))
            config, us = best(times)
            row[name + " us"] = round(us, 2)
            row[name + " GB/s"] = round(shape[0] * FORMATS[t].row_bytes(shape[1]) / us / 1e3)
            row[name + " config"] = config
            if sweep:
                row[name + " all"] = {c: round(v, 2) for c, v in times.items()}
        if t in TUNED:
            for m in (2, 4, 8):
                row[f"big, {m} rows, us"] = round(best(gemv_us(t, BIG, m, timer, [tile_config(t, *BIG)]))[1], 1)
        rows[t.name] = row
    return rows


def expert_section(timer: Timer, sweep: bool) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    f, d = EXPERT
    for t in TUNED:
        if t == Type.IQ4_XS and not FORMATS[t].integer:
            continue
        b = ExpertBench.make(t, t, timer)
        times = {str(c): b.few_us(timer, c) for c in expert_configs(sweep)}
        size = TOP_K * f * FORMATS[t].row_bytes(d)
        up = best({c: v[0] for c, v in times.items()})
        dn = best({c: v[1] for c, v in times.items()})
        size_d = TOP_K * d * FORMATS[t].row_bytes(f)
        rows[t.name] = {
            "gate+up us": round(up[1], 2), "gate+up GB/s": round(2 * size / up[1] / 1e3), "gate+up config": up[0],
            "down us": round(dn[1], 2), "down GB/s": round(size_d / dn[1] / 1e3), "down config": dn[0],
        }  # fmt: skip
    return rows


def tile_section(timer: Timer, sweep: bool) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    n, k = 4096, 4096
    f, d = EXPERT
    for t in TUNED:
        row: dict[str, object] = {}
        for m in (16, 64, 512, 2048):
            base = tiles.tile_config(m, n, k, t)
            tries = tile_configs(sweep and t in TUNED[:4], base) if m >= 512 else [base]
            config, us = best({str(c): gemm_us(t, m, n, k, timer, c) for c in tries})
            row[f"M={m} us"] = round(us, 1)
            row[f"M={m} TFLOP/s"] = round(2 * m * n * k / us / 1e6, 1)
            if sweep:
                row[f"M={m} config"] = config
        if t in (Type.Q4_K, Type.Q8_0, Type.MXFP4):
            b = ExpertBench.make(t, t, timer)
            for m in (64, 512, 2048):
                per = max(1, m * TOP_K // EXPERTS)
                up, dn = b.tile_us(m, timer, tiles.expert_config(per, True), tiles.expert_config(per, False))
                flop = 2 * m * TOP_K * f * d
                row[f"experts M={m} us"] = (round(up, 1), round(dn, 1))
                row[f"experts M={m} TFLOP/s"] = (round(2 * flop / up / 1e6, 1), round(flop / dn / 1e6, 1))
        rows[t.name] = row
    return rows


def run(types: list[Type], timer: Timer, sweep: bool) -> dict[str, object]:
    result: dict[str, object] = {}
    if not timer.dry:
        result["device"] = torch.cuda.get_device_name()
        result["copy GB/s"] = round(copy_bandwidth(timer))
        result["bf16 TFLOP/s"] = round(matmul_rate(timer))
    result["gemv"] = gemv_section(types, timer, sweep)
    result["experts"] = expert_section(timer, sweep)
    result["tiles"] = tile_section(timer, sweep)
    result["step us"] = {name: round(us, 2) for name, us in step_rows(timer).items()}
    return result


def _compile(job: tuple[int, str, list[Type], bool]) -> None:
    """Worker: go through one section without a device so that the disk cache holds its kernels."""
    from ftgguf.kernels.offline import compile_only

    capability, section, types, sweep = job
    compile_only(capability)
    timer = Timer(dry=True)
    if section == "gemv":
        gemv_section(types, timer, sweep)
    elif section == "experts":
        expert_section(timer, sweep)
    elif section == "tiles":
        tile_section(timer, sweep)
    else:
        step_rows(timer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try several configurations for each kernel")
    parser.add_argument("--types", nargs="*", default=[t.name for t in FORMATS], help="weight types to measure")
    parser.add_argument("--json", help="write the numbers to this file too")
    parser.add_argument("--workers", type=int, default=0, help="compile in this many processes first")
    args = parser.parse_args()
    types = [Type[t] for t in args.types]
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the kernel benchmark needs one (torch.cuda.is_available() is false)")
    if args.workers:
        major, minor = torch.cuda.get_device_capability()
        jobs = [(major * 10 + minor, "gemv", [t], args.sweep) for t in types]
        jobs += [(major * 10 + minor, s, [], args.sweep) for s in ("tiles", "experts", "step")]
        import multiprocessing

        with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_compile, jobs))
    result = run(types, Timer(), args.sweep)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(result, out, indent=1)
    for section, rows in result.items():
        if not isinstance(rows, dict):
            print(f"{section}: {rows}")
            continue
        print(f"\n{section}")
        for name, row in rows.items():
            shown = {k: v for k, v in row.items() if not k.endswith("all")} if isinstance(row, dict) else row
            print(f"  {name:36s} {shown}")


if __name__ == "__main__":
    main()
