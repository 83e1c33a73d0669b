"""A kernel that writes where nothing is, for tests of what the engine does then."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _write(x, address):
    tl.store(address.to(tl.pointer_type(tl.int32)), tl.load(x))


def write(device: torch.device) -> Any:
    """Queue the store to an address that nothing can have; the device is lost from then on."""
    _write[(1,)](torch.ones(1, dtype=torch.int32, device=device), 1 << 60)
