"""Both engines at the same measured VRAM: `offload_budgets.py FILE --budgets 4096 8192 12288 --llama-bench PATH`.

For each budget (MiB of device memory in all): ours with `--vram-budget` (decode, the two single paths, a prompt of
8192, short turns on it, decode after it, a resize in service), and llama.cpp's decode with the `-ncmoe` that fills the
budget, over several `-t`; at --prefill-budget also its prompt of 8192 over `-ub`. VRAM is what nvidia-smi says at most
while the engine runs, less what it says before. Random tokens, step against step, no sampling.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
LAYER_SHARE = 0.93
"""Of the file's bytes, what the experts of all layers take (Q4_K_M)."""
LLAMA_BASE = 2200
"""MiB that llama.cpp takes besides experts (weights, KV, its compute buffers, the CUDA context)."""


def watched(command: list[str], limit: float, **how: Any) -> tuple[str, str, int]:
    """(stdout, stderr, MiB of device memory it took at most) of a child."""
    before = int(subprocess.run(QUERY, capture_output=True, text=True).stdout.split()[0])
    watch = subprocess.Popen([*QUERY, "-lms", "100"], stdout=subprocess.PIPE, text=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **how)
        out, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:
        out, errors = "", f"not done in {limit} s: {stopped}"
    finally:
        watch.terminate()
    seen = [int(line) for line in (watch.communicate()[0] or "").split()]
    return out, errors, max(seen, default=before) - before


# ------------------------------------------------------------------------------------------------------- llama.cpp


