"""A `llama-server` that takes its flags, holds the VRAM that they imply and speaks the stub's API; and the `nvidia-smi`
that shows it. What goes wrong is told by the environment: `FAKE_OOM_MIB` (it dies above that), `FAKE_HANG` (it never
answers /health), `FAKE_DIE` (it ends in the middle of a long prompt).

`FAKE_SMI` is the folder that both share: a file for each running server, named by its pid, holding MiB.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.stub_server import Script, stub

LAYERS = 8


def value(argv: list[str], flag: str, default: int) -> int:
    return int(argv[argv.index(flag) + 1]) if flag in argv else default


def memory(moe: int, ubatch: int) -> int:
    """MiB: 300 a layer of experts on the GPU, 1000 besides, half a MiB a row of the batch."""
    return 1000 + 300 * (LAYERS - moe) + ubatch // 2


def serve(argv: list[str], folder: Path) -> int:
    if "--help" in argv:
        print("-c, --ctx-size N\n--port PORT\n" + os.environ.get("FAKE_HELP", "-lm, --load-mode MODE"))
        return 0
    moe, batch = value(argv, "--n-cpu-moe", 0), value(argv, "-b", 2048)
    ubatch = min(value(argv, "-ub", 512), batch)  # as llama.cpp does
    mib = memory(moe, ubatch)
    if mib > int(os.environ.get("FAKE_OOM_MIB", "1000000")):
        print("ggml_backend_cuda_buffer_type_alloc_buffer: allocating: cudaMalloc failed: out of memory")
        print("main: exiting due to model loading error")
        return 1
    (folder / str(os.getpid())).write_text(str(mib))
    print(
        "system_info: n_threads = 1 | CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | AVX512 = 1 |", flush=True
    )
    if os.environ.get("FAKE_HANG"):
        signal.pause()
    # slower with each layer on the CPU, faster prompts with a larger batch
    script = Script(delay=0.0005 * (1 + moe), read_delay=1.0 / ubatch + 0.001 * moe)
    if os.environ.get("FAKE_DIE"):
        script.dies_at = 1000
    with stub(script, value(argv, "--port", 0)):
        threading.Event().wait()
    return 0


def smi(argv: list[str], folder: Path) -> int:
    used = {int(f.name): int(f.read_text()) for f in folder.iterdir() if Path(f"/proc/{f.name}").exists()}
    query = next(a for a in argv if a.startswith("--query"))
    if query == "--query-gpu=name":
        print("NVIDIA Fake 8000")
    elif query == "--query-gpu=memory.used":
        print(100 + sum(used.values()))
    elif not os.environ.get("FAKE_NO_PIDS"):
        print("".join(f"{pid}, {mib}\n" for pid, mib in used.items()), end="")
    return 0


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    sys.exit({"serve": serve, "smi": smi}[what](rest, Path(os.environ["FAKE_SMI"])))
