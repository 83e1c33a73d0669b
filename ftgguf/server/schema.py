"""The request fields of all completion routes, as one table with llama-server's names, aliases, types and limits.

`null` is the same as absent. A value outside a hard limit is a 400 error, outside a soft limit it is clamped; unknown
fields are ignored. Texts of errors are llama-server's (`Field 'x': ...`). The order of the table is the order of
evaluation, which matters for `logit_bias` before `ignore_eos` and `preserved_tokens` before `grammar_triggers`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ftgguf.chat.constraint import closed_schema
from ftgguf.engine.messages import Grammar
from ftgguf.server.adapters import parse_scales
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.params import REASONING_FORMATS, RequestParams
from ftgguf.server.wire import as_bool, as_float, as_int, as_list, as_str, lenient

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT_MAX = 3.4028234663852886e38


class Vocabulary(Protocol):
    """What the front needs of `ftgguf.vocab.Vocab`."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog_ids(self) -> frozenset[int]: ...
    @property
    def control_texts(self) -> Mapping[bytes, int]: ...
    def tokenize(self, text: str, add_special: bool = ..., parse_special: bool = ...) -> list[int]: ...
    def detokenize(self, ids: Sequence[int], special: bool = ...) -> bytes: ...
    def render(self, ids: Sequence[int], remove_special: bool = ..., special: bool = ...) -> bytes: ...
    def piece(self, token: int, special: bool = ...) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What the handlers of fields look at besides the value."""

    defaults: RequestParams
    vocab: Vocabulary
    n_parallel: int
    eog: tuple[int, ...]


Handler = Callable[[RequestParams, Any, str, Context], None]


@dataclass(frozen=True, slots=True)
class Field:
    """One request field. `kind`: `bool`, `int`, `float` or `json`; `low`/`high` inclusive; `target` in `RequestParams`
    (`sampling.x` for the engine's), or a `handler` that stores it."""

    names: tuple[str, ...]
    kind: str
    target: str = ""
    low: float | None = None
    high: float | None = None
    hard: bool = False
    bits: int = 32
    handler: Handler | None = None


def _flag(name: str, target: str = "") -> Field:
    return Field((name,), "bool", target or name)


def _int(
    *names: str, target: str = "", low: int | None = None, high: int = INT32_MAX, hard: bool = True, bits: int = 32
) -> Field:
    return Field(
        names, "int", target or names[0], low, high if low is not None else None, hard and low is not None, bits
    )


def _sample(
    *names: str, kind: str = "float", low: float | None = None, high: float | None = None, hard: bool = False
) -> Field:
    return Field(names, kind, "sampling." + names[0], low, high, hard)


def _json(*names: str, handler: Handler) -> Field:
    return Field(names, "json", handler=handler)


# ------------------------------------------------------------------------------------------------- handlers


def _response_fields(params: RequestParams, value: Any, _: str, __: Context) -> None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        params.response_fields = value


def _dry_base(params: RequestParams, value: Any, _: str, context: Context) -> None:
    base = as_float(value)
    params.sampling["dry_base"] = context.defaults.sampling["dry_base"] if base < 1.0 else base


def _n_cmpl(params: RequestParams, value: Any, _: str, context: Context) -> None:
    count = as_int(value)
    _check_range(count, 1, context.n_parallel, "int")
    params.n_cmpl = count


def _seed(params: RequestParams, value: Any, _: str, __: Context) -> None:
    params.sampling["seed"] = as_int(value, 64) & 0xFFFFFFFF


def _lora(params: RequestParams, value: Any, _: str, __: Context) -> None:
    if not isinstance(value, list):
        raise ValueError("Error: 'lora' must be an array of objects with 'id' and 'scale' fields")
    params.lora = parse_scales(value)


def _dry_breakers(params: RequestParams, value: Any, _: str, __: Context) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError("Error: dry_sequence_breakers must be a non-empty array of strings")
    params.sampling["dry_sequence_breakers"] = tuple(value)


def _grammar(params: RequestParams, value: Any, name: str, _: Context) -> None:
    if name == "json_schema":
        schema = value if isinstance(value, dict | bool) else {}
        if schema == {}:
            schema = {"type": "object"}
        params.grammar = Grammar(kind="json_schema", text=msgspec.json.encode(closed_schema(schema)).decode())
    elif isinstance(value, Grammar):
        params.grammar = value
    elif isinstance(value, str) and value:
        params.grammar = Grammar(kind="gbnf", text=value)


def _reasoning_format(params: RequestParams, value: Any, _: str, __: Context) -> None:
    name = as_str(value)
    if name not in REASONING_FORMATS:
        raise ValueError(f"Unknown reasoning format: {name}")
    params.reasoning_format = name


def _generation_prompt(params: RequestParams, value: Any, _: str, __: Context) -> None:
    params.generation_prompt = as_str(value)


def _reasoning_start(params: RequestParams, value: Any, _: str, __: Context) -> None:
    params.reasoning_start = as_str(value)


def _reasoning_ends(params: RequestParams, value: Any, _: str, __: Context) -> None:
    tags = [value] if isinstance(value, str) else as_list(value)
    params.reasoning_ends = [as_str(tag) for tag in tags if tag != ""]


def _reasoning_message(params: RequestParams, value: Any, _: str, __: Context) -> None:
    params.reasoning_message = as_str(value)


def _preserved(params: RequestParams, value: Any, _: str, context: Context) -> None:
    for text in as_list(value):
        ids = context.vocab.tokenize(as_str(text), add_special=False, parse_special=True)
        if len(ids) == 1 and ids[0] not in params.preserved_tokens:
            params.preserved_tokens.append(ids[0])


def _triggers(params: RequestParams, value: Any, _: str, __: Context) -> None:
    params.grammar_triggers = [item for item in as_list(value) if isinstance(item, dict)]
    if params.grammar_lazy and not params.grammar_triggers:
        raise ValueError("Error: no triggers set for lazy grammar!")


def _bias(value: Any) -> float | None:
    if isinstance(value, bool):
        return None if value else -math.inf
    return float(value) if isinstance(value, int | float) else None


def _is_id(text: str) -> int | None:
    """The number that C's strtol reads from the whole of `text`, if it is one."""
    try:
        return int(text.strip()) if text.strip() == text.lstrip() and text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _logit_bias(params: RequestParams, value: Any, _: str, context: Context) -> None:
    pairs: list[tuple[Any, float]] = []
    if isinstance(value, list):
        for item in value:
            if isinstance(item, list) and len(item) == 2 and (bias := _bias(item[1])) is not None:
                pairs.append((item[0], bias))
    elif isinstance(value, dict):
        for key, item in value.items():
            if (bias := _bias(item)) is not None:
                number = _is_id(key)
                pairs.append((key if number is None else number, bias))
    out: list[tuple[int, float]] = []
    for token, bias in pairs:
        if isinstance(token, str):
            out += [(id, bias) for id in context.vocab.tokenize(token, add_special=False, parse_special=False)]
        elif isinstance(token, int) and not isinstance(token, bool) and 0 <= token < context.vocab.n_vocab:
            out.append((token, bias))
    params.sampling["logit_bias"] = tuple(out)


def _ignore_eos(params: RequestParams, value: Any, _: str, context: Context) -> None:
    params.sampling["ignore_eos"] = as_bool(value)
    if params.sampling["ignore_eos"]:
        params.sampling["logit_bias"] += tuple((id, -math.inf) for id in context.eog)


def _stop(params: RequestParams, value: Any, _: str, context: Context) -> None:
    words: list[str] = []
    if isinstance(value, list):
        words = [as_str(word) for word in value if word not in ("", None, [], {})]
    elif isinstance(value, str):
        words = [value] if value else []
    params.stop = words or list(context.defaults.stop)


SAMPLER_LETTERS = {
    "d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p", "t": "temperature",
    "x": "xtc", "i": "infill", "e": "penalties", "a": "adaptive_p",
}  # fmt: skip
_SAMPLER_NAMES = {
    alias: name for name in SAMPLER_LETTERS.values() for alias in (name, name.replace("_", "-"), name.replace("_", ""))
} | {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}


def _samplers(params: RequestParams, value: Any, _: str, __: Context) -> None:
    if isinstance(value, list):
        names = [_SAMPLER_NAMES.get(as_str(item).lower()) for item in value]
    elif isinstance(value, str):
        names = [SAMPLER_LETTERS.get(letter) for letter in value]
    else:
        return
    params.sampling["samplers"] = tuple(name for name in names if name)


# ---------------------------------------------------------------------------------------------------- table

FIELDS: tuple[Field, ...] = (
    _flag("verbose"),
    _flag("timings_per_token"),
    _flag("stream"),
    _flag("cache_prompt"),
    _flag("return_tokens"),
    _flag("return_progress"),
    _int("sse_ping_interval", low=-1),
    _int("n_predict", "max_completion_tokens", "max_tokens", low=-1),
    _int("n_indent", low=0),
    _int("n_keep", low=-1),
    _int("n_discard", low=0),
    Field(("n_cmpl", "n"), "json", handler=_n_cmpl),
    _int("n_cache_reuse", low=0),
    _int("t_max_predict_ms", low=-1, high=INT64_MAX, bits=64),
    _json("response_fields", handler=_response_fields),
    _sample("top_k", kind="int", low=0, high=INT32_MAX),
    _sample("top_p", low=0.0, high=1.0),
    _sample("min_p", low=0.0, high=1.0),
    _sample("top_n_sigma"),
    _sample("xtc_probability", low=0.0, high=1.0),
    _sample("xtc_threshold", low=0.0, high=1.0),
    _sample("typical_p"),
    _sample("temperature", low=0.0, high=math.inf),
    _sample("dynatemp_range"),
    _sample("dynatemp_exponent"),
    _sample("repeat_last_n", kind="int", low=0, high=INT32_MAX, hard=True),
    _sample("repeat_penalty"),
    _sample("frequency_penalty"),
    _sample("presence_penalty"),
    _sample("dry_multiplier"),
    _json("dry_base", handler=_dry_base),
    _sample("dry_allowed_length", kind="int", low=0, high=INT32_MAX, hard=True),
    _sample("dry_penalty_last_n", kind="int", low=0, high=INT32_MAX, hard=True),
    _sample("mirostat", kind="int", low=0, high=2),
    _sample("mirostat_tau"),
    _sample("mirostat_eta"),
    _sample("adaptive_target", low=-FLOAT_MAX, high=1.0),
    _sample("adaptive_decay", low=0.0, high=0.99, hard=True),
    _json("seed", handler=_seed),
    _sample("n_probs", "logprobs", kind="int"),
    _sample("min_keep", kind="int", low=0, high=INT32_MAX, hard=True),
    _flag("backend_sampling"),
    _flag("post_sampling_probs", "sampling.post_sampling_probs"),
    _json("lora", handler=_lora),
    _json("dry_sequence_breakers", handler=_dry_breakers),
    _json("grammar", "json_schema", handler=_grammar),
    _flag("grammar_lazy"),
    _json("reasoning_format", handler=_reasoning_format),
    _json("generation_prompt", handler=_generation_prompt),
    _flag("parse_tool_calls"),
    _json("preserved_tokens", handler=_preserved),
    _json("grammar_triggers", handler=_triggers),
    _flag("reasoning_control"),
    _int("reasoning_budget_tokens", low=-1),
    _json("reasoning_budget_start_tag", handler=_reasoning_start),
    _json("reasoning_budget_end_tags", "reasoning_budget_end_tag", handler=_reasoning_ends),
    _json("reasoning_budget_message", handler=_reasoning_message),
    _json("logit_bias", handler=_logit_bias),
    _json("ignore_eos", handler=_ignore_eos),
    _json("stop", handler=_stop),
    _json("samplers", handler=_samplers),
)


def evaluate(body: dict[str, Any], context: Context) -> RequestParams:
    """`body`'s fields over the server's defaults; raises `InvalidRequest` with llama-server's text."""
    params = copy.copy(context.defaults)
    params.sampling = dict(params.sampling)
    params.preserved_tokens = list(params.preserved_tokens)
    for entry in FIELDS:
        for name in entry.names:
            value = body.get(name)
            if value is not None:
                try:
                    _store(params, entry, name, value, context)
                except ValueError as error:
                    raise InvalidRequest(f"Field '{name}': {error}") from None
                break
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") is not None:
        try:
            params.include_usage = as_bool(options["include_usage"])
        except ValueError as error:
            raise InvalidRequest(f"Field 'include_usage': {error}") from None
    params.id_slot = lenient(body, "id_slot", -1)
    params.reasoning_in_content = params.stream and params.reasoning_format == "deepseek-legacy"
    return params


def _store(params: RequestParams, entry: Field, name: str, value: Any, context: Context) -> None:
    if entry.handler is not None:
        entry.handler(params, value, name, context)
        return
    if entry.kind == "bool":
        stored: Any = as_bool(value)
    else:
        stored = as_int(value, entry.bits) if entry.kind == "int" else as_float(value)
        if entry.low is not None and entry.high is not None:
            if entry.hard:
                _check_range(stored, entry.low, entry.high, entry.kind)
            else:
                stored = max(entry.low, min(entry.high, stored))
    if entry.target.startswith("sampling."):
        params.sampling[entry.target[len("sampling.") :]] = stored
    else:
        setattr(params, entry.target, stored)


def _check_range(value: float, low: float, high: float, kind: str) -> None:
    if not low <= value <= high:
        low_text, high_text, text = (f"{x:.6f}" if kind == "float" else str(int(x)) for x in (low, high, value))
        raise ValueError(f"Value must be between {low_text} <= value <= {high_text}, but got {text}")
