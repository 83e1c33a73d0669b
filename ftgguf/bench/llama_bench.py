"""Results in llama-bench's formats: its field names in csv, json and jsonl, its columns in md."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ftgguf.bench.plan import SpeedTest
from ftgguf.bench.stats import deviation, mean

FIELDS = (
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends"),
    *("model_filename", "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask"),
    *("cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu"),
    *("no_kv_offload", "flash_attn", "devices", "tensor_split", "tensor_buft_overrides", "load_mode", "lazy_mode"),
    *("embeddings", "no_op_offload", "no_host", "repack", "fit_target", "fit_min_ctx"),
    *("n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
)
"""llama-bench's, in its order; json and jsonl add `samples_ns` and `samples_ts`, then ours."""

_COLUMNS = {"n_threads": "threads", "n_gpu_layers": "ngl"}
_SHOWN = ("n_gpu_layers", "n_cpu_moe", "n_batch", "n_ubatch", "type_k", "type_v", "layout")
"""Columns of the md table that show up only where a value is not llama.cpp's default."""
_USUAL = {"n_batch": 2048, "n_ubatch": 512, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0}


@dataclass(frozen=True, slots=True)
class Result:
    """One test: `settings` are the fields that do not depend on the test; `samples_ns` nanoseconds per repetition."""

    settings: dict[str, Any]
    test: SpeedTest
    test_time: str
    samples_ns: tuple[int, ...]

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.test.n_tokens / (ns * 1e-9) for ns in self.samples_ns]

    def document(self) -> dict[str, Any]:
        """llama-bench's JSON object of the test, then fields that llama-bench does not have."""
        values = self.settings | {
            "n_prompt": self.test.n_prompt,
            "n_gen": self.test.n_gen,
            "n_depth": self.test.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(mean(self.samples_ns)),
            "stddev_ns": round(deviation(self.samples_ns)),
            "avg_ts": mean(self.samples_ts),
            "stddev_ts": deviation(self.samples_ts),
        }
        first = {name: values.pop(name) for name in FIELDS}
        return first | {"samples_ns": list(self.samples_ns), "samples_ts": self.samples_ts} | values


def _size(n_bytes: int) -> str:
    if n_bytes < 1 << 30:
        return f"{n_bytes / 2**20:.2f} MiB"
    return f"{n_bytes / 2**30:.2f} GiB"


def _count(n: int) -> str:
    return f"{n * 1e-6:.2f} M" if n < 1_000_000_000 else f"{n * 1e-9:.2f} B"


def _row(document: dict[str, Any], name: str, columns: Sequence[str]) -> list[str]:
    fixed = {
        "model": document["model_type"],
        "size": _size(document["model_size"]),
        "params": _count(document["model_n_params"]),
        "backend": document["backends"],
        "test": name,
        "t/s": f"{document['avg_ts']:.2f} ± {document['stddev_ts']:.2f}",
    }
    return [str(fixed.get(column, document.get(column, ""))) for column in columns]


def markdown(results: Sequence[Result]) -> str:
    """llama-bench's table."""
    documents = [result.document() for result in results]
    shown = [f for f in _SHOWN if any(d.get(f) != _USUAL.get(f, d.get(f)) for d in documents)]
    if len({d.get("layout") for d in documents}) > 1:
        shown.append("layout")
    columns = ["model", "size", "params", "backend", "n_threads", *dict.fromkeys(shown), "test", "t/s"]
    rows = [_row(d, r.test.name, columns) for d, r in zip(documents, results, strict=True)]
    return table([_COLUMNS.get(c, c) for c in columns], rows, left=("model", "backend", "type_k", "type_v", "layout"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """A Markdown table whose source lines up; columns named in `left` are left-aligned."""
    widths = [max(3, *(len(row[i]) for row in [columns, *rows])) for i in range(len(columns))]
    on_left = [c in left for c in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, on_left, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = ("-" * w if is_left else "-" * (w - 1) + ":" for w, is_left in zip(widths, on_left, strict=True))
    return "\n".join([line(columns), "| " + " | ".join(rule) + " |", *map(line, rows)]) + "\n"


def to_csv(results: Sequence[Result]) -> str:
    """llama-bench's csv: all fields quoted."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, extrasaction="ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
    out.write(",".join(FIELDS) + "\n")
    for result in results:
        document = result.document()
        writer.writerow({f: int(v) if isinstance(v := document[f], bool) else v for f in FIELDS})
    return out.getvalue()


def to_json(results: Sequence[Result]) -> str:
    """llama-bench's json: one array."""
    return json.dumps([result.document() for result in results], indent=2) + "\n"


def to_jsonl(results: Sequence[Result]) -> str:
    """llama-bench's jsonl: one object a line."""
    return "".join(json.dumps(result.document()) + "\n" for result in results)


WRITERS: dict[str, Callable[[Sequence[Result]], str]] = {
    "md": markdown,
    "csv": to_csv,
    "json": to_json,
    "jsonl": to_jsonl,
}
