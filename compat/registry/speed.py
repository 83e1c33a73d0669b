"""How fast is a pull against curl? One file on loopback, from a server that does as little as it can (sendfile).

    python -m compat.registry.speed [--size 1000000000] [--rounds 3]

Both are whole programs, started anew each time; ours hashes, verifies, journals and flushes to disk, curl does not.
`transfer` is ours without the interpreter's start and the imports (0.4 s or so, whatever the file's size).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_PULL = """
import sys
import time
from pathlib import Path
from ftgguf.pull.client import Client, NetOptions
from ftgguf.pull.digest import Digest
from ftgguf.pull.transfer import Item, Transfer
url, digest, size, folder = sys.argv[1:]
begun = time.monotonic()
with Client(NetOptions()) as client:
    Transfer(client, Item(url, "file", int(size), Digest(digest)), Path(folder), "key", lambda _a, _b: None).run()
print(time.monotonic() - begun)
"""


def serve(path: Path) -> int:
    """Serve one file, whole or by ranges, from threads; returns the port."""
    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def answer(connection: socket.socket) -> None:
        waiting = b""
        with connection:
            while True:
                while b"\r\n\r\n" not in waiting:
                    data = connection.recv(65536)
                    if not data:
                        return
                    waiting += data
                head, _, waiting = waiting.partition(b"\r\n\r\n")
                found = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", head)
                start, end = (int(found[1]), int(found[2]) + 1) if found else (0, size)
                status = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (start, end - 1, size)
                line = status if found else b"200 OK"
                connection.sendall(b"HTTP/1.1 " + line + b"\r\nContent-Length: %d\r\n\r\n" % (end - start))
                while start < end:
                    try:
                        start += os.sendfile(connection.fileno(), file, start, min(end - start, 1 << 20))
                    except OSError:
                        return

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def timed(command: list[str]) -> tuple[float, float, int, str]:
    """(seconds, processor seconds, peak resident MiB of all children so far, output) of a program."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used, after.ru_maxrss >> 10, output


def main() -> None:
    """Print each round and the ratio of the best ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10**9)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, hasher, path = Path(name), hashlib.sha256(), Path(name) / "file"
        with path.open("wb") as file:
            for at in range(0, args.size, 1 << 20):
                block = os.urandom(min(1 << 20, args.size - at))
                hasher.update(block)
                file.write(block)
        url = f"http://127.0.0.1:{serve(path)}/file"
        best = {"curl": 0.0, "pull": 0.0, "transfer": 0.0}
        for _ in range(args.rounds):
            target = folder / "target"
            target.mkdir()
            for kind in ("curl", "pull"):
                ours = [sys.executable, "-c", _PULL, url, hasher.hexdigest(), str(args.size), str(target)]
                command = ["curl", "-s", "-o", str(target / "curl"), url] if kind == "curl" else ours
                seconds, used, peak, output = timed(command)
                if kind == "pull":
                    best["transfer"] = max(best["transfer"], args.size / float(output) / 1e6)
                best[kind] = max(best[kind], args.size / seconds / 1e6)
                print(f"{kind}: {args.size / seconds / 1e6:.0f} MB/s, {used:.2f} s of processor, peak {peak} MiB")
            for each in target.iterdir():
                each.unlink()
            target.rmdir()
        ratios = ", ".join(f"{kind} / curl: {best[kind] / best['curl']:.2f}" for kind in ("pull", "transfer"))
        print(f"{ratios}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
