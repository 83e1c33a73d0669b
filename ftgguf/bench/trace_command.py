"""`ftgguf bench trace`: replay agent sessions against our server, and a peer's where asked."""

from __future__ import annotations

import os

from ftgguf.bench import tracefile
from ftgguf.bench.against import finish, new_report
from ftgguf.bench.alone import config_for
from ftgguf.bench.contenders import make_contenders
from ftgguf.bench.options import Options, UsageError
from ftgguf.bench.peers import Peer
from ftgguf.bench.placement import best_placements, check_budget, sizes_of
from ftgguf.bench.report import Report
from ftgguf.bench.trace import Replay
from ftgguf.flags import parse_server
from ftgguf.gguf import GGUFFile
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.vocab import Vocab

MAX_REPLY = 128
"""Tokens generated for a turn at most, unless -n says otherwise."""


def run(options: Options, path: str, peer: Peer | None) -> int:
    """Replay (against `peer` too, where there is one), print, save; returns the exit status."""
    try:
        sessions = tracefile.load(options.traces, turns=options.turns)
    except tracefile.TraceError as error:
        raise UsageError(str(error)) from None
    found, sessions = len(sessions), sessions[: options.sessions]
    with open_model(path) as gguf:
        report = new_report("trace" + (f" against {options.against}" if options.against else ""), gguf)
        sessions, context = _fitted(report, options, gguf, sessions)
        sizes = sizes_of(gguf)
    if options.sessions is not None and options.sessions < found:
        report.notes.append(f"the first {options.sessions} of {found} sessions (--sessions)")
    if options.turns is not None:
        report.notes.append(f"at most {options.turns} turns of each session (--turns)")
    flags = _flags(options, path, context, report)
    n_gen = max(options.gens, default=0) or MAX_REPLY

    def replay() -> None:
        swept = peer is not None and peer.kind == "llama-server"
        placements = best_placements(report, options, flags, peer, sizes) if swept and peer is not None else {}
        Replay(report, options, make_contenders(options, flags, peer, placements), sessions, n_gen).run()
        check_budget(report, parse_server(flags, os.environ).placement.vram_budget)

    return finish(report, options, replay)


def _fitted(
    report: Report, options: Options, gguf: GGUFFile, sessions: list[tracefile.Session]
) -> tuple[list[tracefile.Session], int]:
    """Sessions that the model's context holds, and the context to ask for."""
    limit = gguf.arch("context_length")
    config = parse_server(["-m", str(gguf.path), *options.engine_lines()[0]], os.environ)
    asked = config.context.size if "context.size" in config.given else 0
    vocab = Vocab.load(gguf)
    reply = max(options.gens, default=0) or MAX_REPLY
    room = min(limit, asked or limit) - reply - 64
    try:
        fitted, clip, longest = tracefile.fit(sessions, lambda text: len(vocab.tokenize(text)), room)
    except tracefile.TraceError as error:
        raise UsageError(str(error)) from None
    if clip is not None:
        report.notes.append(
            f"messages are clipped to {clip} characters, so that sessions fit {room + reply + 64} tokens"
        )
    left_out = sum(len(s.requests) for s in sessions) - sum(len(s.requests) for s in fitted)
    if left_out:
        report.notes.append(f"{left_out} turns are left out: even clipped they do not fit")
    # the estimate knows no template: a tenth more, never above what the model was trained for
    return fitted, min(limit, int(longest * 1.1) + reply + 256)


def _flags(options: Options, path: str, context: int, report: Report) -> list[str]:
    engine = options.engine_lines()[0]
    config = config_for(path, ["-c", str(context), *engine], ())
    flags = ["-m", path, "-c", str(context), "-np", "1", *engine]
    for spelling, name in (("-t", "threads"), ("-tb", "threads_batch")):
        if f"cpu.{name}" not in config.given:
            flags += [spelling, str(getattr(config.cpu, name))]
    report.settings |= {
        "context": str(config.context.size),
        "batch": f"{config.context.n_batch}/{config.context.n_ubatch}",
        "KV": f"{config.context.type_k}/{config.context.type_v}",
        "threads": f"{config.cpu.threads} decode, {config.cpu.threads_batch} prefill",
        "rounds": str(options.repetitions),
        "answers": "the recorded ones go into the next prompt; the same number of tokens is generated and dropped",
        "prefix cache": "empty at the start of a round, then as the server keeps it",
        "clock": "the client's",
    }
    return flags