def llama(options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """llama-bench's rows, each with `vram`."""
    command = [str(options.llama_bench), "-m", str(options.file), "-ngl", "99", "-fa", "1", "-o", "json", *arguments]
    where = Path(options.llama_bench).parent
    out, errors, vram = watched(command, 150, cwd=where)
    try:
        found: list[dict[str, Any]] = json.loads(out)
    except ValueError:
        print(f"  llama.cpp {' '.join(arguments)}: failed, {vram} MiB: {errors.strip().splitlines()[-1:]}", flush=True)
        return []
    for row in found:
        row["vram"], row["arguments"] = vram, " ".join(arguments)
        what = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        spread = f"{row['avg_ts']:.1f} +- {row['stddev_ts']:.1f} tok/s"
        print(f"  llama.cpp {row['arguments']}, t {row['n_threads']}: {what} {spread}, {vram} MiB", flush=True)
    return found


def llama_budget(options: argparse.Namespace, budget: int, layers: int) -> dict[str, float]:
    """The best of what fits in `budget`: {"tg": tok/s, "pp8192": tok/s}, and the MiB it took ("tg_vram")."""
    each = options.file.stat().st_size / (1 << 20) * LAYER_SHARE / layers
    on_gpu = int(max(0, budget - LLAMA_BASE) / each)
    best: dict[str, float] = {}

    def found(test: str, row: dict[str, Any]) -> None:
        if row["avg_ts"] > best.get(test, 0.0):
            best[test], best[f"{test}_vram"] = row["avg_ts"], row["vram"]

    def decode(kept: int, load_mode: str = "none") -> bool:
        how = ["-p", "0", "-n", "64", "-r", "2", "-t", options.llama_threads, "-lm", load_mode]
        rows = llama(options, ["-ncmoe", str(layers - kept), *how])
        if not rows or rows[0]["vram"] > budget:
            return False
        for row in rows:
            found("tg", row)
        return True

    kept = min(layers, on_gpu)
    if options.skip_decode:
        kept = 0
    elif decode(kept):
        while kept < layers and decode(kept + 1):
            kept += 1
    else:
        while kept > 0 and not decode(kept - 1):
            kept -= 1
        kept -= 1
    if not options.skip_decode:
        decode(kept, "mmap")
    if budget == options.prefill_budget:
        for ubatch, less in ((4096, 9), (8192, 16)):
            kept = max(0, on_gpu - less)
            # "none" reads the file into memory that the device copies from fast
            how = ["-p", "8192", "-n", "0", "-r", "1", "-ub", str(ubatch), "-b", "8192", "-t", "16", "-lm", "none"]
            for _ in range(3):
                rows = llama(options, ["-ncmoe", str(layers - kept), *how])
                if not rows or rows[0]["vram"] <= budget:
                    break
                kept -= int(-(-(rows[0]["vram"] - budget) // each))
                if kept < 0:
                    rows = []
                    break
            if rows:
                found("pp8192", rows[0])
    return best


# ------------------------------------------------------------------------------------------------------------ ours


def ours(options: argparse.Namespace, budget: int, parts: str, context: int, ubatch: int) -> dict[str, Any]:
    """One process: "decode", "prompt" (of 8192), or "turns" (what follows such a prompt)."""
    print(f"  ours, -c {context} -ub {ubatch}: {parts}", flush=True)
    command = [sys.executable, __file__, str(options.file), "--child", str(budget), "--steps", str(options.steps)]
    command += ["--parts", parts, "--context", str(context), "--ubatch", str(ubatch)]
    command += ["--threads", str(options.threads_at.get(budget, options.threads))]
    out, errors, vram = watched(command, 240, env=os.environ)
    lines = out.strip().splitlines()
    for line in lines[:-1]:
        print(f"  {line}", flush=True)
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        print(f"  ours failed: {errors[-1500:]}", flush=True)
        return {}
    found["vram"] = vram
    print(f"  ours: {vram} MiB of {budget}", flush=True)
    return found


def child(options: argparse.Namespace) -> None:
    """One budget in this process; the last line is JSON."""
    import torch
    from offload_speed import Host
    from speed import Bench, chunk, load, rows

    from ftgguf.experts.store import CachedStore

    how = argparse.Namespace(
        context=options.context, ubatch=options.ubatch, parallel=1, eager=False, vram_budget=options.child or None,
        threads=options.threads,
    )  # fmt: skip
    executor, details, seconds = load(options.file, how)
    for note in details["notes"]:
        print(note)
    print(f"loaded in {seconds['load_s']:.1f} s, warm-up {seconds['warm_up_s']:.1f} s", flush=True)
    bench, result = Bench(executor, options.ubatch), dict[str, Any]()
    store = executor.store if isinstance(executor.store, CachedStore) else None
    table = bench.table(0, executor.n_cells)

    def decode(at: int, steps: int) -> float:
        started = time.perf_counter()
        for i in range(at, at + steps):
            executor.forward(rows(bench.tokens(1), [i], [table], True))
        return steps / (time.perf_counter() - started)

    if "decode" in options.parts:
        decode(0, 160)
        before = store.statistics().sum(0) if store is not None else None
        result["tg"] = [decode(160 + i * options.steps, options.steps) for i in range(3)]
        print(f"decode {statistics.median(result['tg']):.1f} tok/s {[round(v, 1) for v in result['tg']]}", flush=True)
        if store is not None:
            count = store.statistics().sum(0) - before
            result["hit_rate"] = float(count[3] / count[2])
            per = count / count[0]
            print(
                f"hit rate {result['hit_rate']:.3f}; a layer: misses {per[4]:.2f}, fills {per[5]:.2f}, "
                f"CPU {per[6]:.2f}, shared {per[8]:.2f}; {store.controller.reason}"
            )
            t = store.mail.trace
            us = t.mean(0) / 1e3
            print(
                f"last step, us a layer: fills {us[5]:.0f}, busy {us[4]:.0f}, wait {us[6]:.0f}, hidden {us[9]:.0f}, "
                f"whole {np.diff(t[:, 7]).mean() / 1e3:.0f}"
            )
            host = Host(executor)
            decode(700, 60)
            host.show()
            host.undo()
            for name, split in (("fill", (65536, 1)), ("cpu", (0, 0))):
                store.force_split(*split)
                decode(0, 16)
                result[name] = decode(16, 48)
                print(f"every miss by {name}: {result[name]:.1f} tok/s", flush=True)
            store.splits.release()
    if options.parts != "decode" and executor.cells.n_cells < 8192 + 2048:
        started = time.perf_counter()
        assert store is not None, "the KV is grown at the experts' expense"
        more = (8192 + 2048 - executor.cells.n_cells) * executor.cells.cell_bytes
        store.resize(store.budget - -(-more // store.arena.chunk) * store.arena.chunk)
        executor.resize_cells(8192 + 2048)
        print(
            f"KV grown by {more >> 20} MiB at the experts' expense in {time.perf_counter() - started:.2f} s", flush=True
        )
    if options.parts != "decode":
        decode(0, 160)
        short = decode(160, 100)
        result["pp8192"] = bench.prefill(8192, 4)
        print(f"prompt of 8192: {[round(v) for v in result['pp8192']]} tok/s", flush=True)
    if "turns" in options.parts:
        after = [decode(8192, 16), decode(8208, 112), decode(8320, 128)]
        result["after"] = [short, *after]
        print(f"decode before: {short:.1f}; after the prompt, 16, 112, 128 steps: {[round(v, 1) for v in after]} tok/s")
        for n in (16, 64, 256):
            took = []
            for _ in range(4):
                batch = chunk(bench.tokens(n), 8448, table, True)
                started = time.perf_counter()
                executor.forward(batch)
                took.append(time.perf_counter() - started)
            result[f"turn{n}"] = took
            print(f"{n} new tokens on 8448: {[round(v, 3) for v in took]} s", flush=True)
    if store is not None and "turns" in options.parts:
        print(json.dumps(store.prefill.times.status()))
        free = torch.cuda.mem_get_info()[0]
        started = time.perf_counter()
        store.resize(max(2 * store.ring.half, store.budget - (2 << 30)))
        result["resize"] = time.perf_counter() - started
        freed = (torch.cuda.mem_get_info()[0] - free) >> 20
        print(f"resize by -2048 MiB: {result['resize']:.2f} s, {freed} MiB back; decode {decode(8448, 64):.1f} tok/s")
    if store is not None:
        store.close()
    print(json.dumps(result))


def write(path: Path | None, kept: dict[int, dict[str, Any]]) -> None:
    """What was measured so far: a run may be cut any time."""
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(kept))
        part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--budgets", type=int, nargs="*", default=[4096, 8192, 12288])
    parser.add_argument("--prefill-budget", type=int, default=8192)
    parser.add_argument("--ubatch", type=int, default=2048)
    parser.add_argument("--context", type=int, default=12288)
    parser.add_argument("--parts", default="decode")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-threads", default="16,14")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--threads-at", type=json.loads, default={}, help='JSON: {"budget": threads}')
    parser.add_argument("--skip-decode", action="store_true", help="prompts alone, at --prefill-budget")
    parser.add_argument("--child", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.threads_at = {int(k): v for k, v in options.threads_at.items()}
    if options.child is not None:
        child(options)
        return
    from ftgguf.gguf.reader import open_gguf
    from ftgguf.models.config import read_numbers

    layers = read_numbers(open_gguf(options.file)).n_layer
    table: list[str] = []
    kept: dict[int, dict[str, Any]] = {}
    for budget in options.budgets:
        print(f"{budget} MiB", flush=True)
        # as llama-bench does: little KV, its default -ub
        mine = {} if options.skip_decode else ours(options, budget, "decode", 1024, 512)
        if budget == options.prefill_budget and (mine or options.skip_decode):
            for parts, ubatch in (("turns", 2048), ("prompt", 8192)):
                more = ours(options, budget, parts, 12288, ubatch)
                faster = "pp8192" in more and (
                    "pp8192" not in mine
                    or statistics.median(more["pp8192"][1:]) > statistics.median(mine["pp8192"][1:])
                )
                if faster:
                    mine |= {"pp8192": more["pp8192"], "ubatch": ubatch, "vram_prompt": more["vram"]}
                mine[parts] = more
        kept[budget] = {"ours": mine, "llama": {}}
        write(options.json, kept)
        theirs = llama_budget(options, budget, layers) if options.llama_bench else {}
        kept[budget]["llama"] = theirs
        write(options.json, kept)
        if mine:
            line = {"tg": statistics.median(mine["tg"])} if "tg" in mine else {}
            if "pp8192" in mine:
                line["pp8192"] = statistics.median(mine["pp8192"][1:])
            ratios = "; ".join(
                f"{k} {v:.1f} against {theirs[k]:.1f}: {v / theirs[k]:.2f}" for k, v in line.items() if k in theirs
            )
            table.append(f"{budget} MiB: {ratios or line}; split against the better path "
                         f"{line.get('tg', 0.0) / max(mine.get('fill', 1e-9), mine.get('cpu', 1e-9)):.2f}")  # fmt: skip
    print("\n".join(table))


if __name__ == "__main__":
    main()
