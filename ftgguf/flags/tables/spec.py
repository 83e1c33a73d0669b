"""Speculative decoding."""

from __future__ import annotations

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.row import Flag, Parser, grouped, switch, value, void

_ENV = "LLAMA_ARG_"
_DRAFT = "draft models do not work yet; use --spec-type ngram-mod, which needs no second model"
_DRAFT_CPU = "a draft model would share the main model's threads"
_BENCH = "synthetic acceptance is for llama.cpp's own benchmarks; measure with ftgguf bench"


def _types_refused(types: tuple[str, ...]) -> str:
    unknown = [name for name in types if name.startswith("draft-") or name == "ngram-cache"]
    return (
        f"{', '.join(unknown)} is not supported; use ngram-mod, ngram-simple, ngram-map-k or ngram-map-k4v"
        if unknown
        else ""
    )


def _size(words: str, low: int = 1) -> Parser:
    return v.whole(low, 1024, words=f"{words} must be between {low} and 1024 inclusive")


def _map(kind: str) -> tuple[Flag, ...]:
    flag, path = f"--spec-ngram-{kind}", f"spec.ngram_{kind.replace('-', '_')}"
    note = f"tunes --spec-type ngram-{kind}"
    return (
        value(f"{flag}-size-n", hint="N", parse=_size("ngram size N"), to=f"{path}.size_n", tier="B", note=note,
              help=f"ngram-{kind}: tokens looked up"),
        value(f"{flag}-size-m", hint="N", parse=_size("ngram size M"), to=f"{path}.size_m", tier="B", note=note,
              help=f"ngram-{kind}: tokens drafted"),
        value(f"{flag}-min-hits", hint="N", parse=v.whole(1, words="ngram min hits must be at least 1"),
              to=f"{path}.min_hits", tier="B", note=note, help=f"ngram-{kind}: sightings before it drafts"),
    )  # fmt: skip


def _removed(*names: str, use: str, env: str | None = None) -> Flag:
    """A flag llama-server removed; its error names the new one, and so does ours."""
    return value(*names, hint="N", parse=v.stoi, env=env, tier="D", note=f"the argument has been removed. use {use}",
                 help=f"removed; use {use}")  # fmt: skip


def _cpu(*names: str, hint: str, help: str) -> Flag:
    return value(*names, hint=hint, parse=v.text, tier="C", note=_DRAFT_CPU, help=help)


