"""`ftgguf bench kernels`: how fast each kernel is on this GPU, against what the hardware can do.

Products with one row are bound by reading the weights, so they are given in GB/s of weight bytes beside the measured
device copy (bytes read plus bytes written); tiles in TFLOP/s beside a bfloat16 matrix product. Every time is the
median of replays of a CUDA graph over enough distinct buffers that the second-level cache holds none of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from ftgguf.arguments import Parser
from ftgguf.bench.kernel_timing import (
    BIG,
    EXPERT,
    EXPERTS,
    SMALL,
    TOP_K,
    TUNED,
    ExpertBench,
    Timer,
    copy_bandwidth,
    dequantise_us,
    gemm_us,
    gemv_us,
    matmul_rate,
    step_rows,
)
from ftgguf.kernels import gemm as tiles
from ftgguf.kernels.formats import FORMATS, Type
from ftgguf.kernels.gemv import tile_config

SWEPT = (Type.Q4_K, Type.Q6_K, Type.Q8_0)
"""Types whose tile configurations `--sweep` tries."""


def gemv_configs(type_: Type, shape: tuple[int, int], sweep: bool) -> list[tuple[int, int, int] | None]:
    if not sweep or type_ not in TUNED:
        return [tile_config(type_, *shape)]
    return [(1, 32, 1), (1, 64, 1), (2, 32, 2), (1, 64, 2), (2, 64, 2), (2, 64, 4), (1, 128, 4), (4, 32, 4), (4, 32, 2),
            (4, 64, 4)]  # fmt: skip


def expert_configs(sweep: bool) -> list[tuple[int, int] | None]:
    return [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (1, 2), (2, 4), (8, 4)] if sweep else [None]


def tile_configs(sweep: bool, base: tiles.TileConfig, m: int) -> list[tiles.TileConfig]:
    if not sweep:
        return [base]
    c = tiles.TileConfig
    if m <= 64:
        bm = base.bm
        return [base, *[c(bn, bm, bk, w, st, sp) for bn, bk, w, st in (
            (64, 128, 4, 4), (64, 64, 4, 4), (32, 128, 4, 3), (64, 256, 4, 2), (128, 128, 8, 3), (128, 128, 4, 3),
        ) for sp in (4, 8)]]  # fmt: skip
    return [base, c(128, 128, 64, 4, 3), c(64, 128, 64, 4, 3), c(64, 128, 128, 4, 2), c(128, 128, 64, 8, 4),
            c(128, 128, 128, 8, 2), c(64, 256, 64, 8, 3), c(128, 256, 64, 8, 3), c(128, 64, 64, 4, 3),
            c(256, 128, 64, 8, 3), c(128, 128, 32, 8, 4)]  # fmt: skip


def expert_tile_configs(sweep: bool, base: tiles.TileConfig, pair: bool) -> list[tiles.TileConfig]:
    if not sweep:
        return [base]
    c = tiles.TileConfig
    if base.bm <= 64:
        return [base, c(64, 32, 64, 4, 3), c(64, 64, 64, 4, 3), c(128, 32, 128, 8, 3), c(128, 64, 64, 8, 3),
                c(64, 16, 128, 4, 3)]  # fmt: skip
    return [base, c(64, 64, 64, 4, 3), c(64, 128, 64, 4, 3), c(128, 64, 64, 8, 3), c(128, 128, 64, 8, 3),
            c(64, 128, 128, 4, 2), c(64, 256, 64, 8, 2)]  # fmt: skip


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
                tries = gemv_configs(t, BIG, sweep and m == 4 and t in SWEPT)
                config, us = best(gemv_us(t, BIG, m, timer, tries))
                row[f"big, {m} rows, us"] = round(us, 1)
                if len(tries) > 1:
                    row[f"big, {m} rows, config"] = config
        rows[t.name] = row
    return rows


def expert_section(types: list[Type], timer: Timer, sweep: bool) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    f, d = EXPERT
    for t in types:
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


def tile_section(types: list[Type], timer: Timer, sweep: bool) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    n, k = 4096, 4096
    for t in types:
        row: dict[str, object] = {}
        tune = sweep and t in SWEPT
        for m in (16, 64, 512, 2048):
            base = tiles.tile_config(m, n, k, t)
            tries = tile_configs(tune, base, m)
            config, us = best({str(c): gemm_us(t, m, n, k, timer, c) for c in tries})
            row[f"M={m} us"] = round(us, 1)
            row[f"M={m} TFLOP/s"] = round(2 * m * n * k / us / 1e6, 1)
            if tune:
                row[f"M={m} config"] = config
        row["dequantise us"] = round(dequantise_us(t, n, k, timer), 1)
        rows[t.name] = row
    return rows


def expert_tile_section(types: list[Type], timer: Timer, sweep: bool) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    f, d = EXPERT
    for t in types:
        row: dict[str, object] = {}
        tune = sweep and t in SWEPT
        b = ExpertBench.make(t, t, timer)
        for m in (64, 512, 2048, 8192) if t in (Type.Q4_K, Type.Q8_0) else (512, 2048):
            per = max(1, m * TOP_K // EXPERTS)
            flop = 2 * m * TOP_K * f * d
            for name, pair, work in (("gate+up", True, 2 * flop), ("down", False, flop)):
                base = tiles.expert_config(per, pair)
                tries = expert_tile_configs(tune, base, pair)
                config, us = best({str(c): b.tile_us(m, timer, c, pair) for c in tries})
                row[f"{name} M={m} us"] = round(us, 1)
                row[f"{name} M={m} TFLOP/s"] = round(work / us / 1e6, 1)
                if tune:
                    row[f"{name} M={m} config"] = config
        rows[t.name] = row
    return rows


def run(types: list[Type], timer: Timer, sweep: list[str]) -> dict[str, object]:
    result: dict[str, object] = {}
    if not timer.dry:
        result["device"] = torch.cuda.get_device_name()
        result["copy GB/s"] = round(copy_bandwidth(timer))
        result["bf16 TFLOP/s"] = round(matmul_rate(timer))
    result["gemv"] = gemv_section(types, timer, "gemv" in sweep)
    tuned = [t for t in types if t in TUNED]
    result["experts"] = expert_section(tuned, timer, "experts" in sweep)
    result["tiles"] = tile_section(tuned, timer, "tiles" in sweep)
    result["expert tiles"] = expert_tile_section(tuned, timer, "expert tiles" in sweep)
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
        expert_section(types, timer, sweep)
    elif section == "tiles":
        tile_section(types, timer, sweep)
    elif section == "expert tiles":
        expert_tile_section(types, timer, sweep)
    else:
        step_rows(timer)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="ftgguf bench kernels", description=__doc__)
    parser.add_argument(
        "--sweep",
        nargs="*",
        default=[],
        choices=["gemv", "experts", "tiles", "expert tiles"],
        help="sections in which several configurations are tried for each kernel",
    )
    names = [t.name for t in FORMATS]
    parser.add_argument(
        "--types",
        nargs="+",
        default=names,
        choices=names,
        metavar="TYPE",
        help=f"weight types to measure (default: all of {', '.join(names)})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file too")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="compile in this many processes first")
    return parser


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    types = [Type[t] for t in args.types]
    if not torch.cuda.is_available():
        print("ftgguf bench kernels: no CUDA device here to measure kernels on: see ftgguf doctor", file=sys.stderr)
        return 1
    if args.workers:
        major, minor = torch.cuda.get_device_capability()
        capability = major * 10 + minor
        jobs = [
            (capability, s, [t], s in args.sweep)
            for s in ("tiles", "expert tiles", "gemv", "experts")
            for t in types
            if s == "gemv" or t in TUNED
        ]
        jobs.append((capability, "step", [], False))
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
