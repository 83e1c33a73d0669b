"""Kernels compiled by helper processes while the file loads: `python -m ftgguf.engine.cuda_compile FILE ...`.

A helper goes through the passes that the executor will run, on CPU tensors of the same shapes that nobody fills, in a
process where launching a kernel only compiles it (kernels.offline). What it makes lies in Triton's disk cache, where
the engine finds it. Blocks whose tensors have the same shapes and types are gone through once. A mark in the cache
says that a configuration is complete, so that a second start starts no helpers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ftgguf.engine.link import die_with_parent
from ftgguf.engine.survey import Survey
from ftgguf.flags.machine import read_machine

HELPERS = 8
"""Processes at most; each takes about 0.6 GB of memory and a core."""


@dataclass(frozen=True, slots=True)
class Job:
    """What decides which kernels are compiled, beside the file: the executor's sizes and the GPU."""

    path: str
    capability: int
    """Compute capability, 90 for 9.0."""
    first: int
    n_cells: int
    max_rows: int
    decode_rows: int
    kv: str
    short_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str) -> Job:
        """Of the JSON of its fields."""
        fields = json.loads(text)
        return cls(**{**fields, "short_rows": tuple(fields["short_rows"])})


def cache_folder() -> Path:
    """Triton's disk cache."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _mark(job: Job, survey: Survey) -> Path:
    """Where a complete configuration is noted: named by the types and shapes, the sizes and the kernels' sources."""
    import triton

    digest = hashlib.sha256(json.dumps({**asdict(job), "path": ""}).encode())
    for name, taken in sorted(survey.tensors.items()):
        digest.update(f"{name} {int(taken.info.type)} {taken.info.shape}".encode())
    folder = Path(__file__).parents[1]
    for source in sorted((folder / "kernels").glob("*.py")) + sorted((folder / "ops").glob("cuda*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{triton.__version__} {sys.version}".encode())
    return cache_folder() / f"ftgguf-{digest.hexdigest()[:32]}.complete"


def helper_count() -> int:
    """As many as this process has CPUs, one left for the engine: `-t` says how many compute, and nothing computes
    yet."""
    machine = read_machine()
    return max(1, min(HELPERS, machine.bounded(len(machine.allowed)) - 1))


class Helpers:
    """The running helper processes; none where the cache is complete."""

    def __init__(self, job: Job, survey: Survey) -> None:
        self.mark = _mark(job, survey)
        self.started = time.monotonic()
        self.processes: list[subprocess.Popen[bytes]] = []
        if self.mark.exists():
            return
        count = helper_count()
        command = [sys.executable, "-m", "ftgguf.engine.cuda_compile", json.dumps(asdict(job))]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen([*command, f"{i}/{count}"], env=environment, stderr=subprocess.PIPE) for i in range(count)
        ]

    def wait(self) -> str:
        """Wait for all; a line about what was done. A helper that fails costs time, not the start: the engine compiles
        what is missing itself."""
        if not self.processes:
            return "kernels found in the cache"
        failed = ""
        for process in self.processes:
            _, errors = process.communicate()
            if process.returncode:
                failed = errors.decode(errors="replace").strip().splitlines()[-1] if errors else "no message"
        seconds = time.monotonic() - self.started
        text = f"kernels compiled by {len(self.processes)} processes in {seconds:.0f} s"
        return text + (f"; at least one failed ({failed}), its kernels are compiled at warm-up" if failed else "")

    def complete(self) -> None:
        """Note that the warm-up found or made every kernel."""
        self.mark.parent.mkdir(parents=True, exist_ok=True)
        self.mark.touch()

    def stop(self) -> None:
        """End the helpers (loading failed)."""
        for process in self.processes:
            process.kill()
            process.communicate()


def _distinct(model: Any) -> tuple[Any, list[int]]:
    """`model` with one block of each signature, and their numbers in the file."""
    seen: dict[str, int] = {}
    for i, block in enumerate(model.blocks):
        seen.setdefault(_signature(block), i)
    # the last block of the model runs for the wanted rows only: keep one that is not last of each kind
    numbers = sorted(seen.values())
    return replace(model, blocks=tuple(model.blocks[i] for i in [*numbers, numbers[-1]])), [*numbers, numbers[-1]]


def _signature(value: Any) -> str:
    """Types and shapes of a block's weights and its numbers, as text."""
    import torch

    from ftgguf.engine.cuda_weights import ExpertTensor
    from ftgguf.kernels.matrix import QuantMatrix

    if isinstance(value, QuantMatrix):
        return f"{value.type.name}[{value.n},{value.k}]"
    if isinstance(value, ExpertTensor):
        return f"{value.info.type.name}{value.info.shape}"
    if isinstance(value, torch.Tensor):
        return f"f32{list(value.shape)}"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return f"{type(value).__name__}({', '.join(_signature(getattr(value, f)) for f in fields)})"
    return repr(value)


def _compile(job: Job, share: int, count: int) -> None:
    import torch

    from ftgguf.engine.cuda_executor import CudaExecutor
    from ftgguf.engine.cuda_experts import ResidentStore, expert_spec
    from ftgguf.engine.cuda_weights import CudaSource
    from ftgguf.engine.device_memory import DeviceMemory
    from ftgguf.engine.survey import survey
    from ftgguf.flags.config import ContextConfig
    from ftgguf.gguf.reader import open_gguf
    from ftgguf.kernels.offline import compile_only
    from ftgguf.layers.params import Moe
    from ftgguf.models.config import read_numbers
    from ftgguf.models.registry import family

    torch.set_num_threads(1)
    torch.empty = torch.zeros  # what no kernel fills is indexed with: zeros are valid everywhere
    compile_only(job.capability)
    gguf = open_gguf(job.path)
    numbers = read_numbers(gguf)
    found = survey(gguf, numbers, ContextConfig())
    memory = DeviceMemory(torch.device("cpu"))
    source = CudaSource(gguf, memory, found, 0, numbers.n_layer)
    whole = family(gguf.architecture)(source, numbers, ContextConfig())
    model, blocks = _distinct(replace(whole, blocks=whole.blocks[job.first :]))
    store = ResidentStore(memory)
    for i, block in enumerate(model.blocks):
        if isinstance(block.ffn, Moe):
            spec = replace(expert_spec(blocks[i], block.ffn.experts), layer=i)
            store.add(spec)
            store.slot_addr[i] = torch.zeros(spec.experts, dtype=torch.int64)
    executor = CudaExecutor(
        memory, model, store, n_cells=job.n_cells, max_rows=job.max_rows, decode_rows=job.decode_rows,
        max_sequences=job.decode_rows, kv=job.kv, short_rows=job.short_rows,
    )  # fmt: skip
    executor.rehearse(share, count)


def main() -> None:
    """Entry point of a helper. It ends with the engine: a server stopped at start leaves no compilers behind."""
    die_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("share", help="i/n: every n-th pass from the i-th")
    options = parser.parse_args()
    share, _, count = options.share.partition("/")
    _compile(Job.of(options.job), int(share), int(count))


if __name__ == "__main__":
    main()
