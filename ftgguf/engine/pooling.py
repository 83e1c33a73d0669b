"""From the hidden states of a step to the answers of requests for embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftgguf.engine import messages as m
from ftgguf.engine.link import MAX_FRAME
from ftgguf.engine.request import RequestError, Sequence
from ftgguf.engine.scheduler import Step
from ftgguf.nouns import F32

if TYPE_CHECKING:
    from ftgguf.engine.embeddings import Embeddings


def collect(step: Step, states: F32, now: float) -> list[Sequence]:
    """Hidden states, float32 [outputs, n_embd], to the poolers of their sequences; those whose prompt is evaluated."""
    row, done = 0, []
    for sequence, n in step.work:
        pooler, n_past = sequence.pooler, sequence.n_past
        assert pooler is not None
        wanted = len(pooler.wanted(n_past, n_past + n, sequence.n_tokens))
        pooler.take(states[row : row + wanted])
        row += wanted
        sequence.n_past += n
        sequence.n_processed = max(sequence.n_processed, sequence.n_past - sequence.cached)
        sequence.clock.prompt_last = now
        if sequence.n_past == sequence.n_tokens:
            done.append(sequence)
    return done


def answer(embeddings: Embeddings, sequence: Sequence) -> m.Embedded:
    """The pooled states of a prompt that was evaluated. Raises RequestError for more than a message holds."""
    assert sequence.pooler is not None
    values = embeddings.finish(sequence.pooler)
    if values.nbytes > MAX_FRAME - (1 << 16):
        text = f"the embeddings of {len(values)} tokens are {values.nbytes / 2**30:.1f} GiB: choose a --pooling"
        raise RequestError(400, "invalid_request_error", text)
    return m.Embedded(
        id=sequence.id,
        slot=sequence.slot,
        rows=values.shape[0],
        columns=values.shape[1],
        data=values.astype("<f4", copy=False).tobytes(),
        evaluated_n=sequence.n_prompt,
        timings=sequence.timings(),
    )
