"""`python -m compat.registry [--port N] [--fault NAME=VALUE ...]`: the fake registry and Hub, to pull from by hand.

It has the stories model as `HOST/library/stories`, with a system prompt and parameters, and as the repository
`user/stories-GGUF` (Q8_0 and a pretended Q4_K_M). A fault is a field of `Faults`: `--fault cut=3 --fault ranges=wrong`.
"""

from __future__ import annotations

import argparse
import json
import time

from ftgguf.pull.demo import resolve_stories

from .app import FakeSource, Faults
from .server import running


def main() -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m compat.registry", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    data, source = resolve_stories().read_bytes(), FakeSource()
    layers = [("model", data), ("system", b"You tell stories."), ("params", b'{"temperature": 0.5}')]
    source.add_model("library/stories:latest", layers)
    source.add_repo("user/stories-GGUF", {"stories-Q8_0.gguf": data, "stories-Q4_K_M.gguf": data})
    for fault in args.fault:
        name, _, text = fault.partition("=")
        if not hasattr(Faults(), name):
            parser.error(f"no fault '{name}': {', '.join(vars(Faults()))}")
        setattr(source.faults, name, value_of(text))
    with running(source, args.port) as server:
        print(f"ftgguf pull {server.host}/library/stories")
        print(f"HF_ENDPOINT={server.url} ftgguf pull hf.co/user/stories-GGUF:Q8_0", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0


def value_of(text: str) -> object:
    """JSON where it is that (numbers, lists, true), else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
