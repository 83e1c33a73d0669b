"""The command line: `ftgguf serve | run | pull | bench`, and `ftgguf-server`, llama-server's command line as it is."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable

from ftgguf import __version__

OPENMP_SPINS = "1000"
"""See `_calm_openmp`."""

USAGE = """usage: ftgguf COMMAND ...

  serve   the HTTP server; takes llama-server's flags           ftgguf serve -m model.gguf -c 16384
  run     one answer, or a chat in the terminal                 ftgguf run demo "What is the capital of France?"
  pull    get a model without running it                        ftgguf pull demo
  bench   speed of a model here, also against llama.cpp         ftgguf bench -m model.gguf --against llama.cpp
  proxy   compare two servers on a client's real traffic        ftgguf proxy --a URL --b URL

`ftgguf COMMAND --help` lists what a command takes. Models: a .gguf file, `demo` or `stories`.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ftgguf`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    _calm_openmp()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 1
    if argv[0] in ("--version", "version"):
        print(f"ftgguf {__version__}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": serve,
        "run": run,
        "pull": pull,
        "bench": bench,
        "proxy": proxy,
    }
    command = commands.get(argv[0])
    if command is None:
        hint = "; llama-server's flags follow `ftgguf serve`" if argv[0].startswith("-") else ""
        print(f"ftgguf: unknown command '{argv[0]}'{hint}\n{USAGE}", end="", file=sys.stderr)
        return 1
    try:
        return command(argv[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output went away (`ftgguf ... | head`); nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _calm_openmp() -> None:
    """Let ggml's OpenMP workers spin 1,000 rounds at a barrier before they sleep, unless the user says otherwise.

    libgomp reads this when it is loaded, so it comes first, and the engine process inherits it. Its default of 300,000
    rounds burns whole time slices as soon as anything else wants a core: on two busy cores the demo decoded under 1
    token/s with it and 8.7 with this, and on two idle cores 54 with either (2026-11-30).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)


def server_main() -> int:
    """Entry point of `ftgguf-server`."""
    return main(["serve", *sys.argv[1:]])


def _fail(line: object) -> int:
    print(line, file=sys.stderr)
    return 1


def serve(argv: list[str]) -> int:
    """`ftgguf serve`: everything that llama-server's command line can say."""
    from ftgguf.flags import ActionRequested, FlagError, parse_server
    from ftgguf.pull.resolve import DemoError, NameResolutionError, resolve_with_bar

    try:
        config = parse_server(argv, os.environ)
        if not config.model.path:
            return _fail(
                "error: no model given: -m FILE, -m demo (a chat model, made on first use) or -m stories (built in)"
            )
        path = resolve_with_bar(config.model.path)
    except ActionRequested as action:
        print(action.text)
        return 0
    except (FlagError, NameResolutionError, DemoError) as error:
        return _fail(error)
    from ftgguf.server.process import serve as serve_http

    return serve_http(dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(path))))


def run(argv: list[str]) -> int:
    """`ftgguf run MODEL [PROMPT]`."""
    from ftgguf.terminal.main import main as run_main

    return run_main(argv)


def pull(argv: list[str]) -> int:
    """`ftgguf pull NAME`: make or fetch a model and print its path."""
    from ftgguf.pull.resolve import DemoError, NameResolutionError, resolve_with_bar

    if len(argv) != 1 or argv[0].startswith("-"):
        return _fail("usage: ftgguf pull NAME    (demo, stories)")
    try:
        print(resolve_with_bar(argv[0]))
    except (NameResolutionError, DemoError) as error:
        return _fail(f"ftgguf pull: {error}")
    return 0


def bench(argv: list[str]) -> int:
    """`ftgguf bench`."""
    from ftgguf.bench.main import main as bench_main

    return bench_main(argv)


def proxy(argv: list[str]) -> int:
    """`ftgguf proxy --a URL --b URL`."""
    from ftgguf.proxy.main import main as proxy_main

    return proxy_main(argv)
