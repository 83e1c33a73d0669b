"""The sampler chain against libllama's own samplers, driven one by one through llama-cpp-python's bindings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftgguf._libllama as _libllama
from ftgguf.engine.messages import DEFAULT_SAMPLERS, SamplingParams
from ftgguf.engine.sampler import Sampler, SamplingError, sampler_names, sampling_defaults
from ftgguf.gguf import open_gguf
from tests.engine.sampler_oracle import agree, changed, rows
from tests.vocabs import vocab, vocab_path

ALL_NAMES = (*DEFAULT_SAMPLERS, "infill", "adaptive_p")
CASES = {
    "defaults": SamplingParams(seed=7),
    "greedy": SamplingParams(seed=1, temperature=0.0),
    "greedy with penalties": SamplingParams(seed=1, temperature=0.0, top_k=1, repeat_penalty=1.3),
    "penalties": SamplingParams(seed=3, repeat_penalty=1.2, frequency_penalty=0.7, presence_penalty=-0.4),
    "short window": SamplingParams(seed=3, repeat_penalty=1.5, repeat_last_n=5),
    "dry": SamplingParams(seed=4, dry_multiplier=1.3, dry_allowed_length=1, dry_penalty_last_n=512),
    "dry breakers": SamplingParams(seed=4, dry_multiplier=0.8, dry_sequence_breakers=("a", "the", "é", "", "x" * 60)),
    "top_n_sigma": SamplingParams(seed=5, top_n_sigma=1.5, top_k=0),
    "typical": SamplingParams(seed=6, typical_p=0.6, top_k=0, top_p=1.0, min_p=0.0),
    "xtc": SamplingParams(seed=7, xtc_probability=0.7, xtc_threshold=0.08),
    "dynatemp": SamplingParams(seed=8, dynatemp_range=0.5, dynatemp_exponent=1.4),
    "min_keep": SamplingParams(seed=9, min_keep=6, top_p=0.1, min_p=0.9),
    "no truncation": SamplingParams(seed=10, samplers=("temperature",), temperature=1.4),
    "empty chain": SamplingParams(seed=11, samplers=()),
    "xtc after greedy": SamplingParams(
        seed=7, temperature=0.0, top_k=0, xtc_probability=1.0, xtc_threshold=0.0, samplers=("temperature", "xtc")
    ),
    "odd order": SamplingParams(seed=12, samplers=("min_p", "temperature", "top_k", "penalties", "top_p")),
    "twice": SamplingParams(seed=12, samplers=("top_k", "temperature", "temperature", "top_k")),
    "mirostat 1": SamplingParams(seed=13, mirostat=1, mirostat_tau=3.0),
    "mirostat 2": SamplingParams(seed=14, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.2),
    "adaptive": SamplingParams(seed=15, samplers=("top_k", "adaptive_p"), adaptive_target=0.3, adaptive_decay=0.8),
    "adaptive off": SamplingParams(seed=15, samplers=("adaptive_p", "top_k")),
    "infill": SamplingParams(seed=16, samplers=("top_k", "top_p", "infill", "temperature")),
    "bias": SamplingParams(seed=17, logit_bias=((5, 9.0), (9, float("-inf")), (5, -2.0)), temperature=1.2),
}


@pytest.mark.parametrize("case", CASES)
def test_chain_chooses_what_libllama_does(case: str) -> None:
    """Oracle: the same samplers of libllama, in llama-server's order, with the same seed and history."""
    agree(CASES[case])


@pytest.mark.parametrize("case", ["defaults", "greedy", "xtc", "no truncation", "mirostat 2", "adaptive", "typical"])
def test_probabilities_after_the_chain(case: str) -> None:
    """Oracle: the candidates that libllama's chain leaves."""
    agree(changed(CASES[case], n_probs=8, post_sampling_probs=True))


