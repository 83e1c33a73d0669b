"""Slots as llama-server shows them: a view on the sequences, and the tokens each slot held last.

The cells belong to the radix tree; a slot only remembers which tokens to look up there.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftgguf.engine.messages import Generate
from ftgguf.engine.request import Sequence, State
from ftgguf.kv.radix import common_prefix
from ftgguf.nouns import I32

_NO_TOKENS: I32 = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class Slot:
    """Slot `id` with its running sequence, or the rest of its last one."""

    id: int
    sequence: Sequence | None = None
    tokens: I32 = field(default_factory=lambda: _NO_TOKENS)
    adapters: tuple[float, ...] = ()
    """What `tokens` were evaluated with."""
    last_used: int = -1
    shown: dict[str, Any] = field(default_factory=dict)
    """The `/slots` fields of the last sequence."""

    def leave(self, sequence: Sequence, has_new_line: bool, clock: int) -> None:
        """The sequence is over: remember its tokens and what `/slots` shows of it."""
        self.tokens, self.adapters = sequence.evaluated.copy(), sequence.adapters
        self.shown = describe(sequence, has_new_line, has_next=False)
        self.sequence = None
        self.last_used = clock


def describe(sequence: Sequence, has_new_line: bool, has_next: bool) -> dict[str, Any]:
    """The fields of a `/slots` item that come from a task (llama-server's `server_slot::to_json`)."""
    limit = sequence.limit
    return {
        "id_task": sequence.id,
        "n_prompt_tokens": sequence.n_past,
        "n_prompt_tokens_processed": sequence.n_processed,
        "n_prompt_tokens_cache": sequence.cached,
        "params": sequence.request.details,
        "next_token": [
            {
                "has_next_token": has_next,
                "has_new_line": has_new_line,
                "n_remain": -1 if limit == -1 else limit - sequence.n_generated,
                "n_decoded": sequence.n_generated,
            }
        ],
    }


def choose(slots: Iterable[Slot], request: Generate, prompt: I32, similarity: float, taken: Set[int]) -> Slot | None:
    """The slot a request gets, or None when it has to wait. `taken`: slots that earlier requests wait for.

    llama-server's rule: the slot asked for; else, of the idle ones, the one whose tokens share the largest part of the
    prompt (above `similarity`); else the least recently used. An `id_slot` that does not exist asks for nothing.
    """
    slots = list(slots)
    if 0 <= request.id_slot < len(slots):
        slot = slots[request.id_slot]
        return slot if slot.sequence is None and slot.id not in taken else None
    free = [slot for slot in slots if slot.sequence is None and slot.id not in taken]
    best, best_share = None, similarity
    if similarity != 0.0:
        for slot in free:
            share = common_prefix(slot.tokens, prompt) / len(prompt)
            if share > best_share:
                best, best_share = slot, share
    if best is None and free:
        best = min(free, key=lambda slot: (slot.last_used, -slot.id))  # of equals the last one, as llama-server
    return best


def slot_state(slot: Slot, n_ctx: int, has_new_line: bool, speculative: bool = False) -> dict[str, Any]:
    """One item of `/slots`."""
    sequence = slot.sequence
    item: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": n_ctx,
        "speculative": speculative,
        "is_processing": sequence is not None,
    }
    if sequence is not None:
        item |= describe(sequence, has_new_line, has_next=sequence.state != State.DONE)
    return item | slot.shown if sequence is None else item
