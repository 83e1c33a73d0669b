"""`ftgguf bench bw -m FILE`: how fast do misses reach the GPU, how fast does the CPU compute them, and both at once?

Reads the routed experts of a few layers of each type into the host bank and measures with the kernels that serve. The
figures are stored as this machine's profile, which `serve` then uses instead of its start-up probe. Without a CUDA
device only the CPU's side is measured, and the profile is a record of it that `serve` does not use; torch is needed
either way.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftgguf.arguments import Parser, at_least, seconds
from ftgguf.bench import host
from ftgguf.bench.publish import add_output_flags, publish
from ftgguf.bench.recording import command_line
from ftgguf.bench.report import Line, Plot, Report, Table
from ftgguf.engine import cores, devices
from ftgguf.gguf.header import TensorInfo
from ftgguf.gguf.reader import GGUFFile, open_gguf
from ftgguf.models.config import ModelError, read_numbers
from ftgguf.models.registry import family
from ftgguf.models.source import Source, Use

if TYPE_CHECKING:
    import torch

    from ftgguf.experts.measure import Measured
    from ftgguf.experts.store import CachedStore

WORKING_SET = 2 << 30
"""Bytes of experts to read for each type: far more than a CPU's caches hold."""
GB = 1e9
PATHS = (
    ("link alone", "fill"),
    ("CPU alone", "cpu"),
    ("link, both at once", "fill_contended"),
    ("CPU, both at once", "cpu_contended"),
)
"""What is measured for each type, and its field in Bandwidths."""


class _Experts(Source):
    """Only expert tensors get a handle that can be read; vectors are zeros, since their values do not cost time."""

    def __init__(self, gguf: GGUFFile, device: torch.device) -> None:
        super().__init__(gguf)
        self.device = device

    def handle(self, info: TensorInfo, use: Use, layer: int) -> Any:
        import torch

        from ftgguf.engine.cuda_weights import ExpertTensor

        if use is Use.EXPERTS:
            return ExpertTensor(info, layer)
        if use is Use.VECTOR:
            return torch.zeros(tuple(reversed(info.shape)), device=self.device)
        return info


def load_store(path: Path, device: torch.device, cpus: list[int], working_set: int = WORKING_SET) -> CachedStore:
    """A store with a ring and no slots over some layers of each type, and a worker on each of `cpus`. Raises ModelError
    for a file without experts."""
    from ftgguf.engine.cuda_experts import expert_spec
    from ftgguf.engine.cuda_weights import Reader
    from ftgguf.engine.device_memory import DeviceMemory
    from ftgguf.experts.pinning import cuda_pinner
    from ftgguf.experts.store import CachedStore, kind_of
    from ftgguf.flags.config import ContextConfig
    from ftgguf.layers.params import Moe

    gguf = open_gguf(path)
    numbers = read_numbers(gguf)
    model = family(gguf.architecture, str(path))(_Experts(gguf, device), numbers, ContextConfig())
    specs = [expert_spec(i, b.ffn.experts) for i, b in enumerate(model.blocks) if isinstance(b.ffn, Moe)]
    if not specs:
        raise ModelError(f"{path}: this model has no routed experts; bench bw measures their paths")
    largest = max(spec.slot_bytes for spec in specs)
    ring = max(64 << 20, 2 * 8 * largest)
    memory = DeviceMemory(device)
    store = CachedStore(
        memory, budget=ring, ring_bytes=ring, top_k=numbers.top_k, decode_rows=1, cpus=cpus,
        pinner=cuda_pinner(device), warm=False,
    )  # fmt: skip
    taken: dict[str, int] = {}
    for spec in specs:
        kind = kind_of(spec)
        if taken.get(kind, 0) < working_set:
            taken[kind] = taken.get(kind, 0) + spec.experts * spec.slot_bytes
            store.add(spec)
    reader = Reader(gguf, device, 4)
    try:
        store.load(reader, lambda f: None)
    finally:
        reader.close()
    return store