def test_a_large_vocabulary() -> None:
    """The same at 50257 ids, where libllama's partial sorts take other paths."""
    agree(SamplingParams(seed=21, repeat_penalty=1.1, top_k=200), "gpt-2", steps=4)
    agree(SamplingParams(seed=22, top_k=0, dry_multiplier=0.8), "gpt-2", steps=4)
    agree(SamplingParams(seed=23), "gpt-2", steps=10)
    agree(
        SamplingParams(seed=24, repeat_penalty=1.2, dry_multiplier=1.0, logit_bias=((7, 8.0), (9, 8.5))),
        "gpt-2",
        steps=10,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        SamplingParams,
        seed=st.integers(0, 2**32 - 2),
        # below about 1e-36 libllama's own division of logits overflows float32, and no order of candidates is right
        temperature=st.just(0.0) | st.floats(1e-35, 3),
        top_k=st.integers(-1, 600),
        top_p=st.floats(0, 1.2),
        min_p=st.floats(-0.1, 1),
        typical_p=st.floats(0, 1.1),
        top_n_sigma=st.floats(-1, 4),
        xtc_probability=st.floats(0, 1),
        xtc_threshold=st.floats(0, 0.6),
        repeat_penalty=st.floats(0.5, 2),
        frequency_penalty=st.floats(-2, 2),
        repeat_last_n=st.integers(0, 200),
        min_keep=st.integers(0, 9),
        mirostat=st.sampled_from((0, 0, 0, 1, 2)),
        samplers=st.lists(st.sampled_from(DEFAULT_SAMPLERS), max_size=9).map(tuple),
    )
)
def test_any_settings_agree(params: SamplingParams) -> None:
    """Oracle: libllama's samplers with the same random settings."""
    agree(params, steps=6)


@pytest.mark.parametrize("mirostat", [0, 1, 2])
def test_a_temperature_that_overflows_is_a_token_or_an_error(mirostat: int) -> None:
    """1.2e-38 turns logits into infinities inside libllama; the request may fail, the process may not."""
    v = vocab("stories")
    sampler = Sampler(SamplingParams(seed=1, temperature=1.2e-38, mirostat=mirostat), v)
    try:
        token, _ = sampler.sample(rows(3, v.n_vocab)[0])
    except ValueError:
        return
    assert 0 <= token < v.n_vocab


# ------------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_over_raw_logits() -> None:
    """Against a float64 log-softmax; the sampler settings (bias, temperature, top_k) do not change them."""
    logits = rows(3, 512)[0]
    params = SamplingParams(seed=1, temperature=0.1, top_k=2, logit_bias=((4, 30.0),), n_probs=5)
    token, probs = Sampler(params, vocab("stories")).sample(logits)
    assert token == 4
    assert probs is not None
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-wide, kind="stable")[:5]
    assert [entry.id for entry in probs.top] == best.tolist()
    assert [entry.value for entry in probs.top] == pytest.approx(expected[best].tolist(), abs=1e-5)
    assert probs.chosen.value == pytest.approx(expected[4], abs=1e-5)
    assert probs.chosen.piece == vocab("stories").piece(4)
    assert sum(math.exp(entry.value) for entry in probs.top) <= 1.0 + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400) | st.integers(1000, 5000), st.integers(0, 500), st.integers(0, 2**31))
