"""What one request asks for: the fields of llama-server's `task_params`, their defaults, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ftgguf.engine.messages import Grammar, SamplingParams
from ftgguf.flags.config import ServerConfig
from ftgguf.server.wire import f32

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")


@dataclass(slots=True)
class RequestParams:
    """The settings of one request. Field names are llama-server's request fields; `sampling` holds the engine's."""

    stream: bool = False
    include_usage: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    sse_ping_interval: int = 30
    n_predict: int = -1
    n_indent: int = 0
    n_keep: int = 0
    n_discard: int = 0
    n_cmpl: int = 1
    n_cache_reuse: int = 0
    t_max_predict_ms: int = -1
    id_slot: int = -1
    response_fields: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    backend_sampling: bool = False
    lora: dict[int, float] = field(default_factory=dict)
    """Scales of LoRA adapters by id; empty: the server's."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` but `grammar`."""
    grammar: Grammar | None = None
    grammar_lazy: bool = False
    grammar_triggers: list[dict[str, Any]] = field(default_factory=list)
    preserved_tokens: list[int] = field(default_factory=list)
    chat_format: str = "Content-only"
    reasoning_format: str = "deepseek"
    reasoning_in_content: bool = False
    generation_prompt: str = ""
    parse_tool_calls: bool = True
    reasoning_budget_tokens: int = -1
    reasoning_control: bool = False
    reasoning_start: str = ""
    reasoning_ends: list[str] = field(default_factory=list)
    reasoning_message: str = ""
    spec_types: str = "none"

    @classmethod
    def defaults(cls, config: ServerConfig) -> RequestParams:
        """The server's defaults, which every request starts from."""
        sampling = msgspec.structs.asdict(config.sampling)
        grammar = sampling.pop("grammar")
        reasoning = config.chat.reasoning_format
        return cls(
            cache_prompt=config.context.cache_prompt,
            sse_ping_interval=config.http.sse_ping_interval,
            n_predict=config.context.n_predict,
            n_keep=config.context.n_keep,
            n_cache_reuse=config.context.cache_reuse,
            stop=list(config.chat.reverse_prompt),
            sampling=sampling,
            grammar=grammar,
            reasoning_format="deepseek" if reasoning == "auto" else reasoning,
            spec_types=",".join(config.spec.types) or "none",
        )

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.sampling, grammar=self.grammar)

    def settings(self, brief: bool = False) -> dict[str, Any]:
        """llama-server's `generation_settings` (`brief`: the form in `/props` and `/slots`, without texts)."""
        s = self.sampling
        out: dict[str, Any] = {"seed": s["seed"]}
        for name in _FLOATS_FIRST:
            out[name] = s[name] if name == "top_k" else f32(s[name])
        for name in ("repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty"):
            out[name] = s[name] if name == "repeat_last_n" else f32(s[name])
        out |= {
            "dry_multiplier": f32(s["dry_multiplier"]),
            "dry_base": f32(s["dry_base"]),
            "dry_allowed_length": s["dry_allowed_length"],
            "dry_penalty_last_n": s["dry_penalty_last_n"],
        }
        if not brief:
            out["dry_sequence_breakers"] = list(s["dry_sequence_breakers"])
        out["mirostat"] = s["mirostat"]
        for name in ("mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay"):
            out[name] = f32(s[name])
        if not brief:
            out["stop"] = self.stop
        out |= {
            "max_tokens": self.n_predict,
            "n_predict": self.n_predict,
            "n_keep": self.n_keep,
            "n_discard": self.n_discard,
            "ignore_eos": s["ignore_eos"],
            "stream": self.stream,
        }
        if not brief:
            out["logit_bias"] = [{"bias": f32(bias), "token": token} for token, bias in s["logit_bias"]]
        out |= {"n_probs": s["n_probs"], "min_keep": s["min_keep"]}
        if not brief:
            out |= {
                "grammar": self.grammar.text if self.grammar else "",
                "grammar_lazy": self.grammar_lazy,
                "grammar_triggers": self.grammar_triggers,
                "preserved_tokens": self.preserved_tokens,
            }
        return out | self._tail()

    def _tail(self) -> dict[str, Any]:
        return {
            "chat_format": self.chat_format,
            "reasoning_format": self.reasoning_format,
            "reasoning_in_content": self.reasoning_in_content,
            "generation_prompt": self.generation_prompt,
            "samplers": list(self.sampling["samplers"]),
            "speculative.types": self.spec_types,
            "timings_per_token": self.timings_per_token,
            "post_sampling_probs": self.sampling["post_sampling_probs"],
            "backend_sampling": self.backend_sampling,
            "lora": [{"id": id, "scale": scale} for id, scale in self.lora.items()],
        }


_FLOATS_FIRST = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
)
