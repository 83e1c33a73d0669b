"""What a run on a CUDA machine found, as one table: `summary.py OUT` reads what run_all.sh and run_kernels.sh left.

Speeds are tokens a second: ours the median with the least and the most, llama-bench's its mean and deviation. A part
that is not there, or was cut before it had said so much, is named as missing.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

MISSING = "missing"
BUDGETS = (4096, 8192, 12288)
"""MiB of device memory that are always shown."""
Row = tuple[str, str, str, str]
Speed = tuple[float, str]
"""Tokens a second, and how they are shown."""


def text(folder: Path, *names: str) -> str:
    """The first of `names` that has something in it; "" where none has."""
    found = (folder / name for name in names)
    return next((t for p in found if p.is_file() and (t := p.read_text(errors="replace")).strip()), "")


def data(folder: Path, *names: str) -> Any:
    """The same as JSON; None where it is none, as a file that was cut."""
    try:
        return json.loads(text(folder, *names))
    except ValueError:
        return None


def pytest_counts(log: str) -> str:
    """The results of one or several pytest runs in one log: by their last lines, else (-qq) by the letters."""
    counts = Counter({"passed": 0, "failed": 0})
    last = re.findall(r"^=*\s*(\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s\b", log, re.MULTILINE)
    for line in last:
        counts.update({word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", line)})
    if not last:
        letters = Counter("".join(re.findall(r"^([.FEsxX]+)(?:\s+\[ *\d+%\])?\s*$", log, re.MULTILINE)))
        names = {".": "passed", "F": "failed", "E": "errors", "s": "skipped", "x": "xfailed", "X": "xpassed"}
        counts.update({names[letter]: n for letter, n in letters.items()})
    cut = sorted(
        set(re.findall(r"ended with status (\d+)", log)) - {"0", "1"}
    )  # 1: tests failed, and the counts say so
    said = ", ".join(f"{n} {word}" for word, n in counts.items() if "warning" not in word)
    broken = f"**cut or broken** (exit status {', '.join(cut)})" if cut else ""
    return "; ".join(filter(None, [said if counts.total() else "", broken]))


def report_counts(log: str) -> str:
    """The first line of gpu_report's table, and how many tests had begun and said nothing."""
    if not log:
        return ""
    from gpu_report import table

    lines = table(log)
    counts = {"passed": "0", "failed": "0"} | {word: n for n, word in re.findall(r"(\d+) (\w+)", lines[0])}
    cut = sum(line.startswith("cut  ") for line in lines)
    return ", ".join(f"{n} {word}" for word, n in counts.items()) + (f", **{cut} cut**" if cut else "")


def test_rows(folder: Path) -> list[Row]:
    rows = [
        ("engine tests", pytest_counts(text(folder, "engine-tests.log")) or MISSING, "", ""),
        ("servers", report_counts(text(folder, "serve-report.txt")) or MISSING, "", ""),
        ("kernels, every type and M", pytest_counts(text(folder, "tests.log", "k/tests.log")) or MISSING, "", ""),
    ]
    for name, seconds in re.findall(r"^(first|second) start: ([\d.]+) s", text(folder, "log.txt"), re.MULTILINE):
        kind = "empty" if name == "first" else "full"
        rows.append((f"{name} start of a server, {kind} kernel cache", f"{seconds} s", "", ""))
    return rows


