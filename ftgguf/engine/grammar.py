"""Constraints on generated text: GBNF, JSON Schema and Lark grammars, by llguidance over the model's vocabulary.

A `Constraint` answers two questions about the next token: is this one allowed, and which are. A lazy constraint, or one
held back by `after`, sleeps until its string was generated, and is then fed the text from there on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import llguidance
import numpy as np
from numpy.typing import NDArray

from ftgguf.engine.grammar_source import KIND_NAMES, GrammarError, compile_grammar, limits, short
from ftgguf.engine.messages import Grammar
from ftgguf.vocab import Vocab

Mask = NDArray[np.uint32]
Piece = tuple[int | None, bytes]
"""A token's bytes, or some of them; then without its id."""

KEPT = 64
"""Compiled grammars kept for reuse, per model."""


class _Tokens:
    """What llguidance asks of a tokenizer: every token's bytes, and some way to write bytes as tokens.

    llguidance knows one token for the same bytes, but SPM vocabularies have two for most ASCII characters (`a` and
    `<0x61>`): the later ones are hidden from it, and allowed where the first is.
    """

    is_tokenizer_wrapper = True

    def __init__(self, vocab: Vocab) -> None:
        self.eos_token_id = min(vocab.eog_ids, default=0) if vocab.eos is None else vocab.eos
        self.bos_token_id = vocab.bos
        self.tokens = vocab.pieces(special=True)
        self.special_token_ids = sorted(vocab.eog_ids.union(vocab.control_texts.values()))
        special = set(self.special_token_ids)
        self._by_bytes: dict[bytes, int] = {}
        self.first: dict[int, int] = {}
        """Token -> the first with the same bytes, where that is another."""
        for token, piece in enumerate(self.tokens):
            if piece and token not in special and (first := self._by_bytes.setdefault(piece, token)) != token:
                self.first[token] = first
                self.tokens[token] = b""
        self._later = np.array(list(self.first), np.int64)
        self._firsts = np.array(list(self.first.values()), np.int64)

    def add_later(self, mask: Mask) -> None:
        """Give every hidden token the bit of its first."""
        bits = (mask[self._firsts >> 5] >> (self._firsts & 31).astype(np.uint32)) & 1
        np.bitwise_or.at(mask, self._later >> 5, bits << (self._later & 31).astype(np.uint32))

    @cached_property
    def _longest(self) -> int:
        return min(64, max(map(len, self._by_bytes), default=1))

    def __call__(self, text: str | bytes) -> list[int]:
        """Greedy: a constraint reads bytes, so any tokens that give them do."""
        data = text.encode() if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._by_bytes.get(data[at : at + size])
                if token is not None:
                    ids.append(token)
                    at += size
                    break
            else:
                raise GrammarError("the vocabulary cannot write the constrained text")
        return ids


class GrammarCompiler:
    """Compiles grammars for one model and keeps the last ones. Thread-safe.

    The first use builds llguidance's token trie: 0.5 s and 40 MB at 152k ids (Qwen's vocabulary, one core of a Xeon).
    """

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self._lock = threading.Lock()
        """Held for moments only: another thread may compile for seconds meanwhile."""
        self._building = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], _Made | GrammarError] = OrderedDict()

    @cached_property
    def tokens(self) -> _Tokens:
        return _Tokens(self.vocab)

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            self.tokens, n_vocab=self.vocab.n_vocab, eos_token=sorted(self.vocab.eog_ids) or [self.tokens.eos_token_id]
        )

    def warm(self) -> None:
        """Build what the first constrained request would wait for."""
        with self._building:
            _ = self.tokenizer

    def compile(self, grammar: Grammar) -> Constraint:
        """A fresh constraint. GrammarError (a ValueError) if the grammar does not compile."""
        found = self._known(grammar)
        if found is None:
            found = self._make(grammar)
            with self._lock:
                self._kept[grammar.kind, grammar.text] = found
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        if isinstance(found, GrammarError):
            raise found
        matcher, warnings = found
        return Constraint(self, matcher.deep_copy(), grammar, warnings)

    def knows(self, grammar: Grammar) -> bool:
        """Whether `compile` would answer at once, with a constraint or an error."""
        return self._known(grammar) is not None

    def _known(self, grammar: Grammar) -> _Made | GrammarError | None:
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        return found

    def _make(self, grammar: Grammar) -> _Made | GrammarError:
        try:
            made = compile_grammar(grammar, self.vocab)
            self.warm()
            matcher = llguidance.LLMatcher(self.tokenizer, made.text, log_level=0, limits=limits())
            probe = matcher.deep_copy()
            probe.compute_logit_bias()  # what is too complex, or means nothing, shows here: {"$ref": "#"}
            if probe.is_error():
                fault = short(probe.get_error())
                fault = "it allows no text at all" if fault.startswith("NoExtension") else fault
                raise GrammarError(f"failed to parse {KIND_NAMES[grammar.kind]}: {fault}")
        except GrammarError as error:
            return error
        return matcher, made.warnings


