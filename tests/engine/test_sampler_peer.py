"""Sampler, grammar and detokenizer together against a real llama-server: same model, same logits, same request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from compat.oracle import Oracle
from compat.peer import peer_server
from ftgguf.engine.detokenizer import Detokenizer
from ftgguf.engine.grammar import GrammarCompiler
from ftgguf.engine.messages import Grammar, SamplingParams, TokenProbs
from ftgguf.engine.sampler import Sampler, sampler_names
from tests.vocabs import vocab, vocab_path

PROMPT = "Once upon a time, there was a little"
COMPILER = GrammarCompiler(vocab("stories"))


@pytest.fixture(scope="module")
def peer() -> Iterator[str]:
    with peer_server(vocab_path("stories"), ["-c", "512", "-np", "1", "-t", "1"]) as url:
        yield url


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle(vocab_path("stories"), n_ctx=512) as made:
        yield made


def ours(oracle: Oracle, body: dict[str, Any], n_predict: int) -> dict[str, Any]:
    """What the engine would answer, with libllama's logits."""
    v = vocab("stories")
    fields = {name: body[name] for name in SamplingParams.__struct_fields__ if name in body}
    fields["samplers"] = sampler_names(body.get("samplers", SamplingParams().samplers))
    if "logit_bias" in body:
        fields["logit_bias"] = tuple((i, float("-inf") if bias is False else bias) for i, bias in body["logit_bias"])
    if "grammar" in body:
        fields["grammar"] = Grammar(kind="gbnf", text=body["grammar"])
    prompt = v.tokenize(body["prompt"], True, True)
    sampler = Sampler(SamplingParams(**fields), v, prompt, COMPILER)
    text = Detokenizer(v, body.get("stop", ()), n_indent=body.get("n_indent", 0))
    logits = oracle.prefill_logits(prompt)[-1]
    content, probs, kind, word = "", list[TokenProbs](), "limit", ""
    for _ in range(n_predict):
        token, found = sampler.sample(logits)
        piece = text.push(token, found)
        content += piece.text
        probs += piece.probs
        if piece.stop is not None:
            kind, word = "word", piece.stop
            break
        if piece.limit:
            break
        if v.is_eog(token):
            kind = "eos"
            break
        logits = oracle.evaluate([token])[-1]
    if kind != "word":
        last = text.finish()
        content, probs = content + last.text, probs + list(last.probs)
    return {"content": content, "stop_type": kind, "stopping_word": word, "probs": probs}


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "defaults": {"seed": 5},
    "hot": {"seed": 6, "temperature": 1.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {"seed": 7, "repeat_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "window": {"temperature": 0, "repeat_penalty": 1.8, "repeat_last_n": 4},
    "dry": {"seed": 8, "dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 200},
    "xtc": {"seed": 9, "xtc_probability": 0.8, "xtc_threshold": 0.05},
    "typical": {"seed": 10, "typical_p": 0.5},
    "sigma": {"seed": 11, "top_n_sigma": 1.0, "temperature": 1.5},
    "dynatemp": {"seed": 12, "dynatemp_range": 0.6, "dynatemp_exponent": 0.7},
    "mirostat 1": {"seed": 13, "mirostat": 1, "mirostat_tau": 4.0},
    "mirostat 2": {"seed": 14, "mirostat": 2, "mirostat_tau": 4.0},
    "adaptive": {"seed": 15, "samplers": ["top_k", "adaptive_p"], "adaptive_target": 0.4},
    "order": {"seed": 16, "samplers": ["temperature", "min_p", "top_k"], "temperature": 1.3},
    "letters": {"seed": 16, "samplers": "tmk", "temperature": 1.3},
    "unknown sampler": {"seed": 16, "samplers": ["bogus", "top_k"]},
    "min_keep": {"seed": 17, "min_keep": 5, "top_p": 0.1},
    "bias": {"seed": 18, "logit_bias": [[429, 3.5], [432, False]]},
    "stop word": {"temperature": 0, "stop": ["named", "Tim"]},
    "stop over tokens": {"temperature": 0, "stop": ["d to p", "xyz"]},
    "stop never": {"temperature": 0, "stop": ["dragons", " she was very zz"]},
    "grammar": {"seed": 19, "grammar": 'root ::= "girl " [a-z ]+ "." ("\\n" [A-Z])?'},
    "grammar choice": {"seed": 20, "grammar": 'root ::= ("cat" | "dog" | "bird") "s"?', "temperature": 2.0},
    "grammar recursive": {"seed": 21, "grammar": 'root ::= "(" root* ")" | [a-c]', "temperature": 1.5},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_same_text(peer: str, oracle: Oracle, name: str) -> None:
    """Oracle: the content, stop type and stopping word that llama-server gives."""
    body = {"prompt": PROMPT, "n_predict": 60, "cache_prompt": False, **REQUESTS[name]}
    theirs = httpx.post(f"{peer}/completion", json=body, timeout=60).json()
    mine = ours(oracle, body, 60)
    for field in ("content", "stop_type", "stopping_word"):
        assert mine[field] == theirs[field], field


@pytest.mark.parametrize("post", [False, True])
def test_same_probabilities(peer: str, oracle: Oracle, post: bool) -> None:
    """Oracle: llama-server's completion_probabilities, before and after sampling."""
    body = {"prompt": PROMPT, "n_predict": 12, "cache_prompt": False, "seed": 3, "n_probs": 6}
    body |= {"post_sampling_probs": post, "temperature": 1.2}
    theirs = httpx.post(f"{peer}/completion", json=body, timeout=60).json()["completion_probabilities"]
    mine = ours(oracle, body, 12)["probs"]
    assert len(mine) == len(theirs)
    value, top = ("prob", "top_probs") if post else ("logprob", "top_logprobs")
    for a, b in zip(mine, theirs, strict=True):
        assert a.chosen.id == b["id"]
        assert list(a.chosen.piece) == b["bytes"]
        assert a.chosen.value == pytest.approx(b[value], abs=1e-2)
        assert [entry.id for entry in a.top] == [entry["id"] for entry in b[top]]
        assert [entry.value for entry in a.top] == pytest.approx([entry[value] for entry in b[top]], abs=1e-2)


@pytest.mark.parametrize(
    "body",
    [{"content": "Hello world"}, {"content": "Hello <s> é\n\n😀 </s>", "add_special": True},
     {"content": "a </s> b", "parse_special": False}],
)  # fmt: skip
def test_same_tokens(peer: str, body: dict[str, Any]) -> None:
    """Oracle: llama-server's /tokenize and /detokenize."""
    v = vocab("stories")
    theirs = httpx.post(f"{peer}/tokenize", json=body).json()["tokens"]
    assert v.tokenize(body["content"], body.get("add_special", False), body.get("parse_special", True)) == theirs
    text = httpx.post(f"{peer}/detokenize", json={"tokens": theirs}).json()["content"]
    assert v.detokenize(theirs).decode() == text
