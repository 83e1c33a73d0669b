"""Embeddings and scores: how the hidden states of a prompt become one vector, and that vector a reranker's scores.

The states are those behind the final norm, as in llama.cpp (`t_embd`), and the pooling types are its
`llama_pooling_type`. All families here are causal, so a prompt of any length can be pooled batch by batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ftgguf import _ggml_cpu as native
from ftgguf.engine.ggml_weights import GgmlSource
from ftgguf.engine.layout import Layout
from ftgguf.engine.request import StatePooler
from ftgguf.gguf.reader import GGUFFile
from ftgguf.gguf.types import TensorType
from ftgguf.layers.params import Linear
from ftgguf.models.config import ModelError
from ftgguf.nouns import F32

POOLING = ("none", "mean", "cls", "last", "rank")
"""By llama.cpp's number, which is the value of `<arch>.pooling_type`."""
RERANKERS = ("qwen3",)
"""Architectures whose classification head llama.cpp's graph reads (`build_pooling`)."""
HEAD = "cls.output"


class Pooler:
    """Collects what one prompt's pooling needs. Rows come in order of position, in any number of batches."""

    __slots__ = ("_last", "_n", "_rows", "_sum", "pooling")

    def __init__(self, pooling: str) -> None:
        self.pooling = pooling
        self.reset()

    @property
    def needs_all(self) -> bool:
        """Every row must be computed: a prefix that others left in the cells cannot be used."""
        return self.pooling not in ("last", "rank")

    def reset(self) -> None:
        """Start again from the first row."""
        self._n = 0
        self._rows: list[F32] = []
        self._sum: Any = 0.0
        self._last: F32 | None = None

    def wanted(self, start: int, stop: int, total: int) -> range:
        """Of the positions [start, stop) of a prompt of `total` tokens, those whose states are needed."""
        if self.pooling in ("none", "mean"):
            return range(start, stop)
        at = 0 if self.pooling == "cls" else total - 1
        return range(at, at + 1) if start <= at < stop else range(0)

    def take(self, rows: F32) -> None:
        """The states of the wanted positions of one batch, float32 [n, n_embd] (copied)."""
        if not len(rows):
            return
        if self.pooling == "none":
            self._rows.append(rows.copy())
        elif self.pooling == "mean":
            self._sum = self._sum + rows.sum(axis=0, dtype=np.float64)
            self._n += len(rows)
        else:
            self._last = rows[-1].copy()

    def result(self) -> F32:
        """float32 [1, n_embd], or [tokens, n_embd] without pooling."""
        if self.pooling == "none":
            return np.concatenate(self._rows)
        if self.pooling == "mean":
            return np.asarray(self._sum / self._n, np.float32)[None]
        assert self._last is not None
        return self._last[None]


class Classifier:
    """A reranker's head, `cls.output.weight` [labels, n_embd], computed by ggml as llama.cpp does it.

    llama.cpp takes the softmax over the labels for Qwen3 (`yes` is the first): the score is a probability.
    """

    def __init__(self, gguf: GGUFFile, n_embd: int) -> None:
        """ModelError where the file has no such head, or its architecture none in llama.cpp."""
        if gguf.architecture not in RERANKERS:
            raise ModelError(
                f"{gguf.path}: rank pooling needs a reranker, and models of architecture {gguf.architecture} have no "
                f"classification head (known: {', '.join(RERANKERS)})"
            )
        info = gguf.tensors.get(HEAD + ".weight")
        if info is None:
            raise ModelError(
                f"{gguf.path}: rank pooling needs a reranker's file, and this one has no tensor '{HEAD}.weight'"
            )
        names = gguf.metadata.get(f"{gguf.architecture}.classifier.output_labels")
        self.labels = 1 if names is None else len(names)
        self._backend = native.Backend(1)
        self._source = GgmlSource(gguf, self._backend, Layout.PLAIN)
        head: Linear = self._source.linear(HEAD, self.labels, n_embd)
        self._arena = native.Arena(self._backend)
        self._graph = native.Graph(self._arena, 8)
        self._input = self._graph.input("x", int(TensorType.F32), [n_embd, 1])
        scores = self._graph.mul_mat(head.weight.plain, self._input)
        if head.bias is not None:
            scores = self._graph.add(scores, head.bias.plain)
        self._output = self._graph.softmax(scores)
        self._graph.output(self._output)
        self._graph.place()

    def __call__(self, row: F32) -> F32:
        """Scores float32 [1, labels] of one pooled state, float32 [1, n_embd]."""
        self._graph.set(self._input, np.ascontiguousarray(row, np.float32))
        self._graph.compute()
        scores: F32 = self._graph.values(self._output)
        return scores.copy()


class Embeddings:
    """What an engine does with the states of a prompt. `pooling` is the server's."""

    def __init__(self, pooling: str, classifier: Classifier | None = None) -> None:
        self.pooling = pooling
        self.classifier = classifier

    def pooler(self, pooling: str) -> Pooler:
        """For `messages.Generate.embed`: a pooling type, or `model`. Raises ValueError for one that cannot be."""
        pooling = self.pooling if pooling == "model" else pooling
        if pooling not in POOLING:
            raise ValueError(f"unknown pooling type '{pooling}' (known: {', '.join(POOLING)})")
        if pooling == "rank" and self.classifier is None:
            raise ValueError("this server computes no scores: start it with --reranking")
        return Pooler(pooling)

    def finish(self, pooler: StatePooler) -> F32:
        """float32 [rows, columns] of `messages.Embedded`."""
        rows = pooler.result()
        return self.classifier(rows) if pooler.pooling == "rank" and self.classifier is not None else rows


def load_embeddings(gguf: GGUFFile, n_embd: int, pooling: str, classify: bool) -> Embeddings:
    """The pooling that was asked for (`--pooling`), else the file's, else none. ModelError for what cannot be.

    `classify`: rank pooling needs its head (the server was started for embeddings).
    """
    if not pooling:
        key = f"{gguf.architecture}.pooling_type"
        value = gguf.metadata.get(key, 0)
        known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(POOLING)
        if not known and classify:
            raise ModelError(f"{gguf.path}: key '{key}' is {value!r}, not a pooling type; choose one with --pooling")
        pooling = POOLING[value] if known else "none"
    return Embeddings(pooling, Classifier(gguf, n_embd) if pooling == "rank" and classify else None)
