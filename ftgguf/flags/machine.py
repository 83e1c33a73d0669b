"""How many CPUs this process may really use: affinity mask, cgroup quota, hyper-threads, efficiency cores.

Read from /proc and /sys only (Linux); elsewhere psutil's counts. A container with a quota of 4 CPUs on a 64-core
host must not start 64 threads: with a barrier after every operator, throttled threads stop the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """CPUs of this process. `quota` is the cgroup limit in CPUs, `None` where there is none."""

    allowed: tuple[int, ...]
    """CPU numbers of the affinity mask, ascending."""
    core_of: dict[int, tuple[int, int]]
    """CPU number -> (package, core); CPUs with the same value are hyper-threads of one core."""
    efficiency: frozenset[int] = frozenset()
    """CPUs of a hybrid processor that are efficiency cores."""
    quota: float | None = None

    def cores(self, cpus: tuple[int, ...] = ()) -> int:
        """Physical cores among the allowed CPUs (and `cpus`, if given), without efficiency cores."""
        usable = [cpu for cpu in self.allowed if not cpus or cpu in cpus]
        fast = [cpu for cpu in usable if cpu not in self.efficiency] or usable
        return max(1, len({self.core_of.get(cpu, (-1, cpu)) for cpu in fast}))

    def bounded(self, threads: int) -> int:
        """`threads` cut to the cgroup quota, at least 1."""
        return threads if self.quota is None else max(1, min(threads, int(self.quota)))


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine as this process sees it; `root` stands in for `/` in tests."""
    try:
        allowed = tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        import psutil  # 40 ms that Linux need not pay

        allowed = tuple(range(psutil.cpu_count(logical=True) or 1))
        physical = psutil.cpu_count(logical=False) or len(allowed)
        return Machine(allowed, {cpu: (0, cpu % physical) for cpu in allowed})
    topology = {cpu: core for cpu in allowed if (core := _core(root, cpu)) is not None}
    return Machine(allowed, topology, _efficiency(root), cgroup_quota(root))


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _core(root: Path, cpu: int) -> tuple[int, int] | None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package, core = _read(folder / "physical_package_id"), _read(folder / "core_id")
    if package is None or core is None:
        return None
    try:
        return int(package), int(core)
    except ValueError:
        return None


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _efficiency(root: Path) -> frozenset[int]:
    """Intel's hybrid processors list their efficiency cores as the PMU `cpu_atom`."""
    text = _read(root / "sys/devices/cpu_atom/cpus")
    return parse_cpu_list(text) if text else frozenset()


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time the process's cgroup and all above it allow (v1 and v2); None without a limit."""
    found: list[float] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if not controllers:
            found += _quotas(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
                found += _quotas(root / "sys/fs/cgroup" / mount, path, _quota_v1)
    return min(found) if found else None


def _quotas(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Limits of the group at `path` and of every group above it. Inside a container the path may not exist below
    the mount: then the mount itself is the container's group."""
    relative = [part for part in path.split("/") if part and part != ".."]
    found = []
    for depth in range(len(relative), -1, -1):
        quota = read(mount.joinpath(*relative[:depth]))
        if quota is not None:
            found.append(quota)
    return found


def _ratio(quota: str, period: str) -> float | None:
    try:
        limit, per = int(quota), int(period)
    except ValueError:  # "max"
        return None
    return limit / per if limit > 0 and per > 0 else None


def _quota_v2(folder: Path) -> float | None:
    fields = (_read(folder / "cpu.max") or "").split()
    return _ratio(*fields) if len(fields) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return _ratio(quota, period) if quota and period else None
