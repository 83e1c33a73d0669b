"""`--numa`: ggml's own placement of its compute threads over the nodes of a machine, as llama.cpp asks for it.

`distribute` spreads the threads over the nodes, `isolate` keeps them on the node that the process started on, and
`numactl` leaves each thread the CPUs that `numactl` gave the process. With one node none of them changes anything.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

log = logging.getLogger("ftgguf.engine")

STRATEGIES = {"distribute": 1, "isolate": 2, "numactl": 3}
"""ggml's `enum ggml_numa_strategy`."""
NODES = Path("/sys/devices/system/node")


def count_nodes(folder: Path = NODES) -> int:
    """NUMA nodes of this machine as ggml counts them: node0, node1 ... without a gap; 0 where Linux shows none."""
    n = 0
    while (folder / f"node{n}").exists():
        n += 1
    return n


def set_numa(strategy: str) -> bool:
    """Ask ggml for `strategy` (`off` asks for nothing); whether it changes anything. Call before anything computes."""
    if strategy == "off":
        return False
    import llama_cpp  # noqa: F401  loads libggml-cpu, which is then found by its name

    library = ctypes.CDLL("libggml-cpu.so.0")
    library.ggml_is_numa.restype = ctypes.c_bool
    library.ggml_numa_init(ctypes.c_int(STRATEGIES[strategy]))
    if library.ggml_is_numa():
        log.info("--numa %s: threads are placed over %d nodes", strategy, count_nodes())
        return True
    log.warning("--numa %s changes nothing: this machine has one NUMA node", strategy)
    return False
