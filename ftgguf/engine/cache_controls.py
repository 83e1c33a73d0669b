"""The expert cache's part of the engine's controls: its status, counters for /metrics, and a new size.

Controls are handled between steps, so every one of them is a safe point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore

MIB = 1 << 20
ACTIONS = ("expert_cache_status", "expert_cache_rebuild")


def store_of(executor: Any) -> CachedStore | None:
    """The cached store below `executor`, or None: no GPU, or every expert resident."""
    segments = getattr(executor, "segments", (executor,))
    for segment in segments:
        store = getattr(segment, "store", None)
        if store is not None and hasattr(store, "resize"):
            found: CachedStore = store
            return found
    return None


def answer(executor: Any, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Do one of `ACTIONS`. Raises ValueError with a line for the user."""
    store = store_of(executor)
    if store is None:
        if action == "expert_cache_status":
            return {"enabled": False, "reason": "no expert cache: the experts are all resident, or run on the CPU"}
        raise ValueError("there is no expert cache to rebuild: the experts are all resident, or run on the CPU")
    from ftgguf.experts.status import cache_status

    elastic = getattr(executor, "elastic", None)
    if action == "expert_cache_status":
        return {"enabled": True} | cache_status(store) | ({} if elastic is None else {"boundary": elastic.status()})
    size = arguments.get("size_mib")
    if size is None:
        return {"enabled": True, "size_mib": store.budget // MIB} | store.rebuild()
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"'size_mib' must be a whole number of MiB from 0 on, not {size!r}")
    most = room(executor)
    if most is not None and size * MIB > most:
        raise ValueError(
            f"{size} MiB of experts: at most {most // MIB} MiB of --vram-budget are left for them beside weights, KV "
            "and the workspace of prompts"
        )
    try:
        done = (store if elastic is None else elastic).resize(size * MIB)
    except MemoryError as error:
        raise ValueError(str(error)) from error
    return {"enabled": True, "size_mib": size} | done


def room(executor: Any) -> int | None:
    """Bytes that the cache may have at most now: what the plan left for it with every KV cell in memory, and what the
    cells that have none yet would take. The device's count of what is free knows nothing of a prompt's workspace.
    None where there was no plan (tests)."""
    least: int | None = getattr(executor, "expert_room", None)
    elastic = getattr(executor, "elastic", None)
    return least if least is None or elastic is None else least + elastic.absent_bytes


def metrics(executor: Any) -> dict[str, float]:
    """Counters and gauges of the cache; empty without one."""
    store = store_of(executor)
    if store is None:
        return {}
    from ftgguf.experts.status import metrics as values

    return values(store)
