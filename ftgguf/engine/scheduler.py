"""Which rows go into the next step: admission, continuous batching, chunked prefill, and who gives way when pages run
out.

A step holds one row for each generating sequence and then prompt rows, so decode goes on in every step. Requests are
admitted in order of arrival. A prompt gets the pages for all its tokens when it starts and one page at a time while it
generates; when none is left even after eviction, the youngest sequence gives its pages back (what it had evaluated
stays in the tree while there is room) and starts again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ftgguf.engine.cache import KvCache
from ftgguf.engine.config import EngineConfig
from ftgguf.engine.drafts import Drafter
from ftgguf.engine.executor import Executor, NotSupported
from ftgguf.engine.metrics import Metrics
from ftgguf.engine.request import Sequence, State
from ftgguf.engine.slots import Slot, choose
from ftgguf.kv.host import HostTier
from ftgguf.kv.radix import Match, common_prefix
from ftgguf.nouns import PAGE, Batch

RESUME_SPARE = 4
"""Pages per running sequence that must be in reach before a preempted one comes back, so that it does not have to
leave again at once."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: `work` lists (sequence, its number of rows) in the order of the rows."""

    batch: Batch
    work: list[tuple[Sequence, int]]
    prompt_rows: int


class Scheduler:
    """Plans steps. `clock` gives seconds; `add_bos`: a context shift keeps one token more (llama-server's rule)."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        cache: KvCache,
        metrics: Metrics,
        clock: Callable[[], float],
        add_bos: bool = False,
    ) -> None:
        self.executor = executor
        self.config = config
        self.cache = cache
        self.metrics = metrics
        self.n_ctx = min(config.n_ctx, cache.n_cells)
        self.can_shift = config.ctx_shift and not executor.recurrent
        self.add_bos = add_bos
        self.queue: deque[Sequence] = deque()
        self.slots = [Slot(i) for i in range(config.n_slots)]
        self.active: list[Sequence] = []
        """Sequences with a slot, by arrival."""
        self.started: list[Sequence] = []
        """Sequences that began since the caller last looked."""
        self.speculates = bool(config.spec.types) and not executor.recurrent
        self._drafter = Drafter(config.spec) if self.speculates else None
        self.host: HostTier | None = None
        """Where pages that left the tree are found again."""
        self.exhausted: list[Sequence] = []
        """Sequences that can never have another cell; the caller ends them."""
        self._clock = clock
        self._turn = 0
        self._kind: object = None
        """The kind of the last step's sequences, where there were several kinds."""
        self._refused: Sequence | None = None
        """The oldest sequence that found no pages: nobody younger starts before it."""
        rows = executor.max_rows
        self._prefill_rows = min(config.prefill_rows or max(PAGE, rows // 4), rows)
        self._token, self._position, self._sequence, self._cell, self._outputs = (
            np.zeros(rows, dtype=np.int32) for _ in range(5)
        )
        self._counting = np.arange(max(self.n_ctx + 1, rows), dtype=np.int32)

    # -------------------------------------------------------------------------------------------- admission

    def admit(self) -> list[Sequence]:
        """Give slots to queued sequences, first come first served; returns those that got one."""
        admitted: list[Sequence] = []
        if not self.queue or len(self.active) == len(self.slots):
            return admitted
        wanted: set[int] = set()
        for sequence in list(self.queue):
            request = sequence.request
            slot = choose(self.slots, request, sequence.known, self.config.slot_prompt_similarity, wanted)
            if slot is None:
                if 0 <= request.id_slot < len(self.slots):
                    wanted.add(request.id_slot)
                continue
            self.queue.remove(sequence)
            slot.sequence = sequence
            sequence.slot = slot.id
            sequence.state = State.READY
            self.active.append(sequence)
            admitted.append(sequence)
        self.active.sort(key=lambda sequence: sequence.arrival)
        return admitted

    def leave(self, sequence: Sequence, keep: bool, has_new_line: bool) -> None:
        """Take a sequence out; with `keep`, what it evaluated stays in the tree for others."""
        if sequence.state == State.QUEUED:
            self.queue.remove(sequence)
        else:
            self._turn += 1
            if keep and sequence.pages and sequence.keeps:
                self.cache.keep(sequence)
            self.slots[sequence.slot].leave(sequence, has_new_line, self._turn)
            self.cache.release(sequence)
            self.active.remove(sequence)
        sequence.state = State.DONE

    def forget_slot(self, slot: Slot) -> int:
        """Erase what slot `slot` holds from the tree; returns its number of tokens."""
        n = len(slot.tokens)
        self.cache.tree.forget(slot.tokens, slot.adapters)
        slot.tokens = slot.tokens[:0]
        return n

    # -------------------------------------------------------------------------------------------- planning

    def plan(self) -> Step | None:
        """The next step, or None when nothing can run. `started` and `exhausted` are filled on the way."""
        self._make_room()
        active = self.active
        kinds = list(dict.fromkeys([sequence.kind for sequence in active]))
        if len(kinds) <= 1:
            return self._plan(active)
        last = kinds.index(self._kind) if self._kind in kinds else -1
        for kind in kinds[last + 1 :] + kinds[: last + 1]:  # each kind in its turn
            step = self._plan([sequence for sequence in active if sequence.kind == kind])
            if step is not None:
                self._kind = kind
                return step
        return None

    def _plan(self, active: list[Sequence]) -> Step | None:
        """A step of sequences of one kind."""
        decoding = [sequence for sequence in active if sequence.state == State.DECODE]
        waiting = len(decoding) != len(active)
        limit = self.executor.max_rows
        if len(decoding) >= limit:
            decoding = self._rotate(decoding, limit - 1 if waiting and limit > 1 else limit)
        work: list[tuple[Sequence, int]] = []
        rows, spare = 0, limit - len(decoding)
        for index, sequence in enumerate(decoding):
            if self._drafter is not None:
                self._draft(sequence, spare // 2 if waiting else spare)
                spare -= len(sequence.draft)
            n_past, n = sequence.n_past, 1 + len(sequence.draft)
            self._token[rows] = sequence.tokens[n_past]
            self._token[rows + 1 : rows + n] = sequence.draft
            self._position[rows : rows + n] = self._counting[n_past : n_past + n]
            self._sequence[rows : rows + n] = index
            self._cell[rows : rows + n] = sequence.table[n_past : n_past + n]
            work.append((sequence, n))
            rows += n
        self._outputs[:rows] = self._counting[:rows]
        n_decode = rows
        if waiting and (not rows or self.config.cont_batching):
            rows = self._add_prompts(active, work, rows)
        return self._step(work, len(decoding), n_decode, rows) if rows else None

    def _draft(self, sequence: Sequence, budget: int) -> None:
        """Give the sequence a draft of at most `budget` tokens, for which there are cells without evicting any."""
        assert self._drafter is not None
        n_past = sequence.n_past
        room = min(budget, self.n_ctx - n_past - 2)
        if sequence.limit >= 0:
            room = min(room, sequence.limit - sequence.n_generated - 1)
        draft = self._drafter.draft(sequence.known, room)
        while n_past + 1 + len(draft) > len(sequence.pages) * PAGE and self.cache.pool.n_free:
            if not self.cache.grow(sequence):
                break
        sequence.draft = draft[: len(sequence.pages) * PAGE - n_past - 1]

    def _rotate(self, decoding: list[Sequence], n: int) -> list[Sequence]:
        """`n` of more sequences than fit in a step, each in its turn."""
        self._turn += 1
        first = self._turn * n % len(decoding)
        return (decoding[first:] + decoding[:first])[:n]

    def _step(self, work: list[tuple[Sequence, int]], n_decoding: int, n_decode: int, rows: int) -> Step:
        """`n_decoding` of the sequences generate, with `n_decode` rows together; the others' prompts follow."""
        n_outputs, row = n_decode, n_decode
        for sequence, n in work[n_decoding:]:
            row += n
            n_past = sequence.n_past
            if sequence.pooler is not None:
                for at in sequence.pooler.wanted(n_past, n_past + n, sequence.n_tokens):
                    self._outputs[n_outputs] = row - n + at - n_past
                    n_outputs += 1
            elif n_past + n == sequence.n_tokens and sequence.limit != 0:
                self._outputs[n_outputs] = row - 1
                n_outputs += 1
        features, adapters = work[0][0].kind
        batch = Batch(
            self._token[:rows],
            self._position[:rows],
            self._sequence[:rows],
            self._cell[:rows],
            tuple([sequence.table[: sequence.n_past + n] for sequence, n in work]),
            self._outputs[:n_outputs],
            features=features,
            adapters=adapters,
        )
        return Step(batch, work, rows - n_decode)

    # -------------------------------------------------------------------------------------------- prompts

    def _add_prompts(self, active: list[Sequence], work: list[tuple[Sequence, int]], rows: int) -> int:
        """Fill the step with prompt rows behind `rows` decode rows; returns the new number of rows."""
        prompts = self._start_prompts(active)
        budget = self.executor.max_rows - rows
        if rows:
            budget = min(budget, self._prefill_rows)
        for sequence, n in share_rows([(s, s.n_tokens - s.n_past) for s in prompts], budget):
            stop, n_past = rows + n, sequence.n_past
            self._token[rows:stop] = sequence.tokens[n_past : n_past + n]
            self._position[rows:stop] = self._counting[n_past : n_past + n]
            self._sequence[rows:stop] = len(work)
            self._cell[rows:stop] = sequence.table[n_past : n_past + n]
            work.append((sequence, n))
            rows = stop
        return rows

    def _start_prompts(self, active: list[Sequence]) -> list[Sequence]:
        """The sequences with prompt tokens to evaluate now; those that can start do so."""
        prompts: list[Sequence] = []
        blocked = False
        refused = self._refused
        if refused is not None and refused.state not in (State.READY, State.PREEMPTED):
            refused = self._refused = None
        for sequence in active:
            if sequence.state == State.PREFILL:
                prompts.append(sequence)
            elif sequence.state in (State.READY, State.PREEMPTED) and not blocked:
                if refused is not None and refused.arrival < sequence.arrival:
                    blocked = True
                    continue
                match = self._match(sequence, prompts)
                if match is None:
                    continue
                if self._begin(sequence, match):
                    prompts.append(sequence)
                else:
                    blocked = True
                    self._refused = sequence
        return prompts

    def _match(self, sequence: Sequence, prompts: list[Sequence]) -> Match | None:
        """What the tree holds of the sequence; None to wait for a running prompt that is about to hold more.

        Requests with one prompt often arrive together. Evaluating the shared part once takes no longer for anybody.
        """
        if self.host is not None and sequence.reuses:
            self.host.recall(sequence.known[: sequence.n_tokens - 1], sequence.adapters)
        match = self.cache.match(sequence)
        if not sequence.reuses or self.executor.recurrent:
            return match
        for other in prompts:
            shared = min(common_prefix(sequence.known, other.known), sequence.n_tokens - 1, other.exact)
            if shared <= match.length + PAGE or not other.keeps:
                continue
            if other.n_past > match.length:
                self.cache.keep(other)
                match = self.cache.match(sequence)
            if shared > match.length + PAGE:
                return None
        return match

    def _begin(self, sequence: Sequence, match: Match) -> bool:
        holders = sum(1 for other in self.active if other.pages)
        spare = holders * (RESUME_SPARE if sequence.state == State.PREEMPTED else 1)
        if not self.cache.begin(sequence, match, spare):
            if holders:
                return False
            if not self.cache.begin(sequence, match.whole_pages(), 0, pin=False):
                self._exhaust(sequence)
                return False
        if sequence.state == State.READY:
            sequence.cached = sequence.n_past
            sequence.clock.start = self._clock()
            self.metrics.n_prompt_cached += sequence.cached
            self.started.append(sequence)
        if sequence.pooler is not None:
            sequence.pooler.reset()
        sequence.state = State.PREFILL
        return True

    # -------------------------------------------------------------------------------------------- pages

    def _make_room(self) -> None:
        """A cell for the next token of every generating sequence, the oldest first."""
        for sequence in list(self.active):
            if sequence.state != State.DECODE:
                continue
            if sequence.n_past + 1 >= self.n_ctx and not self._shift(sequence):
                self._exhaust(sequence)
            elif sequence.n_past == len(sequence.pages) * PAGE:
                self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        while not self.cache.grow(sequence):
            holders = [other for other in self.active if other.pages]
            if len(holders) == 1:
                if self.cache.unpin(sequence):
                    continue
                self._exhaust(sequence)
                return
            self._preempt(holders[-1])
            if holders[-1] is sequence:
                return

    def _exhaust(self, sequence: Sequence) -> None:
        sequence.state = State.DONE
        self.exhausted.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the cells of `sequence` away; it starts again when there is room."""
        self.metrics.n_preempted += 1
        if sequence.keeps:
            self.cache.keep(sequence)
        self.cache.release(sequence)
        sequence.state = State.PREEMPTED

    def _shift(self, sequence: Sequence) -> bool:
        """Make room in a full context by dropping tokens behind the first `n_keep` (llama-server's context shift)."""
        if not self.can_shift:
            return False
        request = sequence.request
        n_keep = sequence.n_prompt if request.n_keep < 0 else request.n_keep
        n_keep = max(0, min(self.n_ctx - 4, n_keep + self.add_bos))
        n_left = sequence.n_past - n_keep
        n_discard = max(0, min(request.n_discard or n_left // 2, n_left - 1))
        if n_discard == 0:
            return False
        try:
            done = self.cache.shift(sequence, n_keep, n_discard)
        except NotSupported:
            self.can_shift = False
            return False
        if done:
            sequence.truncated = True
            self.metrics.n_context_shifts += 1
        return done


def share_rows(prompts: list[tuple[Sequence, int]], budget: int) -> list[tuple[Sequence, int]]:
    """How many of its remaining tokens each prompt gets of `budget` rows: short ones first, then by arrival.

    Prompts that need at most a quarter of the budget share up to half of it, so that a short question does not wait
    for a long document; the rest goes to the oldest.
    """
    shares: dict[int, int] = {}
    left = budget
    if len(prompts) > 1:
        half = budget // 2
        for sequence, need in prompts:
            if need <= budget // 4 and need <= half:
                shares[sequence.id] = need
                half -= need
                left -= need
    for sequence, need in prompts:
        if left > 0 and sequence.id not in shares:
            shares[sequence.id] = min(need, left)
            left -= shares[sequence.id]
    return [(sequence, shares[sequence.id]) for sequence, _ in prompts if sequence.id in shares]
