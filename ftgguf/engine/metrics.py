"""The counters behind `/metrics`: llama-server's (its `server_metrics`) and those of this engine's own events."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftgguf.engine.request import Sequence


@dataclass(slots=True)
class Bucket:
    """Tokens, the steps they took, and seconds."""

    count: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, count: int, steps: int, seconds: float) -> None:
        self.count += count
        self.steps += steps
        self.seconds += seconds

    def rate(self) -> float:
        """Steps per second: a first token costs no step, so it does not raise the rate."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Metrics:
    """Totals since start, and two windows that a scrape resets."""

    prompt: Bucket = field(default_factory=Bucket)
    predict: Bucket = field(default_factory=Bucket)
    prompt_window: Bucket = field(default_factory=Bucket)
    predict_window: Bucket = field(default_factory=Bucket)
    n_prompt_cached: int = 0
    n_tokens_max: int = 0
    n_decode: int = 0
    n_busy_slots: int = 0
    n_preempted: int = 0
    n_deferred_pages: int = 0
    n_context_shifts: int = 0
    n_failed_steps: int = 0
    n_drafts: int = 0
    n_draft_tokens: int = 0
    n_draft_accepted: int = 0
    prompt_step_seconds: float = 0.0
    """What the last step with prompt rows took."""

    def add_prompt(self, tokens: int, seconds: float) -> None:
        """`tokens` prompt rows were computed in a step of `seconds`."""
        self.prompt_step_seconds = seconds
        self.prompt.add(tokens, tokens, seconds)
        self.prompt_window.add(tokens, tokens, seconds)

    def add_draft(self, tokens: int, accepted: int) -> None:
        """A draft of `tokens` was verified."""
        self.n_drafts += 1
        self.n_draft_tokens += tokens
        self.n_draft_accepted += accepted

    def add_predicted(self, sequence: Sequence) -> None:
        """The sequence is over."""
        n = sequence.n_generated
        if n > 0:
            seconds = sequence.clock.predicted_ms() / 1e3
            self.predict.add(n, n - 1, seconds)
            self.predict_window.add(n, n - 1, seconds)

    def report(self, reset: bool) -> dict[str, float]:
        """By llama-server's metric names without prefix, and ours; `reset` starts new windows."""
        value = {
            "prompt_tokens_total": self.prompt.count,
            "prompt_tokens_cached_total": self.n_prompt_cached,
            "prompt_seconds_total": self.prompt.seconds,
            "tokens_predicted_total": self.predict.count,
            "tokens_predicted_seconds_total": self.predict.seconds,
            "n_decode_total": self.n_decode,
            "n_tokens_max": self.n_tokens_max,
            "spec_decode_num_draft_tokens_total": self.n_draft_tokens,
            "spec_decode_num_accepted_tokens_total": self.n_draft_accepted,
            "spec_decode_num_drafts_total": self.n_drafts,
            "prompt_tokens_seconds": self.prompt_window.rate(),
            "predicted_tokens_seconds": self.predict_window.rate(),
            "n_busy_slots_per_decode": self.n_busy_slots / self.n_decode if self.n_decode else 0.0,
            "preemptions_total": self.n_preempted,
            "deferred_for_pages_total": self.n_deferred_pages,
            "context_shifts_total": self.n_context_shifts,
            "failed_steps_total": self.n_failed_steps,
        }
        if reset:
            self.prompt_window, self.predict_window = Bucket(), Bucket()
        return value
