"""A batch's integers on their way to the device: one pinned buffer, one copy a pass, addresses that never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ftgguf.kernels.attention import prefill_tiles
from ftgguf.nouns import I32, PAGE, Batch
from ftgguf.ops.cuda import ATTENTION_ROWS, Rows

TILE_ROWS = 64
"""Rows of one attention tile (kernels.attention.prefill_tiles)."""


class Inputs:
    """Fields for up to `max_rows` rows of up to `max_sequences` sequences of up to `max_pages` pages. `tiled` False:
    attention takes every row by itself, however many there are, so that a captured pass does not depend on which rows
    are of one sequence."""

    def __init__(
        self, device: torch.device, max_rows: int, max_sequences: int, max_pages: int, *, tiled: bool = True
    ) -> None:
        self.device = device
        self.max_rows, self.max_sequences, self.max_pages = max_rows, max_sequences, max_pages
        self.tiled_above = ATTENTION_ROWS if tiled else max_rows
        self.max_tiles = max_rows if max_rows > self.tiled_above else 1
        sizes = {
            "token": max_rows, "position": max_rows, "sequence": max_rows, "cell": max_rows, "outputs": max_rows,
            "tiles": 3 * self.max_tiles, "table": max_sequences * max_pages,
        }  # fmt: skip
        self.at: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            self.at[name] = (end, size)
            end += -(-size // 4) * 4
        pinned = device.type == "cuda"
        self.staged = torch.zeros(end, dtype=torch.int32, pin_memory=pinned)
        self.host: I32 = self.staged.numpy()
        self.on_device = torch.zeros(end, dtype=torch.int32, device=device)
        self.copied: Any = torch.cuda.Event() if pinned else None

    @property
    def nbytes(self) -> int:
        return int(self.on_device.numel()) * 4

    def _field(self, name: str) -> torch.Tensor:
        start, size = self.at[name]
        return self.on_device[start : start + size]

    def _put(self, name: str, values: Any, n: int) -> None:
        start, size = self.at[name]
        if n > size:
            raise ValueError(f"a batch with {n} of '{name}', the executor takes {size}")
        self.host[start : start + n] = values

    def tiles_for(self, rows: int) -> int:
        """Attention tiles that a pass of `rows` rows has at most: a run more for each sequence, and one of padding."""
        return min(self.max_tiles, -(-rows // TILE_ROWS) + self.max_sequences)

    def fill(self, batch: Batch, rows: int, outputs: int | None = None, *, fixed: bool = False) -> None:
        """Copy `batch` over, padded to `rows` with rows that write nothing, and to `outputs` with output row 0.

        `fixed`: repeat the last attention tile up to `tiles_for(rows)`, so that a captured pass fits every batch.
        """
        if self.copied is not None:
            self.copied.synchronize()
        n = batch.rows
        pad = rows - n
        for name, values, padding in (
            ("token", batch.token, 0), ("position", batch.position, 0), ("sequence", batch.sequence, 0),
            ("cell", batch.cell, -1),
        ):  # fmt: skip
            self._put(name, values, n)
            if pad:
                start = self.at[name][0]
                self.host[start + n : start + rows] = padding
        n_outputs = len(batch.outputs)
        self._put("outputs", batch.outputs, n_outputs)
        if outputs is not None and outputs > n_outputs:
            start = self.at["outputs"][0]
            self.host[start + n_outputs : start + outputs] = 0
        if len(batch.tables) > self.max_sequences:
            raise ValueError(f"{len(batch.tables)} sequences in a batch, the executor takes {self.max_sequences}")
        start = self.at["table"][0]
        for s, table in enumerate(batch.tables):
            pages = table[::PAGE]
            if len(pages) > self.max_pages:
                raise ValueError(f"a sequence of {len(table)} cells, the executor takes {self.max_pages * PAGE}")
            at = start + s * self.max_pages
            np.floor_divide(pages, PAGE, out=self.host[at : at + len(pages)])
        self._tiles(batch, rows, fixed)
        used = start + len(batch.tables) * self.max_pages
        self.on_device[:used].copy_(self.staged[:used], non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def _tiles(self, batch: Batch, rows: int, fixed: bool) -> None:
        self.n_tiles = 0
        if rows <= self.tiled_above:
            return
        edges = np.flatnonzero(np.diff(batch.sequence)) + 1
        starts = [0, *edges.tolist()]
        ends = [*edges.tolist(), batch.rows]
        runs = [(a, b - a, int(batch.sequence[a])) for a, b in zip(starts, ends, strict=True)]
        if rows > batch.rows:
            runs.append((batch.rows, rows - batch.rows, 0))
        tiles = prefill_tiles(runs, TILE_ROWS)
        if fixed:
            tiles += tiles[-1:] * (self.tiles_for(rows) - len(tiles))
        self.n_tiles = len(tiles)
        self._put("tiles", np.asarray(tiles, np.int32).reshape(-1), 3 * len(tiles))

    def rows(self, rows: int, n_outputs: int, *, all_outputs: bool) -> Rows:
        """Views on the device's fields for a pass of `rows` rows."""
        tiles = None
        if rows > self.tiled_above:
            tiles = self._field("tiles")[: 3 * self.n_tiles].view(-1, 3)
        return Rows(
            token=self._field("token")[:rows],
            position=self._field("position")[:rows],
            sequence=self._field("sequence")[:rows],
            cell=self._field("cell")[:rows],
            table=self._field("table").view(self.max_sequences, self.max_pages),
            tiles=tiles,
            outputs=None if all_outputs else self._field("outputs")[:n_outputs],
            n_outputs=rows if all_outputs else n_outputs,
        )


def check_pages(batch: Batch) -> None:
    """ValueError unless every sequence's cells come in whole pages: cell = page * PAGE + position % PAGE, which is
    what ftgguf.kv hands out and what the kernels' page tables can express. Checks each page's first cell and the
    cells written."""
    for table in batch.tables:
        if len(table) and np.any(table[::PAGE] % PAGE):
            raise ValueError("a page table entry does not start at a page: the device needs whole pages")
    if np.any((batch.cell - batch.position) % PAGE):
        raise ValueError("a row's cell and position differ within the page: the device needs whole pages")