FLAGS: tuple[Flag, ...] = grouped(
    "speculative",
    value("--spec-type", hint=",".join(special.SPEC_TYPES), parse=special.spec_types, to="spec.types", mode="append",
          env=_ENV + "SPEC_TYPE", shown="none", refuse=_types_refused, help="kinds of speculation, comma-separated"),
    value("--spec-draft-model", "-md", "--model-draft", hint="FNAME", parse=v.text, to="spec.draft.path",
          env=_ENV + "SPEC_DRAFT_MODEL", tier="D", note=_DRAFT, help="draft model"),
    value("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft", hint="<user>/<model>[:quant]", parse=v.text,
          to="spec.draft.hf_repo", env=_ENV + "SPEC_DRAFT_HF_REPO", tier="D", note=_DRAFT,
          help="draft model from Hugging Face"),
    value("--spec-draft-n-max", hint="N", parse=v.whole(0), to="spec.draft.n_max", env=_ENV + "SPEC_DRAFT_N_MAX",
          tier="C", note=_DRAFT, help="most tokens drafted"),
    value("--spec-draft-n-min", hint="N", parse=v.stoi, to="spec.draft.n_min", env=_ENV + "SPEC_DRAFT_N_MIN",
          tier="C", note=_DRAFT, help="fewest tokens drafted"),
    value("--spec-draft-p-split", "--draft-p-split", hint="P", parse=v.real(), to="spec.draft.p_split",
          env=_ENV + "SPEC_DRAFT_P_SPLIT", tier="C", note=_DRAFT, help="probability at which a draft branches"),
    value("--spec-draft-p-min", "--draft-p-min", hint="P", parse=v.real(), to="spec.draft.p_min",
          env=_ENV + "SPEC_DRAFT_P_MIN", tier="C", note=_DRAFT, help="least probability of a drafted token"),
    value("--spec-draft-sampling", hint="{greedy,probabilistic}", parse=v.choice("greedy", "probabilistic"),
          to="spec.draft.sampling", env=_ENV + "SPEC_DRAFT_SAMPLING", tier="C", note=_DRAFT,
          help="how drafts are sampled"),
    switch("--spec-draft-backend-sampling", no=("--no-spec-draft-backend-sampling",), tier="C", tier_off="C",
           env=_ENV + "SPEC_DRAFT_BACKEND_SAMPLING", note=_DRAFT, note_off=_DRAFT, shown="on",
           help="sample drafts on the device"),
    value("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", hint="N",
          parse=special.gpu_layers, to="spec.draft.gpu_layers", env=_ENV + "N_GPU_LAYERS_DRAFT", tier="C",
          note=_DRAFT, shown="auto", help="layers of the draft model on the GPU"),
    value("--spec-draft-device", "-devd", "--device-draft", hint="<dev1,dev2,..>", parse=special.devices,
          to="spec.draft.devices", tier="C", note=_DRAFT, shown="as --device", help="devices of the draft model"),
    value("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft", hint="TYPE", parse=special.cache_type,
          to="spec.draft.type_k", env=_ENV + "SPEC_DRAFT_CACHE_TYPE_K", tier="C", note=_DRAFT,
          help="type of K for the draft model"),
    value("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft", hint="TYPE", parse=special.cache_type,
          to="spec.draft.type_v", env=_ENV + "SPEC_DRAFT_CACHE_TYPE_V", tier="C", note=_DRAFT,
          help="type of V for the draft model"),
    value("--spec-draft-override-tensor", "-otd", "--override-tensor-draft", mode="append",
          hint="<tensor name pattern>=<buffer type>,...", parse=special.tensor_overrides, to="spec.draft.overrides",
          tier="C", note=_DRAFT, shown="none", help="--override-tensor for the draft model"),
    void("--spec-draft-cpu-moe", "-cmoed", "--cpu-moe-draft", env=_ENV + "SPEC_DRAFT_CPU_MOE", tier="C",
         note=_DRAFT, help="--cpu-moe for the draft model"),
    value("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "-ncmoed", "--n-cpu-moe-draft", hint="N",
          parse=v.whole(0), env=_ENV + "SPEC_DRAFT_N_CPU_MOE", tier="C", note=_DRAFT,
          help="--n-cpu-moe for the draft model"),
    _cpu("--spec-draft-threads", "-td", "--threads-draft", hint="N", help="--threads for the draft model"),
    _cpu("--spec-draft-threads-batch", "-tbd", "--threads-batch-draft", hint="N",
         help="--threads-batch for the draft model"),
    _cpu("--spec-draft-cpu-mask", "-Cd", "--cpu-mask-draft", hint="M", help="--cpu-mask for the draft model"),
    _cpu("--spec-draft-cpu-range", "-Crd", "--cpu-range-draft", hint="lo-hi", help="--cpu-range for the draft model"),
    _cpu("--spec-draft-cpu-strict", "--cpu-strict-draft", hint="<0|1>", help="--cpu-strict for the draft model"),
    _cpu("--spec-draft-prio", "--prio-draft", hint="N", help="--prio for the draft model"),
    _cpu("--spec-draft-poll", "--poll-draft", hint="<0|1>", help="--poll for the draft model"),
    _cpu("--spec-draft-cpu-mask-batch", "-Cbd", "--cpu-mask-batch-draft", hint="M",
         help="--cpu-mask-batch for the draft model"),
    _cpu("--spec-draft-cpu-strict-batch", "--cpu-strict-batch-draft", hint="<0|1>",
         help="--cpu-strict-batch for the draft model"),
    _cpu("--spec-draft-prio-batch", "--prio-batch-draft", hint="N", help="--prio-batch for the draft model"),
    _cpu("--spec-draft-poll-batch", "--poll-batch-draft", hint="<0|1>", help="--poll-batch for the draft model"),
    value("-lcs", "--lookup-cache-static", hint="FNAME", parse=v.text, tier="C",
          note="ngram-cache is not supported; ngram-mod keeps its table in memory", help="fixed n-gram cache"),
    value("-lcd", "--lookup-cache-dynamic", hint="FNAME", parse=v.text, tier="C",
          note="ngram-cache is not supported; ngram-mod keeps its table in memory", help="growing n-gram cache"),
    value("--spec-ngram-mod-n-min", hint="N", parse=_size("ngram n-min", 0), to="spec.ngram_mod.n_min",
          help="ngram-mod: fewest tokens drafted"),
    value("--spec-ngram-mod-n-max", hint="N", parse=_size("ngram n-max", 0), to="spec.ngram_mod.n_max",
          help="ngram-mod: most tokens drafted"),
    value("--spec-ngram-mod-n-match", hint="N", parse=_size("ngram size N"), to="spec.ngram_mod.n_match",
          help="ngram-mod: tokens looked up"),
    *_map("simple"),
    *_map("map-k"),
    *_map("map-k4v"),
    value("--spec-synth-len", hint="L", parse=v.text, env=_ENV + "SPEC_SYNTH_LEN", tier="D", note=_BENCH,
          help="synthetic acceptance length"),
    value("--spec-synth-rates", hint="P0,P1,...", parse=v.text, env=_ENV + "SPEC_SYNTH_RATES", tier="D", note=_BENCH,
          help="synthetic acceptance rates"),
    _removed("--draft", "--draft-n", "--draft-max", env=_ENV + "DRAFT_MAX",
             use="--spec-draft-n-max or --spec-ngram-mod-n-max"),
    _removed("--draft-min", "--draft-n-min", env=_ENV + "DRAFT_MIN",
             use="--spec-draft-n-min or --spec-ngram-mod-n-min"),
    _removed("--spec-ngram-size-n", use="the respective --spec-ngram-*-size-n"),
    _removed("--spec-ngram-size-m", use="the respective --spec-ngram-*-size-m"),
    _removed("--spec-ngram-min-hits", use="the respective --spec-ngram-*-min-hits"),
)  # fmt: skip
