"""The peer's placement on a machine with a GPU: swept by starting its server with each setting and asking it."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import psutil

from ftgguf.bench import host
from ftgguf.bench.child import peer_environment
from ftgguf.bench.client import RequestFailed, identify
from ftgguf.bench.contenders import peer_command, peer_flags
from ftgguf.bench.in_process import say
from ftgguf.bench.options import Options
from ftgguf.bench.peers import Peer
from ftgguf.bench.report import NOT_COMPARABLE, Report
from ftgguf.bench.servers import Server, ServerError
from ftgguf.bench.sweep import GEN, PROMPT, BudgetError, Trial, sweep
from ftgguf.flags import parse_server

TOLERANCE = 1.02
"""A side may exceed the budget by this factor before the comparison is called unfair: drivers round up."""


def best_placement(report: Report, options: Options, flags: list[str], peer: Peer, n_layers: int) -> list[str] | None:
    """llama-server's best flags for `--vram-budget` (all of the GPU without it), found by trying; None without a GPU or
    where `--peer-args` places already. What was tried goes into the report's notes."""
    if not host.gpu_names():
        return None
    if any(flag in shlex.split(options.peer_args) for flag in ("-ngl", "--n-gpu-layers", "--n-cpu-moe", "-ncmoe")):
        report.notes.append("the peer's placement is that of --peer-args, not swept")
        return None
    budget = (parse_server(flags, {}).placement.vram_budget or 1 << 30) << 20
    shared = _without(
        peer_flags(flags), ("-ngl", "--n-gpu-layers", "-ncmoe", "--n-cpu-moe", "-ub", "--ubatch-size", "-fa")
    )

    def measure(n_cpu_moe: int, ubatch: int) -> Trial:
        trial = Trial(n_cpu_moe, ubatch)
        say(f"sweep: {' '.join(trial.flags)}")
        return _measured(trial, peer_command(peer, [*shared, *trial.flags]), options.timeout)

    try:
        best, tried = sweep(measure, n_layers, budget)
    except BudgetError as error:
        report.trouble(NOT_COMPARABLE, str(error))
        return None
    report.notes.append(f"the peer's placement was swept over {len(tried)} settings; kept: {' '.join(best.flags)}")
    report.notes += [f"sweep: {trial.describe()}" for trial in tried]
    return best.flags


def _measured(trial: Trial, command: list[str], timeout: float) -> Trial:
    """The trial's memory and speeds: one prompt of PROMPT tokens, then GEN tokens, after a warm-up."""
    n, moe = trial.ubatch, trial.n_cpu_moe
    with tempfile.TemporaryDirectory(prefix="ftgguf-sweep-") as folder:
        server = Server(command, Path(folder) / "log.txt", timeout, peer_environment())
        try:
            with server:
                target = identify(server.url, "", timeout)
                target.complete(list(range(16)), 4)
                read = target.complete([i % 500 for i in range(PROMPT)], 1)
                write = target.complete(list(range(16)), GEN)
                assert server.memory is not None
                server.memory.look()
                return Trial(moe, n, server.memory.vram_peak, PROMPT / read.ttft, write.decode_rate)
        except (ServerError, RequestFailed, psutil.Error) as error:
            return Trial(moe, n, error=str(error))


def _without(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """`flags` without those of `names` and their values."""
    kept, skip = [], False
    for flag in flags:
        if skip:
            skip = False
        elif flag in names:
            skip = True
        else:
            kept.append(flag)
    return kept


def check_budget(report: Report, budget: int | None) -> None:
    """A side that took more VRAM than the budget of `budget` MiB makes the comparison unfair."""
    for c in report.contestants:
        if budget and c.vram_peak > budget * TOLERANCE * 2**20:
            text = f"{c.name} took {c.vram_peak / 2**20:.0f} MiB of VRAM, the budget is {budget} MiB"
            report.trouble(NOT_COMPARABLE, text)
