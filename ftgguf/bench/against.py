"""`ftgguf bench --against PEER`: compare with the peer that was found, write the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from ftgguf import __version__
from ftgguf.bench import host
from ftgguf.bench.alone import config_for
from ftgguf.bench.child import end_leftovers
from ftgguf.bench.in_process import GREEDY_TOKENS, Duel, say
from ftgguf.bench.options import Options
from ftgguf.bench.peers import Peer
from ftgguf.bench.publish import publish
from ftgguf.bench.recording import command_line
from ftgguf.bench.report import OURS_FAILED, Report
from ftgguf.flags.table import by_spelling
from ftgguf.gguf import GGUFFile
from ftgguf.pull.ollama_gguf import open_model

SHARED = (
    *("context.n_batch", "context.n_ubatch", "context.type_k", "context.type_v", "context.flash_attn"),
    *("cpu.threads", "cpu.threads_batch", "context.size", "model.path"),
)
"""Settings that libllama takes in process as they are."""


def run(options: Options, path: str, peer: Peer | None) -> int:
    """Compare with `peer` (None: libllama in process), print, save; returns the exit status."""
    with open_model(path) as gguf:
        report = new_report(f"against {options.against}", gguf)
        size = gguf.size
    if peer is None:
        return finish(report, options, lambda: _in_process(report, options, path, size))
    from ftgguf.bench.over_http import compare_over_http

    return finish(report, options, lambda: compare_over_http(report, options, path, peer))


def new_report(kind: str, gguf: GGUFFile) -> Report:
    """A report with its header: the command line, this machine, the model's hash."""
    shards = [shard.path for shard in gguf.shards]
    say(f"sha256 of {gguf.path}")
    report = Report(kind, command_line(["ftgguf", *sys.argv[1:]]))
    report.host = host.describe()
    report.model = {
        "file": str(gguf.path),
        "sha256": host.sha256(shards),
        "type": f"{gguf.architecture} {gguf.file_type}",
        "size": f"{gguf.size / 2**20:.1f} MiB",
        "file cache": "warm (the hash read it)",
    }
    report.settings = {"ftgguf": __version__}
    return report


def finish(report: Report, options: Options, work: Callable[[], None]) -> int:
    """Run `work`; whatever happens, show and save what is in the report. A second interrupt does not stop the saving.

    Returns the exit status."""
    former = signal.signal(signal.SIGTERM, _interrupt)  # servers must be ended then, too
    try:
        work()
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keyboard = signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_leftovers()
        try:
            publish(report, output=options.output, page=options.html, report_file=options.report)
        except OSError as error:
            print(f"ftgguf bench: the report could not be written: {error}", file=sys.stderr)
            report.trouble(OURS_FAILED, f"a file of the report could not be written: {error}")
        finally:
            signal.signal(signal.SIGTERM, former)
            signal.signal(signal.SIGINT, keyboard)
    if options.html:
        say(f"page written to {options.html}")
    return report.status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _in_process(report: Report, options: Options, path: str, size: int) -> None:
    # the greedy comparison needs room for its prompts too
    config = config_for(path, options.engine_lines()[0], options.tests, reserve=512 + GREEDY_TOKENS)
    argv = ["-m", path, "-c", str(config.context.size), "-np", "1", *options.engine_lines()[0]]
    shared = shared_flags(argv)
    dropped = [flag for flag in argv if flag not in shared and flag.startswith("-") and flag != "-np"]
    if dropped:
        report.notes.append(f"flags that only ours has: {' '.join(dropped)}")
    c = config.context
    report.settings |= {
        "context": str(c.size),
        "batch": f"{c.n_batch}/{c.n_ubatch}",
        "KV": f"{c.type_k}/{c.type_v}",
        "threads": f"{config.cpu.threads} decode, {config.cpu.threads_batch} prefill",
        "rounds": str(options.repetitions),
        "warm-up": "each test once" if options.warm_up else "none",
        "token ids": f"uniform random, seed {options.seed}, the same for all sides",
    }
    Duel(report, options, argv, shared, size).run()


def shared_flags(argv: list[str]) -> list[str]:
    """The flags of `argv` whose settings are in SHARED, with their values."""
    kept: list[str] = []
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        row, _ = by_spelling()[flag]
        values = [rest.pop(0)] if row.takes_value and rest else []
        paths = (
            [a.path for a in row.assignments(row.parse(values[0], lambda line: None))] if values and row.parse else []
        )
        if paths and all(path in SHARED for path in paths):
            kept += [flag, *values]
    return kept