def test_top_logprobs_properties(n: int, n_top: int, seed: int) -> None:
    """Against a full sort, with ties and minus infinities."""
    logits = np.random.default_rng(seed).integers(-3, 4, n).astype(np.float32)
    logits[np.random.default_rng(seed + 1).integers(0, n, n // 4)] = -np.inf
    logits[0] = 1.0
    value, top = _libllama.top_logprobs(logits, 0, n_top)
    order = sorted(range(n), key=lambda i: (-logits[i], i))
    assert [i for i, _ in top] == order[: min(n, n_top)]
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum())
    assert value == pytest.approx(1.0 - log_sum, abs=1e-5)
    lowest = float(np.finfo(np.float32).min)
    assert all(v == lowest for i, v in top if logits[i] == -np.inf)


# ---------------------------------------------------------------------------------------- masks, seeds, bad input


def test_mask_forbids() -> None:
    """Only tokens with their bit can come out, for greedy and random choice alike."""
    chain = _libllama.SamplerChain(vocab("stories").native, SamplingParams(seed=3, temperature=2.0))
    allowed = {3, 31, 32, 511}
    mask = np.zeros(16, np.uint32)
    for token in allowed:
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    seen = {chain.sample(logits, mask) for logits in rows(5, 512, 200)}
    assert seen == allowed


def test_candidate_subset_equals_full_logits() -> None:
    """The top 50 with their ids give what all logits give, since top_k 40 comes first (penalties off)."""
    params = SamplingParams(seed=5)
    full, part = (_libllama.SamplerChain(vocab("stories").native, params) for _ in range(2))
    for logits in rows(6, 512):
        ids = np.sort(np.argsort(-logits)[:50]).astype(np.int32)
        assert full.sample(logits) == part.sample(np.ascontiguousarray(logits[ids]), ids=ids)


def test_seeds() -> None:
    """Same seed, same tokens; -1 draws a seed, says which, and that seed repeats the run."""

    def run(seed: int) -> tuple[int, list[int]]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.5, top_k=0), vocab("stories"))
        return sampler.seed, [sampler.sample(logits)[0] for logits in rows(8, 512)]

    assert run(7) == run(7)
    drawn, tokens = run(0xFFFFFFFF)
    assert run(drawn)[1] == tokens
    assert tokens != run(0xFFFFFFFF)[1]


@pytest.mark.parametrize(
    ("fill", "message"),
    [(float("nan"), "not numbers"), (float("inf"), "not numbers"), (float("-inf"), "minus infinity")],
)
def test_logits_that_are_no_numbers(fill: float, message: str) -> None:
    """libllama sorts NaNs (undefined behaviour) or picks the last token; here it is that request's error."""
    logits = np.full(512, fill, np.float32)
    for case in ("defaults", "mirostat 1", "adaptive", "infill", "typical"):
        with pytest.raises(SamplingError, match=message):
            Sampler(CASES[case], vocab("stories")).sample(logits)
    logits[:] = 0
    logits[100] = fill
    if fill != float("-inf"):
        with pytest.raises(SamplingError, match=message):
            Sampler(CASES["defaults"], vocab("stories")).sample(logits)
    sampler = Sampler(SamplingParams(seed=1, temperature=0), vocab("stories"))
    assert sampler.sample(rows(1, 512)[0])[0] == int(rows(1, 512)[0].argmax())


def test_everything_biased_away() -> None:
    """Every token at minus infinity leaves nothing to choose: an error, not the last token."""
    params = SamplingParams(seed=1, logit_bias=tuple((i, float("-inf")) for i in range(512)))
    for name in ("temperature", "top_k", "typ_p", "min_p", "top_p"):
        with pytest.raises(SamplingError, match="no token is left"):
            Sampler(changed(params, samplers=(name,)), vocab("stories")).sample(rows(1, 512)[0])


