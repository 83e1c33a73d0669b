"""What the engine needs of a vocabulary: which tokens end generation, samplers and text decoders for its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftgguf.engine.detokenizer import Detokenizer
from ftgguf.engine.grammar import GrammarCompiler
from ftgguf.engine.messages import Generate
from ftgguf.engine.request import TextDecoder, TokenSampler
from ftgguf.engine.sampler import Sampler
from ftgguf.vocab import Vocab


@dataclass(frozen=True, slots=True)
class Toolkit:
    """`make_sampler` and `make_decoder` raise ValueError for settings that cannot work; the request then fails with
    code 400 and the error's text."""

    n_vocab: int
    eog: frozenset[int]
    add_bos: bool
    make_sampler: Callable[[Generate], TokenSampler]
    make_decoder: Callable[[Generate], TextDecoder]
    grammars: GrammarCompiler | None = None
    """What the samplers compile grammars with; None where they take none."""


def toolkit_of(vocab: Vocab, special: bool = False) -> Toolkit:
    """The real one, on libllama's samplers. `special` (`--special`): control tokens are rendered for every request."""
    grammars = GrammarCompiler(vocab)

    def sampler(request: Generate) -> TokenSampler:
        return Sampler(request.sampling, vocab, request.tokens, grammars, special=special, reasoning=request.reasoning)

    def decoder(request: Generate) -> TextDecoder:
        return Detokenizer(
            vocab,
            request.stop,
            special=special or request.special,
            preserved=request.preserved_tokens,
            n_indent=request.n_indent,
            t_max_predict_ms=request.t_max_predict_ms,
        )

    return Toolkit(vocab.n_vocab, vocab.eog_ids, vocab.add_bos, sampler, decoder, grammars)
