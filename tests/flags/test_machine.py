"""What the machine allows: affinity, topology, cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftgguf.flags.machine import Machine, cgroup_quota, parse_cpu_list, read_machine


def test_cores_leave_out_hyper_threads_and_efficiency_cores() -> None:
    """A hybrid processor: 2 fast cores with 2 threads each, 4 slow ones."""
    topology = {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1)} | {cpu: (0, cpu) for cpu in range(4, 8)}
    machine = Machine(tuple(range(8)), topology, frozenset(range(4, 8)))
    assert machine.cores() == 2
    assert machine.cores((4, 5)) == 2
    assert Machine((0, 1), {0: (0, 0), 1: (1, 0)}).cores() == 2  # same core number on two packages
    assert Machine((5,), {}).cores() == 1  # no topology to read


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
          "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/d\n", "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us": "300000\n",
          "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"}, 3.0),
        ({"proc/self/cgroup": "4:cpu:/d\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"proc/self/cgroup": "4:memory:/d\nrubbish\n"}, None),
    ],
)  # fmt: skip
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """Layouts as the kernel's cgroup-v2 and sched-bwc documents describe them; every level above counts."""
    assert cgroup_quota(tree(tmp_path, files)) == quota


def test_this_machine_is_readable(tmp_path: Path) -> None:
    """The real /proc and /sys give something sensible; an empty root gives one core per allowed CPU."""
    machine = read_machine()
    assert 1 <= machine.cores() <= len(machine.allowed)
    assert machine.bounded(10**6) >= 1
    assert read_machine(tmp_path).cores() == len(machine.allowed)
    assert parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}