BAD = {
    "repeat_penalty": [0.0, -1.0, float("nan"), float("inf"), 1e-45],
    "frequency_penalty": [float("nan"), float("inf")],
    "temperature": [float("nan"), float("inf")],
    "repeat_last_n": [-1],
    "dry_penalty_last_n": [-1],
    "min_keep": [-1],
    "mirostat": [3, -1],
    "top_k": [1 << 40],
    "seed": [-1, 1 << 32],
    "dry_sequence_breakers": [("a",) * 100],
    "logit_bias": [((512, 1.0),), ((-1, 1.0),), ((3, float("nan")),), ((3, float("inf")),)],
    "samplers": [("top_k",) * 100],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_settings_are_refused(field: str, value: Any) -> None:
    """One clear error each; the process lives."""
    with pytest.raises(SamplingError, match="Failed to initialize samplers"):
        Sampler(changed(SamplingParams(), **{field: value}), vocab("stories"))


def test_huge_windows_are_bounded() -> None:
    """A window of 2^31-1 would be allocated up front (8 GB); it works like one that holds every token."""
    big = SamplingParams(seed=2, repeat_last_n=2**31 - 1, repeat_penalty=1.4, dry_penalty_last_n=2**31 - 1)
    big = changed(big, dry_multiplier=0.5)
    small = changed(big, repeat_last_n=1000, dry_penalty_last_n=1000)
    a, b = (Sampler(p, vocab("stories"), range(100)) for p in (big, small))
    assert [a.sample(x)[0] for x in rows(4, 512)] == [b.sample(x)[0] for x in rows(4, 512)]


def test_wrong_arrays_are_refused() -> None:
    chain = _libllama.SamplerChain(vocab("stories").native, SamplingParams())
    with pytest.raises(ValueError, match="one value per token"):
        chain.sample(np.zeros(511, np.float32))
    with pytest.raises(ValueError, match="a bit for every token"):
        chain.sample(np.zeros(512, np.float32), np.zeros(15, np.uint32))
    with pytest.raises(TypeError):
        chain.sample(np.zeros((2, 256), np.float32))
    with pytest.raises(IndexError):
        chain.sample(np.zeros(2, np.float32), ids=np.array([1, 512], np.int32))
    with pytest.raises(IndexError):
        chain.accept(512)


def test_ignore_eos() -> None:
    """Against llama-server: every end-of-generation id gets minus infinity."""
    logits = np.zeros(512, np.float32)
    end = next(iter(vocab("stories").eog_ids))
    logits[end] = 50
    assert Sampler(SamplingParams(temperature=0), vocab("stories")).sample(logits)[0] == end
    assert Sampler(SamplingParams(temperature=0, ignore_eos=True), vocab("stories")).sample(logits)[0] != end


def test_infill_on_the_whole_vocabulary_is_refused() -> None:
    """libllama's infill compares all pairs: 50257 candidates would take minutes."""
    with pytest.raises(SamplingError, match="put top_k or top_p before it"):
        Sampler(SamplingParams(samplers=("infill",)), vocab("gpt-2")).sample(np.zeros(50257, np.float32))


# ------------------------------------------------------------------------------------------------ names, defaults


def test_sampler_names() -> None:
    """Spellings and letters of llama.cpp's common_sampler_types_from_names; unknown ones are left out, as there."""
    assert sampler_names(["Top-K", "topp", "nucleus", "temp", "typ", "min-p", "bogus", "dry"]) == (
        *("top_k", "top_p", "top_p", "temperature", "typ_p", "min_p", "dry"),
    )
    assert sampler_names("edskypmxt") == DEFAULT_SAMPLERS
    assert sampler_names("t?i") == ("temperature", "infill")
    assert sampler_names("") == ()


def test_sampling_defaults_of_a_file() -> None:
    """Keys of llama.cpp's common_init_sampler_from_model."""
    keys: dict[str, Any] = {
        "general.sampling.temp": 0.35,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_last_n": 128,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.sequence": "top_k;temperature",
        "general.sampling.min_p": "0.01",
        "general.sampling.mirostat": "x",
    }
    with open_gguf(vocab_path("stories"), keys) as gguf:
        fields = sampling_defaults(gguf)
    assert fields == {
        "temperature": pytest.approx(0.35),
        "top_k": 20,
        "repeat_last_n": 128,
        "repeat_penalty": pytest.approx(1.1),
        "samplers": ("top_k", "temperature"),
        "min_p": 0.01,
    }
    assert SamplingParams(**fields).top_k == 20
    with open_gguf(vocab_path("stories")) as gguf:
        assert sampling_defaults(gguf) == {}
