"""Captured passes of an executor: which there are, what memory they hold, and when they are captured again."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ftgguf.engine.device_memory import DeviceMemory

KEPT_PROMPTS = 32
"""Captured prompt passes kept, the last used ones."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A captured prompt pass and its output (None: no logits are wanted)."""

    graph: Any
    out: torch.Tensor | None


class Graphs:
    """Decode's by row count, all captured at start; prompts' by (rows, outputs), captured when they come. They share
    one pool, and hold the addresses of the KV cells: when those have moved, each is captured again when it comes."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory, self.device = memory, memory.device
        self.decode: dict[int, Any] = {}
        self.prompts: OrderedDict[tuple[int, int], PromptGraph] = OrderedDict()
        self.pool: Any = None
        self.warm: set[int] = set()
        """Row counts of prompts whose kernels are loaded: only those may be captured."""
        self._uncaptured: set[tuple[int, int]] = set()
        """Prompts' passes that found no memory for a graph."""
        self._stale = False
        """The cells have moved. All of decode's at once would hold up the request for which they did."""

    def capture(self, sizes: Iterable[int], run: Callable[[int], None]) -> None:
        """Capture `run` for each row count. The largest first: it takes the memory that the others find. Raises
        MemoryError."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        self.pool = torch.cuda.graph_pool_handle()
        for rows in sorted(sizes, reverse=True):
            self.decode[rows] = self._captured(lambda rows=rows: run(rows))[0]  # type: ignore[misc]
        torch.cuda.synchronize(self.device)
        self.memory.reserve("graphs", max(0, torch.cuda.memory_reserved(self.device) - before))

    def of(self, rows: int, run: Callable[[int], None]) -> Any:
        """Decode's graph of `rows` rows, None where there is to be none. Raises torch.OutOfMemoryError."""
        graph = self.decode.get(rows)
        if graph is None and self._stale:
            torch.cuda.empty_cache()
            try:
                graph = self.decode[rows] = self._counted(lambda: run(rows))[0]
            except RuntimeError as error:
                if _no_memory(error):
                    raise torch.OutOfMemoryError(str(error)) from error
                raise
        return graph

    def prompt(self, key: tuple[int, int], run: Callable[[], torch.Tensor | None]) -> PromptGraph | None:
        """A prompt's graph; None where its kernels are not loaded, or, said once, where there is no memory for it."""
        known = self.prompts.get(key)
        if known is not None:
            self.prompts.move_to_end(key)
            return known
        if key[0] not in self.warm or key in self._uncaptured:
            return None
        while len(self.prompts) >= KEPT_PROMPTS:
            self.prompts.popitem(last=False)
        torch.cuda.empty_cache()
        try:
            self.prompts[key] = PromptGraph(*self._counted(run))
        except RuntimeError as error:
            if not _no_memory(error):
                raise
            log.warning("prompt passes of %d rows stay without a CUDA graph: no memory for one", key[0])
            self._uncaptured.add(key)
            return None
        return self.prompts[key]

    def forget(self) -> None:
        """The cells are about to move; nothing may be running."""
        self._stale = self._stale or bool(self.decode)
        self.decode.clear()
        self.prompts.clear()
        self._uncaptured.clear()
        self.pool = None
        self.memory.held.pop("graphs", None)

    def _captured(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        return graph, out

    def _counted(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        before = torch.cuda.memory_reserved(self.device)
        found = self._captured(run)
        grown = max(0, torch.cuda.memory_reserved(self.device) - before)
        self.memory.held["graphs"] = self.memory.held.get("graphs", 0) + grown
        return found


def _no_memory(error: RuntimeError) -> bool:
    """Whether there was no memory; a capture that ends early raises another error over it."""
    return any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__context__))
