"""Registering host memory with the CUDA driver: kernels then read it by pointer, and copies run at the link's rate."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import weakref
from pathlib import Path

import torch

_MAPPED = 2
"""cudaHostRegisterMapped: the device sees the same address under unified addressing."""


class CudaPinner:
    """`cudaHostRegister` through torch's runtime library, so that both use one context."""

    def __init__(self) -> None:
        self.runtime = torch.cuda.cudart()

    def register(self, address: int, nbytes: int) -> str:
        """See experts.bank.Pinner."""
        code = int(self.runtime.cudaHostRegister(address, nbytes, _MAPPED))
        if code == 0:
            return ""
        self._forget_error()
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "" if soft == resource.RLIM_INFINITY else f", RLIMIT_MEMLOCK is {soft} bytes"
        return f"cudaHostRegister refused {nbytes} bytes with error {code}{limit}"

    def unregister(self, address: int) -> None:
        self.runtime.cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """The runtime remembers the last error and the next kernel launch would report it."""
        with contextlib.suppress(AttributeError, OSError, StopIteration):
            maps = Path("/proc/self/maps").read_text().split()
            ctypes.CDLL(next(word for word in maps if "libcudart" in word)).cudaGetLastError()


def cuda_pinner(device: torch.device) -> CudaPinner | None:
    """The pinner of `device`; None without CUDA, where the GPU's kernels run in the interpreter on host memory."""
    return CudaPinner() if device.type == "cuda" else None


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] in host memory that kernels on `device` read by its address. Registered, as torch's own pinned
    memory comes in powers of two (256 MiB for 166); torch's where the driver refuses. Raises torch's error then."""
    pinner = cuda_pinner(device)
    if pinner is None:
        return torch.empty(nbytes, dtype=torch.uint8)
    data = torch.empty(nbytes, dtype=torch.uint8)
    if pinner.register(data.data_ptr(), nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(data, pinner.unregister, data.data_ptr())
    return data
