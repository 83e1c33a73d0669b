"""Our defaults against llama-server's."""

from __future__ import annotations

from typing import Any

import pytest

from ftgguf.flags import ServerConfig

SAME: dict[str, str] = {
    "n_predict": "context.n_predict", "n_batch": "context.n_batch", "n_ubatch": "context.n_ubatch",
    "n_ctx": "context.size", "cont_batching": "context.cont_batching", "ctx_shift": "context.shift",
    "swa_full": "context.swa_full", "cache_prompt": "context.cache_prompt", "n_cache_reuse": "context.cache_reuse",
    "cache_ram_mib": "context.cache_ram", "cache_idle_slots": "context.cache_idle_slots",
    "checkpoint_min_step": "context.checkpoint_min_step", "slot_prompt_similarity": "context.slot_prompt_similarity",
    "n_ctx_checkpoints": "context.checkpoints", "kv_unified_per_slot": "context.per_slot",
    "rope_freq_base": "context.rope_freq_base", "rope_freq_scale": "context.rope_freq_scale",
    "yarn_orig_ctx": "context.yarn_orig_ctx", "yarn_ext_factor": "context.yarn_ext_factor",
    "yarn_attn_factor": "context.yarn_attn_factor", "yarn_beta_slow": "context.yarn_beta_slow",
    "yarn_beta_fast": "context.yarn_beta_fast", "warmup": "context.warmup",
    "n_gpu_layers": "placement.gpu_layers", "fit_params": "placement.fit", "fit_params_min_ctx": "placement.fit_ctx",
    "main_gpu": "placement.main_gpu", "check_tensors": "model.check_tensors", "offline": "model.offline",
    "models_max": "model.models_max", "models_autoload": "model.models_autoload",
    "use_jinja": "chat.jinja", "prefill_assistant": "chat.prefill_assistant", "special": "chat.special",
    "force_pure_content_parser": "chat.skip_parsing",
    "reuse_port": "http.reuse_port", "timeout_read": "http.timeout",
    "sse_ping_interval": "http.sse_ping_interval", "cors_origins": "http.cors_origins",
    "cors_methods": "http.cors_methods", "cors_headers": "http.cors_headers",
    "cors_credentials": "http.cors_credentials", "endpoint_slots": "http.slots", "endpoint_props": "http.props",
    "endpoint_metrics": "http.metrics", "sleep_idle_seconds": "http.sleep_idle_seconds", "ui": "http.ui",
    "embd_normalize": "http.embd_normalize", "verbosity": "log.verbosity",
    "sampling.temp": "sampling.temperature", "sampling.top_k": "sampling.top_k", "sampling.top_p": "sampling.top_p",
    "sampling.min_p": "sampling.min_p", "sampling.typ_p": "sampling.typical_p",
    "sampling.top_n_sigma": "sampling.top_n_sigma", "sampling.xtc_probability": "sampling.xtc_probability",
    "sampling.xtc_threshold": "sampling.xtc_threshold", "sampling.penalty_last_n": "sampling.repeat_last_n",
    "sampling.penalty_repeat": "sampling.repeat_penalty", "sampling.penalty_freq": "sampling.frequency_penalty",
    "sampling.penalty_present": "sampling.presence_penalty", "sampling.dry_multiplier": "sampling.dry_multiplier",
    "sampling.dry_base": "sampling.dry_base", "sampling.dry_allowed_length": "sampling.dry_allowed_length",
    "sampling.dry_penalty_last_n": "sampling.dry_penalty_last_n", "sampling.mirostat": "sampling.mirostat",
    "sampling.mirostat_tau": "sampling.mirostat_tau", "sampling.mirostat_eta": "sampling.mirostat_eta",
    "sampling.dynatemp_range": "sampling.dynatemp_range",
    "sampling.dynatemp_exponent": "sampling.dynatemp_exponent",
    "sampling.adaptive_target": "sampling.adaptive_target", "sampling.adaptive_decay": "sampling.adaptive_decay",
    "sampling.ignore_eos": "sampling.ignore_eos", "sampling.min_keep": "sampling.min_keep",
    "sampling.n_probs": "sampling.n_probs", "sampling.reasoning_budget_tokens": "chat.reasoning_budget",
    "speculative.ngram_mod.n_match": "spec.ngram_mod.n_match", "speculative.ngram_mod.n_min": "spec.ngram_mod.n_min",
    "speculative.ngram_mod.n_max": "spec.ngram_mod.n_max", "speculative.draft.n_max": "spec.draft.n_max",
    "speculative.draft.p_split": "spec.draft.p_split",
}  # fmt: skip


def test_defaults_are_the_peers() -> None:
    """Defaults against llama-server's own CommonParams (the xllamacpp wheel, whose wrapper changes the port to 0)."""
    params = pytest.importorskip("xllamacpp").CommonParams()
    different, compared = [], 0
    for theirs, ours in SAME.items():
        peer: Any = params
        for name in theirs.split("."):
            peer = getattr(peer, name, None)
        if peer is None:
            continue
        here: Any = ServerConfig()
        for name in ours.split("."):
            here = getattr(here, name)
        compared += 1
        if peer != pytest.approx(here) if isinstance(here, float) else peer != here:
            different.append((theirs, peer, here))
    assert different == []
    assert compared > 70
    assert list(params.hostnames) == list(ServerConfig().http.hosts)
