"""How much memory this process may still take: the system's figure, or the container's limit where that is lower."""

from __future__ import annotations

from pathlib import Path

import psutil

GIB = 1 << 30


def available_memory() -> int:
    """Bytes: MemAvailable, bounded by what the control group (v2 or v1) leaves."""
    free = int(psutil.virtual_memory().available)
    v1 = Path("/sys/fs/cgroup/memory")
    limit = _number(Path("/sys/fs/cgroup/memory.max")) or _number(v1 / "memory.limit_in_bytes")
    used = _number(Path("/sys/fs/cgroup/memory.current")) or _number(v1 / "memory.usage_in_bytes")
    # v1 says "no limit" with a number near 2^63
    if limit is None or used is None or limit >= 1 << 60:
        return free
    return min(free, max(limit - used, 0))


def check_kv(n_cells: int, nbytes: int) -> None:
    """Raise MemoryError if the KV cells that were asked for cannot be held by memory and swap.

    The system hands out their addresses whatever their number, and ends the process when they are filled.
    """
    free = available_memory() + int(psutil.swap_memory().free)
    if nbytes > free:
        raise MemoryError(
            f"{n_cells} KV cells need {nbytes / GIB:.1f} GiB and {free / GIB:.1f} GiB of memory are available: take a "
            "smaller context (-c), or smaller cells (-ctk q8_0 -ctv q8_0)"
        )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
