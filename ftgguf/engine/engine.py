"""The engine: requests in, messages out, one forward pass per `step`. Usable in process and behind a socket alike.

engine = Engine(executor, vocab, config, n_ctx_train=...)
engine.submit(Generate(id=1, prompt=(...)))
while engine.has_work:
    for message in engine.step(): ...
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftgguf.engine import messages as m
from ftgguf.engine import pooling
from ftgguf.engine.cache import KvCache
from ftgguf.engine.config import EngineConfig
from ftgguf.engine.controls import Controls
from ftgguf.engine.executor import Executor, ExecutorLost
from ftgguf.engine.metrics import Metrics
from ftgguf.engine.output import Output
from ftgguf.engine.request import RequestError, Sequence, State
from ftgguf.engine.sampler import SamplingError
from ftgguf.engine.scheduler import Scheduler, Step
from ftgguf.engine.toolkit import Toolkit, toolkit_of
from ftgguf.flags.config import ServerConfig
from ftgguf.kv.host import HostTier
from ftgguf.kv.snapshots import SnapshotBudget
from ftgguf.nouns import F32, Snapshot
from ftgguf.vocab import Vocab

if TYPE_CHECKING:
    from ftgguf.engine.embeddings import Embeddings

log = logging.getLogger("ftgguf.engine")


class Engine:
    """Serves requests on one executor. Not thread-safe: one thread calls all methods.

    `config` is the server's configuration or, for tests and tools, the engine's own. `info` is what `ready` reports.
    """

    def __init__(
        self,
        executor: Executor,
        vocab: Vocab | Toolkit,
        config: ServerConfig | EngineConfig,
        *,
        n_ctx_train: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(config, ServerConfig):
            self.toolkit = vocab if isinstance(vocab, Toolkit) else toolkit_of(vocab, special=config.chat.special)
            config = EngineConfig.of(config, executor.n_cells, n_ctx_train)
        else:
            self.toolkit = vocab if isinstance(vocab, Toolkit) else toolkit_of(vocab)
        self.executor = executor
        self.config = config
        self.info: dict[str, Any] = {}
        self.embeddings: Embeddings | None = None
        """None where the executor has no states to pool."""
        self.send_now: Callable[[list[m.ToFront]], None] | None = None
        """Takes messages in the middle of a step: where set, a first token and an end do not wait for what the engine
        does for its own order."""
        self.metrics = Metrics()
        snapshots = SnapshotBudget(config.snapshot_bytes, _no_snapshots) if executor.recurrent else None
        self.cache = KvCache(executor, snapshots)
        self.scheduler = Scheduler(executor, config, self.cache, self.metrics, clock, self.toolkit.add_bos)
        self.host: HostTier | None = None
        if config.host_bytes and not executor.recurrent:
            self.host = HostTier(executor, self.cache.pool, self.cache.tree, config.host_bytes)
            self.scheduler.host = self.host
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._outputs: dict[int, Output] = {}
        self._messages: list[m.ToFront] = []
        self._arrivals = 0
        self._controls = Controls(self)

    # -------------------------------------------------------------------------------------------- in

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do or to say."""
        return bool(self._sequences or self._messages)

    def ready(self) -> m.Ready:
        """What the front is told when the model is loaded."""
        return m.Ready(info=self.info, n_ctx=self.scheduler.n_ctx, n_slots=len(self.scheduler.slots))

    def handle(self, message: m.ToEngine) -> None:
        """Any message of the front. `shutdown` is the caller's business."""
        if isinstance(message, m.Generate):
            self.submit(message)
        elif isinstance(message, m.Cancel):
            self.cancel(message.id)
        else:
            self.control(message)

    def submit(self, request: m.Generate) -> None:
        """Queue a request. One that cannot be served is answered by `Failed` at the next step."""
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id} is in use")
        try:
            self._check(request)
            pooler = None
            if request.embed and self.embeddings is not None:
                pooler = self.embeddings.pooler(request.embed)
            sequence = Sequence(request, self._arrivals, self.config.n_predict, pooler)
            known = sequence.known
            if int(known.min()) < 0 or int(known.max()) >= self.toolkit.n_vocab:
                raise RequestError(400, "invalid_request_error", "Prompt contains invalid tokens")
        except (RequestError, OverflowError, ValueError) as error:
            self._refuse(request.id, error)
            return
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self.scheduler.queue.append(sequence)

    def _check(self, request: m.Generate) -> None:
        if request.embed and self.embeddings is None:
            raise RequestError(501, "not_supported_error", "this model computes no embeddings")
        n, n_ctx = len(request.prompt) or len(request.packed) // 4, self.scheduler.n_ctx
        if n == 0:
            raise RequestError(400, "invalid_request_error", "the prompt holds no tokens")
        if n >= n_ctx:
            raise RequestError(
                400,
                "exceed_context_size_error",
                f"request ({n} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
                n_prompt_tokens=n,
                n_ctx=n_ctx,
            )

    def cancel(self, id: int) -> None:
        """Stop request `id`; nothing more is said about it. What it evaluated is kept. Unknown ids are ignored."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._leave(sequence, keep=True)
            self._messages = [message for message in self._messages if getattr(message, "id", None) != id]

    def control(self, request: m.Control) -> None:
        """Answer a `Control`, now or when the slot it asks for is idle."""
        self._controls.handle(request)

    def reply(self, message: m.Reply) -> None:
        self._messages.append(message)

    # -------------------------------------------------------------------------------------------- a step

    def step(self) -> list[m.ToFront]:
        """One forward pass, if there is anything to compute; returns the messages that are due.

        Raises ExecutorLost when the executor cannot go on; `drain` then gives the last messages.
        """
        scheduler = self.scheduler
        if scheduler.queue:
            for sequence in scheduler.admit():
                self._prepare(sequence)
        step = scheduler.plan()
        if scheduler.started:
            self._announce()
        if scheduler.exhausted:
            self._end_exhausted()
        if step is not None:
            self._run(step)
        return self.drain()

    def drain(self) -> list[m.ToFront]:
        """The messages that are due, without computing anything."""
        messages, self._messages = self._messages, []
        return messages

    def _prepare(self, sequence: Sequence) -> None:
        """Sampler and text decoder; settings that cannot work fail this request only."""
        if sequence.pooler is not None:
            return
        try:
            sequence.sampler = self.toolkit.make_sampler(sequence.request)
            self._outputs[sequence.id] = Output(sequence.request, self.toolkit.make_decoder(sequence.request))
        except ValueError as error:
            self._fail(sequence, RequestError(400, "invalid_request_error", str(error)), keep=False)
        except Exception as error:
            log.exception("request %d: its sampler cannot be made", sequence.id)
            self._fail(sequence, _internal(error), keep=False)

    def _announce(self) -> None:
        for sequence in self.scheduler.started:
            self._messages.append(m.Started(id=sequence.id, slot=sequence.slot, cached=sequence.cached))
            self._progress(sequence)
        self.scheduler.started.clear()

    def _run(self, step: Step) -> None:
        started = self._clock()
        try:
            values = self.executor.forward(step.batch)
        except ExecutorLost as error:
            for sequence in list(self._sequences.values()):
                self._fail(sequence, _internal(error), keep=False)
            raise
        except Exception as error:
            self.metrics.n_failed_steps += 1
            log.exception("a step of %d rows failed", step.batch.rows)
            for sequence, _ in step.work:
                self._fail(sequence, _internal(error), keep=False)
            return
        now = self._clock()
        self._count(step, now - started)
        if step.batch.features:
            for sequence in pooling.collect(step, values, now):
                self._embedded(sequence)
            return
        row = 0
        for sequence, n in step.work:
            if sequence.state == State.DECODE:
                self._verify(sequence, values[row : row + n])
                row += n
                continue
            sequence.n_past += n
            if sequence.state == State.PREFILL and self._advance_prompt(sequence, now):
                self._sample_first(sequence, values[row])
                row += 1

    def _sample_first(self, sequence: Sequence, logits: F32) -> None:
        """The prompt is evaluated: the first token goes out, then the prompt is kept for others."""
        self._sample(sequence, logits)
        if sequence.state == State.DECODE:  # else it left, and what it evaluated was kept then
            self._hurry()
            self.cache.keep(sequence)

    def _verify(self, sequence: Sequence, logits: F32) -> None:
        """Sample behind the next token, and on through its draft as long as what was drafted is chosen."""
        draft = sequence.draft.tolist()
        before = sequence.n_accepted
        sequence.n_drafted += len(draft)
        for i, expected in enumerate([*draft, -1]):
            sequence.n_past += 1
            self._sample(sequence, logits[i], expected)
            if sequence.n_accepted - before <= i or sequence.state != State.DECODE:
                break
        if draft:
            self.metrics.add_draft(len(draft), sequence.n_accepted - before)

    def _count(self, step: Step, seconds: float) -> None:
        metrics = self.metrics
        metrics.n_decode += 1
        metrics.n_busy_slots += len(self.scheduler.active)
        if step.prompt_rows:
            metrics.add_prompt(step.prompt_rows, seconds)
        for sequence, n in step.work:
            length = sequence.n_past + (1 if sequence.state == State.DECODE else n)
            if length > metrics.n_tokens_max:
                metrics.n_tokens_max = length

    def _advance_prompt(self, sequence: Sequence, now: float) -> bool:
        """A part of the prompt was evaluated; True when a token is to be sampled now."""
        sequence.n_processed = max(sequence.n_processed, min(sequence.n_past, sequence.n_prompt) - sequence.cached)
        if not sequence.n_generated:
            sequence.clock.prompt_last = now
            self._progress(sequence)
        if sequence.n_past < sequence.n_tokens:
            return False
        sequence.state = State.DECODE
        if sequence.limit == 0:
            self._outputs[sequence.id].stop_type = "limit"
            self._finish(sequence)
            return False
        return True

    def _progress(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.return_progress and request.stream:
            self._messages.append(
                m.Progress(
                    id=sequence.id,
                    total=sequence.n_prompt,
                    cache=sequence.cached,
                    processed=sequence.n_past,
                    time_ms=(self._clock() - sequence.clock.start) * 1e3,
                )
            )

    def _sample(self, sequence: Sequence, logits: F32, drafted: int = -1) -> None:
        """Choose the next token; whatever goes wrong here is this request's trouble only."""
        try:
            assert sequence.sampler is not None
            token, probs = sequence.sampler.sample(logits)
            clock = sequence.clock
            clock.gen_last = self._clock()
            sequence.n_generated += 1
            if sequence.n_generated == 1:
                clock.prompt_last = clock.gen_last
            sequence.append(token)
            sequence.n_accepted += token == drafted
            full = sequence.n_past + 1 >= self.scheduler.n_ctx and not self.scheduler.can_shift
            output = self._outputs[sequence.id]
            delta = output.push(sequence, token, probs, token in self.toolkit.eog, full)
        except SamplingError as error:
            self._fail(sequence, RequestError(500, "server_error", str(error)), keep=True)
            return
        except Exception as error:
            log.exception("request %d: sampling failed", sequence.id)
            self._fail(sequence, _internal(error), keep=True)
            return
        if delta is not None:
            self._messages.append(delta)
        if output.ended:
            self._finish(sequence)

    # -------------------------------------------------------------------------------------------- ends

    def _end_exhausted(self) -> None:
        """Sequences for which there is no cell left in the whole pool end as at the end of their context."""
        for sequence in self.scheduler.exhausted:
            if not sequence.n_generated:
                text = "Context size has been exceeded."
                self._fail(sequence, RequestError(500, "server_error", text), keep=True)
                continue
            delta = self._outputs[sequence.id].exhaust(sequence)
            if delta is not None:
                self._messages.append(delta)
            self._finish(sequence)
        self.scheduler.exhausted.clear()

    def _finish(self, sequence: Sequence) -> None:
        output = self._outputs[sequence.id]
        assert sequence.sampler is not None
        self._messages.append(
            m.Finished(
                id=sequence.id,
                slot=sequence.slot,
                stop_type=output.stop_type,
                stopping_word=output.stopping_word,
                truncated=sequence.truncated,
                has_new_line=output.has_new_line,
                predicted_n=sequence.n_generated,
                evaluated_n=sequence.n_prompt,
                cached_n=sequence.n_past,
                timings=sequence.timings(),
                seed=sequence.sampler.seed,
            )
        )
        self._hurry()
        self._leave(sequence, keep=True)

    def _hurry(self) -> None:
        if self.send_now is not None:
            self.send_now(self.drain())

    def _embedded(self, sequence: Sequence) -> None:
        """The whole prompt was evaluated: pool it, or fail this request only."""
        assert self.embeddings is not None
        try:
            message = pooling.answer(self.embeddings, sequence)
        except RequestError as error:
            self._fail(sequence, error, keep=True)
        except Exception as error:
            log.exception("request %d: pooling failed", sequence.id)
            self._fail(sequence, _internal(error), keep=True)
        else:
            self._messages.append(message)
            self._leave(sequence, keep=True)

    def _fail(self, sequence: Sequence, error: RequestError, keep: bool) -> None:
        self._leave(sequence, keep)
        self._refuse(sequence.id, error)

    def _refuse(self, id: int, error: Exception) -> None:
        if isinstance(error, ValueError):
            error = RequestError(400, "invalid_request_error", str(error))
        if not isinstance(error, RequestError):
            error = RequestError(400, "invalid_request_error", "Prompt contains invalid tokens")
        self._messages.append(
            m.Failed(id=id, code=error.code, type=error.kind, message=error.message, extra=dict(error.extra))
        )

    def _leave(self, sequence: Sequence, keep: bool) -> None:
        output = self._outputs.pop(sequence.id, None)
        del self._sequences[sequence.id]
        self.metrics.add_predicted(sequence)
        self.scheduler.leave(sequence, keep, output is not None and output.has_new_line)
        self._controls.slot_left(sequence.slot)

    def end_reasoning(self, id: int) -> bool:
        """End the thinking of request `id` at its next token; False if it is not thinking."""
        sequence = self._sequences.get(id)
        return sequence is not None and sequence.sampler is not None and sequence.sampler.end_reasoning()

    def has_new_line(self, sequence: Sequence) -> bool:
        """Whether the sequence has generated a line break (`/slots`)."""
        output = self._outputs.get(sequence.id)
        return output is not None and output.has_new_line


def _internal(error: BaseException) -> RequestError:
    return RequestError(500, "server_error", f"Compute error: {error}" if str(error) else "Compute error.")


def _no_snapshots(snapshot: Snapshot) -> None:
    raise AssertionError("no executor makes snapshots yet")
