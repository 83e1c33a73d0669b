"""What is to be measured: llama-bench's tests, and the random tokens they run on."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SpeedTest:
    """One llama-bench test: after `n_depth` tokens of context evaluate `n_prompt` in batches, then `n_gen` one by one.

    `name` is llama-bench's: pp512, tg128, pp512+tg128, `pp512 @ d4096`. Its speed counts n_prompt + n_gen tokens.
    """

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """Tokens that count."""
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        """Cells the test needs."""
        return self.n_depth + self.n_prompt + self.n_gen


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a test: the context, the prompt and the generated part."""

    depth: list[int]
    prompt: list[int]
    gen: list[int]


def random_tokens(test: SpeedTest, n_vocab: int, seed: int) -> Tokens:
    """Uniform token ids, as llama-bench's: the same for every engine of a comparison with the same seed."""
    ids = np.random.default_rng(seed).integers(0, n_vocab, test.n_ctx).tolist()
    a, b = test.n_depth, test.n_depth + test.n_prompt
    return Tokens(ids[:a], ids[a:b], ids[b:])


def make_tests(
    prompts: list[int], gens: list[int], pairs: list[tuple[int, int]], depths: list[int]
) -> tuple[SpeedTest, ...]:
    """The tests of `-p`, `-n`, `-pg` and `-d` in llama-bench's order; zeros leave a kind out."""
    shapes = [(p, 0) for p in prompts if p] + [(0, n) for n in gens if n] + [(p, n) for p, n in pairs if p or n]
    return tuple(SpeedTest(p, n, depth) for depth in depths for p, n in shapes)


def int_list(text: str) -> list[int]:
    """`512`, `1,2,4`, `first-last`, `first-last+step`, `first-last*factor`, joined by commas. ValueError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part.strip())
        if match is None:
            raise ValueError(f"'{part}' is no number and no range (first-last, first-last+step, first-last*factor)")
        first, last, how, by = int(match[1]), int(match[2] or match[1]), match[3] or "+", int(match[4] or 1)
        if last < first or (how == "+" and by < 1) or (how == "*" and (by < 2 or first < 1)):
            raise ValueError(f"'{part}' is an empty or endless range")
        value = first
        while value <= last:
            found.append(value)
            value = value + by if how == "+" else value * by
    return found


def pair(text: str) -> tuple[int, int]:
    """`pp,tg`. ValueError."""
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if match is None:
        raise ValueError(f"'{text}' is no pair: -pg takes prompt and generated tokens, as in -pg 512,128")
    return int(match[1]), int(match[2])