def ours(folder: Path) -> dict[str, Speed]:
    """speed.py's tests: "tg", "tg x4", "pp512" and so on."""
    found: dict[str, Speed] = {}
    if kept := data(folder, "speed.json"):
        for name, values in kept["results"].items():
            found[name] = (median(values), f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
    else:
        line = r"^((?:tg x|pp)\d+) +([\d.]+) tok/s +([\d.]+ to [\d.]+)"
        for name, value, spread in re.findall(line, text(folder, "speed.txt"), re.MULTILINE):
            found[name] = (float(value), f"{value} ({spread})")
    return {name.removesuffix(" x1"): speed for name, speed in found.items()}


def theirs(folder: Path) -> dict[str, Speed]:
    """llama-bench's, by the same names."""
    found: dict[str, Speed] = {}
    for r in data(folder, "llama-bench.json") or []:
        if not (r["n_prompt"] and r["n_gen"]) and not r.get("n_depth"):
            name = f"pp{r['n_prompt']}" if r["n_prompt"] else "tg"
            found[name] = (float(r["avg_ts"]), f"{r['avg_ts']:.1f} ± {r['stddev_ts']:.1f}")
    if not found:
        line = r"\| +(pp\d+|tg)\d* \| +([\d.]+) ± ([\d.]+) \|"
        for name, mean, deviation in re.findall(line, text(folder, "llama-bench.txt")):
            found[name] = (float(mean), f"{mean} ± {deviation}")
    return found


def compared(name: str, a: Speed | None, b: Speed | None) -> Row:
    return name, a[1] if a else MISSING, b[1] if b else MISSING, f"{a[0] / b[0]:.2f}" if a and b else ""


def resident_rows(folder: Path) -> list[Row]:
    a, b = ours(folder), theirs(folder)
    named = {"tg": "decode, 1 sequence", "pp512": "prompt of 512", "pp8192": "prompt of 8192"}
    rows = [compared(name, a.get(test), b.get(test)) for test, name in named.items()]
    if "tg x4" in a and "tg" in a:
        rows.insert(1, ("decode, 4 sequences", a["tg x4"][1], "", f"{a['tg x4'][0] / a['tg'][0]:.2f} x our one"))
    return rows


def offload_rows(folder: Path) -> list[Row]:
    """Both engines at the same budget; in parentheses what each took of the device."""
    kept = {int(budget): sides for budget, sides in (data(folder, "offload.json") or {}).items()}

    def side(values: Sequence[float], vram: float | None) -> Speed | None:
        took = f" ({vram:.0f} MiB)" if vram is not None else ""
        return (median(values), f"{median(values):.1f}{took}") if values else None

    rows = []
    for test, what in (("tg", "decode"), ("pp8192", "prompt of 8192")):
        for budget in sorted({*BUDGETS, *kept}):
            a, b = (kept.get(budget, {}).get(who, {}) for who in ("ours", "llama"))
            if test == "pp8192" and budget != 8192 and not (test in a or test in b):
                continue  # measured at one budget
            # our first prompt is the warm-up's
            mine = side(a.get(test, [])[test != "tg" :], a.get("vram" if test == "tg" else "vram_prompt"))
            other = side([b[test]] if test in b else [], b.get(f"{test}_vram"))
            rows.append(compared(f"{what} at {budget} MiB", mine, other))
    return rows


def http_rows(folder: Path) -> list[Row]:
    """The client's numbers, each against that placement of the peer's which does best in it."""
    rows = []
    for path in sorted(folder.glob("against*.json")):
        budget = re.sub(r"\D", "", path.stem) or "0"
        where = "over HTTP, " + (f"at {budget} MiB" if budget != "0" else "all resident")
        kept = data(folder, path.name) or {"rows": []}
        speeds = [row for row in kept["rows"] if row["metric"] == "tok/s"]
        if not speeds:
            rows.append((where, MISSING, MISSING, ""))
        for row in speeds:
            ratios = [r for r in kept["ratios"] if (r["workload"], r["metric"]) == (row["workload"], "tok/s")]
            if not ratios:
                rows.append((f"{where}: {row['workload']}", MISSING, MISSING, ""))
                continue
            least = min(ratios, key=lambda r: float(r["ratio"]))
            us = next(c["name"] for c in kept["contestants"] if c["ours"])
            a, b = (f"{median(row['samples'][name]):.1f}" for name in (us, least["peer"]))
            spread = f"{least['ratio']:.2f} ({least['low']:.2f} to {least['high']:.2f})"
            rows.append((f"{where}: {row['workload']}", a, b, spread))
    return rows


def kernel_lines(kept: dict[str, Any]) -> list[str]:
    """A line for each type; one row: 65536 x 2048, eight gathered experts of 768 x 2048; tiles 4096 x 4096."""
    copy = kept.get("copy GB/s")
    head = ["type", "GEMV us", "GB/s", "of copy", "experts: gate+up us", "GB/s", "down us", "GB/s"]
    rows = [[*head, "tiles, M = 16 / 64 / 512 / 2048: TFLOP/s"], ["---", *["--:"] * len(head)]]
    gemv = kept.get("gemv", {})
    for name in sorted(gemv, key=lambda n: -float(gemv[n]["big GB/s"])):
        one, some, tiles = (kept.get(section, {}).get(name, {}) for section in ("gemv", "experts", "tiles"))
        share = f"{100 * one['big GB/s'] / copy:.0f} %" if copy else MISSING
        experts = [some.get(key, "") for key in ("gate+up us", "gate+up GB/s", "down us", "down GB/s")]
        rates = " / ".join(str(tiles[f"M={m} TFLOP/s"]) for m in (16, 64, 512, 2048)) if tiles else ""
        rows.append([name, one["big us"], one["big GB/s"], share, *experts, rates])
    about = f"Device copy {copy or MISSING} GB/s, bfloat16 product {kept.get('bf16 TFLOP/s') or MISSING} TFLOP/s."
    return [about, "", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def summary(folder: Path) -> str:
    """The tables in markdown."""
    details = (data(folder, "speed.json") or {}).get("details", {})
    kernels = data(folder, "kernels.json", "k/kernels.json")
    device = details.get("device_name") or (kernels or {}).get("device") or "a CUDA device"
    about = [device, *([f"{details['n_layer']} layers"] if "n_layer" in details else [])]
    about += [f"llama.cpp b{r['build_number']}" for r in (data(folder, "llama-bench.json") or [])[:1]]
    lines = [f"{', '.join(about)}. Speeds in tokens a second.", ""]
    rows: list[Row] = [("", "ours", "llama.cpp", "ours / llama.cpp"), ("---", "--:", "--:", "--:")]
    rows += test_rows(folder) + resident_rows(folder) + offload_rows(folder) + http_rows(folder)
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(kernel_lines(kernels) if kernels else [f"The kernels by type: {MISSING}."])])


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit("usage: summary.py OUT, the folder that run_all.sh wrote to")
    print(summary(Path(sys.argv[1])))
