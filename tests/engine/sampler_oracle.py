"""libllama's own samplers as llama-server chains them, driven one by one through llama-cpp-python's bindings."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest

from ftgguf.engine.messages import SamplingParams
from ftgguf.engine.sampler import Sampler
from ftgguf.nouns import F32
from tests.vocabs import vocab, vocab_path

STEPS = 40


@functools.cache
def oracle_vocab(name: str) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(vocab_path(name)).encode(), params)
    assert model
    return llama_cpp.llama_model_get_vocab(model)


class Oracle:
    """llama-server's chain (llama.cpp common/sampling.cpp) built sampler by sampler, with no code of ours."""

    def __init__(self, params: SamplingParams, name: str) -> None:
        self.vocab = oracle_vocab(name)
        self.chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        self.n = llama_cpp.llama_vocab_n_tokens(self.vocab)
        for sampler in self.samplers(params):
            llama_cpp.llama_sampler_chain_add(self.chain, sampler)

    def samplers(self, p: SamplingParams) -> list[Any]:
        made: list[Any] = []
        if p.logit_bias:
            biases = (llama_cpp.llama_logit_bias * len(p.logit_bias))(*p.logit_bias)
            made.append(llama_cpp.llama_sampler_init_logit_bias(self.n, len(p.logit_bias), biases))
        if p.mirostat:
            made.append(llama_cpp.llama_sampler_init_temp(p.temperature))
            one = llama_cpp.llama_sampler_init_mirostat
            two = llama_cpp.llama_sampler_init_mirostat_v2
            made.append(
                one(self.n, p.seed, p.mirostat_tau, p.mirostat_eta, 100)
                if p.mirostat == 1
                else two(p.seed, p.mirostat_tau, p.mirostat_eta)
            )
            return made
        words = [word.encode() for word in p.dry_sequence_breakers]
        breakers = (ctypes.c_char_p * len(words))(*words)
        build: dict[str, Callable[[], Any]] = {
            "penalties": lambda: penalties(self.n, p),
            "dry": lambda: dry(self.vocab, p, breakers, len(words)),
            "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(p.top_n_sigma),
            "top_k": lambda: llama_cpp.llama_sampler_init_top_k(p.top_k),
            "typ_p": lambda: llama_cpp.llama_sampler_init_typical(p.typical_p, p.min_keep),
            "top_p": lambda: llama_cpp.llama_sampler_init_top_p(p.top_p, p.min_keep),
            "min_p": lambda: llama_cpp.llama_sampler_init_min_p(p.min_p, p.min_keep),
            "xtc": lambda: llama_cpp.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, p.seed),
            "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
                p.temperature, p.dynatemp_range, p.dynatemp_exponent
            ),
            "infill": lambda: llama_cpp.llama_sampler_init_infill(self.vocab),
        }
        made += [build[name]() for name in p.samplers if name != "adaptive_p"]
        adaptive = function("llama_sampler_init_adaptive_p", [ctypes.c_float, ctypes.c_float, ctypes.c_uint32])
        if "adaptive_p" in p.samplers:
            made.append(adaptive(p.adaptive_target, p.adaptive_decay, p.seed))
        else:
            made.append(llama_cpp.llama_sampler_init_dist(p.seed))
        return made

    def apply(self, logits: F32) -> tuple[int, dict[int, float]]:
        """The chosen id, and the probabilities of the candidates that are left."""
        data = (llama_cpp.llama_token_data * len(logits))(*((i, float(x), 0.0) for i, x in enumerate(logits)))
        array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(self.chain, ctypes.byref(array))
        left = {array.data[i].id: array.data[i].p for i in range(array.size)}
        return array.data[array.selected].id, left

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self.chain, token)


def function(name: str, arguments: list[Any]) -> Any:
    """A function of libllama by name: the bindings lag behind the header in places."""
    found = getattr(llama_cpp.llama_cpp._lib, name)
    found.argtypes, found.restype = arguments, llama_cpp.llama_sampler_p_ctypes
    return found


def penalties(n_vocab: int, p: SamplingParams) -> Any:
    make = function(
        "llama_sampler_init_penalties", [ctypes.c_int32, ctypes.c_int32, ctypes.c_float, ctypes.c_float, ctypes.c_float]
    )
    return make(n_vocab, p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)


def dry(model_vocab: Any, p: SamplingParams, breakers: Any, n: int) -> Any:
    kinds = [ctypes.c_void_p, ctypes.c_float, ctypes.c_float, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]
    make = function("llama_sampler_init_dry", [*kinds, ctypes.c_size_t])
    return make(model_vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n, breakers, n)


def rows(seed: int, n_vocab: int, steps: int = STEPS) -> F32:
    """Logits like a model's: the same few tokens far ahead of noise in every row, so that penalties bite."""
    rng = np.random.default_rng(seed)
    made = rng.normal(0, 1.5, (steps, n_vocab)).astype(np.float32)
    favourites = rng.integers(0, n_vocab, 12)
    made[:, favourites] += rng.uniform(3, 8, (steps, 12)).astype(np.float32)
    return made


def agree(params: SamplingParams, name: str = "stories", seed: int = 0, steps: int = STEPS) -> None:
    v = vocab(name)
    prompt = np.random.default_rng(seed + 1).integers(0, v.n_vocab, 90).tolist()
    ours, oracle = Sampler(params, v, prompt), Oracle(params, name)
    for token in prompt:
        oracle.accept(token)
    for logits in rows(seed, v.n_vocab, steps):
        chosen, left = oracle.apply(logits)
        token, probs = ours.sample(logits)
        assert token == chosen
        if params.post_sampling_probs:
            assert probs is not None
            best = sorted(left.items(), key=lambda item: (-item[1], item[0]))
            expected = [value for _, value in best[: params.n_probs] if value > 0]
            assert [entry.value for entry in probs.top] == pytest.approx(expected)
            assert probs.chosen.value == pytest.approx(left[token])
        oracle.accept(chosen)


def changed(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | changes)
