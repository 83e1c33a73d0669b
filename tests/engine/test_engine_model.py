"""The engine over a real model: greedy texts of a crowded pool against each request alone and uncached."""

from __future__ import annotations

import random
from pathlib import Path

from engine_support import ask, check_idle, run_all

from ftgguf.engine.engine import Engine
from ftgguf.engine.load import load_engine
from ftgguf.engine.messages import Generate, SamplingParams
from ftgguf.flags import parse_server

GGUF = Path(__file__).parents[1] / "data" / "stories260K.gguf"
GREEDY = SamplingParams(temperature=0.0, seed=1)


def load(*flags: str) -> Engine:
    return load_engine(parse_server(["-m", str(GGUF), "-t", "1", "--no-warmup", *flags], {}), lambda *_: None)


def test_crowded_pool_gives_the_solo_texts() -> None:
    """24 prompts with shared beginnings on 4 slots and 256 cells: evicted, preempted, and the same greedy texts.

    One may differ: batches of other shapes sum floats in another order, which can turn a near tie.
    """
    rng = random.Random(1)
    base = [1] + [rng.randrange(260, 500) for _ in range(60)]
    requests = []
    for id in range(24):
        prompt = base[: rng.randrange(1, 60)] + [rng.randrange(260, 500) for _ in range(rng.randrange(1, 40))]
        requests.append(Generate(id=id, prompt=tuple(prompt), max_tokens=rng.randrange(1, 60), sampling=GREEDY))
    solo = load("-c", "512", "-np", "1")
    texts = []
    for r in requests:
        alone = Generate(id=r.id, prompt=r.prompt, max_tokens=r.max_tokens, sampling=GREEDY, cache_prompt=False)
        texts.append(ask(solo, alone).text)
    crowded = load("-c", "256", "-np", "4", "--kv-unified")
    for request in requests:
        crowded.submit(request)
    answers = run_all(crowded).answers
    assert crowded.metrics.n_preempted > 0
    assert crowded.cache.tree.evicted_pages > 0
    assert sum(answers[r.id].text != text for r, text in zip(requests, texts, strict=True)) <= 1
    check_idle(crowded)


def test_cold_and_cached_answers_agree() -> None:
    """Bug log R20: the same prompt three times, an edit in the middle, the cache off: one text for each prompt."""
    engine = load("-c", "512", "-np", "2", "--kv-unified")
    rng = random.Random(2)
    prompt = [1] + [rng.randrange(260, 500) for _ in range(200)]
    edited = [*prompt[:100], 300, *prompt[101:]]

    def text(id: int, tokens: list[int], cache: bool = True) -> str:
        request = Generate(id=id, prompt=tuple(tokens), max_tokens=40, sampling=GREEDY, cache_prompt=cache)
        return ask(engine, request).text

    assert len({text(1, prompt), text(2, prompt), text(3, prompt), text(4, prompt, cache=False)}) == 1
    assert len({text(5, edited), text(6, edited), text(7, edited, cache=False)}) == 1


def test_context_shift_on_a_real_model() -> None:
    """A greedy story goes on past its context: exactly as many tokens as asked for, with shifts."""
    engine = load("-c", "256", "-np", "1", "--context-shift")
    sampling = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
    answer = ask(engine, Generate(id=1, prompt=(1, 403, 407, 261, 378), max_tokens=600, sampling=sampling))
    assert len(answer.tokens) == 600
    assert answer.finished is not None
    assert answer.finished.truncated
    assert engine.metrics.n_context_shifts >= 2