_Made = tuple[llguidance.LLMatcher, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Asleep until one of `needles` appears. `recent` is the end of the text so far, token by token: as much of it as
    an incomplete needle could use."""

    needles: tuple[bytes, ...]
    recent: tuple[Piece, ...] = ()
    is_after: bool = False


class Constraint:
    """The state of one request's grammar. Not thread-safe. `warnings` says what is not enforced."""

    def __init__(
        self, compiler: GrammarCompiler, matcher: llguidance.LLMatcher, grammar: Grammar, warnings: tuple[str, ...]
    ) -> None:
        self.warnings = warnings
        self._compiler, self._vocab, self._matcher, self._grammar = compiler, compiler.vocab, matcher, grammar
        self._waiting: _Waiting | None = None
        if grammar.after:
            self._waiting = _Waiting((grammar.after.encode(),), is_after=True)
        elif grammar.lazy:
            self._waiting = self._for_triggers()
        self._refused: set[int] = set()

    @property
    def active(self) -> bool:
        """Whether the constraint restricts the next token."""
        return self._waiting is None

    def allows(self, token: int) -> bool:
        """Whether `token` may come next. GrammarError if the grammar is too complex to tell."""
        if self._waiting is None:
            if self._vocab.is_eog(token):
                return self._checked(self._matcher.is_accepting())
            return self._checked(self._matcher.validate_tokens([self._first(token)]) == 1)
        if self._vocab.is_eog(token):
            return self._grammar.lazy
        try:
            self._advance(self._waiting, token, self._vocab.piece(token, special=True))
        except GrammarError:
            return False
        return True

    def mask(self, refused: int) -> Mask:
        """Which tokens may come next, one bit each, least significant first: uint32 [ceil(n_vocab / 32)].

        While the constraint sleeps nearly all may: `refused`, which `allows` said no to, loses its bit, as do those
        refused before at this position.
        """
        bits = np.zeros((self._vocab.n_vocab + 31) // 32, np.uint32)
        if self._waiting is None:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._checked(True)
            self._compiler.tokens.add_later(bits)
            return bits
        self._refused.add(refused)
        bits[:] = 0xFFFFFFFF
        for token in self._refused if self._grammar.lazy else self._refused | self._vocab.eog_ids:
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        return bits

    def accept(self, token: int) -> None:
        """`token` was generated. GrammarError if the grammar does not allow it."""
        self._refused.clear()
        if self._vocab.is_eog(token):
            return
        if self._waiting is not None:
            piece = self._vocab.piece(token, special=True)
            self._waiting, self._matcher = self._advance(self._waiting, token, piece)
        elif not self._matcher.consume_token(self._first(token)):
            raise GrammarError(short(self._matcher.get_error()) or "the grammar does not allow this token")

    def _first(self, token: int) -> int:
        return self._compiler.tokens.first.get(token, token)

    def _for_triggers(self) -> _Waiting:
        return _Waiting(tuple(trigger.encode() for trigger in self._grammar.triggers))

    def _advance(
        self, waiting: _Waiting, token: int | None, piece: bytes
    ) -> tuple[_Waiting | None, llguidance.LLMatcher]:
        """The state after `piece` (of `token`, None if cut from one) while asleep; GrammarError if it ends the sleep
        with text that the grammar forbids."""
        recent: tuple[Piece, ...] = (*waiting.recent, (token, piece))
        text = b"".join(piece for _, piece in recent)
        hits = [(at, at + len(needle)) for needle in waiting.needles if (at := text.find(needle)) >= 0]
        if not hits:
            needed = max(map(len, waiting.needles)) - 1
            while len(text) - len(recent[0][1]) >= needed:
                text = text[len(recent[0][1]) :]
                recent = recent[1:]
                if not recent:
                    break
            return replace(waiting, recent=recent), self._matcher
        start, end = min(hits)
        if not waiting.is_after:
            return None, self._fed(_tail(recent, start))
        rest = _tail(recent, end)
        if not self._grammar.lazy:
            return None, self._fed(_lstrip(rest))
        # The rest may hold a trigger already. It is at most one token long, so one step is enough to see it.
        return self._advance(self._for_triggers(), None, b"".join(piece for _, piece in rest))

    def _fed(self, pieces: Sequence[Piece]) -> llguidance.LLMatcher:
        """A copy of the matcher after `pieces`: as tokens where the grammar takes them so, else as their bytes."""
        matcher = self._matcher.deep_copy()
        for token, piece in pieces:
            if not piece:
                continue
            first = None if token is None else self._first(token)
            if first is not None and matcher.validate_tokens([first]) == 1 and matcher.consume_token(first):
                continue
            if not matcher.consume_tokens(self._compiler.tokens(piece)):
                raise GrammarError(f"the grammar does not allow the text that woke it: {piece!r}")
        return matcher

    def _checked(self, answer: bool) -> bool:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {short(self._matcher.get_error())}")
        return answer


def _tail(recent: Sequence[Piece], start: int) -> list[Piece]:
    """The tokens' bytes from byte `start` on; a token that is cut has no id."""
    parts: list[Piece] = []
    for token, piece in recent:
        if start <= 0:
            parts.append((token, piece))
        elif start < len(piece):
            parts.append((None, piece[start:]))
        start -= len(piece)
    return parts


def _lstrip(parts: Sequence[Piece]) -> list[Piece]:
    """Without leading white space: what stands between a thinking tag and the answer is not part of the answer."""
    rest = list(parts)
    while rest and not (stripped := rest[0][1].lstrip()):
        rest.pop(0)
    if rest and len(stripped) != len(rest[0][1]):
        rest[0] = (None, stripped)
    return rest
