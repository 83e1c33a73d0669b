"""`ftgguf doctor`: what this machine has, what ftgguf makes of it, and what will not work, each with its cure."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from ftgguf import __version__
from ftgguf.arguments import Parser
from ftgguf.engine import devices
from ftgguf.engine.memory import available_memory
from ftgguf.flags.machine import read_machine

GIB = 1 << 30
Row = tuple[str, str]


def main(argv: list[str]) -> int:
    """Print the report; the exit status is 1 when something is wrong that has a cure."""
    Parser(prog="ftgguf doctor", description=__doc__).parse_args(argv)
    rows, problems, hints = report()
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}")
    print()
    for line in problems or ["Nothing is in the way."]:
        print(f"! {line}" if problems else line)
    for line in hints:
        print(f"- {line}")
    return 1 if problems else 0


def report() -> tuple[list[Row], list[str], list[str]]:
    """(what was found, what will not work, what may matter)."""
    rows: list[Row] = [("ftgguf", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")]
    problems: list[str] = []
    _gpu(rows, problems)
    _software(rows, problems)
    _cpu(rows)
    _memory(rows, problems)
    locked = lock_hints(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], bool(devices.list_devices()))
    return rows, problems, locked + huge_page_hints(_huge_pages())


def _gpu(rows: list[Row], problems: list[str]) -> None:
    found = devices.list_devices()
    driver = devices.driver()
    if not found:
        what = "a driver is loaded, but no GPU is visible" if Path("/proc/driver/nvidia").exists() else "none found"
        rows.append(("GPU", f"{what}: models run on the CPU"))
        return
    if driver is not None:
        rows.append(("driver", f"{driver.version or '?'}, CUDA {driver.cuda[0]}.{driver.cuda[1]}"))
    for device in found:
        capability = ".".join(map(str, device.capability))
        rows.append((device.id, f"{device.line().split(': ', 1)[1]}, compute capability {capability}"))
        rows.append(("  link", _link(device)))
        wrong = devices.problem(device, driver)
        if wrong is not None and wrong not in problems:
            problems.append(wrong)


def _link(device: devices.Device) -> str:
    if device.link is None:
        return "unknown (the management library does not say)"
    generation, lanes = device.link
    text = f"PCIe {generation} x{lanes}, {devices.link_rate(device.link) / 1e9:.1f} GB/s each way"
    if device.link_max is not None and device.link_max != device.link:
        text += f" (PCIe {device.link_max[0]} x{device.link_max[1]} under load at most)"
    return text


def _software(rows: list[Row], problems: list[str]) -> None:
    try:
        built = devices.torch_cuda()
        kind = f"for CUDA {built[0]}.{built[1]}" if built else "CPU only"
        rows.append(("torch", f"{_version('torch')}, {kind}"))
        rows.append(("triton", _version("triton")))
    except devices.DeviceError as error:
        rows.append(("torch", str(error)))
    compiler = devices.compiler_problem()
    rows.append(("C compiler", compiler or "found, and Python's headers"))
    if compiler is not None and devices.list_devices():
        problems.append(compiler)
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    kernels = sum(1 for _ in cache.glob("*/*.cubin")) if cache.is_dir() else 0
    rows.append(("kernel cache", f"{cache}, {kernels} compiled kernels"))
    if devices.list_devices() and not os.access(cache if cache.is_dir() else Path.home(), os.W_OK):
        problems.append(f"the kernel cache {cache} cannot be written, so every start compiles: set TRITON_CACHE_DIR")


def _cpu(rows: list[Row]) -> None:
    machine = read_machine()
    quota = "" if machine.quota is None else f", limited to {machine.quota:g} CPUs"
    rows.append(("CPU", f"{_cpu_name()}: {machine.cores()} cores, {len(machine.allowed)} threads{quota}"))
    rows.append(("NUMA nodes", str(max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))))))
    try:
        from ftgguf import _ggml_cpu as native

        features = [name for name, there in native.cpu_features().items() if there]
        rows.append(("ggml", f"{native.ggml_version()}: {' '.join(features)}"))
    except ImportError as error:
        rows.append(("ggml", f"not loaded ({error})"))


def _memory(rows: list[Row], problems: list[str]) -> None:
    total, free = int(psutil.virtual_memory().total), available_memory()
    rows.append(("memory", f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available to this process"))
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    endless = soft == resource.RLIM_INFINITY
    bound = ", which does not bind this process: it has CAP_IPC_LOCK" if _may_lock() else ""
    rows.append(("huge pages", _huge_pages() or "not available"))
    rows.append(("locked memory", "no limit" if endless else f"{soft / GIB:.2f} GiB (ulimit -l){bound}"))
    if "microsoft" in platform.release().lower():
        problems.append("WSL: about half of the memory can be page-locked; larger expert pools are partly pinned")


def lock_hints(limit: int, gpu: bool) -> list[str]:
    """What a limit on locked memory of `limit` bytes (RLIM_INFINITY: none) means for a machine with a `gpu` or without.

    A hint and no fault: NVIDIA's driver for Linux pins by pin_user_pages, which the limit does not bind, so that on
    most machines a small one (8 MiB is usual) costs nothing; where something else enforces it, start-up says how much
    of the pool was pinned.
    """
    if limit == resource.RLIM_INFINITY or limit >= psutil.virtual_memory().total or _may_lock():
        return []
    size = f"{limit / GIB:.2f} GiB" if limit >= GIB // 100 else f"{limit / 1024:.0f} KiB"
    cure = "raise it with 'ulimit -l unlimited', or memlock in /etc/security/limits.conf"
    if gpu:
        return [
            f"locked memory is limited to {size}: pinning of the expert pool may be capped there, and --mlock is. If "
            f"the server says at its start that the pool is pinned in part, {cure}"
        ]
    return [
        f"locked memory is limited to {size}: --mlock, and a GPU's expert pool if there were one, may need more: {cure}"
    ]


def _huge_pages() -> str:
    """The system's choice for transparent huge pages, which the engine asks for with madvise; "" where it has none."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def huge_page_hints(chosen: str) -> list[str]:
    """What the system's choice means for weights in memory."""
    if chosen != "never":
        return []
    return [
        "transparent huge pages are switched off: the CPU reads weights up to a third slower. Cure: echo madvise | "
        "sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    ]


def _may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK, which no limit binds."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
        return bool(int(line.split()[1], 16) >> 14 & 1)
    except (OSError, StopIteration, ValueError, IndexError):
        return False


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    raise SystemExit(main([]))