def fill_report(report: Report, measured: dict[str, Measured], gpu: bool) -> None:
    """The figures of each type of expert as a table and as bars, GB/s of expert data."""
    rows = []
    for kind, m in measured.items():
        r = m.rates
        link, both, phi = "-", "-", "-"
        if gpu:
            link, both = f"{r.fill / GB:.1f}", f"{r.fill_contended / GB:.1f} + {r.cpu_contended / GB:.1f}"
            phi = f"{r.fill_contended / ((r.fill_contended + r.cpu_contended) or 1.0):.2f}"
        rows.append(
            [kind, f"{m.expert_bytes / 1e6:.2f}", link, f"{r.cpu / GB:.1f}", both, phi, f"{m.cpu_entry * 1e6:.1f}"]
        )
    columns = ["type", "MB an expert", "link", "CPU", "link + CPU at once", "phi", "us a row at the CPU"]
    note = "GB/s of expert data; phi is the share of misses that goes over the link where both paths end together"
    if not gpu:
        note = "no CUDA device: only the CPU's side was measured; GB/s of expert data"
    report.tables.append(Table("How fast misses are served", columns, rows, ["type"], note))
    lines = [Line(name, [(float(i), getattr(m.rates, field) / GB) for i, m in enumerate(measured.values())])
             for name, field in PATHS if any(getattr(m.rates, field) for m in measured.values())]  # fmt: skip
    text = (
        "Experts reach the GPU over the link, or the CPU computes them where they are; at once, both share the memory."
    )
    report.plots.append(Plot("Expert data by path", "", "GB/s", lines, text, list(measured)))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="ftgguf bench bw", description=__doc__)
    parser.add_argument("-m", "--model", required=True, help="a file or name of a model with routed experts")
    parser.add_argument("-t", "--threads", type=at_least(1), help="CPU threads (default: all but one)")
    parser.add_argument("--seconds", type=seconds, default=0.5, help="time for each figure")
    parser.add_argument("--no-store", action="store_true", help="do not store the profile")
    add_output_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        import torch
    except ImportError:
        print(f"ftgguf bench bw: needs torch: pip install 'ftgguf[gpu]' ({_gpus()})", file=sys.stderr)
        return 1

    from ftgguf.experts import measure, profile
    from ftgguf.pull.resolve import DemoError, NameResolutionError, resolve_with_bar

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report = Report("bw", command_line(["ftgguf", "bench", "bw", *argv]), host.describe())
    try:
        path = Path(str(resolve_with_bar(options.model)))
        claimed = cores.claim(options.threads or _most_threads())
        if options.threads and len(claimed.cpus) < options.threads:
            report.notes.append(f"-t {options.threads} was cut to {len(claimed.cpus)}: there are no more CPUs here")
        report.notes += [claimed.line] if claimed.line else []
        store = load_store(path, device, claimed.cpus)
    except (ModelError, MemoryError, OSError, ValueError, NameResolutionError, DemoError) as error:
        print(f"ftgguf bench bw: {error}", file=sys.stderr)
        return 1
    try:
        measured = measure.probe(store, options.seconds)
        key = measure.profile_key(device, store.worker.threads)
        report.model = {"file": str(path), "experts": store.bank.report.line()}
        report.settings = {
            "link": link_of(device),
            "threads": str(key.threads),
            "ggml": key.ggml,
            "seconds a figure": str(options.seconds),
        }
    finally:
        store.close()
        claimed.release()
    fill_report(report, measured, device.type == "cuda")
    where = ""
    if not options.no_store:
        where = str(profile.store(measure.profile_folder(), measure.profile_of(measured, key)))
    report.notes.append(f"stored in {where}: {_use_of(device)}" if where else "not stored")
    report.data = {"key": asdict(key), "types": {k: asdict(m) for k, m in measured.items()}, "stored": where}
    publish(report, output=options.output, page=options.html, report_file=options.report)
    return report.status


def _use_of(device: torch.device) -> str:
    """What the stored profile is good for: `serve` asks for one where it splits misses between a link and the CPU."""
    if device.type == "cuda":
        return "`serve` uses it from now on"
    return "a record of the CPU's figures, which `serve` does not use: it needs a profile only beside a GPU"


def link_of(device: torch.device) -> str:
    """For the report's header: whose link was measured, or that none was, and why."""
    if device.type == "cuda":
        import torch

        return f"to {torch.cuda.get_device_name(device)}"
    return f"NOT MEASURED, the CPU's side alone: {_gpus()}"


def _gpus() -> str:
    """Why there is no link to measure, by the driver and by how torch was built."""
    found = devices.list_devices()
    if not found:
        return "no NVIDIA GPU found here"
    why = devices.problem(found[0], devices.driver())
    return f"{found[0].id} ({found[0].name}) is here; {why or 'torch does not see it: see ftgguf doctor'}"


def _most_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)
