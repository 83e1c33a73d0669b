"""What the front and the engine say to each other over the socketpair: msgspec structs, msgpack-encoded, tagged.

The engine owns everything that decides when a sequence ends (sampler, grammar, detokenising, stop strings), so a
request carries token ids in and text pieces come out. Ids are chosen by the front and are unique for its life.
Field names and defaults are llama-server's (its `server-schema.cpp`), so that the front maps them one to one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ftgguf.nouns import I32

DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's LLAMA_DEFAULT_SEED: draw a random seed."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output. `kind`: `gbnf`, `json_schema` or `lark`; `text` its source.

    `lazy` constraints sleep until one of `triggers` (strings found in the generated text) appears.
    `after` (a string, such as an end-of-thinking tag) holds the constraint back until it was generated.
    """

    kind: str
    text: str
    lazy: bool = False
    triggers: tuple[str, ...] = ()
    after: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """llama-server's sampling settings with its defaults; applied in the order of `samplers`."""

    seed: int = RANDOM_SEED
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias); minus infinity forbids the token. Ids outside the vocabulary are dropped by the front."""
    ignore_eos: bool = False
    n_probs: int = 0
    post_sampling_probs: bool = False
    grammar: Grammar | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How the thinking of an answer is bounded (llama-server's reasoning budget).

    Thinking begins after the text `start` was generated (`open`: the prompt has begun it) and ends with one of `ends`.
    After `budget` tokens of it (-1: no limit), or when a `reasoning_end` control comes, the tokens `forced` are
    generated: a message and the first of `ends`.
    """

    start: str
    ends: tuple[str, ...]
    forced: tuple[int, ...]
    budget: int = -1
    open: bool = False


# ---------------------------------------------------------------------------------------------- front -> engine


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Run one sequence. `prompt` is token ids (never empty). `max_tokens` -1 means until the context is full;
    0 means evaluate the prompt only."""

    id: int
    prompt: tuple[int, ...] = ()
    packed: bytes = b""
    """The prompt as little-endian int32, in place of `prompt`: how the front sends it. Thousands of ids cost a
    millisecond to write, read and look at one by one."""
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = -1
    stop: tuple[str, ...] = ()
    cache_prompt: bool = True
    id_slot: int = -1
    n_keep: int = 0
    n_discard: int = 0
    n_indent: int = 0
    t_max_predict_ms: int = -1
    return_progress: bool = False
    special: bool = False
    """Render control tokens in the text (`--special`)."""
    preserved_tokens: tuple[int, ...] = ()
    """Control tokens that are rendered although `special` is off (tool-call and thinking tags)."""
    reasoning: Reasoning | None = None
    anchors: tuple[int, ...] = ()
    """Prompt lengths at which a snapshot is worth keeping (system end, turn ends)."""
    stream: bool = True
    """False: pieces may be joined before they are sent; the text is the same."""
    embed: str = ""
    """Pool the prompt's final hidden states (or score them, with rank pooling) instead of generating: ends with one
    `Embedded`. A pooling type, or `model` for the server's. Sampling and stop fields are not read."""
    adapters: tuple[float, ...] = ()
    """The scale of each LoRA adapter by its id; shorter than their number means 0 for the rest."""
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    """The request's `generation_settings` as the front shows them in `/slots`; the engine only echoes it."""

    @property
    def tokens(self) -> I32:
        """The prompt's ids, int32 [n] (read-only where they came packed). OverflowError for an id of more bits."""
        import numpy as np  # who only reads the flags has no need of it

        if self.packed:
            return np.frombuffer(self.packed, "<i4")
        return np.fromiter(self.prompt, np.int32, len(self.prompt))


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop request `id` within a step; no further message about it is sent."""

    id: int


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """Ask the engine something; answered by one `Reply` with the same `id`.

    `action`: `slots`, `metrics`, `slot_save`, `slot_restore`, `slot_erase`, `cache_status`, `reasoning_end`,
    `shutdown`; arguments in `arguments`.
    """

    id: int
    action: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- engine -> front


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """Progress of the load, 0..1, with the stage's name."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded. `info` holds nouns.ModelInfo's fields and what start-up prints (threads, context ...)."""

    info: dict[str, Any]
    n_ctx: int
    """Tokens that one request may occupy."""
    n_slots: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """Request `id` got slot `slot`; `cached` of its prompt tokens were reused."""

    id: int
    slot: int
    cached: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Prompt progress after one batch (`return_progress`)."""

    id: int
    total: int
    cache: int
    processed: int
    time_ms: float


class TokenProb(msgspec.Struct, frozen=True, array_like=True):
    """One candidate: its id, its piece as raw bytes, and log-probability (or probability after sampling)."""

    id: int
    piece: bytes
    value: float


class TokenProbs(msgspec.Struct, frozen=True, array_like=True):
    """A generated token with its `n_probs` best alternatives, best first."""

    chosen: TokenProb
    top: tuple[TokenProb, ...]


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """New text of request `id`: whole UTF-8 characters, no part of a stop string. `tokens` are the ids since the last
    delta, those of held-back text too. `stopped`: a stop string ended the text here."""

    id: int
    text: str
    tokens: tuple[int, ...]
    probs: tuple[TokenProbs, ...] = ()
    predicted_n: int = 0
    timings: dict[str, float] = msgspec.field(default_factory=dict)
    """nouns.Timings' fields so far."""
    stopped: bool = False


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The end of request `id`. All text was sent in `Delta`s before. `stop_type`: `none`, `eos`, `word`, `limit`."""

    id: int
    slot: int
    stop_type: str
    stopping_word: str
    truncated: bool
    has_new_line: bool
    predicted_n: int
    evaluated_n: int
    """All prompt tokens, cached ones too."""
    cached_n: int
    """Tokens of the sequence now held for reuse (llama-server's `tokens_cached`)."""
    timings: dict[str, float]
    seed: int = RANDOM_SEED
    """The seed that was used."""


class Embedded(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """The end of an `embed` request: `data` is float32 [rows, columns], little-endian, row by row.

    One row for a pooled prompt, one for each token without pooling; with rank pooling the columns are the scores of the
    classifier's labels. Nothing is normalised.
    """

    id: int
    slot: int
    rows: int
    columns: int
    data: bytes
    evaluated_n: int
    """All prompt tokens, cached ones too."""
    timings: dict[str, float]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Request `id` failed; `type` and `code` are llama-server's error type and HTTP status, `extra` joins it."""

    id: int
    code: int
    type: str = msgspec.field(name="error_type")  # "type" is the tag on the wire
    message: str
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a `Control`."""

    id: int
    ok: bool
    value: Any = None
    message: str = ""


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag="fatal"):
    """The engine cannot start or go on; it exits after this. `message` names the cause and the cure."""

    message: str


ToEngine = Generate | Cancel | Control
ToFront = Loading | Ready | Started | Progress | Delta | Finished | Embedded | Failed | Reply | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
