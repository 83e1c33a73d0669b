"""The KV cells of a segment on the device: one allocation for all layers of one shape, and the host's moves on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.kernels.activations import quantize
from ftgguf.kernels.formats import Activation
from ftgguf.kernels.kvcache import KVCache
from ftgguf.layers.params import Attention
from ftgguf.nouns import I32

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.int8}
STORED_AS = {"q4_0": "q8_0", "q4_1": "q8_0", "iq4_nl": "q8_0", "q5_0": "q8_0", "q5_1": "q8_0"}
"""KV types that the device stores as another one."""
COPIED = 1024
"""Cells moved at once: half a context at once would need as much memory again."""
_ORDER = ("q8_0", "f16", "bf16", "f32")


def kv_kind(type_k: str, type_v: str, attentions: Sequence[Attention] = ()) -> tuple[str, list[str]]:
    """The one type that the device's cells have for `-ctk`/`-ctv`, and a line for each thing that is not as asked.

    K and V share a type here: the more precise of the two. Q8_0 needs head sizes that are multiples of 32.
    """
    notes = []
    for flag, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind in STORED_AS:
            notes.append(f"{flag} {kind}: the GPU stores this cache as {STORED_AS[kind]}")
    k, v = STORED_AS.get(type_k, type_k), STORED_AS.get(type_v, type_v)
    kind = max(k, v, key=_ORDER.index)
    if k != v:
        notes.append(f"-ctk {type_k} with -ctv {type_v}: on the GPU both are stored as {kind}")
    if kind == "q8_0" and any(a.head_dim % 32 or a.v_dim % 32 for a in attentions):
        notes.append("q8_0 cells need heads of a multiple of 32 elements: the GPU stores this model's as f16")
        kind = "f16"
    return kind, notes


def cell_bytes(attentions: Sequence[Attention], kind: str) -> int:
    """Bytes of one cell over `attentions`."""
    total = 0
    for a in attentions:
        for dim in (a.head_dim, a.v_dim):
            total += a.kv_heads * (dim * DTYPES[kind].itemsize + (dim // 32 * 2 if kind == "q8_0" else 0))
    return total


@contextlib.contextmanager
def _room(n: int) -> Iterator[None]:
    """What moves `n` cells: a device without room for it refuses in a line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"the GPU has no memory to move {n} KV cells: lower -c or raise --vram-budget") from error


