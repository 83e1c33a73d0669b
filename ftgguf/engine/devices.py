"""Which GPUs there are, whether this installation can use them, and which one a configuration means. No torch here.

Found through the driver's own libraries (libcuda, libnvidia-ml) by ctypes: the numbering is CUDA's, so it honours
CUDA_VISIBLE_DEVICES and agrees with torch's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ftgguf.flags.config import PlacementConfig
from ftgguf.models.config import ModelError

MIB = 1 << 20
OLDEST = (8, 0)
"""Compute capability from which the kernels run: bfloat16 tensor-core products (Ampere, RTX 30, A100)."""
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*."""
_MEMORY_CLOCK, _BUS_WIDTH = 36, 37
"""CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE (kHz) and _GLOBAL_MEMORY_BUS_WIDTH (bits)."""


PCIE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane in one direction, by PCIe generation."""


class DeviceError(ModelError):
    """A GPU was asked for and cannot be used: one line with the cause and the cure."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Sizes in bytes; `free` and the link are None where the management library is missing."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int | None = None
    link: tuple[int, int] | None = None
    """PCIe (generation, lanes) now; idle cards may run slower than `link_max`."""
    link_max: tuple[int, int] | None = None
    bandwidth: float | None = None
    """Bytes/s of its memory by clock and bus width; None where the driver does not tell."""

    @property
    def id(self) -> str:
        return f"CUDA{self.index}"

    def line(self) -> str:
        """As llama.cpp's --list-devices prints a device."""
        free = self.total if self.free is None else self.free
        return f"{self.id}: {self.name} ({self.total // MIB} MiB, {free // MIB} MiB free)"


