"""`ftgguf proxy --a URL --b URL`: its command line, and the report it keeps up to date."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import uvicorn

from ftgguf.arguments import Parser
from ftgguf.bench import host
from ftgguf.bench.cache_watch import CacheWatch
from ftgguf.bench.client import Target
from ftgguf.bench.publish import add_output_flags, publish, save
from ftgguf.bench.recording import command_line
from ftgguf.bench.report import Contestant, Report
from ftgguf.proxy.app import Proxy, Side
from ftgguf.proxy.ledger import Ledger, say
from ftgguf.proxy.sameness import compare_models

SAVE_S = 1.0
"""Seconds from a measured answer to the writing of the report, if nothing is under way then."""
PATIENCE_S = 30.0
"""And at most."""


def main(argv: list[str]) -> int:
    """Serve until interrupted, then print the report; returns the exit status (that of the report)."""
    options = _parser().parse_args(argv)
    if options.a.rstrip("/") == options.b.rstrip("/"):
        print("ftgguf proxy: --a and --b are the same server", file=sys.stderr)
        return 1
    report = Report("proxy", command_line(["ftgguf", "proxy", *argv]))
    report.host = host.describe()
    try:
        a = _side(options.a, "A", options.a_key, first=True)
        b = _side(options.b, "B", options.b_key, first=False)
    except httpx.HTTPError as error:
        print(f"ftgguf proxy: {error.request.url} does not answer: {error}", file=sys.stderr)
        return 1
    # ratios read "ours / theirs": ours is the ftgguf of the two, A where that does not decide
    if a.contestant.ours or not b.contestant.ours:
        a.contestant.ours, b.contestant.ours = True, False
    report.contestants = [a.contestant, b.contestant]
    peer = next(c for c in report.contestants if not c.ours)
    targets = [Target(s.url, "native", api_key=s.api_key, timeout=30) for s in (a, b)]
    compare_models(report, targets[0], targets[1], peer)
    report.notes.append("both servers were started by somebody else: flags, budgets and kernels are not known here")
    how = "" if options.mode == "split" else ", at once" if options.at_once else ", B after A"
    report.settings = {
        "mode": options.mode + how,
        "sampling": "the client's",
        "clock": "the proxy's",
        "prefix cache": "as each server keeps it",
    }
    ledger = Ledger(report, a.contestant, b.contestant)
    proxy = Proxy(a, b, ledger, options.mode, options.at_once, options.timeout)
    proxy.changed = _Saver(ledger, options.report, options.html, lambda: not proxy.in_flight).changed
    say(f"listening on http://{options.host}:{options.port}: {options.mode} of A {a.url} and B {b.url}; Ctrl-C ends")
    settings = uvicorn.Config(
        proxy.app(),
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(settings)
    watches = [CacheWatch(report, s.contestant.name, Target(s.url, "native", api_key=s.api_key)) for s in (a, b)]
    try:
        server.run()
    finally:
        for watch in watches:
            watch.stop()
    if not server.started:
        return 1
    publish(ledger.close(), output=options.output, page=options.html, report_file=options.report)
    return report.status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ftgguf proxy",
        description="Pass a client's traffic to A, show the same to B, and compare them on it. Point the client at "
        "the address that is printed; end with Ctrl-C.",
    )
    parser.add_argument("--a", required=True, metavar="URL", help="the server whose answers the client gets")
    parser.add_argument("--b", required=True, metavar="URL", help="the server that is compared")
    mode = "mirror: A answers, B gets a copy; split: conversations are dealt out in turns"
    parser.add_argument("--mode", choices=("mirror", "split"), default="mirror", help=mode)
    at_once = "mirror while A answers, not after: for servers on two machines"
    parser.add_argument("--at-once", action="store_true", help=at_once)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8090, help="port to listen on (default: %(default)s)")
    parser.add_argument("--a-key", default="", metavar="KEY", help="API key for A instead of the client's")
    parser.add_argument("--b-key", default="", metavar="KEY", help="API key for B, which never gets the client's")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds until a side counts as hung")
    add_output_flags(parser)
    return parser


def _side(url: str, letter: str, api_key: str, *, first: bool) -> Side:
    """Ask the server what it is. Raises httpx.HTTPError if nobody answers."""
    url = url.rstrip("/")
    build = ""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    reply = httpx.get(f"{url}/props", timeout=10, headers=headers)
    if reply.status_code == 200 and reply.headers.get("content-type", "").startswith("application/json"):
        build = str(reply.json().get("build_info", ""))
    ours = "ftgguf" in build
    side = Contestant(f"{letter} {'ftgguf' if ours else url.split('//')[-1]}", ours=ours, build=build, command=url)
    return Side(url, side, api_key, keeps_credentials=first)


class _Server(uvicorn.Server):
    """uvicorn that ends on a signal without raising it again: the report is still to be printed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        former = {n: signal.signal(n, self.handle_exit) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


class _Saver:
    """Writes the report's files, whole or not at all, a little after something was measured: while no answer is under
    way, since drawing the page would hold it up, but not later than PATIENCE_S."""

    def __init__(self, ledger: Ledger, report: str, page: str, idle: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._files = {"report_file": report, "page": page}
        self._idle = idle
        self._since = -1.0

    def changed(self) -> None:
        """Something was measured. In the event loop."""
        if self._since < 0 and any(self._files.values()):
            self._since = time.monotonic()
            self._later()

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(SAVE_S, self._tick)

    def _tick(self) -> None:
        if not self._idle() and time.monotonic() - self._since < PATIENCE_S:
            self._later()
            return
        self._since = -1.0
        try:
            save(self._ledger.finish(), **self._files)
        except OSError as error:
            say(f"the report could not be written: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
