"""Context, KV, batching and slots."""

from __future__ import annotations

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.row import Assignment, Flag, Warn, switch, value, void

_ENV = "LLAMA_ARG_"


def _slots(text: str, warn: Warn) -> int:
    count = v.stoi(text, warn)
    if count == 0:
        raise ValueError("invalid value (at least 1 slot, or -1 for auto)")
    return max(count, -1)


def _context(size: int) -> tuple[Assignment, ...]:
    """`-c 0` asks for the whole context, so `--fit` may not shrink it (llama.cpp sets the floor to the maximum)."""
    whole = (Assignment("placement.fit_ctx", 2**32 - 1),) if size == 0 else ()
    return (Assignment("context.size", size), *whole)


def _kv_note(kind: str) -> str:
    if kind in ("f16", "bf16", "q8_0", "f32"):
        return ""
    return f"{kind} is kept as {kind} on the CPU and as q8_0 on the GPU"


FLAGS: tuple[Flag, ...] = (
    value("-c", "--ctx-size", hint="N", parse=v.whole(0), expand=_context, env=_ENV + "CTX_SIZE",
          shown="0, from the model", help="context in tokens, over all slots"),
    value("-n", "--predict", "--n-predict", hint="N", parse=v.whole(-1), to="context.n_predict",
          env=_ENV + "N_PREDICT", help="tokens to generate where a request does not say, -1 for no limit"),
    value("-b", "--batch-size", hint="N", parse=v.whole(1), to="context.n_batch", env=_ENV + "BATCH",
          help="tokens taken in at once (logical batch)"),
    value("-ub", "--ubatch-size", hint="N", parse=v.whole(0), to="context.n_ubatch", env=_ENV + "UBATCH", tier="B",
          note="the largest prefill chunk; a chunk may be smaller so that decoding goes on between chunks. Not given, "
               "and experts come from host memory: as wide as --batch-size, since each chunk reads them all once",
          help="tokens computed at once (physical batch), 0 for --batch-size"),
    value("--keep", hint="N", parse=v.whole(-1), to="context.n_keep", tier="B",
          note="used by --context-shift only", help="prompt tokens a context shift keeps, -1 for all"),
    value("-np", "--parallel", hint="N", parse=_slots, to="context.n_parallel", env=_ENV + "N_PARALLEL",
          group="server", shown="-1, auto: 4 slots and one KV pool",
          help="slots: requests served at the same time"),
    switch("-kvu", "--kv-unified", no=("-no-kvu", "--no-kv-unified"), to="context.kv_unified",
           env=_ENV + "KV_UNIFIED", group="server", shown="on if --parallel is auto",
           help="one KV pool for all slots, so that each may use the whole context"),
    value("--kv-unified-per-slot", hint="N", parse=v.whole(0), to="context.per_slot",
          env=_ENV + "KV_UNIFIED_PER_SLOT", group="server", tier="B", shown="none",
          note="limits each slot; without -c the pool is sized to slots x N",
          help="most tokens one slot may use"),
    switch("-cb", "--cont-batching", no=("-nocb", "--no-cont-batching"), to="context.cont_batching",
           env=_ENV + "CONT_BATCHING", group="server", help="new requests join the running batch"),
    value("-fa", "--flash-attn", hint="[on|off|auto]", parse=v.on_off_auto("--flash-attn"), to="context.flash_attn",
          env=_ENV + "FLASH_ATTN", tier="B",
          note=lambda mode: "attention is always computed without a score matrix" if mode == "off" else "",
          help="flash attention: on, off, auto"),
    value("-ctk", "--cache-type-k", hint="TYPE", parse=special.cache_type, to="context.type_k",
          env=_ENV + "CACHE_TYPE_K", tier="B", note=_kv_note,
          help=f"type of K in the KV cache: {', '.join(special.CACHE_TYPES)}"),
    value("-ctv", "--cache-type-v", hint="TYPE", parse=special.cache_type, to="context.type_v",
          env=_ENV + "CACHE_TYPE_V", tier="B", note=_kv_note,
          help=f"type of V in the KV cache: {', '.join(special.CACHE_TYPES)}"),
    void("--swa-full", to="context.swa_full", env=_ENV + "SWA_FULL", tier="B",
         note="sliding-window layers keep all cells, so every prefix can be reused",
         help="full-size KV for sliding-window layers"),
    switch("--context-shift", no=("--no-context-shift",), to="context.shift", env=_ENV + "CONTEXT_SHIFT",
           group="server", tier="B", note="a full slot drops the older half of what --keep does not protect",
           tier_off="A", help="go on generating when the context is full by dropping old tokens"),
    switch("--cache-prompt", no=("--no-cache-prompt",), to="context.cache_prompt", env=_ENV + "CACHE_PROMPT",
           group="server", help="reuse what a prompt has in common with earlier ones"),
    value("--cache-reuse", hint="N", parse=v.whole(0), to="context.cache_reuse", env=_ENV + "CACHE_REUSE",
          group="server", tier="B", note="prefixes are reused through the radix tree; shifted chunks are not",
          help="shortest chunk to reuse at another position, 0 for never"),
    value("-cram", "--cache-ram", hint="N", parse=v.whole(-1), to="context.cache_ram", env=_ENV + "CACHE_RAM",
          group="server",
          help="MiB of host memory for prompts kept for reuse beyond the KV cells, -1 for no limit, 0 for none"),
    switch("--cache-idle-slots", no=("--no-cache-idle-slots",), to="context.cache_idle_slots",
           env=_ENV + "CACHE_IDLE_SLOTS", group="server", tier="B", tier_off="B",
           note="idle prompts stay in the radix tree and move to host memory when their cells are needed",
           note_off="idle prompts are dropped when their cells are needed",
           help="keep prompts of idle slots when a new request comes"),
    value("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", hint="N", parse=v.whole(0), to="context.checkpoints",
          env=_ENV + "CTX_CHECKPOINTS", group="server", tier="B",
          note="bounds the snapshots of recurrent and sliding-window state on one conversation",
          help="state snapshots to keep per slot"),
    value("-cms", "--checkpoint-min-step", hint="N", parse=v.whole(0, words="checkpoint-min-step must be non-negative"),
          to="context.checkpoint_min_step", env=_ENV + "CHECKPOINT_MIN_SPACING_NT", group="server", tier="B",
          note="applies between turns too small to be worth a snapshot; turn ends are always candidates",
          help="least distance between snapshots in tokens, 0 for none"),
    value("-sps", "--slot-prompt-similarity", hint="SIMILARITY", parse=v.real(), to="context.slot_prompt_similarity",
          group="server", tier="B", note="chooses the slot number only; reuse comes from the radix tree, whatever slot",
          help="how much of a prompt must match a slot's to prefer that slot, 0 for never"),
    value("--slot-save-path", hint="PATH", parse=v.directory, to="context.slot_save_path", group="server",
          shown="none", help="folder for saved slots; without it saving and restoring slots is off"),
    value("-dt", "--defrag-thold", hint="N", parse=v.text, env=_ENV + "DEFRAG_THOLD", tier="C",
          note="deprecated in llama-server too: the KV cache needs no defragmentation",
          help="KV defragmentation threshold (deprecated)"),
    value("--rope-scaling", hint="{none,linear,yarn}", parse=v.choice("none", "linear", "yarn"),
          to="context.rope_scaling", env=_ENV + "ROPE_SCALING_TYPE", shown="from the model",
          help="how RoPE is stretched beyond the training context"),
    value("--rope-scale", hint="N", parse=v.real(0, words="invalid value (must be greater than 0)", above=True),
          expand=lambda n: (Assignment("context.rope_freq_scale", 1.0 / n),), env=_ENV + "ROPE_SCALE",
          shown="from the model", help="stretch the context N times"),
    value("--rope-freq-base", hint="N", parse=v.real(0), to="context.rope_freq_base", env=_ENV + "ROPE_FREQ_BASE",
          shown="from the model", help="base frequency of RoPE"),
    value("--rope-freq-scale", hint="N", parse=v.real(0), to="context.rope_freq_scale",
          env=_ENV + "ROPE_FREQ_SCALE", shown="from the model", help="frequency factor of RoPE, 1/N of --rope-scale N"),
    value("--yarn-orig-ctx", hint="N", parse=v.whole(0), to="context.yarn_orig_ctx", env=_ENV + "YARN_ORIG_CTX",
          shown="0, the training context", help="YaRN: the context the model was trained with"),
    value("--yarn-ext-factor", hint="N", parse=v.real(), to="context.yarn_ext_factor", env=_ENV + "YARN_EXT_FACTOR",
          shown="-1, from the model", help="YaRN: extrapolation mix, 0 for interpolation only"),
    value("--yarn-attn-factor", hint="N", parse=v.real(), to="context.yarn_attn_factor",
          env=_ENV + "YARN_ATTN_FACTOR", shown="-1, from the model", help="YaRN: attention magnitude"),
    value("--yarn-beta-slow", hint="N", parse=v.real(), to="context.yarn_beta_slow", env=_ENV + "YARN_BETA_SLOW",
          shown="-1, from the model", help="YaRN: high correction dimension"),
    value("--yarn-beta-fast", hint="N", parse=v.real(), to="context.yarn_beta_fast", env=_ENV + "YARN_BETA_FAST",
          shown="-1, from the model", help="YaRN: low correction dimension"),
    switch("--warmup", no=("--no-warmup",), to="context.warmup", group="server", tier="B", tier_off="B",
           note="kernels are tuned and one step runs before the server says it is ready",
           note_off="the first request pays for warming up", help="run once before serving"),
)  # fmt: skip
