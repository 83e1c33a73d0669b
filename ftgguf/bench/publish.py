"""Where a report goes: to the terminal as tables or JSON, to files as JSON and as a page, whole or not at all."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from ftgguf.bench import html, table
from ftgguf.bench.report import Contestant, Report, Row
from ftgguf.bench.stats import deviation, mean


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """`-o`, `--html` and `--report`, as `ftgguf bench` has them."""
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md", help="report on standard output")
    parser.add_argument("--html", default="", metavar="FILE", help="the report as one self-contained page with plots")
    parser.add_argument("--report", default="", metavar="FILE", help="the report as JSON")


def publish(report: Report, *, output: str = "md", page: str = "", report_file: str = "") -> None:
    """Write the files that are named, then print `report` as `output` (`md`, `json`). OSError if a file cannot be
    written; the rest is done all the same."""
    report = neutral(report)
    try:
        save(report, page=page, report_file=report_file)
    finally:
        print(to_json(report).decode() if output == "json" else table.render(report), end="", flush=True)


def neutral(report: Report) -> Report:
    """`report` without the names of this user's folders: others read it. The home is `~`, our interpreter `python`."""
    home = str(Path.home())
    inside = re.compile(rf"(?<![\w.~/-]){re.escape(home)}(?=/|\b)") if len(home) > 1 else None

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            value = value.replace(f"{sys.executable} ", "python ")
            return inside.sub("~", value) if inside is not None else value
        if isinstance(value, list):
            return [shown(v) for v in value]
        return {k: shown(v) for k, v in value.items()} if isinstance(value, dict) else value

    return msgspec.convert(shown(msgspec.to_builtins(report)), Report)


def save(report: Report, *, page: str = "", report_file: str = "") -> None:
    """Write the files that are named. OSError as for `publish`."""
    report = neutral(report)
    failed: OSError | None = None
    for name, content in ((report_file, to_json), (page, lambda r: html.page(r).encode())):
        try:
            if name:
                write_whole(Path(name), content(report))
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` beside `path` and move it there: a reader, and an interrupt, sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def to_json(report: Report) -> bytes:
    """Indented JSON: the report, then what follows from it: `ratios`, and `llama_bench`, each speed under llama-bench's
    field names. `report.from_json` reads it and leaves these out."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    document |= {"status": report.status, "ratios": _ratios(report), "llama_bench": _llama_bench(report)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _ratios(report: Report) -> list[dict[str, Any]]:
    found = []
    for row in report.rows:
        for peer in report.peers:
            ratio = report.ratio(row, peer)
            if ratio is not None:
                what = {"workload": row.workload, "metric": row.metric, "percentile": row.compared, "peer": peer.name}
                found.append(what | {"ratio": ratio.value, "low": ratio.low, "high": ratio.high})
    return found


def _llama_bench(report: Report) -> list[dict[str, Any]]:
    return [
        _record(report, row, c, row.samples[c.name])
        for row in report.rows
        for c in report.contestants
        if row.metric == "tok/s" and row.samples.get(c.name)
    ]


def _record(report: Report, row: Row, c: Contestant, samples: list[float]) -> dict[str, Any]:
    """Samples of a test that is no llama-bench test (`turns: decode`) have `test` alone to tell what they are."""
    return {
        "engine": c.name,
        "build_commit": c.build,
        "cpu_info": report.host.get("cpu", ""),
        "gpu_info": report.host.get("gpu", ""),
        "model_filename": report.model.get("file", ""),
        "model_type": report.model.get("type", ""),
        "test": row.workload,
        "avg_ts": mean(samples),
        "stddev_ts": deviation(samples),
        "samples_ts": samples,
    }
