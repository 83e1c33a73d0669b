"""What the expert cache says about itself: `GET /v1/cache/status`, fields for /metrics, one log line at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftgguf.experts.residency import Stat

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore


def cache_status(store: CachedStore) -> dict[str, Any]:
    """The whole state at a safe point. Bytes, bytes/s, counts since start; `layers` in the order they run."""
    stats = store.statistics()
    total = stats.sum(0)
    served = store.mail.doorbell.statistics()
    cpu_bytes, cpu_ns = sum(s[3] for s in served), sum(s[4] for s in served)
    fill_bytes = sum(int(stats[i, Stat.FILLS]) * spec.slot_bytes for i, spec in enumerate(store.order))
    bank = store.bank.report
    return {
        "mode": store.controller.status()["mode"] if store._forced is None else "forced",
        "policy": store.policy.name,
        "budget_bytes": store.budget,
        "arena_bytes": store.arena.bytes,
        "ring_bytes": 2 * store.ring.half,
        "slots": sum(store.arena.plan.counts()),
        "slot_classes": [
            {"slot_bytes": c.slot_bytes, "slots": n, "layers": len(c.layers), "experts": c.experts}
            for c, n in zip(store.arena.plan.classes, store.arena.plan.counts(), strict=True)
        ],
        "plan": store.arena.plan.reason,
        "experts": {
            "wanted": int(total[Stat.EXPERTS]),
            "hits": int(total[Stat.HITS]),
            "misses": int(total[Stat.MISSES]),
            "fills": int(total[Stat.FILLS]),
            "cpu": int(total[Stat.CPU]),
            "hit_rate": store.hit_rate(),
        },
        "fill": {"bytes": fill_bytes},
        "cpu": {
            "bytes": cpu_bytes,
            "seconds": cpu_ns * 1e-9,
            "bytes_per_second": cpu_bytes / (cpu_ns * 1e-9) if cpu_ns else 0.0,
            "threads": store.worker.threads,
            "jobs": sum(s[0] for s in served),
        },
        "prefill": {
            "passes": store.prefill_passes,
            "layers_by_mode": dict(store.prefill.counts),
            "times": store.prefill.times.status(),
            "copied_experts": store.prefill_copied,
            "copied_bytes": store.ring.copied_bytes,
            "cpu_experts": store.prefill_cpu_experts,
        },
        "split": store.controller.status(),
        "costs": store.costs.source,
        "bank": {
            "bytes": bank.bytes,
            "pinned_bytes": bank.pinned,
            "unpinned_layers": sum(1 for ok in store.bank.pinned.values() if not ok),
            "line": bank.line(),
        },
        "rebuilds": store.rebuilds,
        "slabs_moved": store.slabs_moved,
        "error": store.mail.error(),
    }


def metrics(store: CachedStore) -> dict[str, float]:
    """Numbers for /metrics; names end in `_total` where they only grow."""
    s = cache_status(store)
    e, p = s["experts"], s["prefill"]
    return {
        "expert_wanted_total": e["wanted"],
        "expert_hits_total": e["hits"],
        "expert_misses_total": e["misses"],
        "expert_fills_total": e["fills"],
        "expert_cpu_total": e["cpu"],
        "expert_fill_bytes_total": s["fill"]["bytes"],
        "expert_cpu_bytes_total": s["cpu"]["bytes"],
        "expert_cpu_seconds_total": s["cpu"]["seconds"],
        "expert_prefill_copied_bytes_total": p["copied_bytes"],
        "expert_prefill_cpu_total": p["cpu_experts"],
        "expert_slots": s["slots"],
        "expert_arena_bytes": s["arena_bytes"],
        "expert_rebuilds_total": s["rebuilds"],
        "expert_unpinned_layers": s["bank"]["unpinned_layers"],
        "expert_split_switches_total": s["split"]["switches"],
    }


def start_line(store: CachedStore) -> str:
    """One line for the log: what was chosen and why."""
    counts = store.arena.plan.counts()
    whole = len(store.order) * store.order[0].experts
    return (
        f"expert cache: {sum(counts)} of {whole} experts in {store.arena.bytes / 1e9:.2f} GB "
        f"({store.arena.plan.reason}); prefill ring {2 * store.ring.half / 1e6:.0f} MB; "
        f"{store.worker.threads} CPU threads; {store.controller.reason}; bandwidths {store.costs.source}; "
        f"{store.bank.report.line()}"
    )
