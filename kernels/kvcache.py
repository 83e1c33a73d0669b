"""The KV cache of one layer on the device: pages of cells, in f16, bf16 or Q8_0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE = 32
"""Cells in a page; ftgguf.nouns.PAGE."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """`k` [cells, HK, HD] and `v` [cells, HK, HV] of float16, bfloat16 or int8; for int8 (Q8_0) `k_scale` and
    `v_scale` are float16 [cells, HK, size / 32]. Cell = page * PAGE + offset."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def quantised(self) -> bool:
        return bool(self.k.dtype == torch.int8)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(k, v, k_scale, v_scale); for float caches the scales are placeholders."""
        return (self.k, self.v, self.k if self.k_scale is None else self.k_scale,
                self.v if self.v_scale is None else self.v_scale)  # fmt: skip


def make_cache(pages: int, heads: int, head_size: tuple[int, int], kind: str, device: torch.device | str) -> KVCache:
    """A cache of `pages` pages. `kind`: `f16`, `bf16` or `q8_0` (head sizes multiples of 32)."""
    cells = pages * PAGE
    hd, hv = head_size
    if kind == "q8_0":
        if hd % 32 or hv % 32:
            raise ValueError(f"q8_0 KV needs head sizes that are multiples of 32, not {hd} and {hv}: use f16")
        return KVCache(
            torch.zeros(cells, heads, hd, dtype=torch.int8, device=device),
            torch.zeros(cells, heads, hv, dtype=torch.int8, device=device),
            torch.zeros(cells, heads, hd // 32, dtype=torch.float16, device=device),
            torch.zeros(cells, heads, hv // 32, dtype=torch.float16, device=device),
        )
    types = {"f16": torch.float16, "bf16": torch.bfloat16}
    if kind not in types:
        raise ValueError(f"KV type {kind!r} is not supported on the GPU: use f16, bf16 or q8_0")
    return KVCache(
        torch.zeros(cells, heads, hd, dtype=types[kind], device=device),
        torch.zeros(cells, heads, hv, dtype=types[kind], device=device),
    )
