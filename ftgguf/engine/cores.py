"""Which CPUs do this engine's workers stand on, beside those of other engines on this machine?

Workers that are pinned and poll share a core badly: two engines on the same cores nearly stop each other. So each
engine claims the physical cores of its workers, and another one takes others; where too few are left it does not pin,
and the system spreads its threads. A claim is an abstract Unix socket with the core's name: the kernel gives it up with
the process, however that ends, and there are no files, folders or permissions to be wrong. Engines in containers with a
network of their own do not see each other's.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
NAME = "ftgguf-core"
TURN_S = 2.0
"""How long an engine waits for another one that is choosing at this moment."""


@dataclass(slots=True)
class Claim:
    """CPUs for workers, one each; all -1 where they are not pinned. Held until `release`, or the process's end."""

    cpus: list[int]
    line: str
    """For the log, where it is not as on a machine of its own; else empty."""
    held: list[socket.socket] = field(default_factory=list)

    def release(self) -> None:
        """Others may have the cores. Safe to call twice."""
        while self.held:
            self.held.pop().close()


def claim(count: int, allowed: Sequence[int] | None = None, name: str = NAME) -> Claim:
    """CPUs for `count` workers (as many as there are CPUs at most) out of `allowed` (None: those that this process may
    use), on cores that no other engine has claimed. A single worker is not pinned."""
    count = max(1, count)
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return Claim([-1] * count, "")
        allowed = sorted(os.sched_getaffinity(0))
    order = spread(allowed, core_of)
    count = min(count, len(order))
    if count <= 1:
        return Claim([-1], "")
    turn = _turn(name)
    held: list[socket.socket] = []
    try:
        chosen, taken = _choose(order, count, name, held)
    finally:
        if turn is not None:
            turn.close()
    if len(chosen) == count:
        line = f"CPU workers are on CPUs {ranges(chosen)}: other engines have {taken} of the cores" if taken else ""
        return Claim(chosen, line, held)
    for each in held:
        each.close()
    return Claim(
        [-1] * count,
        f"CPU workers are not pinned: other engines have {taken} of the cores, and {count} workers need more than the "
        f"{len(chosen)} CPUs of the others (-t bounds them)",
    )


def _choose(order: Sequence[int], count: int, name: str, held: list[socket.socket]) -> tuple[list[int], int]:
    """CPUs whose cores could be claimed, `count` at most, the claims in `held`; and how many cores others have."""
    mine: dict[int, bool] = {}
    chosen: list[int] = []
    for cpu in order:
        if len(chosen) == count:
            break
        core = core_of(cpu)
        if core not in mine:
            found = _bind(f"{name}-{core}")
            mine[core] = found is not None
            held += [] if found is None else [found]
        if mine[core]:
            chosen.append(cpu)
    return chosen, sum(not own for own in mine.values())


def spread(allowed: Sequence[int], core: Callable[[int], int]) -> list[int]:
    """`allowed` in the order of choice: every core once before any twice, the last ones first, since the first serve
    interrupts."""
    seen: dict[int, int] = {}
    ranked = []
    for cpu in sorted(allowed, reverse=True):
        rank = seen.get(core(cpu), 0)
        seen[core(cpu)] = rank + 1
        ranked.append((rank, -cpu))
    return [-cpu for _, cpu in sorted(ranked)]


def core_of(cpu: int) -> int:
    """The first CPU of the physical core of `cpu`, which stands for it; `cpu` itself where Linux does not tell."""
    with suppress(OSError, ValueError):
        text = (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return int(text.replace("-", ",").split(",")[0])
    return cpu


def ranges(cpus: Sequence[int]) -> str:
    """`2-5,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _bind(name: str) -> socket.socket | None:
    """The abstract socket `name`, which one process at a time can have; None where another one has it. Where there are
    no abstract sockets, or none for us, nobody's claims are known, and each engine is alone."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        found.bind(f"\0{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            found.close()
            return None
    return found


def _turn(name: str) -> socket.socket | None:
    """The right to choose, so that two engines that start at once do not each get half; None where another engine has
    had it for TURN_S."""
    end = time.monotonic() + TURN_S
    while (found := _bind(f"{name}-turn")) is None and time.monotonic() < end:
        time.sleep(0.01)
    return found
