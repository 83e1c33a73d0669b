"""The sampler chain's short way, over a few candidates, against the long one and libllama's own samplers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import ftgguf._libllama as _libllama
from ftgguf.engine.messages import SamplingParams
from ftgguf.engine.sampler import Sampler
from ftgguf.nouns import F32
from tests.engine.sampler_oracle import agree, changed, rows
from tests.vocabs import vocab


def equal_ways(params: SamplingParams, logits: list[F32], prompt: list[int] | None = None) -> int:
    """The chain without a mask (a shortlist where there is one) and with a mask that allows all (never one).

    Returns how many candidates the former had at last.
    """
    v = vocab("gpt-2")
    short, long = (_libllama.SamplerChain(v.native, params) for _ in range(2))
    everything = np.full((v.n_vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
    for chain in (short, long):
        chain.accept_all(prompt or [])
    for values in logits:
        token = short.sample(values)
        assert token == long.sample(values, everything)
        assert short.candidates(200) == long.candidates(200)
        assert long.n_considered == v.n_vocab
        short.accept(token)
        long.accept(token)
    return int(short.n_considered)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from((1, 2, 5, 40, 128)),
    st.sampled_from(("pairs", "rising", "falling", "few values", "mostly out", "one value")),
    st.sampled_from((1.0, 1.3)),
    st.sampled_from((0.0, 0.8)),
    st.lists(st.tuples(st.integers(0, 300), st.floats(-9, 9) | st.just(float("-inf"))), max_size=5).map(tuple),
)
def test_equal_logits_on_the_short_way(
    seed: int, top_k: int, kind: str, repeat: float, temperature: float, bias: tuple[tuple[int, float], ...]
) -> None:
    """Which of equal logits is chosen, and in which order they stand, is what libllama's sort of all of them does. As
    models with the same row for several tokens have it, and in orders that are the best and worst for a heap."""
    n = vocab("gpt-2").n_vocab
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 3, n).astype(np.float32)
    if kind == "pairs":
        values[n // 2 : n // 2 * 2] = values[: n // 2]
    elif kind in ("rising", "falling"):
        values = np.sort(np.round(values, 2))[:: 1 if kind == "rising" else -1].copy()
    elif kind == "few values":
        values = np.round(values)
    elif kind == "mostly out":
        values = np.where(rng.random(n) < 0.998, -np.inf, np.round(values)).astype(np.float32)
        values[7] = 1.0
    else:
        values[:] = 0.5
    params = SamplingParams(
        seed=seed % 1000, top_k=top_k, temperature=temperature, repeat_penalty=repeat, logit_bias=bias
    )
    considered = equal_ways(params, [values, np.roll(values, 101)], rng.integers(0, 300, 40).tolist())
    if kind == "pairs" and len({token for token, _ in bias}) == len(bias):
        assert considered < n // 8


def test_ignore_eos_does_not_bar_the_short_way() -> None:
    """It comes as a flag and as biases of minus infinity, as the front sends it; the token stays out, whatever else is
    added to it, and the chain is as quick as without (the long way looks at all 50257 candidates)."""
    v = vocab("gpt-2")
    eos = v.eos
    assert eos is not None
    params = SamplingParams(
        temperature=0.0, top_k=1, ignore_eos=True, logit_bias=((eos, 5.0), (eos, float("-inf")), (3, 1.0))
    )
    logits = rows(2, v.n_vocab, 5)
    logits[:, eos] = 100.0
    sampler = Sampler(params, v)
    for row in logits:
        token, _ = sampler.sample(row)
        assert token == int(np.argmax(np.where(np.arange(v.n_vocab) == eos, -np.inf, row)))
    twice = ((eos, float("-inf")), (eos, 5.0), (eos, float("-inf")))
    equal_ways(changed(params, logit_bias=twice), list(logits))
    chain = _libllama.SamplerChain(v.native, changed(params, logit_bias=twice))
    assert chain.sample(logits[0]) != eos
    assert chain.n_considered < 100


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 100),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 90),
    st.sampled_from((("penalties", "dry", "top_k", "temperature"), ("penalties",), ("dry", "top_k"), ())),
)
def test_only_the_end_of_a_prompt_is_read(
    seed: int, last_n: int, dry_n: int, length: int, samplers: tuple[str, ...]
) -> None:
    """Penalties and DRY look back as far as their windows: the chain that took in the whole prompt says the same."""
    v = vocab("stories")
    params = SamplingParams(
        seed=seed, repeat_last_n=last_n, repeat_penalty=1.5, dry_multiplier=0.9, dry_allowed_length=1,
        dry_penalty_last_n=dry_n, samplers=samplers,
    )  # fmt: skip
    prompt = np.random.default_rng(seed).integers(0, 12, length).tolist()
    whole = _libllama.SamplerChain(v.native, params)
    whole.accept_all(prompt)
    for form in (prompt, tuple(prompt), np.array(prompt, np.int32)):
        ours = Sampler(params, v, form)
        again = _libllama.SamplerChain(v.native, params)
        again.accept_all(prompt)
        for logits in rows(seed, v.n_vocab, 4):
            token = again.sample(logits)
            again.accept(token)
            assert ours.sample(logits)[0] == token


def test_a_token_biased_twice_is_biased_twice() -> None:
    """As llama-server does with `[[id, 3], [id, 3]]`, on the short way too."""
    agree(SamplingParams(temperature=0.0, top_k=1, logit_bias=((7, 3.0), (7, 3.0), (9, 5.5))), "gpt-2")


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        SamplingParams,
        seed=st.integers(0, 1000),
        top_k=st.integers(1, 120),
        repeat_penalty=st.sampled_from((1.0, 1.3, 0.7)),
        presence_penalty=st.sampled_from((0.0, 1.5, -1.5)),
        dry_multiplier=st.sampled_from((0.0, 0.8)),
        top_n_sigma=st.sampled_from((-1.0, 1.0)),
        temperature=st.sampled_from((0.0, 0.8)),
        logit_bias=st.lists(
            st.tuples(st.integers(0, 50256), st.floats(-9, 9) | st.just(float("-inf"))), max_size=4
        ).map(tuple),
    ),
    st.booleans(),
)
def test_the_short_way_equals_the_long_way(params: SamplingParams, ties: bool) -> None:
    """The chain over a shortlist (no mask) against the chain over the whole vocabulary (a mask that allows all), also
    where many logits are equal."""
    v = vocab("gpt-2")
    short, long = (_libllama.SamplerChain(v.native, params) for _ in range(2))
    everything = np.full((v.n_vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
    for logits in rows(params.seed, v.n_vocab, 5):
        values = np.round(logits) if ties else logits
        token = short.sample(values)
        assert token == long.sample(values, everything)
        assert short.candidates(200) == long.candidates(200)
        short.accept(token)
        long.accept(token)
