"""What the expert cache says about itself: `GET /v1/cache/status`, fields for /metrics, one log line at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftgguf.experts.control import Arm
from ftgguf.experts.disk import OnDisk
from ftgguf.experts.residency import Stat

if TYPE_CHECKING:
    from ftgguf.experts.store import CachedStore


def cache_status(store: CachedStore) -> dict[str, Any]:
    """The whole state at a safe point. Bytes, bytes/s, counts since start; `layers` in the order they run."""
    stats = store.statistics()
    total = stats.sum(0)
    served = store.mail.doorbell.statistics()
    cpu_bytes, cpu_ns = sum(s[3] for s in served), sum(s[4] for s in served)
    fill_bytes = sum(
        int(stats[i, Stat.FILLS]) * spec.slot_bytes + int(stats[i, Stat.SHARED]) * store.parts[i].size
        for i, spec in enumerate(store.order)
    )
    bank = store.bank.report
    return {
        "mode": store.controller.status()["mode"] if store.splits.forced is None else "forced",
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
            "shared": int(total[Stat.SHARED]),
            "hit_rate": store.hit_rate(),
        },
        "fill": {
            "bytes": fill_bytes,
            "seconds": store.fill_seconds,
            "bytes_per_second": store.fill_bytes_timed / store.fill_seconds if store.fill_seconds else 0.0,
        },
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
        "fallbacks": fallbacks(store),
        "bank": {
            "bytes": bank.bytes,
            "pinned_bytes": bank.pinned,
            "unpinned_layers": sum(1 for ok in store.bank.pinned.values() if not ok),
            "line": bank.line(),
        },
        "rebuilds": store.rebuilds,
        "slabs_moved": store.slabs_moved,
        "promoted": store.promoted,
        "error": store.mail.error(),
    }


def fallbacks(store: CachedStore) -> dict[str, int]:
    """What does not go as it was meant to, by name: counts since start, or how many layers it concerns."""
    return {
        "unpinned_layers": sum(1 for ok in store.bank.pinned.values() if not ok),
        "experts_on_disk": sum(isinstance(r, OnDisk) for r in store.bank.layers.values()),
        "prefill_without_ring": 0 if store.ring.buffers else 1,
        "guessed_bandwidths": 0 if store.costs.measured else 1,
        "room_for_prompts": store.room_given,
        "split_gave_way": store.controller.switches,
        "watchdog": 1 if store.mail.error() else 0,
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
        "expert_shared_total": e["shared"],
        "expert_fill_bytes_total": s["fill"]["bytes"],
        "expert_cpu_bytes_total": s["cpu"]["bytes"],
        "expert_cpu_seconds_total": s["cpu"]["seconds"],
        "expert_fill_seconds_total": s["fill"]["seconds"],
        "expert_fill_bytes_per_second": s["fill"]["bytes_per_second"],
        "expert_cpu_bytes_per_second": s["cpu"]["bytes_per_second"],
        "expert_hit_rate": e["hit_rate"],
        "expert_mode": list(Arm).index(store.controller.arm),
        "expert_trial_steps_total": s["split"]["trial_steps"],
        **{f"expert_phi_{kind.replace(chr(43), chr(95))}": phi for kind, phi in s["split"]["phi"].items()},
        **{f"expert_fallback_{name}": n for name, n in s["fallbacks"].items()},
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
