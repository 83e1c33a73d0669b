"""Answers to the front's questions about the engine: `/slots`, `/metrics`, saving, restoring and erasing slots."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftgguf.engine import cache_controls, slot_files
from ftgguf.engine.executor import NotSupported
from ftgguf.engine.messages import Control, Reply
from ftgguf.engine.slots import Slot, slot_state

if TYPE_CHECKING:
    from ftgguf.engine.engine import Engine


class ControlError(Exception):
    """The control cannot be done; the text is for the user."""


class Controls:
    """Handles `Control` messages for one engine. Actions on a busy slot wait until it is idle, as in llama-server."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[Control] = []
        self._fingerprint = ""

    def handle(self, request: Control) -> None:
        """Answer `request` with one `Reply`, at once or when its slot is idle."""
        if request.action.startswith("slot_"):
            slot = self._slot(request)
            if slot is not None and slot.sequence is not None:
                self._waiting.append(request)
                return
        try:
            value = self._answer(request)
        except (ControlError, NotSupported, ValueError, OSError, MemoryError) as error:
            self._engine.reply(Reply(id=request.id, ok=False, message=str(error)))
        else:
            self._engine.reply(Reply(id=request.id, ok=True, value=value))

    def slot_left(self, slot: int) -> None:
        """Slot `slot` is idle: what waited for it is done now."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self.handle(request)

    def _slot(self, request: Control) -> Slot | None:
        slots = self._engine.scheduler.slots
        index = request.arguments.get("id_slot", -1)
        return slots[index] if isinstance(index, int) and 0 <= index < len(slots) else None

    def _answer(self, request: Control) -> Any:
        engine, action = self._engine, request.action
        if action == "slots":
            return [self._state(slot) for slot in engine.scheduler.slots]
        if action == "metrics":
            return self._metrics(bool(request.arguments.get("reset", True)))
        if action == "cache_status":
            return self._cache_status()
        if action in cache_controls.ACTIONS:
            return cache_controls.answer(engine.executor, action, request.arguments)
        if action in ("slot_save", "slot_restore", "slot_erase"):
            slot = self._slot(request)
            if slot is None:
                raise ControlError("Invalid slot ID")
            if action == "slot_erase":
                return {"id_slot": slot.id, "n_erased": engine.scheduler.forget_slot(slot)}
            return self._move(slot, action, request.arguments)
        if action == "reasoning_end":
            return {"success": engine.end_reasoning(int(request.arguments["request"]))}
        raise ControlError(f"unknown action '{action}'")

    def _state(self, slot: Slot) -> dict[str, Any]:
        engine = self._engine
        new_line = slot.sequence is not None and engine.has_new_line(slot.sequence)
        return slot_state(slot, engine.scheduler.n_ctx, new_line, engine.scheduler.speculates)

    def _metrics(self, reset: bool) -> dict[str, float]:
        engine = self._engine
        value = engine.metrics.report(reset)
        value["requests_processing"] = len(engine.scheduler.active)
        value["requests_deferred"] = len(engine.scheduler.queue)
        value["deferred_for_pages_total"] = engine.cache.refusals
        value["evicted_pages_total"] = engine.cache.tree.evicted_pages
        value["copied_cells_total"] = engine.cache.copied_cells
        if engine.host is not None:
            value["host_spilled_pages_total"] = engine.host.spilled_pages
            value["host_recalled_pages_total"] = engine.host.recalled_pages
            value["host_bytes"] = engine.host.used
        value.update(cache_controls.metrics(engine.executor))
        return value

    def _cache_status(self) -> dict[str, int]:
        cache = self._engine.cache
        return {
            "n_cells": cache.n_cells,
            "pages": cache.pool.n_pages,
            "pages_free": cache.pool.n_free,
            "pages_evictable": cache.tree.evictable_pages(),
            "nodes": cache.tree.n_nodes,
            "evicted_pages": cache.tree.evicted_pages,
        }

    def _move(self, slot: Slot, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        path = Path(str(arguments.get("path") or arguments["filename"]))
        name = str(arguments.get("filename", path.name))
        started = time.perf_counter()
        if not self._fingerprint:
            self._fingerprint = slot_files.fingerprint(engine.info)
        lora = slot_files.adapters_fingerprint(engine.info)
        if action == "slot_save":
            saved, written = slot_files.save(path, slot, engine.cache, self._fingerprint, lora)
            took = (time.perf_counter() - started) * 1e3
            value = {"n_saved": saved, "n_written": written, "timings": {"save_ms": took}}
        else:
            restored, read = slot_files.restore(
                path, slot, engine.cache, self._fingerprint, engine.scheduler.n_ctx, engine.toolkit.n_vocab, lora
            )
            took = (time.perf_counter() - started) * 1e3
            value = {"n_restored": restored, "n_read": read, "timings": {"restore_ms": took}}
        return {"id_slot": slot.id, "filename": name} | value