def in_parts(n: int, move: Callable[[int, int], None]) -> None:
    """Call `move(first, last)` over the cells [0, n): COPIED at a time, fewer where the device has no room for so many.

    A call that raises torch's OutOfMemoryError is made again for fewer cells: up to there it must have changed nothing,
    or what it does again. Raises MemoryError where not even one cell can be moved.
    """
    at, size = 0, COPIED
    while at < n:
        try:
            move(at, min(at + size, n))
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise MemoryError("the GPU has no memory to move a KV cell: lower -c or raise --vram-budget") from error
            size = max(1, size // 4)
            torch.cuda.empty_cache()
        else:
            at += size


class CudaCells:
    """`caches[i]` serves the segment's i-th block; layers of one shape lie behind each other in one tensor."""

    def __init__(self, memory: DeviceMemory, attentions: Sequence[Attention], n_cells: int, kind: str) -> None:
        self.n_cells = n_cells
        self.kind = kind
        self.device = memory.device
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for i, a in enumerate(attentions):
            shapes.setdefault((a.kv_heads, a.head_dim, a.v_dim), []).append(i)
        self.pools: list[torch.Tensor] = []
        """[layers, cells, ...] each; `read` takes them in this order."""
        self._groups: list[tuple[list[int], int]] = []
        """(layers, number of tensors) of each shape."""
        for (heads, hd, hv), layers in shapes.items():
            planes = [(dim, DTYPES[kind]) for dim in (hd, hv)]
            if kind == "q8_0":
                planes += [(dim // 32, torch.float16) for dim in (hd, hv)]
            tensors = [memory.tensor("KV", (len(layers), n_cells, heads, d), t, zero=True) for d, t in planes]
            self.pools += tensors
            self._groups.append((layers, len(tensors)))
        self._make_views()

    def _make_views(self) -> None:
        made: dict[int, KVCache] = {}
        at = 0
        for layers, n in self._groups:
            for j, i in enumerate(layers):
                made[i] = KVCache(*[t[j] for t in self.pools[at : at + n]])
            at += n
        self.caches = [made[i] for i in range(len(made))]

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell over all layers."""
        return sum(p[:, 0].numel() * p.element_size() for p in self.pools)

    def resize(self, memory: DeviceMemory, n_cells: int) -> None:
        """Memory for `n_cells` cells: those below keep their contents, new ones are zero. Addresses change.

        The device must be idle. Raises MemoryError where the budget has no room; everything is as before then.
        """
        grown = (n_cells - self.n_cells) * self.cell_bytes
        if memory.left is not None and grown > memory.left:
            raise MemoryError(f"no room on the GPU for {n_cells} KV cells: {grown >> 20} MiB more are needed")
        keep = min(n_cells, self.n_cells)
        for i, old in enumerate(self.pools):
            # Old and new at once where there is room for both, by way of host memory where there is not.
            shape, held = tuple(old.shape), old.numel() * old.element_size()
            size = held // shape[1] * n_cells
            if memory.left is not None and size > memory.left:
                self.pools[i] = old = old[:, :keep].cpu()
                self._release(memory, held)
                held = 0
            try:
                new = memory.tensor("KV", (shape[0], n_cells, *shape[2:]), old.dtype, zero=True)
            except MemoryError:
                if not held:  # a smaller one failed to grow: its own size was there a moment ago
                    self.pools[i] = memory.tensor("KV", shape, old.dtype)
                    self.pools[i].copy_(old)
                self._make_views()
                raise
            new[:, :keep].copy_(old[:, :keep])
            self.pools[i] = new
            del old
            self._release(memory, held)
        self.n_cells = n_cells
        self._make_views()

    def _release(self, memory: DeviceMemory, nbytes: int) -> None:
        """Bytes of a tensor that was just let go: no view of it may be left."""
        self.caches = []
        memory.held["KV"] -= nbytes
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _index(self, cells: I32) -> torch.Tensor:
        if len(cells) and (cells.min() < 0 or cells.max() >= self.n_cells):
            raise IndexError(f"cells {int(cells.min())}..{int(cells.max())} are not all in a pool of {self.n_cells}")
        return torch.from_numpy(np.ascontiguousarray(cells, np.int64)).to(self.device)

    def copy(self, src: I32, dst: I32) -> None:
        """Cell src[i] to cell dst[i] in every layer; the sets are disjoint. Raises MemoryError as `in_parts`."""
        a, b = self._index(src), self._index(dst)

        def move(first: int, last: int) -> None:
            for pool in self.pools:
                pool.index_copy_(1, b[first:last], pool.index_select(1, a[first:last]))

        in_parts(len(src), move)

    def read(self, cells: I32) -> bytes:
        """The cells' bytes, cell after cell, each with its layers in the order of `pools`. Raises MemoryError where the
        device has no room to gather them."""
        at = self._index(cells)
        parts = []
        with _room(len(cells)):
            for pool in self.pools:
                picked = pool.index_select(1, at).transpose(0, 1).reshape(len(cells), -1).contiguous()
                parts.append(picked.view(torch.uint8))
            if not parts or not len(cells):
                return b""
            return bytes(torch.cat(parts, 1).cpu().numpy())

    def write(self, cells: I32, data: bytes) -> None:
        """The inverse of `read`. Raises ValueError for data of another length, MemoryError as `read`."""
        at = self._index(cells)
        widths = [p[:, 0].numel() * p.element_size() for p in self.pools]
        if len(data) != len(cells) * sum(widths):
            raise ValueError(
                f"{len(data)} bytes do not fit {len(cells)} cells of {sum(widths)}: saved with another model or KV type"
            )
        if not len(cells):
            return
        with _room(len(cells)):
            rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(cells), -1).to(self.device)
            start = 0
            for pool, width in zip(self.pools, widths, strict=True):
                part = rows[:, start : start + width].contiguous().view(pool.dtype)
                part = part.view(len(cells), pool.shape[0], *pool.shape[2:]).transpose(0, 1).contiguous()
                pool.index_copy_(1, at, part)
                start += width

    def keys(self, layer: int, cells: torch.Tensor) -> torch.Tensor:
        """K of `cells` (int64 on the device) in `layer` as float32 [cells, heads, dim]."""
        cache = self.caches[layer]
        k = cache.k.index_select(0, cells).float()
        if cache.k_scale is not None:
            scale = cache.k_scale.index_select(0, cells).float()
            k = (k.view(*k.shape[:2], -1, 32) * scale[..., None]).view(k.shape)
        return k

    def set_keys(self, layer: int, cells: torch.Tensor, k: torch.Tensor) -> None:
        """Store float32 [cells, heads, dim] as K of `cells` in `layer`. Takes its memory before it changes anything."""
        cache = self.caches[layer]
        if cache.k_scale is None:
            cache.k.index_copy_(0, cells, k.to(cache.k.dtype))
            return
        n, heads, dim = k.shape
        planes = quantize(k.reshape(n, heads * dim).contiguous(), Activation.Q8_0)
        scales = planes.d[..., 0].reshape(n, heads, dim // 32).half()
        cache.k.index_copy_(0, cells, planes.q.view(n, heads, dim))
        cache.k_scale.index_copy_(0, cells, scales)
