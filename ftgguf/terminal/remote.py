"""`ftgguf ps` and `ftgguf stop`: what a running server has loaded, by its Ollama API; Ollama's own server works too."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from ftgguf.arguments import BAD_USAGE, Parser
from ftgguf.pull.show import columns
from ftgguf.pull.sizes import human

DEFAULT_PORT = 8080
TIMEOUT_S = 30.0


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"Error: {message}\n{self.format_usage()}")


def _parser(name: str, description: str) -> _Parser:
    parser = _Parser(f"ftgguf {name}", description=description, allow_abbrev=False)
    parser.add_argument("--host", default="", help="the server's address, host[:port] or URL (OLLAMA_HOST, 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help=f"its port ({DEFAULT_PORT})")
    parser.add_argument("--api-key", default="", help="its key (LLAMA_API_KEY)")
    return parser


def address(host: str, port: int) -> str:
    """The server's base URL from `--host` and `--port`; without a host `OLLAMA_HOST`, then this machine.

    As Ollama reads it: a scheme alone means port 80 or 443, a bare IPv6 address needs no brackets. 0.0.0.0, which a
    server listens on, is this machine.
    """
    text = (host or os.environ.get("OLLAMA_HOST", "")).strip().strip("'\"") or "127.0.0.1"
    scheme, marked, rest = text.partition("://")
    scheme, rest = (scheme, rest) if marked else ("http", text)
    if rest.count(":") > 1 and not rest.startswith("["):
        rest = f"[{rest}]"
    parts = urlsplit(f"{scheme}://{rest}")
    usual = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT) if marked else DEFAULT_PORT
    name = parts.hostname or "127.0.0.1"
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port or parts.port or usual}{parts.path.rstrip('/')}"


def _request(args: argparse.Namespace, method: str, path: str, body: Any = None) -> Any:
    """The answer's JSON; SystemExit with one line where there is none."""
    try:
        base = address(args.host, args.port)
    except ValueError as error:
        raise SystemExit(f"Error: {args.host or os.environ.get('OLLAMA_HOST')} is no address: {error}") from None
    key = args.api_key or os.environ.get("LLAMA_API_KEY", "").split(",")[0]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, base + path, json=body, headers=headers, timeout=TIMEOUT_S)
        document = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise SystemExit(f"Error: no ftgguf server at {base} ({error}): start it with ftgguf serve") from None
    if answer.status_code >= 400:
        said = document.get("error") if isinstance(document, dict) else document
        raise SystemExit(f"Error: {said.get('message') if isinstance(said, dict) else said}")
    return document


def ps(argv: Sequence[str]) -> int:
    """`ps`: name, ID, size, where it runs, context, and until when it stays."""
    parser = _parser("ps", "List the models that a running server has loaded.")
    parser.add_argument("--json", action="store_true", help="as /api/ps answers")
    args = parser.parse_args(argv)
    try:
        document = _request(args, "GET", "/api/ps")
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(document))
        return 0
    rows: list[tuple[str, ...]] = [("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL")]
    for model in document.get("models") or []:
        size, on_gpu = int(model.get("size") or 0), int(model.get("size_vram") or 0)
        context = str(model.get("context_length") or "")
        until = remaining(model.get("expires_at") or "", datetime.now(UTC))
        rows.append(
            (model["name"], str(model.get("digest", ""))[:12], human(size), processor(size, on_gpu), context, until)
        )
    print("\n".join(columns(rows)))
    return 0


def processor(size: int, on_gpu: int) -> str:
    """`100% GPU`, `100% CPU`, `48%/52% CPU/GPU`."""
    if on_gpu <= 0 or size <= 0:
        return "100% CPU"
    if on_gpu >= size:
        return "100% GPU"
    on_cpu = round(100 * (size - on_gpu) / size)
    return f"{on_cpu}%/{100 - on_cpu}% CPU/GPU"


def remaining(expires: str, now: datetime) -> str:
    """`4 minutes from now`, `Forever`, `Stopping...`."""
    try:
        seconds = (datetime.fromisoformat(expires.replace("Z", "+00:00")) - now).total_seconds()
    except ValueError:
        return ""
    if seconds < 0:
        return "Stopping..."
    for size, unit in ((365 * 86400, "year"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size:
            count = int(seconds / size)
            if unit == "year" and count >= 10:
                return "Forever"
            return f"{count} {unit}{'s' * (count != 1)} from now"
    return "Less than a second from now"


def stop(argv: Sequence[str]) -> int:
    """`stop NAME`: unload it, once the requests that use it have ended."""
    parser = _parser("stop", "Have a running server unload a model.")
    parser.add_argument("name")
    args = parser.parse_args(argv)
    try:
        _request(args, "POST", "/api/generate", {"model": args.name, "keep_alive": 0, "stream": False})
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 1
    return 0
