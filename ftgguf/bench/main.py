"""`ftgguf bench`: which measurement is asked for?"""

from __future__ import annotations

import importlib
import sys

from ftgguf.bench.options import USAGE, Options, UsageError, check_transport, parse

OTHERS = {
    "cache": "ftgguf.bench.cache",
    "kernels": "ftgguf.bench.kernels",
    "bw": "ftgguf.bench.bw",
}
"""Measurements with a command line of their own: `main(argv) -> int` of a module."""


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    if argv[:1] and argv[0] in OTHERS:
        return _other(argv[0], argv[1:])
    if any(a in ("-h", "--help", "help") for a in argv):
        print(USAGE, end="")
        return 0
    from ftgguf.engine.executor import NotSupported
    from ftgguf.flags import ActionRequested, FlagError
    from ftgguf.gguf import GGUFError
    from ftgguf.models.config import ModelError
    from ftgguf.pull.resolve import DemoError, NameResolutionError

    trace = argv[:1] == ["trace"]
    try:
        options = parse(argv[1:] if trace else argv, positional=trace)
        return _run(options, trace)
    except ActionRequested as action:
        print(action.text)
        return 0
    except (UsageError, FlagError, GGUFError, ModelError, NameResolutionError, DemoError, NotSupported) as error:
        print(f"ftgguf bench: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"ftgguf bench: not enough memory: {error}", file=sys.stderr)
        return 1


def _run(options: Options, trace: bool) -> int:
    from ftgguf.bench.peers import NoPeer, Peer, find_peer, find_served
    from ftgguf.bench.report import PEER_FAILED
    from ftgguf.pull.resolve import resolve_with_bar

    peer: Peer | None = None
    if options.against:  # before a model is fetched, hashed or measured
        try:
            peer = find_served(options) if trace else find_peer(options)
        except NoPeer as error:
            print(f"ftgguf bench{' trace' * trace}: {error}", file=sys.stderr)
            return PEER_FAILED
    if options.against and not trace:
        check_transport(options, http=peer is not None)
    path = str(resolve_with_bar(options.model))
    if trace:
        from ftgguf.bench.trace_command import run as run_trace

        return run_trace(options, path, peer)
    if options.against:
        from ftgguf.bench.against import run as run_against

        return run_against(options, path, peer)
    from ftgguf.bench.alone import run

    return run(options, path)


def _other(name: str, argv: list[str]) -> int:
    try:
        module = importlib.import_module(OTHERS[name])
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == OTHERS[name]:
            print(f"ftgguf bench {name} is not in this version", file=sys.stderr)
        else:
            print(f"ftgguf bench {name} needs {missing}: install ftgguf[gpu]", file=sys.stderr)
        return 1
    status: int = module.main(argv)
    return status
