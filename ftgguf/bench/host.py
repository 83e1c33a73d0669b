"""What machine is this, and is it quiet? Facts that a reader of a measurement needs beside it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ftgguf.flags.machine import read_machine

BUSY = 0.25
"""Load per core from other processes at which a measurement is called disturbed."""


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpu_names() -> str:
    """NVIDIA GPUs, comma-separated, asked of nvidia-smi; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(done.stdout.split("\n")).strip(", ") if done.returncode == 0 else ""


def gpu_memory() -> int:
    """Bytes of all NVIDIA GPUs together, used or not; 0 without one."""
    return sum(int(mib) << 20 for mib in re.findall(r"^(\d+)$", smi("--query-gpu=memory.total"), re.MULTILINE))


def smi(what: str) -> str:
    """nvidia-smi's answer to a query, a line for each; empty without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        asked = [tool, what, "--format=csv,noheader,nounits"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def governor() -> str:
    """The frequency governor of CPU 0; empty where the system does not say (virtual machines)."""
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def others_load(seconds: float = 1.0) -> float:
    """Busy CPUs during the next `seconds`, while this process sleeps: what others take."""
    share: float = psutil.cpu_percent(interval=seconds) / 100
    return share * (psutil.cpu_count() or 1)


def describe() -> dict[str, str]:
    """The machine as the report's header has it. Takes a second: it watches what else runs."""
    machine = read_machine()
    busy = others_load()
    facts = {
        "cpu": cpu_name(),
        "cores": f"{machine.cores()} of {psutil.cpu_count(logical=False) or os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "gpu": gpu_names() or "none",
        "system": f"{platform.system()} {platform.release()}",
        "governor": governor() or "unknown",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "other load": f"{busy:.2f} CPUs" + (" (not a quiet machine)" if busy > BUSY * machine.cores() else ""),
    }
    return facts


def sha256(paths: list[Path], progress: Callable[[float], None] = lambda f: None) -> str:
    """Hex SHA-256 over all shards of a model, one after the other. Reads them, so the file cache is warm after it."""
    total, done = sum(p.stat().st_size for p in paths) or 1, 0
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                done += len(block)
                progress(done / total)
    return digest.hexdigest()
