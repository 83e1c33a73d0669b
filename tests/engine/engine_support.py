"""An executor that notices every wrong cell, a naive model of the same function, and a driver for the engine.

`CheckingExecutor` gives each cell a value that is a hash of its token, its position and the values of all cells it
attends to through the page table, in order. So a stale cell, a swapped page, a lost copy or a wrong position changes
every later logit of the sequence. `naive_values` computes the same hash from the token list alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftgguf.engine import messages as m
from ftgguf.engine.config import EngineConfig
from ftgguf.engine.detokenizer import Piece
from ftgguf.engine.engine import Engine
from ftgguf.engine.request import TextDecoder, TokenSampler
from ftgguf.engine.toolkit import Toolkit
from ftgguf.kv.pages import cells_of
from ftgguf.nouns import F32, I32, Batch

N_VOCAB = 24
EOG = 0
PIECES = ["<eog>", "\n", " ", "\t", *"abcdefghijklmnopqrst"]
_ODD = (np.arange(1 << 14, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def mix(x: np.ndarray | np.uint64) -> Any:
    """splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def cell_value(token: int, position: int, attended: np.ndarray) -> np.uint64:
    with np.errstate(over="ignore"):
        seen = np.sum(attended * _ODD[: len(attended)], dtype=np.uint64)
        return np.uint64(mix(seen + mix(np.uint64(token * 1_000_003 + position + 1))))


