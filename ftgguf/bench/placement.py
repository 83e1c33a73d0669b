"""The peer's placement on a machine with a GPU: swept by starting its server with each setting and asking it."""

from __future__ import annotations

import re
import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ftgguf.bench import host
from ftgguf.bench.child import peer_environment
from ftgguf.bench.client import RequestFailed, identify
from ftgguf.bench.contenders import PLACING, SWEPT, peer_command, peer_flags, without
from ftgguf.bench.in_process import say
from ftgguf.bench.options import Options
from ftgguf.bench.peers import Peer
from ftgguf.bench.report import NOT_COMPARABLE, PEER_FAILED, Report
from ftgguf.bench.servers import Server, ServerError
from ftgguf.bench.sweep import GEN, PROMPT, UBATCHES, BudgetError, Found, Hung, Sweep, Trial
from ftgguf.flags import parse_server
from ftgguf.gguf import GGUFFile

MIB = 1 << 20
OVERHEAD = 1024 * MIB
"""About what a CUDA context, the KV cache and the buffers of a pass take: where the search begins."""
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps")
"""The tensors that llama.cpp's `--n-cpu-moe` keeps on the CPU."""

TOLERANCE = 1.02
"""A side may exceed the budget by this factor before the comparison is called unfair: drivers round up. The peer's
settings are swept with the same."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model's file: bytes of each layer's routed experts, and of everything else."""

    experts: tuple[int, ...]
    besides: int


def sizes_of(gguf: GGUFFile) -> Sizes:
    """Sizes of what `--n-cpu-moe` moves, and of the rest."""
    experts = [0] * gguf.arch("block_count")
    for tensor in gguf.tensors.values():
        found = _EXPERTS.match(tensor.name)
        if found is not None and int(found[1]) < len(experts):
            experts[int(found[1])] += tensor.nbytes
    return Sizes(tuple(experts), gguf.size - sum(experts))


def best_placements(
    report: Report, options: Options, flags: list[str], peer: Peer, sizes: Sizes
) -> dict[str, list[str]]:
    """llama-server's best flags for `--vram-budget` (all of the GPU without it), found by trying: by what they are best
    at, one entry where one setting is. Empty without a GPU or where `--peer-args` places already. What was tried goes
    into the report's notes. Of the time of `--limit` it may take half."""
    if not host.gpu_names():
        return {}
    if any(flag in shlex.split(options.peer_args) for flag in PLACING):
        report.notes.append("the peer's placement is that of --peer-args, not swept")
        return {}
    config = parse_server(flags, {})
    asked = config.placement.vram_budget
    budget = int(asked * MIB * TOLERANCE) if asked else host.gpu_memory() or 1 << 50
    prompt = min(PROMPT, config.context.size - GEN - 64)
    shared = without(peer_flags(flags), SWEPT)

    def measure(n_cpu_moe: int, ubatch: int, mapped: bool) -> Trial:
        trial = Trial(n_cpu_moe, ubatch, mapped=mapped, read_flags=peer.read_flags)
        say(f"sweep: {' '.join(trial.flags)}")
        command = peer_command(peer, [*shared, *trial.flags, *shlex.split(options.peer_args)])
        found = measured(trial, command, options.timeout, prompt, budget)
        say(f"sweep: {found.describe()}")
        report.notes.append(f"sweep: {found.describe()}")  # kept when an interrupt ends the search
        if "no answer" in found.error:  # each further trial would take as long
            raise Hung(found)
        return found

    try:
        found = Sweep(
            measure, sizes.experts, budget, sizes.besides + OVERHEAD, lambda: not options.time_for(options.limit / 2)
        ).run(UBATCHES)
    except BudgetError as error:
        report.trouble(PEER_FAILED if error.failed else NOT_COMPARABLE, str(error))
        return {}
    if found.left_out:
        report.notes.append(f"the peer's placement, not tried: {'; '.join(found.left_out)}")
    return kept(report, found)


def kept(report: Report, found: Found) -> dict[str, list[str]]:
    """The settings worth a side of their own: the best for the whole job, and what reads or writes clearly faster."""
    sides = {"": found.best.flags}
    if found.reading.pp > 1.05 * found.best.pp:
        sides[" for prompts"] = found.reading.flags
    if found.writing.tg > 1.05 * found.best.tg:
        sides[" for writing"] = found.writing.flags
    said = "; ".join(f"best{name or ' in all'}: {' '.join(flags)}" for name, flags in sides.items())
    report.notes.append(f"the peer's placement was swept over {len(found.tried)} settings; {said}")
    return sides


def measured(trial: Trial, command: list[str], timeout: float, prompt: int, budget: int) -> Trial:
    """The trial with its memory, and with its speeds if it fits `budget` bytes: `prompt` tokens read, then GEN written,
    after a warm-up of one full physical batch. A server that dies, hangs or cannot be measured is a trial with an
    error."""
    with tempfile.TemporaryDirectory(prefix="ftgguf-sweep-") as folder:
        server = Server(command, Path(folder) / "log.txt", timeout, peer_environment())
        try:
            with server, server.blamed():
                target = identify(server.url, "", timeout)
                target.complete(list(range(16)), 4)
                assert server.memory is not None
                server.memory.look()
                if not server.memory.vram_peak:
                    return replace(trial, error="nvidia-smi shows no memory of it: its VRAM cannot be measured")
                if server.memory.vram_peak > budget:
                    return replace(trial, vram=server.memory.vram_peak)
                target.complete([(7 * i + 1) % 500 for i in range(min(prompt, trial.ubatch))], 1)
                pp = prompt / target.complete([i % 500 for i in range(prompt)], 1).ttft
                tg = target.complete(list(range(16)), GEN).decode_rate
                server.memory.look()
                return replace(trial, vram=server.memory.vram_peak, pp=pp, tg=tg)
        except (ServerError, RequestFailed) as error:
            return replace(trial, error=_why(str(error), server))


def _why(error: str, server: Server) -> str:
    """The error; out of memory by its name, since the log's last lines may not say it."""
    text = server.text().lower()
    if "out of memory" in text or "failed to allocate" in text or "cudamalloc failed" in text:
        return f"out of memory: {error}"
    return error


def check_budget(report: Report, budget: int | None) -> None:
    """A side that took more VRAM than the budget of `budget` MiB makes the comparison unfair; within TOLERANCE it is
    noted."""
    for c in report.contestants:
        if not budget or c.vram_peak <= budget * MIB:
            continue
        text = f"{c.name} took {c.vram_peak / MIB:.0f} MiB of VRAM, the budget is {budget} MiB"
        if c.vram_peak > budget * MIB * TOLERANCE:
            report.trouble(NOT_COMPARABLE, text)
        else:
            report.notes.append(f"{text}: within the {TOLERANCE - 1:.0%} that every side may take more")