def link_rate(link: tuple[int, int]) -> float:
    """Bytes/s in one direction of a PCIe link of (generation, lanes); 0 for a generation that is not known."""
    generation, lanes = link
    return PCIE_GB_S.get(generation, 0.0) * lanes * 1e9


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda` is the newest CUDA version that the driver supports, as (major, minor)."""

    cuda: tuple[int, int]
    version: str


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _library(*names: str) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def _cuda() -> ctypes.CDLL | None:
    """libcuda after cuInit, or None: no driver, or no GPU behind it."""
    lib = _library("libcuda.so.1", "libcuda.so")
    return lib if lib is not None and lib.cuInit(0) == 0 else None


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    lib = _library("libnvidia-ml.so.1", "libnvidia-ml.so")
    return lib if lib is not None and lib.nvmlInit_v2() == 0 else None


def driver() -> Driver | None:
    """The NVIDIA driver, or None where there is none or it finds no GPU."""
    lib = _cuda()
    if lib is None:
        return None
    number = ctypes.c_int()
    lib.cuDriverGetVersion(ctypes.byref(number))
    text = ctypes.create_string_buffer(96)
    nvml = _nvml()
    if nvml is not None:
        nvml.nvmlSystemGetDriverVersion(text, 96)
    return Driver((number.value // 1000, number.value % 1000 // 10), text.value.decode())


def list_devices() -> list[Device]:
    """The GPUs that CUDA shows to this process, in its order."""
    lib = _cuda()
    if lib is None:
        return []
    count = ctypes.c_int()
    lib.cuDeviceGetCount(ctypes.byref(count))
    return [_describe(lib, i) for i in range(count.value)]


def _describe(lib: ctypes.CDLL, index: int) -> Device:
    handle = ctypes.c_int()
    lib.cuDeviceGet(ctypes.byref(handle), index)
    name = ctypes.create_string_buffer(256)
    lib.cuDeviceGetName(name, 256, handle)
    total = ctypes.c_size_t()
    lib.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    values = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MEMORY_CLOCK, _BUS_WIDTH):
        value = ctypes.c_int()
        lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        values.append(value.value)
    # two transfers a clock
    bandwidth = 2e3 * values[2] * values[3] / 8 or None
    managed = _managed(lib, handle)
    link, link_max = _links(managed)
    return Device(
        index=index,
        name=name.value.decode(),
        capability=(values[0], values[1]),
        total=total.value,
        free=_free(managed),
        link=link,
        link_max=link_max,
        bandwidth=bandwidth,
    )


def _managed(lib: ctypes.CDLL, handle: ctypes.c_int) -> ctypes.c_void_p | None:
    """The management library's handle of a CUDA device, found by its PCI address."""
    nvml = _nvml()
    if nvml is None:
        return None
    address = ctypes.create_string_buffer(32)
    found = ctypes.c_void_p()
    if lib.cuDeviceGetPCIBusId(address, 32, handle) or nvml.nvmlDeviceGetHandleByPciBusId_v2(
        address, ctypes.byref(found)
    ):
        return None
    return found


def _free(managed: ctypes.c_void_p | None) -> int | None:
    nvml = _nvml()
    memory = _Memory()
    if managed is None or nvml is None or nvml.nvmlDeviceGetMemoryInfo(managed, ctypes.byref(memory)):
        return None
    return int(memory.free)


def _links(managed: ctypes.c_void_p | None) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    nvml = _nvml()
    if managed is None or nvml is None:
        return None, None
    pairs: list[tuple[int, int] | None] = []
    for kind in ("Curr", "Max"):
        values = []
        for what in ("Generation", "Width"):
            value = ctypes.c_uint()
            if getattr(nvml, f"nvmlDeviceGet{kind}PcieLink{what}")(managed, ctypes.byref(value)):
                break
            values.append(value.value)
        pairs.append((values[0], values[1]) if len(values) == 2 else None)
    return pairs[0], pairs[1]


def free_memory(index: int) -> int | None:
    """Free bytes of device `index`, this process's own use not counted as free; None where nobody can say."""
    lib = _cuda()
    if lib is None:
        return None
    handle = ctypes.c_int()
    lib.cuDeviceGet(ctypes.byref(handle), index)
    return _free(_managed(lib, handle))


# ------------------------------------------------------------------------------------------------ can it be used?


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that the installed torch was built for, without importing it; None for a CPU build.

    Raises DeviceError where torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise DeviceError("torch is not installed, and the GPU needs it: pip install 'ftgguf[gpu]'")
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*'(\d+)\.(\d+)", version.read_text(), re.M)
    return (int(found[1]), int(found[2])) if found else None


def compiler_problem() -> str | None:
    """Triton compiles a small launcher in C on the first start: what it lacks, with the cure, or None."""
    compiler = os.environ.get("CC") or "gcc"
    if not (shutil.which(compiler) or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
        return "no C compiler, which Triton needs: install gcc (apt install gcc), or set CC to one"
    include = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not include.exists():
        return (
            f"Python's headers are missing ({include}), which Triton needs: install them (apt install python3-dev), "
            "or use a Python from a virtual environment that has them"
        )
    return None


def problem(device: Device, found: Driver | None) -> str | None:
    """Why `device` cannot be used, with the cure, or None."""
    if device.capability < OLDEST:
        have, want = (".".join(map(str, v)) for v in (device.capability, OLDEST))
        return (
            f"{device.id} ({device.name}) has compute capability {have}, the kernels need {want} or newer: use -ngl 0"
        )
    try:
        built = torch_cuda()
    except DeviceError as error:
        return str(error)
    if built is None:
        return "the installed torch is a CPU build: pip install --force-reinstall 'ftgguf[gpu]'"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, and the GPU needs it: pip install triton"
    if found is not None and found.cuda[0] < built[0]:
        return (
            f"the NVIDIA driver {found.version} supports CUDA {found.cuda[0]}.{found.cuda[1]}, torch was built for "
            f"{built[0]}.{built[1]}: update the driver, or install a torch for CUDA {found.cuda[0]}"
        )
    return compiler_problem()


def choose(placement: PlacementConfig) -> tuple[Device | None, str]:
    """The GPU to use and why, or (None, why not).

    Raises DeviceError where a GPU was named (-dev), or layers were asked onto one (-ngl N, -ngl all), and it is there
    but cannot be used, or the named one is not there. With nothing asked for, the CPU is used and the line says why.
    """
    if placement.devices == ():
        return None, "-dev none"
    if not placement.kv_offload:
        return None, "--no-kv-offload keeps the KV in host memory, and a layer runs where its KV is"
    if placement.gpu_layers == 0:
        return None, "-ngl 0"
    devices = list_devices()
    named = placement.devices[0] if placement.devices else None
    if not devices:
        if named is not None:
            raise DeviceError(f"-dev {named}: no NVIDIA GPU or driver was found; use -dev none to run on the CPU")
        return None, "no NVIDIA GPU found"
    wanted = named or f"CUDA{placement.main_gpu}"
    device = next((d for d in devices if d.id == wanted), None)
    if device is None:
        flag = "-dev" if named else "-mg"
        there = ", ".join(d.id for d in devices)
        raise DeviceError(f"{flag} {named or placement.main_gpu}: no such GPU; there are: {there}")
    wrong = problem(device, driver())
    if wrong is None:
        return device, f"{device.id} ({device.name})"
    if named is not None or placement.gpu_layers != -1:
        raise DeviceError(wrong)
    return None, f"{device.id} is not used: {wrong}"


def listing() -> str:
    """What --list-devices prints."""
    lines = [f"  {device.line()}" for device in list_devices()]
    return "\n".join(["Available devices:", *lines]) if lines else "Available devices:\n  (none)"
