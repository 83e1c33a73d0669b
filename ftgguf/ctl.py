"""`ftgguf ctl cache status | resize MiB | rebuild`: the expert cache of a running server, by its HTTP API."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from ftgguf.arguments import Parser
from ftgguf.terminal.remote import DEFAULT_PORT, address

MIB = 1 << 20
TIMEOUT_S = 120.0
"""A resize waits for the step that is running, and moves gigabytes."""


class CtlError(Exception):
    """The server did not do it; the text is for the user."""


def _where(top: bool) -> Parser:
    """The flags that say which server, before the command and after it; there they only replace what was given."""
    kept: Any = argparse.SUPPRESS
    flags = Parser(add_help=False)
    flags.add_argument(
        "--host", default="" if top else kept, help="the server's address, host[:port] or URL (OLLAMA_HOST, 127.0.0.1)"
    )
    flags.add_argument("--port", type=int, default=0 if top else kept, help=f"its port ({DEFAULT_PORT})")
    flags.add_argument("--api-key", default="" if top else kept, help="its key (LLAMA_API_KEY)")
    return flags


def _parser() -> Parser:
    after = [_where(top=False)]
    parser = Parser(
        "ftgguf ctl", description="Control a running server.", allow_abbrev=False, parents=[_where(top=True)]
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="cache")
    cache = what.add_parser("cache", help="the experts cached in GPU memory").add_subparsers(
        dest="action", required=True, metavar="status|resize|rebuild"
    )
    status = cache.add_parser("status", parents=after, help="what is cached, how often it hits, who serves the misses")
    status.add_argument("--json", action="store_true", help="everything, as the server says it")
    resize = cache.add_parser("resize", parents=after, help="give the cache another size; the best experts stay")
    resize.add_argument("mib", type=int, metavar="MiB")
    cache.add_parser("rebuild", parents=after, help="keep the size, fill the slots anew with the best experts")
    return parser


def _ask(args: argparse.Namespace, method: str, path: str, body: Any = None) -> Any:
    try:
        base = address(args.host, args.port)
    except ValueError as error:
        raise CtlError(f"{args.host or os.environ.get('OLLAMA_HOST')} is no address: {error}") from None
    key = args.api_key or os.environ.get("LLAMA_API_KEY", "").split(",")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, base + path, json=body, headers=headers, timeout=TIMEOUT_S)
        data = answer.json()
    except httpx.HTTPError as error:
        raise CtlError(f"no answer from {base}: {error}. Is `ftgguf serve` running there?") from None
    except ValueError:
        raise CtlError(f"{base} answered {answer.status_code} without JSON: it is no ftgguf server") from None
    if answer.status_code != 200:
        said = data.get("error", data) if isinstance(data, dict) else data
        raise CtlError(f"{base}: {said.get('message', said) if isinstance(said, dict) else said}")
    return data


def _lines(experts: dict[str, Any]) -> list[str]:
    """What a person wants to know of `experts` in `GET /v1/cache/status`."""
    if not experts.get("enabled"):
        return [str(experts.get("reason", "no expert cache"))]
    e, split, bank = experts["experts"], experts["split"], experts["bank"]
    lines = [
        f"slots     {experts['slots']} in {experts['arena_bytes'] / MIB:.0f} MiB, ring "
        f"{experts['ring_bytes'] / MIB:.0f} MiB; {experts['plan']}",
        f"decode    {e['wanted']} experts wanted, {100 * e['hit_rate']:.1f} % in a slot; of {e['misses']} misses "
        f"{e['fills']} filled, {e['cpu']} on the CPU",
        f"split     {experts['mode']}: {split['reason']}",
    ]
    for kind, phi in split["phi"].items():
        rates = split["rates"][kind]["contended"]
        lines.append(
            f"  {kind}: phi {phi:.2f}; link {rates['fill'] / 1e9:.1f}, CPU {rates['cpu'] / 1e9:.1f} GB/s in service"
        )
    modes = {name: n for name, n in experts["prefill"]["layers_by_mode"].items() if n}
    lines.append("prefill   layers by mode: " + (", ".join(f"{name} {n}" for name, n in modes.items()) or "none yet"))
    lines.append(f"host      {bank['line']}")
    if "boundary" in experts:
        b = experts["boundary"]
        lines.append(
            f"KV        {b['cells']} cells in {b['kv_bytes'] / MIB:.0f} MiB, up to {b['kv_most_bytes'] / MIB:.0f}; the "
            f"boundary moved {b['moves']} times"
        )
    if experts.get("error"):
        lines.append(f"error     {experts['error']}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. An error is one line on stderr and status 1."""
    args = _parser().parse_args(argv)
    try:
        if args.action == "status":
            data = _ask(args, "GET", "/v1/cache/status")
            print(json.dumps(data, indent=1) if args.json else "\n".join(_lines(data["experts"])))
            return 0
        body = {} if args.action == "rebuild" else {"size_mib": args.mib}
        done = _ask(args, "POST", "/v1/cache/rebuild", body)
    except CtlError as error:
        print(f"ftgguf ctl: {error}", file=sys.stderr)
        return 1
    print(
        f"{done['slots']} slots in {done['bytes'] / MIB:.0f} MiB (before: {done['bytes_before'] / MIB:.0f} MiB), "
        f"{done['moved']} experts moved"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
