"""The command line: `ftgguf serve | run | pull ...`, and `ftgguf-server`, llama-server's command line as it is."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from ftgguf import __version__

OPENMP_SPINS = "20000"
"""See `_calm_openmp`."""

USAGE = """usage: ftgguf COMMAND ...

  serve   the HTTP server; takes llama-server's flags           ftgguf serve -m model.gguf -c 16384
  run     one answer, or a chat in the terminal                 ftgguf run demo "Why is the sky blue?"
  pull    get a model without running it                        ftgguf pull qwen3:30b
  list    the models that are here
  show    what a model is and where it would run                ftgguf show demo
  rm, cp  delete, copy a pulled model
  ps      the models that a running server has loaded
  stop    have a running server unload a model                  ftgguf stop demo
  create  a model from a Modelfile                              ftgguf create mine -f Modelfile
  bench   speed of a model here, also against llama.cpp         ftgguf bench -m model.gguf --against llama.cpp
  proxy   compare two servers on a client's real traffic        ftgguf proxy --a URL --b URL
  ctl     the expert cache of a running server                  ftgguf ctl cache status
  doctor  what this machine has, and what will not work
  plan    where each part of a model would go                   ftgguf plan model.gguf
  completion    a script that completes commands and models     source <(ftgguf completion bash)

`ftgguf COMMAND --help` lists what a command takes. Models: a .gguf file, `demo`, `stories`, a name as Ollama has them
(`qwen3:30b`), or `hf.co/user/repo:Q4_K_M`.
"""

COMMANDS = {
    "run": "ftgguf.terminal.main:main",
    **{name: f"ftgguf.pull.commands:COMMANDS.{name}" for name in ("pull", "list", "ls", "show", "rm", "cp", "create")},
    "ps": "ftgguf.terminal.remote:ps",
    "stop": "ftgguf.terminal.remote:stop",
    "completion": "ftgguf.terminal.completion:script",
    "complete": "ftgguf.terminal.completion:answer",
    "bench": "ftgguf.bench.main:main",
    "proxy": "ftgguf.proxy.main:main",
    "ctl": "ftgguf.ctl:main",
    "doctor": "ftgguf.engine.doctor:main",
    "plan": "ftgguf.engine.plan:main",
}
"""Command -> the function that takes its arguments and returns the exit status, imported only when it is asked for:
`module:name`, or `module:TABLE.key`."""

NOT_HERE = {
    "push": "models are pulled, not published; upload the GGUF with the Hub's or Ollama's own tools",
    "signin": "pulls use the key of 'ollama signin' (~/.ollama/id_ed25519) or HF_TOKEN where they are there",
    "signout": "nobody is signed in here",
}
"""Commands of Ollama that have no counterpart, and what to do instead."""

SCRIPTED = "scripted:"
"""`-m scripted:FILE.json` is the model of tests (`ftgguf.engine.scripted`), not a name to look up."""


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
    if argv[0] in NOT_HERE:
        print(f"ftgguf: {argv[0]} is not supported: {NOT_HERE[argv[0]]}", file=sys.stderr)
        return 1
    if argv[0] != "serve" and argv[0] not in COMMANDS:
        hint = "; llama-server's flags follow `ftgguf serve`" if argv[0].startswith("-") else ""
        print(f"ftgguf: unknown command '{argv[0]}'{hint}\n{USAGE}", end="", file=sys.stderr)
        return 1
    try:
        return serve(argv[1:]) if argv[0] == "serve" else _command(argv[0])(argv[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    finally:
        _let_go_of_readers()


def _let_go_of_readers() -> None:
    """Where the reader of our output went away (`ftgguf ... | head`) nothing more can be said to it: without this, what
    is still to be written makes Python end with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # there is none, or it was closed
            continue


def _calm_openmp() -> None:
    """Let ggml's OpenMP workers spin 20,000 rounds at a barrier before they sleep, unless the user says otherwise.

    libgomp reads this when it is loaded, so it comes first, and the engine process inherits it. Its default of 300,000
    rounds burns whole time slices as soon as anything else wants a core, and decoding nearly stops. The demo's decode
    step on two idle cores: 30 ms at 1,000 rounds, 26 at 20,000, 26 at 300,000 (2026-11-30, docs/measurements/cpu.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)


def server_main() -> int:
    """Entry point of `ftgguf-server`."""
    return main(["serve", *sys.argv[1:]])


def _fail(line: object) -> int:
    print(line, file=sys.stderr)
    return 1


def _command(name: str) -> Callable[[list[str]], int]:
    module, _, function = COMMANDS[name].partition(":")
    table, _, key = function.partition(".")
    found = getattr(importlib.import_module(module), table)
    chosen: Callable[[list[str]], int] = found[key] if key else found
    return chosen


def serve(argv: list[str]) -> int:
    """`ftgguf serve`: everything that llama-server's command line can say."""
    from ftgguf.flags import ActionRequested, CacheListRequested, FlagError, ListDevicesRequested, parse_server
    from ftgguf.pull.commands import model_table
    from ftgguf.pull.layers import NO_EXTRAS
    from ftgguf.pull.resolve import DemoError, NameResolutionError, served_with_bar
    from ftgguf.pull.store import Store

    try:
        config, extras = parse_server(argv, os.environ), NO_EXTRAS
        if config.router:
            from ftgguf.server.router_process import serve_router

            return serve_router(config, argv, os.environ)
        if not config.model.path.startswith(SCRIPTED):
            config, extras = served_with_bar(config)
    except CacheListRequested:
        print("\n".join(model_table(Store(None))))
        return 0
    except ListDevicesRequested:
        from ftgguf.engine.devices import listing

        print(listing())
        return 0
    except ActionRequested as action:
        print(action.text)
        return 0
    except (FlagError, NameResolutionError, DemoError) as error:
        return _fail(f"{error}" if str(error).startswith("error") else f"error: {error}")
    from ftgguf.server.process import serve as serve_http

    return serve_http(config, extras)
