"""How long until a server answers: the first start on this machine, which compiles its kernels, and the next one.

It leaves Triton's cache filled for the servers of test_serve_gpu.py, which have fewer cores each.
"""

from __future__ import annotations

import re
import time

from serve_helpers import CONTEXT, moe, server


def main() -> None:
    """Two starts of a server with an expert cache; prints what compiled the kernels, and seconds."""
    for name in ("first", "second"):
        began = time.monotonic()
        with server(moe(), "-c", str(CONTEXT), "-np", "4", "--moe-mode", "hybrid") as running:
            took = time.monotonic() - began
            compiled = re.search(r"kernels (compiled|found|run)[^\n]*", running.log)
            print(f"{name} start: {took:.1f} s ({compiled[0] if compiled else 'no word about kernels'})", flush=True)


if __name__ == "__main__":
    main()