def logits_of(value: np.uint64) -> F32:
    with np.errstate(over="ignore"):
        bits = mix(value + np.arange(N_VOCAB, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    logits = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    logits[EOG] *= 0.7
    return logits


def naive_values(tokens: Iterable[int]) -> np.ndarray:
    values = np.zeros(0, dtype=np.uint64)
    for position, token in enumerate(tokens):
        values = np.append(values, cell_value(token, position, values))
    return values


class CheckingExecutor:
    """See the module's text. `fail_at`: forward calls (by number) that raise."""

    recurrent = False
    n_vocab = N_VOCAB

    def __init__(self, n_cells: int, max_rows: int, fail_at: dict[int, Exception] | None = None) -> None:
        self.n_cells, self.max_rows = n_cells, max_rows
        self.values = mix(np.arange(n_cells, dtype=np.uint64) + np.uint64(12345))
        self.positions = np.full(n_cells, -1)
        self.fail_at = fail_at or {}
        self.rows: list[int] = []
        self.batches: list[list[tuple[int, int]]] = []
        """For each pass: (rows of a sequence, positions it ends at)."""

    def forward(self, batch: Batch) -> F32:
        call = len(self.rows)
        self.rows.append(batch.rows)
        if call in self.fail_at:
            raise self.fail_at[call]
        assert 0 < batch.rows <= self.max_rows
        assert batch.token.dtype == batch.position.dtype == batch.cell.dtype == batch.sequence.dtype == np.int32
        assert all(table.dtype == np.int32 for table in batch.tables)
        out: list[F32] = []
        wanted = batch.outputs.tolist()
        assert wanted == sorted(set(wanted))
        for row in range(batch.rows):
            table, position = batch.tables[batch.sequence[row]], int(batch.position[row])
            cell = int(batch.cell[row])
            assert table[position] == cell
            seen = table[:position]
            assert self.positions[seen].tolist() == list(range(position))
            value = cell_value(int(batch.token[row]), position, self.values[seen])
            self.values[cell], self.positions[cell] = value, position
            if row in wanted:
                out.append(logits_of(value))
        ends = [len(table) for table in batch.tables]
        counts = np.bincount(batch.sequence, minlength=len(ends)).tolist()
        self.batches.append(list(zip(counts, ends, strict=True)))
        return np.array(out, dtype=np.float32).reshape(len(out), N_VOCAB)

    def copy_cells(self, src: I32, dst: I32) -> None:
        assert len(src) == len(dst)
        assert not set(src.tolist()) & set(dst.tolist())
        self.values[dst] = self.values[src]
        self.positions[dst] = self.positions[src]

    def shift_cells(self, cells: I32, delta: int) -> None:
        self.positions[cells] += delta

    def read_cells(self, cells: I32) -> bytes:
        return self.values[cells].tobytes() + self.positions[cells].astype(np.int64).tobytes()

    def write_cells(self, cells: I32, data: bytes) -> None:
        if len(data) != 16 * len(cells):
            raise ValueError("wrong size")
        self.values[cells] = np.frombuffer(data[: 8 * len(cells)], dtype=np.uint64)
        self.positions[cells] = np.frombuffer(data[8 * len(cells) :], dtype=np.int64)


class PickSampler:
    """Deterministic, but different for each seed: one of the best three, by seed and position."""

    def __init__(self, seed: int, fail_at: int = -1) -> None:
        self.seed = seed
        self.count = 0
        self.fail_at = fail_at

    def end_reasoning(self) -> bool:
        return False

    def sample(self, logits: F32) -> tuple[int, m.TokenProbs | None]:
        if self.count == self.fail_at:
            raise RuntimeError("the sampler is broken")
        best = np.argsort(-logits, kind="stable")[:3]
        token = int(best[(self.seed + self.count) % 3])
        self.count += 1
        chosen = m.TokenProb(token, PIECES[token].encode(), float(logits[token]))
        return token, m.TokenProbs(chosen, (chosen,))


class HoldingDecoder:
    """Text of PIECES; holds back what may become a stop string (written plainly, for the tests)."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.held = ""
        self.tokens: list[int] = []
        self.probs: list[m.TokenProbs] = []
        self.has_new_line = False

    def push(self, token: int, probs: m.TokenProbs | None = None, elapsed_ms: float = 0.0) -> Piece:
        self.tokens.append(token)
        if probs is not None:
            self.probs.append(probs)
        self.held += "" if token == EOG else PIECES[token]
        found = [(self.held.index(word), word) for word in self.stop if word in self.held]
        if found:
            position, word = min(found)
            return self._out(position, word)
        for start in range(len(self.held)):
            if any(word.startswith(self.held[start:]) for word in self.stop):
                text, self.held = self.held[:start], self.held[start:]
                return Piece(text, (), (), held=True)
        return self._out(len(self.held))

    def finish(self) -> Piece:
        return self._out(len(self.held))

    def _out(self, n: int, stop: str | None = None) -> Piece:
        text, self.held = self.held[:n], ""
        piece = Piece(text, tuple(self.tokens), tuple(self.probs), stop)
        self.tokens, self.probs = [], []
        self.has_new_line |= "\n" in text
        return piece


def toolkit(fail_sampler: dict[int, int] | None = None) -> Toolkit:
    """`fail_sampler`: request id -> the sample at which its sampler raises; -1: its settings are refused."""
    failing = fail_sampler or {}

    def sampler(request: m.Generate) -> TokenSampler:
        if failing.get(request.id) == -1:
            raise ValueError("bad grammar")
        return PickSampler(request.sampling.seed, failing.get(request.id, -1))

    def decoder(request: m.Generate) -> TextDecoder:
        return HoldingDecoder(request.stop)

    return Toolkit(N_VOCAB, frozenset({EOG}), False, sampler, decoder)


def make_engine(
    n_cells: int = 4096, max_rows: int = 64, fail_sampler: dict[int, int] | None = None, **config: Any
) -> tuple[Engine, CheckingExecutor]:
    executor = CheckingExecutor(n_cells, max_rows, config.pop("fail_at", None))
    config = {"n_ctx": n_cells, "n_slots": 4} | config
    return Engine(executor, toolkit(fail_sampler), EngineConfig(**config)), executor


def generate(id: int, prompt: Iterable[int], seed: int = 0, **fields: Any) -> m.Generate:
    return m.Generate(id=id, prompt=tuple(prompt), sampling=m.SamplingParams(seed=seed), **fields)


@dataclass
class Answer:
    """All that was said about one request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    deltas: list[m.Delta] = field(default_factory=list)
    started: m.Started | None = None
    finished: m.Finished | None = None
    failed: m.Failed | None = None
    progress: list[m.Progress] = field(default_factory=list)


class Collector:
    """Answers by request id; checks the order of messages."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = defaultdict(Answer)
        self.replies: dict[int, m.Reply] = {}

    def take(self, messages: list[m.ToFront]) -> None:
        for message in messages:
            if isinstance(message, m.Reply):
                self.replies[message.id] = message
                continue
            assert not isinstance(message, m.Loading | m.Ready | m.Fatal)
            answer = self.answers[message.id]
            assert answer.finished is None
            assert answer.failed is None
            if isinstance(message, m.Started):
                assert answer.started is None
                answer.started = message
            elif isinstance(message, m.Delta):
                assert answer.started is not None
                answer.deltas.append(message)
                answer.text += message.text
                answer.tokens += message.tokens
            elif isinstance(message, m.Progress):
                answer.progress.append(message)
            elif isinstance(message, m.Finished):
                answer.finished = message
            else:
                answer.failed = message


def run_all(engine: Engine, collector: Collector | None = None, limit: int = 20_000) -> Collector:
    """Step until nothing is left to do."""
    collector = collector or Collector()
    for _ in range(limit):
        if not engine.has_work:
            return collector
        collector.take(engine.step())
    raise AssertionError("the engine does not come to an end")


def ask(engine: Engine, request: m.Generate) -> Answer:
    engine.submit(request)
    return run_all(engine).answers[request.id]


def naive_answer(request: m.Generate, n_ctx: int) -> tuple[list[int], str]:
    """(tokens, stop_type) of a request run alone and from scratch; no stop strings."""
    sampler = PickSampler(request.sampling.seed)
    known = list(request.prompt)
    values = naive_values(known)
    generated: list[int] = []
    if request.max_tokens == 0:
        return generated, "limit"
    while True:
        token, _ = sampler.sample(logits_of(values[-1]))
        generated.append(token)
        if token == EOG:
            return generated, "eos"
        if len(known) + 1 >= n_ctx or len(generated) == request.max_tokens:
            return generated, "limit"
        values = np.append(values, cell_value(token, len(known), values))
        known.append(token)


def check_pages(engine: Engine) -> None:
    """Every page reference is the tree's or a sequence's, and page tables say what the pages are."""
    held = np.zeros(engine.cache.pool.n_pages, dtype=np.int32)
    for node in engine.cache.tree.nodes():
        np.add.at(held, node.pages, 1)
    for sequence in engine.scheduler.active:
        np.add.at(held, sequence.pages, 1)
        cells = cells_of(sequence.pages)
        assert sequence.table[: len(cells)].tolist() == cells.tolist()
        assert sequence.n_past <= len(cells)
    assert held.tolist() == engine.cache.pool.ref_counts().tolist()


def check_idle(engine: Engine) -> None:
    """Nothing runs or is locked, and every page reference is the tree's."""
    assert not engine.scheduler.active
    assert not engine.scheduler.queue
    assert all(node.locks == 0 for node in engine.cache.tree.nodes())
    check_pages(engine)
