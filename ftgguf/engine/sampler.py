"""Choosing the next token as llama-server does: the same chain, the same order around a grammar, the same seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

import ftgguf._libllama as _libllama
from ftgguf.engine.budget import ReasoningBudget
from ftgguf.engine.grammar import Constraint, GrammarCompiler
from ftgguf.engine.grammar_source import GrammarError
from ftgguf.engine.messages import Reasoning, SamplingParams, TokenProb, TokenProbs
from ftgguf.gguf import GGUFFile
from ftgguf.nouns import F32, I32
from ftgguf.vocab import Vocab

log = logging.getLogger(__name__)

MAX_RESAMPLES = 32
"""Times that a sleeping constraint may refuse a token that would wake it with text it forbids."""

SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
SAMPLER_NAMES = {
    spelling: name
    for name in SAMPLER_LETTERS.values()
    for spelling in (name, name.replace("_", "-"), name.replace("_", ""))
} | _ALIASES
"""Every spelling of a sampler's name that llama.cpp accepts, lower case -> canonical."""


class SamplingError(ValueError):
    """A request's sampling cannot be done (bad value) or cannot go on (nothing left to choose). Fails that request."""


def sampler_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Canonical names from a list of names, or a string of letters. What llama.cpp does not know is left out with a
    warning in the log, as llama-server does."""
    found: list[str] = []
    table = SAMPLER_LETTERS if isinstance(names, str) else SAMPLER_NAMES
    for name in names:
        known = table.get(name if isinstance(names, str) else name.lower())
        if known is None:
            log.warning("unable to match sampler %r", name)
        else:
            found.append(known)
    return tuple(found)


_FILE_KEYS = {
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temperature", float),
    "penalty_last_n": ("repeat_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}


def sampling_defaults(gguf: GGUFFile) -> dict[str, Any]:
    """SamplingParams fields that the file's `general.sampling.*` keys set; an explicit flag overrides them.

    As llama.cpp does, a number may have any numeric type or be written as a string, and other values are ignored.
    """
    fields: dict[str, Any] = {}
    sequence = gguf.metadata.get("general.sampling.sequence")
    if isinstance(sequence, str) and sequence:
        fields["samplers"] = sampler_names(sequence.split(";"))
    for key, (field, kind) in _FILE_KEYS.items():
        value = gguf.metadata.get(f"general.sampling.{key}")
        if isinstance(value, str | int | float | np.generic):
            try:
                fields[field] = kind(float(value))
            except (ValueError, OverflowError):
                log.warning("general.sampling.%s in %s is not a number: %r", key, gguf.path, value)
    return fields


class Sampler:
    """One request's sampler. Not thread-safe.

    `prompt` (all of the prompt's token ids) is what penalties and DRY see before the first generated token, as far as
    their windows reach back.
    SamplingError for settings that the samplers or the grammar cannot take, in llama-server's words where it has some.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocab,
        prompt: Sequence[int] | I32 = (),
        grammars: GrammarCompiler | None = None,
        *,
        special: bool = False,
        reasoning: Reasoning | None = None,
    ) -> None:
        self.params = params
        self._budget: ReasoningBudget | None = None
        self._vocab, self._special = vocab, special
        self._constraint: Constraint | None = None
        biases = list(params.logit_bias)
        if params.ignore_eos:
            biases += [(token, float("-inf")) for token in sorted(vocab.eog_ids)]
        try:
            settings = replace(params, logit_bias=tuple(biases), samplers=sampler_names(params.samplers))
            self._chain = _libllama.SamplerChain(vocab.native, settings)
            windows = params.repeat_last_n, params.dry_penalty_last_n  # no other sampler looks back
            window = max(windows) if min(windows) >= 0 else len(prompt)
            self._chain.accept_all(np.asarray(prompt[-window:]).tolist() if window else [])
            if params.grammar is not None:
                self._constraint = (grammars or GrammarCompiler(vocab)).compile(params.grammar)
            if reasoning is not None:
                self._budget = ReasoningBudget(reasoning, lambda token: vocab.piece(token, special=True))
        except (ValueError, IndexError, TypeError, OverflowError, RuntimeError) as error:
            raise SamplingError(f"Failed to initialize samplers: {error}") from None

    @property
    def seed(self) -> int:
        """The seed that is used: the request's, or the one that was drawn."""
        seed: int = self._chain.seed
        return seed

    @property
    def constraint(self) -> Constraint | None:
        return self._constraint

    def sample(self, logits: F32) -> tuple[int, TokenProbs | None]:
        """The next token from float32 logits [n_vocab], accepted, and its probabilities if the request asked for some.

        First the chain chooses freely; only where the grammar refuses the choice is it asked again under the grammar's
        mask, so that a seed gives llama-server's text. A token that the reasoning budget forces comes before all that.
        SamplingError where nothing can be chosen.
        """
        try:
            forced = self._budget.next() if self._budget is not None else None
            token: int = self._chain.sample(logits) if forced is None else self._only(logits, forced)
            if forced is None and self._constraint is not None:
                token = self._constrained(self._constraint, logits, token)
            probs = self._probs(logits, token) if self.params.n_probs > 0 else None
            self.accept(token)
        except (_libllama.NoCandidate, GrammarError) as error:
            raise SamplingError(str(error)) from None
        return token, probs

    def accept(self, token: int) -> None:
        """Tell samplers and grammar of a token chosen elsewhere (`sample` has done so for its own)."""
        self._chain.accept(token)
        if self._budget is not None:
            self._budget.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    def end_reasoning(self) -> bool:
        """Force the end of the thinking that is going on; False if there is none, or no budget was set up."""
        return self._budget is not None and self._budget.end()

    def _only(self, logits: F32, token: int) -> int:
        """`token`, drawn from the chain as its only candidate, so that the random state goes on as in llama.cpp."""
        mask = np.zeros((len(logits) + 31) // 32, np.uint32)
        mask[token // 32] = np.uint32(1 << (token % 32))
        chosen: int = self._chain.sample(logits, mask)
        return chosen

    def _constrained(self, constraint: Constraint, logits: F32, token: int) -> int:
        for _ in range(MAX_RESAMPLES):
            if constraint.allows(token):
                return token
            token = self._chain.sample(logits, constraint.mask(token))
        if constraint.allows(token):
            return token
        raise GrammarError("no token was found that the grammar allows")

    def _probs(self, logits: F32, token: int) -> TokenProbs:
        """Log-probabilities over the raw logits, or probabilities of the chain's last candidates."""
        top: list[tuple[int, float]]
        if self.params.post_sampling_probs:
            value, top = self._chain.chosen_probability, self._chain.candidates(self.params.n_probs)
        else:
            value, top = _libllama.top_logprobs(logits, token, self.params.n_probs)
        return TokenProbs(self._prob(token, value), tuple(self._prob(*entry) for entry in top))

    def _prob(self, token: int, value: float) -> TokenProb:
        return TokenProb(token, self._vocab.piece(token, self._special), value)
