"""The state of one sequence: its tokens, its cells, its place in the schedule and its clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from ftgguf.engine.detokenizer import Piece
from ftgguf.engine.messages import Generate, TokenProbs
from ftgguf.kv.pages import cells_of
from ftgguf.kv.radix import Node
from ftgguf.nouns import F32, I32, PAGE


class RequestError(Exception):
    """This request cannot be served; becomes a `Failed` with llama-server's error type and HTTP code."""

    def __init__(self, code: int, kind: str, message: str, **extra: int) -> None:
        super().__init__(message)
        self.code, self.kind, self.message, self.extra = code, kind, message, extra


class TokenSampler(Protocol):
    """Chooses the tokens of one sequence; holds its random state, penalties and grammar."""

    @property
    def seed(self) -> int:
        """The seed in use (a random one where the request asked for that)."""

    def sample(self, logits: F32) -> tuple[int, TokenProbs | None]:
        """Choose and accept a token from raw logits, float32 [n_vocab]; its probabilities when `n_probs` > 0."""

    def end_reasoning(self) -> bool:
        """Force the end of the thinking that is going on; False if there is none."""


class TextDecoder(Protocol):
    """Turns the tokens of one sequence into text, holding back what may become a stop string."""

    has_new_line: bool

    def push(self, token: int, probs: TokenProbs | None = None, elapsed_ms: float = 0.0) -> Piece:
        """One generated token, `elapsed_ms` after the first; returns what may leave now."""

    def finish(self) -> Piece:
        """What was held back, when the sequence ends without a stop string."""


class StatePooler(Protocol):
    """Makes the embedding of a prompt from its hidden states (engine.embeddings.Pooler)."""

    pooling: str

    @property
    def needs_all(self) -> bool:
        """No prefix may be reused."""

    def reset(self) -> None:
        """Forget all rows."""

    def wanted(self, start: int, stop: int, total: int) -> range:
        """The positions of [start, stop) whose states are needed, of a prompt of `total` tokens."""

    def take(self, rows: F32) -> None:
        """Their states, float32 [n, n_embd]."""

    def result(self) -> F32:
        """The embedding, float32 [1 or tokens, n_embd]."""


class State(IntEnum):
    """Where a sequence stands. `READY` has a slot and waits for pages; `PREEMPTED` gave its pages back."""

    QUEUED = 0
    READY = 1
    PREFILL = 2
    DECODE = 3
    PREEMPTED = 4
    DONE = 5


@dataclass(slots=True)
class Clock:
    """Moments in seconds (`time.perf_counter`), 0 while not reached, as llama-server's `server_slot_stats`."""

    start: float = 0.0
    prompt_last: float = 0.0
    gen_last: float = 0.0

    def prompt_ms(self) -> float:
        """From the start to the last prompt batch; the first token costs the prompt."""
        return (self.prompt_last - self.start) * 1e3 if self.prompt_last else 0.0

    def predicted_ms(self) -> float:
        """From the first token to the last; at least a microsecond once a token exists."""
        return max(1e-3, (self.gen_last - self.prompt_last) * 1e3) if self.gen_last else 0.0


_NO_DRAFT: I32 = np.zeros(0, np.int32)


class Sequence:
    """One request being served.

    `tokens[:n_tokens]` is the prompt and what was generated; the first `n_past` of them are evaluated, and token i is
    in cell `table[i]`. `pages` holds one page for each page index of the table.
    """

    __slots__ = (
        "adapters",
        "arrival",
        "cached",
        "clock",
        "draft",
        "exact",
        "id",
        "kind",
        "limit",
        "n_accepted",
        "n_drafted",
        "n_generated",
        "n_past",
        "n_processed",
        "n_prompt",
        "n_tokens",
        "node",
        "pages",
        "pooler",
        "request",
        "sampler",
        "slot",
        "state",
        "table",
        "tokens",
        "truncated",
    )

    def __init__(self, request: Generate, arrival: int, n_predict: int, pooler: StatePooler | None = None) -> None:
        prompt = request.tokens
        n = len(prompt)
        self.pooler = pooler
        """Of an `embed` request."""
        self.adapters = used_adapters(request.adapters)
        """Scales by adapter; sequences with other ones have other K and V for the same tokens."""
        self.kind = (pooler is not None, self.adapters)
        """Only sequences of one kind can be in one step."""
        self.request = request
        self.id = request.id
        self.arrival = arrival
        self.state = State.QUEUED
        self.slot = -1
        self.limit = request.max_tokens if request.max_tokens != -1 else n_predict
        """Tokens to generate; -1: no limit."""
        self.tokens: I32 = np.empty(n + 64, dtype=np.int32)
        self.tokens[:n] = prompt
        self.n_prompt = self.n_tokens = n
        self.n_past = 0
        self.cached = 0
        """Prompt tokens reused at the first start."""
        self.n_processed = 0
        """Prompt tokens evaluated for this request (once each, however often it was preempted)."""
        self.n_generated = 0
        self.draft: I32 = _NO_DRAFT
        """Tokens that the step in progress evaluates behind the next one."""
        self.n_drafted = self.n_accepted = 0
        self.exact = 1 << 60
        """The cells of positions below this are exact; a context shift lowers it, and nothing above is kept."""
        self.truncated = False
        self.table: I32 = np.empty(0, dtype=np.int32)
        self.pages: list[int] = []
        self.node: Node | None = None
        self.sampler: TokenSampler | None = None
        self.clock = Clock()

    @property
    def keeps(self) -> bool:
        """What it evaluates stays for others. Prompts that are pooled whole come back to nobody's use."""
        return self.pooler is None or not self.pooler.needs_all

    @property
    def reuses(self) -> bool:
        """It may start behind a prefix that others evaluated."""
        return self.keeps and self.request.cache_prompt

    @property
    def known(self) -> I32:
        """The prompt and all generated tokens, int32 [n_tokens] (a view)."""
        return self.tokens[: self.n_tokens]

    @property
    def evaluated(self) -> I32:
        """The tokens whose cells are filled, int32 [n_past] (a view)."""
        return self.tokens[: self.n_past]

    def append(self, token: int) -> None:
        """Add a generated token (not evaluated yet)."""
        if self.n_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty_like(self.tokens)])
        self.tokens[self.n_tokens] = token
        self.n_tokens += 1

    def add_pages(self, pages: list[int]) -> None:
        """Extend the table by `pages`."""
        have = len(self.pages) * PAGE
        need = have + len(pages) * PAGE
        if need > len(self.table):
            grown = np.empty(max(need, 2 * len(self.table)), dtype=np.int32)
            grown[:have] = self.table[:have]
            self.table = grown
        self.table[have:need] = cells_of(pages)
        self.pages.extend(pages)

    def timings(self) -> dict[str, float]:
        """nouns.Timings' fields."""
        clock = self.clock
        drafts = {"draft_n": self.n_drafted, "draft_n_accepted": self.n_accepted} if self.n_drafted else {}
        return {
            "cache_n": self.cached,
            "prompt_n": self.n_processed,
            "prompt_ms": clock.prompt_ms(),
            "predicted_n": self.n_generated,
            "predicted_ms": clock.predicted_ms(),
            **drafts,
        }


def used_adapters(scales: tuple[float, ...]) -> tuple[float, ...]:
    """Scales without the zeros at their end: equal for requests that use the same adapters in the same way."""
    n = len(scales)
    while n and scales[n - 1] == 0.0:
        n -= 1
    return scales[:n]
