"""Sampling defaults of requests."""

from __future__ import annotations

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.row import Assignment, Flag, grouped, value, void

_ENV = "LLAMA_ARG_"


def _dry_base(base: float) -> tuple[Assignment, ...]:
    """llama.cpp drops a base below 1 without a word; the row says so."""
    return (Assignment("sampling.dry_base", base),) if base >= 1 else ()


FLAGS: tuple[Flag, ...] = grouped(
    "sampling",
    value("--samplers", hint="SAMPLERS", parse=special.samplers, to="sampling.samplers",
          help="samplers in their order, separated by ;"),
    value("-s", "--seed", hint="SEED", parse=v.seed, to="sampling.seed", shown="-1, draw one", help="seed"),
    value("--sampler-seq", "--sampling-seq", hint="SEQUENCE", parse=special.sampler_letters, to="sampling.samplers",
          shown="edskypmxt", help="samplers in their order, one letter each: "
          + ", ".join(f"{letter} {name}" for name, letter in special.SAMPLERS.items())),
    void("--ignore-eos", to="sampling.ignore_eos", help="never end a text by itself"),
    value("--temp", "--temperature", hint="N", parse=v.real(),
          expand=lambda n: (Assignment("sampling.temperature", max(n, 0.0)),), env=_ENV + "TEMPERATURE", shown="0.8",
          help="temperature, 0 for greedy"),
    value("--top-k", hint="N", parse=v.whole(), to="sampling.top_k", env=_ENV + "TOP_K",
          help="keep the k likeliest tokens, 0 for all"),
    value("--top-p", hint="N", parse=v.real(), to="sampling.top_p", env=_ENV + "TOP_P",
          help="keep the likeliest tokens that make up p, 1 for all"),
    value("--min-p", hint="N", parse=v.real(), to="sampling.min_p", env=_ENV + "MIN_P",
          help="drop tokens below this share of the likeliest, 0 for none"),
    value("--top-nsigma", "--top-n-sigma", hint="N", parse=v.real(), to="sampling.top_n_sigma",
          help="keep tokens within n standard deviations of the best logit, -1 for off"),
    value("--xtc-probability", hint="N", parse=v.real(), to="sampling.xtc_probability",
          help="XTC: how often the likeliest tokens are dropped, 0 for never"),
    value("--xtc-threshold", hint="N", parse=v.real(), to="sampling.xtc_threshold",
          help="XTC: least probability of a token that may be dropped, above 0.5 for off"),
    value("--typical", "--typical-p", hint="N", parse=v.real(), to="sampling.typical_p",
          help="locally typical sampling, 1 for off"),
    value("--repeat-last-n", hint="N", parse=v.whole(0, words="error: invalid repeat-last-n = {}"),
          to="sampling.repeat_last_n", help="tokens looked back on by the penalties, 0 for off"),
    value("--repeat-penalty", hint="N", to="sampling.repeat_penalty", env=_ENV + "REPEAT_PENALTY",
          parse=v.real(1e-38, words="error: repeat-penalty must be finite and greater than 0", finite=True),
          help="divides the logits of tokens seen, 1 for off"),
    value("--presence-penalty", hint="N", to="sampling.presence_penalty", env=_ENV + "PRESENCE_PENALTY",
          parse=v.real(words="error: presence-penalty must be finite", finite=True),
          help="taken off the logits of tokens seen, 0 for off"),
    value("--frequency-penalty", hint="N", to="sampling.frequency_penalty", env=_ENV + "FREQUENCY_PENALTY",
          parse=v.real(words="error: frequency-penalty must be finite", finite=True),
          help="taken off the logits of tokens for each time seen, 0 for off"),
    value("--dry-multiplier", hint="N", parse=v.real(), to="sampling.dry_multiplier",
          help="DRY: strength of the repetition penalty, 0 for off"),
    value("--dry-base", hint="N", parse=v.real(), expand=_dry_base, shown="1.75",
          note=lambda n: "below 1, ignored as in llama-server" if n < 1 else "",
          help="DRY: growth of the penalty per repeated token"),
    value("--dry-allowed-length", hint="N", parse=v.whole(), to="sampling.dry_allowed_length",
          help="DRY: repetitions up to this length are free"),
    value("--dry-penalty-last-n", hint="N", parse=v.whole(0, words="error: invalid dry-penalty-last-n = {}"),
          to="sampling.dry_penalty_last_n", help="DRY: tokens looked back on, 0 for off"),
    value("--dry-sequence-breaker", hint="STRING", parse=special.sequence_breaker, mode="append",
          to="sampling.dry_sequence_breakers", shown=r"\n : \" *",
          help="DRY: a text that ends a repetition; replaces the default ones; none for none"),
    value("--adaptive-target", hint="N", parse=v.real(), to="sampling.adaptive_target",
          help="adaptive-p: prefer tokens near this probability, negative for off"),
    value("--adaptive-decay", hint="N", parse=v.real(), to="sampling.adaptive_decay",
          help="adaptive-p: how slowly the target adapts, 0 to 0.99"),
    value("--dynatemp-range", hint="N", parse=v.real(), to="sampling.dynatemp_range",
          help="temperature varies by this much with the entropy, 0 for off"),
    value("--dynatemp-exp", hint="N", parse=v.real(), to="sampling.dynatemp_exponent",
          help="exponent of the entropy in --dynatemp-range"),
    value("--mirostat", hint="N", parse=v.whole(), to="sampling.mirostat",
          help="Mirostat in place of top-k, top-p and typical: 0 off, 1 or 2"),
    value("--mirostat-lr", hint="N", parse=v.real(), to="sampling.mirostat_eta", help="Mirostat: learning rate"),
    value("--mirostat-ent", hint="N", parse=v.real(), to="sampling.mirostat_tau", help="Mirostat: target entropy"),
    value("-l", "--logit-bias", hint="TOKEN_ID(+/-)BIAS", parse=special.logit_bias, to="sampling.logit_bias",
          mode="append", shown="none", help="make a token likelier (15043+1) or less likely (15043-1)"),
    value("--grammar", hint="GRAMMAR", parse=special.gbnf, to="sampling.grammar", shown="none",
          help="GBNF grammar the output must follow"),
    value("--grammar-file", hint="FNAME", parse=special.gbnf_file, to="sampling.grammar", shown="none",
          completes="*.gbnf", help="file with such a grammar"),
    value("-j", "--json-schema", hint="SCHEMA", parse=special.schema, to="sampling.grammar", shown="none",
          help="JSON schema the output must follow; {} for any JSON object"),
    value("-jf", "--json-schema-file", hint="FILE", parse=special.schema_file, to="sampling.grammar", shown="none",
          completes="*.json", help="file with such a schema"),
    void("-bs", "--backend-sampling", env=_ENV + "BACKEND_SAMPLING", tier="C",
         note="candidates are always selected on the device that computed the logits, with the same result",
         help="sample on the device"),
)  # fmt: skip
