"""The engine's greedy text is libllama's, token by token, on real weights: the stories model dense and as three MoEs,
and the demo. Same kernels, same order: not even a near tie may fall differently. (2048 cells: when cells
are used again, attention adds in another order, and near ties may.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compat.oracle import Oracle
from ftgguf.engine.load import load_engine
from ftgguf.engine.messages import Delta, Finished, Generate, SamplingParams
from ftgguf.flags import parse_server
from ftgguf.pull.demo import resolve_demo

PROMPTS = ("Once upon a time", "Tom and his dog", "Lily said")


def check(path: Path, prompts: tuple[str, ...], n: int, layout: str = "plain") -> None:
    config = parse_server(["-m", str(path), "-c", "2048", "-t", "1", "--weights-layout", layout], {}, ())
    engine = load_engine(config, lambda stage, fraction: None)
    with Oracle(path, n_ctx=512, n_threads=1, repack=layout == "repacked") as oracle:
        for i, prompt in enumerate(prompts):
            tokens = oracle.tokenize(prompt)
            oracle.reset()
            expected = oracle.greedy(tokens, n)
            engine.submit(
                Generate(
                    id=i, prompt=tuple(tokens), sampling=SamplingParams(temperature=0), max_tokens=n, cache_prompt=False
                )
            )
            text, finished = "", None
            while engine.has_work:
                for message in engine.step():
                    if isinstance(message, Delta):
                        text += message.text
                    elif isinstance(message, Finished):
                        finished = message
            assert finished is not None
            assert text == expected.text.decode("utf-8", "replace")


def test_dense_stories(stories_dense: Path) -> None:
    check(stories_dense, PROMPTS, 200)


@pytest.mark.parametrize(
    ("arch", "kind", "layout"),
    [
        ("llama", "Q8_0", "plain"),
        ("granitemoe", "Q4_0", "repacked"),
        ("glm4moe", "F16", "plain"),
        ("llama", "MXFP4", "repacked"),
    ],
)
def test_stories_as_mixtures(stories_moe: Callable[..., Path], arch: str, kind: str, layout: str) -> None:
    check(stories_moe(arch, kind), PROMPTS, 200, layout)


@pytest.mark.slow
def test_demo() -> None:
    """Downloads the demo model's package where it is not in the cache."""
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    questions = ("What is the capital of France?", "Why is the sky blue?", "Write a haiku about snow.")
    check(resolve_demo(), tuple(chat.format(q) for q in questions), 100)
