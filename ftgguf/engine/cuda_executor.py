"""The executor of a segment on a CUDA device: paged cells, captured decode, prefill in one eager pass a chunk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftgguf.engine.cuda_cells import CudaCells, in_parts
from ftgguf.engine.cuda_experts import ExpertStore
from ftgguf.engine.cuda_graphs import Graphs
from ftgguf.engine.cuda_inputs import Inputs, check_pages
from ftgguf.engine.device_memory import DeviceMemory
from ftgguf.engine.executor import ExecutorLost, NotSupported
from ftgguf.engine.pass_sizes import graph_rows, prompt_rows
from ftgguf.layers.block import segment
from ftgguf.layers.params import Decoder
from ftgguf.nouns import F32, I32, PAGE, Batch
from ftgguf.ops.cuda import CudaOps, RopeTables, Rows

if TYPE_CHECKING:
    from ftgguf.engine.elastic import Elastic

HEAD_ROWS = 64
"""Rows whose logits exist at once: 64 rows of a vocabulary of 152k are 39 MB."""
MAKE_ROOM = 8
"""Tries of a pass that finds no memory, each after the expert cache gave some back."""
log = logging.getLogger(__name__)


class CudaExecutor:
    """Blocks [first, last) of a model on one device (engine.executor.Executor for a whole model).

    `decode_rows`: batches of up to so many rows run as captured graphs (`--parallel`), of which every row's logits may
    be wanted; `eager` runs the same passes without capture (`--debug-eager`). `short_rows`: further row counts with a
    graph, for prompts of a few rows, with the logits of at most `decode_rows` rows; for a store that `takes_short`. On
    a CPU device (the Triton interpreter) everything is eager.
    """

    recurrent = False

    def __init__(
        self,
        memory: DeviceMemory,
        model: Decoder,
        store: ExpertStore,
        *,
        n_cells: int,
        max_rows: int,
        decode_rows: int,
        max_sequences: int,
        kv: str = "f16",
        eager: bool = False,
        first: int = 0,
        last: int | None = None,
        start_cells: int | None = None,
        short_rows: tuple[int, ...] = (),
    ) -> None:
        """`n_cells` are the numbers that batches may use, `start_cells` those that have memory at first (all)."""
        self.memory, self.device = memory, memory.device
        self.model, self.store = model, store
        self.first, self.last = first, len(model.blocks) if last is None else last
        self.final = self.last == len(model.blocks)
        self.n_vocab = model.n_vocab
        self.n_cells = -(-n_cells // PAGE) * PAGE
        self.max_rows = max(max_rows, decode_rows)
        self.captures = self.device.type == "cuda" and not eager
        attentions = [b.attention for b in model.blocks[self.first : self.last]]
        start = self.n_cells if start_cells is None else -(-start_cells // PAGE) * PAGE
        self.cells = CudaCells(memory, attentions, min(start, self.n_cells), kv)
        self.elastic: Elastic | None = None
        self.expert_room: int | None = None
        """Bytes that experts may have at most once every cell has memory, by the plan; None without one."""
        self.ropes = RopeTables(self.device)
        sizes = graph_rows(decode_rows)
        self.decode_top = top = sizes[-1]
        """Rows up to which a pass is decode's; logits of so many rows are kept."""
        self.sizes = sizes + [rows for rows in sorted(short_rows) if top < rows <= self.max_rows]
        pages = self.n_cells // PAGE
        self.small = Inputs(self.device, self.sizes[-1], max(max_sequences, top), pages, tiled=False)
        self.large = Inputs(self.device, self.max_rows, max(max_sequences, top), pages)
        memory.reserve("inputs", self.small.nbytes + self.large.nbytes)
        width = self.n_vocab if self.final else model.n_embd
        self.result = memory.tensor("logits", (top, width), torch.float32)
        pinned = self.device.type == "cuda"
        self.hidden = memory.tensor("inputs", (self.max_rows, model.n_embd), torch.float32) if first else None
        self.host_hidden = torch.empty(self.max_rows, model.n_embd, pin_memory=pinned) if first else None
        host_rows = max(top, HEAD_ROWS) if self.final else self.max_rows
        self.host_result = torch.empty(host_rows, width, pin_memory=pinned)
        self.after_warm_up: Callable[[], None] = lambda: None
        """Called when every kernel is compiled."""
        self.graphs = Graphs(memory)

    # ------------------------------------------------------------------------------------------------- the passes

    def _ops(self, rows: Rows) -> CudaOps:
        return CudaOps(rows, self.cells.caches, self.ropes, self.store, self.first)

    def _pass(self, rows: Rows, h: Any) -> torch.Tensor | None:
        """Logits of the wanted rows, or the hidden state of all; None where no logits are wanted."""
        ops = self._ops(rows)
        out = segment(ops, self.model, self.first, self.last, h)
        return out if out is None or self.final else ops.finish(out)

    def _decode(self, rows: int) -> None:
        """The pass that a graph holds: `small` and `hidden` in, `result` out: of all rows up to `decode_top`, else of
        as many wanted ones."""
        h = None if self.hidden is None else self.hidden[:rows]
        n = min(rows, self.decode_top)
        out = self._pass(self.small.rows(rows, n, all_outputs=n == rows), h)
        assert out is not None
        self.result[:n].copy_(out)

    def warm_up(self) -> None:
        """Compile and load every kernel that the file's types need, then capture the decode graphs. Rows that write
        nothing: no cell changes."""
        with self._on_device():
            nothing = np.zeros(0, np.int32)
            for rows in self._prompt_sizes()[: None if self.captures else 1]:
                self._prefill(_dummy(rows, nothing), None, warming=True)
            for rows in self.sizes:
                outputs = np.arange(min(rows, self.decode_top), dtype=np.int32)
                self.small.fill(_dummy(rows, outputs), rows)
                self._decode(rows)
            self.after_warm_up()
            if not self.captures:
                return
            self.store.prompting = False
            self.graphs.capture(self.sizes, self._decode)

    def resize_cells(self, n_cells: int) -> None:
        """Have memory for `n_cells` cells, whole pages; contents below stay. A safe point: waits for the device.

        Captured passes hold the cells' addresses: they are captured again when they come. Raises MemoryError where
        there is no room (the cells are as before).
        """
        if n_cells % PAGE or not 0 < n_cells <= self.n_cells:
            raise ValueError(f"{n_cells} cells are no whole pages of {self.n_cells}")
        with self._on_device():
            self._wait()
            self.graphs.forget()
            self.cells.resize(self.memory, n_cells)

    def _prompt_sizes(self) -> list[int]:
        """Every size that prompts are padded to, the largest first: it takes the memory that the others find."""
        found = {prompt_rows(n, self.max_rows) for n in range(self.decode_top + 1, self.max_rows + 1)}
        return sorted(found, reverse=True)

    def rehearse(self, share: int, count: int) -> None:
        """Go through every `count`-th kind of pass from the `share`-th, for a process that only compiles."""
        passes = [(size, True) for size in self._prompt_sizes()] + [(size, False) for size in self.sizes]
        for size, prompt in passes[share::count]:
            inputs = self.large if prompt else self.small
            inputs.fill(_dummy(size, np.zeros(0, np.int32)), size, fixed=prompt)
            for outputs in (0, 1) if prompt else (min(size, self.decode_top),):
                h = None if self.hidden is None else self.hidden[:size]
                self._pass(inputs.rows(size, outputs, all_outputs=outputs == size), h)

    def forward(self, batch: Batch) -> F32:
        """See engine.executor.Executor.forward."""
        return self.run(batch)

    def run(self, batch: Batch, hidden: F32 | None = None) -> F32:
        """One pass: logits [outputs, vocab], or the hidden state [rows, n_embd] of a segment that is not the last.

        `hidden` float32 [rows, n_embd]: the hidden state of the segment before (or embeddings). Raises ValueError for
        a batch that does not fit, MemoryError (the executor lives on) and ExecutorLost.
        """
        hidden = batch.embedding if hidden is None else hidden
        if any(batch.adapters):
            raise NotSupported("LoRA adapters are applied on the CPU only: add -ngl 0")
        if not 0 < batch.rows <= self.max_rows:
            raise ValueError(f"a batch of {batch.rows} rows, the executor takes 1 to {self.max_rows}")
        check_pages(batch)
        for _ in range(MAKE_ROOM):
            try:
                return self._run(batch, hidden)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if not self._make_room(batch.rows):
                    break
        raise MemoryError(
            f"the GPU has no memory for {batch.rows} rows: lower -ub ({self.max_rows}) or raise --vram-budget"
        )

    def _make_room(self, rows: int) -> bool:
        """After a pass that found no memory: the expert cache gives some back, if it has any."""
        spare = self.store.abandon()
        if not spare:
            return False
        if self.elastic is not None:
            self.elastic.lend(spare)
        else:
            store: Any = self.store
            store.resize(store.budget - spare)
        log.warning("a pass of %d rows found no memory: the expert cache gave back %d MiB", rows, spare >> 20)
        return True

    def _run(self, batch: Batch, hidden: F32 | None) -> F32:
        try:
            with self._on_device():
                small = batch.rows <= self.decode_top or self._short(batch)
                decoding = small and (hidden is None) == (self.hidden is None) and not (batch.features and self.final)
                self.store.start(not decoding, batch.rows)
                if batch.features and self.final:
                    values = self._features(batch, hidden)
                else:
                    values = self._small(batch, hidden) if decoding else self._prefill(batch, hidden)
                self.store.finish(batch.rows, waited=len(values) > 0)
                return values
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.device.type == "cuda" and "CUDA" in str(error):
                raise ExecutorLost(
                    f"the GPU failed ({str(error).splitlines()[0]}); --debug-eager finds the kernel"
                ) from error
            raise

    def _short(self, batch: Batch) -> bool:
        """Whether a prompt's few rows run as decode's rows do: nothing is decided on the host then, layer by layer."""
        fits = batch.rows <= self.sizes[-1] and len(batch.outputs) <= self.decode_top
        return fits and self.store.takes_short(batch.rows)

    def _on_device(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _small(self, batch: Batch, hidden: F32 | None) -> F32:
        rows = next(size for size in self.sizes if size >= batch.rows)
        every = rows <= self.decode_top
        self.small.fill(batch, rows, None if every else self.decode_top)
        if hidden is not None:
            self._upload(hidden)
        graph = self.graphs.of(rows, self._decode)
        if graph is None:
            self._decode(rows)
        else:
            graph.replay()
        if self.final and not len(batch.outputs):
            return np.empty((0, self.n_vocab), np.float32)
        n = batch.rows if every else len(batch.outputs)
        self.host_result[:n].copy_(self.result[:n], non_blocking=True)
        self.store.overlap()
        self._wait()
        values: F32 = self.host_result[:n].numpy()
        if not self.final or len(batch.outputs) == n:
            return values
        return values[batch.outputs]  # of a decode pass whose other rows nobody wants

    def _prefill(self, batch: Batch, hidden: F32 | None, warming: bool = False) -> F32:
        n = len(batch.outputs)
        if self.captures and (hidden is None) == (self.hidden is None) and n <= self.decode_top:
            return self._prompt(batch, hidden)
        self.large.fill(batch, batch.rows)
        h = None
        if hidden is not None:
            h = self._upload(hidden)
        elif warming and self.hidden is not None:
            h = self.hidden[: batch.rows].zero_()
        rows = self.large.rows(batch.rows, n, all_outputs=n == batch.rows)
        if self.final and n > HEAD_ROWS:
            return self._many_outputs(batch, rows, h)
        return self._fetch(self._pass(rows, h), n)

    def _prompt(self, batch: Batch, hidden: F32 | None) -> F32:
        """A prompt's pass, padded to a size that others share and captured: the host takes some 3 ms a layer for an
        eager pass, more than a GPU does for a thousand rows."""
        n = len(batch.outputs)
        size = prompt_rows(batch.rows, self.max_rows)
        outputs = 0 if n == 0 or not self.final else 1 if n == 1 else self.decode_top
        self.large.fill(batch, size, outputs, fixed=True)
        h = None
        if self.hidden is not None:
            if hidden is not None:
                self._upload(hidden)
            h = self.hidden[:size]
        rows = self.large.rows(size, outputs, all_outputs=False)
        known = None
        if self.store.captures_prompts:
            known = self.graphs.prompt((size, outputs), lambda: self._pass(rows, h))
        if known is None:
            out = self._pass(rows, h)
            self.graphs.warm.add(size)
        else:
            known.graph.replay()
            out = known.out
        return self._fetch(out, n if self.final else batch.rows)

    def _fetch(self, out: torch.Tensor | None, n: int) -> F32:
        """The first `n` rows of a pass's result on the host."""
        if out is None or n == 0:
            return np.empty((0, self.n_vocab), np.float32)
        target = self.host_result[:n]
        target.copy_(out[:n], non_blocking=True)
        self._wait()
        values: F32 = target.numpy()
        return values

    def _many_outputs(self, batch: Batch, rows: Rows, h: Any) -> F32:
        """Logits of many rows (perplexity): the blocks once, the head on HEAD_ROWS rows at a time."""
        ops = self._ops(rows)
        ops.keep_hidden = True
        hidden = segment(ops, self.model, self.first, self.last, h)
        ops.keep_hidden = False
        assert hidden is not None
        n = rows.n_outputs
        result = np.empty((n, self.n_vocab), np.float32)
        for at in range(0, n, HEAD_ROWS):
            logits = ops.head(hidden[at : at + HEAD_ROWS].contiguous(), self.model.head)
            result[at : at + HEAD_ROWS] = logits.cpu().numpy()
        return result

    def _features(self, batch: Batch, hidden: F32 | None) -> F32:
        """The final norm of the wanted rows, in one eager pass."""
        n = len(batch.outputs)
        self.large.fill(batch, batch.rows)
        rows = self.large.rows(batch.rows, n, all_outputs=n == batch.rows)
        ops = self._ops(rows)
        ops.wants_features = True
        out = segment(ops, self.model, self.first, self.last, None if hidden is None else self._upload(hidden))
        if out is None:
            return np.empty((0, self.model.n_embd), np.float32)
        values: F32 = out.float().cpu().numpy()
        return values

    def _upload(self, hidden: F32) -> Any:
        n = len(hidden)
        if self.hidden is None or self.host_hidden is None:
            return torch.from_numpy(np.ascontiguousarray(hidden, np.float32)).to(self.device)
        self.host_hidden[:n].copy_(torch.from_numpy(np.ascontiguousarray(hidden, np.float32)))
        self.hidden[:n].copy_(self.host_hidden[:n], non_blocking=True)
        return self.hidden[:n]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # -------------------------------------------------------------------------------------------------- the cells

    def copy_cells(self, src: I32, dst: I32) -> None:
        self.cells.copy(src, dst)

    def read_cells(self, cells: I32) -> bytes:
        return self.cells.read(cells)

    def write_cells(self, cells: I32, data: bytes) -> None:
        self.cells.write(cells, data)

    def shift_cells(self, cells: I32, delta: int) -> None:
        """Rotate K of `cells` by `delta` positions, layer by layer, as llama.cpp's context shift does. Raises
        MemoryError as `cuda_cells.in_parts`."""
        at = torch.from_numpy(np.ascontiguousarray(cells, np.int64)).to(self.device)
        by = torch.full((len(cells),), delta, dtype=torch.int32, device=self.device)
        for i, block in enumerate(self.model.blocks[self.first : self.last]):
            rope = block.attention.rope
            if rope is None:
                raise NotSupported("the context of a model without RoPE cannot be shifted")

            def turn(first: int, last: int, i: int = i, rope: Any = rope) -> None:
                row = by[first:last]
                ops = CudaOps(Rows(row, row, row, row, row, None, None, 0), (), self.ropes, self.store, 0)
                self.cells.set_keys(i, at[first:last], ops.rope(self.cells.keys(i, at[first:last]), rope))

            in_parts(len(cells), turn)


def _dummy(rows: int, outputs: I32) -> Batch:
    """Rows at position 0 that write no cell."""
    zero = np.zeros(rows, np.int32)
    return Batch(zero, zero, zero, np.full(rows, -PAGE, np.int32), (np.zeros(1, np.int32),), outputs)
