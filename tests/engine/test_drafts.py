"""Drafts from a request's own tokens, and that they change how fast a text comes and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.engine import messages as m
from ftgguf.engine.config import EngineConfig
from ftgguf.engine.drafts import Drafter, most_common, sightings
from ftgguf.engine.engine import Engine
from ftgguf.engine.scripted import Script, ScriptedExecutor
from ftgguf.flags.config import NgramMap, NgramMod, SpecConfig
from ftgguf.nouns import F32, I32
from tests.engine.engine_support import EOG, N_VOCAB, toolkit


def ids(*values: int) -> I32:
    return np.array(values, np.int32)


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60), n=st.integers(1, 4))
def test_sightings_are_those_of_a_plain_search(tokens: list[int], n: int) -> None:
    expected = [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[len(tokens) - n :]]
    assert sightings(ids(*tokens), n).tolist() == (expected if len(tokens) > n else [])


def test_the_most_common_continuation() -> None:
    assert most_common(ids(5, 6, 7, 6, 7), ids(0, 1, 2, 3)).tolist() == [1, 3]
    assert most_common(ids(5, 6, 7), ids(0, 1, 2)).tolist() == [2]


def spec(kind: str, **sizes: int) -> SpecConfig:
    name = kind.replace("-", "_")
    return SpecConfig(types=(kind,), **{name: (NgramMod if kind == "ngram-mod" else NgramMap)(**sizes)})


def test_each_kind_drafts_as_its_sizes_say() -> None:
    """By hand, from llama.cpp's description of each kind."""
    tokens = ids(1, 2, 3, 4, 5, 9, 1, 2, 8, 8, 1, 2)
    simple = Drafter(spec("ngram-simple", size_n=2, size_m=3))
    assert simple.draft(tokens, 99).tolist() == [8, 8, 1]
    assert simple.draft(tokens, 2).tolist() == [8, 8]
    assert simple.draft(tokens, 0).tolist() == []
    assert Drafter(spec("ngram-simple", size_n=2, size_m=1)).draft(tokens, 99).tolist() == []
    assert Drafter(spec("ngram-map-k", size_n=2, size_m=3, min_hits=3)).draft(tokens, 99).tolist() == []
    assert Drafter(spec("ngram-map-k", size_n=2, size_m=1, min_hits=2)).draft(tokens, 99).tolist() == [8]
    often = ids(1, 2, 3, 1, 2, 3, 1, 2, 8, 1, 2)
    assert Drafter(spec("ngram-map-k4v", size_n=2, size_m=2)).draft(often, 99).tolist() == [3, 1]
    loop = ids(*[1, 2, 3] * 3)
    assert Drafter(spec("ngram-mod", n_match=3, n_min=2, n_max=7)).draft(loop, 99).tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert Drafter(spec("ngram-mod", n_match=3, n_min=8, n_max=7)).draft(loop, 99).tolist() == []


class Greedy:
    """The largest logit."""

    seed = 0

    def sample(self, logits: F32) -> tuple[int, None]:
        return int(logits.argmax()), None

    def end_reasoning(self) -> bool:
        return False


def run(
    config: SpecConfig, script: list[int], prompt: list[int], **fields: Any
) -> tuple[list[int], m.Finished, Engine]:
    executor = ScriptedExecutor([Script(tuple(script))], n_vocab=N_VOCAB, eog=EOG, n_cells=1024, max_rows=64)
    tools = replace(toolkit(), make_sampler=lambda request: Greedy())
    engine = Engine(executor, tools, EngineConfig(n_ctx=fields.pop("n_ctx", 512), n_slots=2, spec=config))
    engine.handle(m.Generate(id=1, prompt=tuple(prompt), **fields))
    tokens: list[int] = []
    while engine.has_work:
        for message in engine.step():
            if isinstance(message, m.Delta):
                tokens += message.tokens
            elif isinstance(message, m.Finished):
                return tokens, message, engine
    raise AssertionError("it did not finish")


LOOP = spec("ngram-simple", size_n=3, size_m=8)
TEXT = st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=40)


@settings(max_examples=60)
@given(
    prompt=TEXT, script=TEXT, limit=st.sampled_from([-1, 0, 1, 7, 30]), n_ctx=st.sampled_from([48, 64, 512]),
    kind=st.sampled_from([LOOP, spec("ngram-mod", n_match=2, n_min=1, n_max=9),
                          spec("ngram-map-k4v", size_n=2, size_m=5)]),
)  # fmt: skip
def test_the_text_is_the_same_with_and_without(
    prompt: list[int], script: list[int], limit: int, n_ctx: int, kind: SpecConfig
) -> None:
    plain, end, _ = run(SpecConfig(), script * 3, prompt, max_tokens=limit, n_ctx=n_ctx)
    drafted, other, engine = run(kind, script * 3, prompt, max_tokens=limit, n_ctx=n_ctx)
    assert drafted == plain
    assert (other.stop_type, other.predicted_n, other.cached_n) == (end.stop_type, end.predicted_n, end.cached_n)
    assert engine.cache.pool.n_used == len({page for node in engine.cache.tree.nodes() for page in node.pages})
    accepted = other.timings.get("draft_n_accepted", 0)
    assert 0 <= accepted <= other.timings.get("draft_n", 0)


def test_a_repeated_text_takes_fewer_steps() -> None:
    script = [3, 4, 5, 6, 7, 8] * 20
    plain, _, slow = run(SpecConfig(), script, [1, 2])
    drafted, end, fast = run(LOOP, script, [1, 2])
    assert drafted == plain
    assert fast.metrics.n_decode < slow.metrics.n_decode / 3
    assert end.timings["draft_n_accepted"] > 80
    report = fast.metrics.report(False)
    assert report["spec_decode_num_accepted_tokens_total"] == end.timings["draft_n_accepted"]
    assert report["spec_decode_num_drafts_total"] > 5


def test_wrong_drafts_cost_no_text() -> None:
    """The prompt promises another continuation than the model writes."""
    prompt = [3, 4, 5, 9, 9, 9, 9, 3, 4, 5, 9, 9, 9, 9]
    script = [3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 8]
    assert run(LOOP, script, prompt)[0] == run(SpecConfig(), script, prompt)[0]


@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-mod", "ngram-map-k", "ngram-map-k4v"])
def test_defaults_of_every_kind_run(kind: str) -> None:
    script = list(range(3, 24)) * 6
    assert run(SpecConfig(types=(kind,)), script, [1, 2])[0] == run(SpecConfig(), script, [1, 2])[0]
