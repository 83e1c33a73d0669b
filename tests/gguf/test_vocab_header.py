"""The vocabulary-only header: libllama as oracle that nothing is lost, and its assertions as the list of refusals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_craft as craft
import llama_cpp
import pytest
from gguf_craft import ARCH, BOOL, F32, I32, STR, U32, kv, kv_array, model

from ftgguf.gguf import GGUFError, open_gguf
from ftgguf.gguf.writer import vocab_only_bytes

IDS = ("bos", "eos", "eot", "sep", "nl", "pad", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")


@contextmanager
def vocabulary(path: str) -> Iterator[Any]:
    """libllama's vocabulary of `path`."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    handle = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    assert handle
    yield llama_cpp.llama_model_get_vocab(handle)
    llama_cpp.llama_model_free(handle)


@contextmanager
def from_bytes(data: bytes) -> Iterator[Any]:
    """The same from memory, as the engine does it."""
    handle = os.memfd_create("vocabulary")
    os.write(handle, data)
    with vocabulary(f"/proc/self/fd/{handle}") as found:
        yield found
    os.close(handle)


def described(vocab: Any) -> list[Any]:
    """All that libllama says of a vocabulary: texts, scores, attributes, special ids, flags."""
    api = llama_cpp
    tokens = [
        (api.llama_vocab_get_text(vocab, i), api.llama_vocab_get_score(vocab, i), api.llama_vocab_get_attr(vocab, i))
        for i in range(api.llama_vocab_n_tokens(vocab))
    ]
    special = [getattr(api, f"llama_vocab_{name}")(vocab) for name in IDS]
    return [tokens, special, api.llama_vocab_get_add_bos(vocab), api.llama_vocab_get_add_eos(vocab)]


def tokenize(vocab: Any, text: bytes) -> list[int]:
    buffer = (llama_cpp.llama_token * 256)()
    count = llama_cpp.llama_tokenize(vocab, text, len(text), buffer, 256, True, True)
    return list(buffer[:count])


def test_libllama_sees_the_same_vocabulary(stories_dense: Path) -> None:
    """Oracle: libllama on the model file itself."""
    data = vocab_only_bytes(open_gguf(stories_dense))
    assert len(data) < 1 << 16
    text = "Once upon a time, naïve 日本 <s></s>\n".encode()
    with vocabulary(str(stories_dense)) as theirs, from_bytes(data) as ours:
        assert described(ours) == described(theirs)
        assert tokenize(ours, text) == tokenize(theirs, text)
        assert len(tokenize(ours, text)) > 10


def test_overrides_reach_libllama(stories_dense: Path) -> None:
    """Expectation: --override-kv tokenizer.ggml.add_bos_token=bool:false, the most used override."""
    found = open_gguf(stories_dense, {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.eos_token_id": 3})
    with from_bytes(vocab_only_bytes(found)) as vocab:
        assert not llama_cpp.llama_vocab_get_add_bos(vocab)
        assert llama_cpp.llama_vocab_eos(vocab) == 3


def test_the_header_holds_the_tokenizer_only(stories_dense: Path, tmp_path: Path) -> None:
    """Oracle: our own reader."""
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(vocab_only_bytes(open_gguf(stories_dense)))
    found = open_gguf(path)
    assert not found.tensors
    assert {key.split(".")[0] for key in found.metadata} == {"general", "tokenizer"}
    assert found.architecture == "llama"


BYTES = [f"<0x{i:02X}>" for i in range(256)]
TOKENS: Sequence[str | bytes] = ["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab"]


def keys(kind: str = "gpt2", tokens: Sequence[str | bytes] = TOKENS, **other: bytes) -> dict[str, bytes]:
    """A vocabulary that is right, by key name."""
    return {
        "model": kv("tokenizer.ggml.model", STR, kind),
        "tokens": kv_array("tokenizer.ggml.tokens", STR, tokens),
        "scores": kv_array("tokenizer.ggml.scores", F32, [0.0] * len(tokens)),
        "token_type": kv_array("tokenizer.ggml.token_type", I32, [1] * len(tokens)),
        "merges": kv_array("tokenizer.ggml.merges", STR, ["a b"]),
        **other,
    }


def flag(name: str) -> bytes:
    return kv(f"tokenizer.ggml.{name}", BOOL, 1)


def number(name: str, value: int, kind: int = U32) -> bytes:
    return kv(f"tokenizer.ggml.{name}_token_id", kind, value)


def short(count: int) -> dict[str, bytes]:
    return keys(tokens=TOKENS[:count])


REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "unknown model": (keys("rwkv"), "tokenizer model 'rwkv' is not supported; supported: llama, gpt2, gemma4, bert"),
    "model not a string": (keys() | {"model": kv("tokenizer.ggml.model", U32, 1)}, "is an integer, expected a string"),
    "no model": (keys() | {"model": kv("x", U32, 1)}, "'tokenizer.ggml.model' is missing"),
    "no tokens": (keys() | {"tokens": kv("x", U32, 1)}, "'tokenizer.ggml.tokens' is missing"),
    "tokens empty": (keys(tokens=[]), "tokenizer.ggml.tokens is empty"),
    "tokens of numbers": (
        keys() | {"tokens": kv_array("tokenizer.ggml.tokens", U32, [1])},
        "'tokenizer.ggml.tokens' must be an array of str",
    ),
    "same token twice": (keys(tokens=[*TOKENS, "a"]), "tokens 259 and 262 have the same text 'a'"),
    "same up to a zero byte": (keys(tokens=[*TOKENS, b"a\0x"]), "tokens 259 and 262 have the same text 'a'"),
    "empty and its stand-in": (keys(tokens=[*TOKENS, "", "[EMPTY_262]"]), "tokens 262 and 263 have the same text"),
    "long token": (keys(tokens=[*TOKENS, "x" * 65537]), "has a string of 65537 bytes, at most 65536 are allowed"),
    "scores short": (
        keys() | {"scores": kv_array("tokenizer.ggml.scores", F32, [0.0])},
        "tokenizer.ggml.scores has 1 values for 262 tokens",
    ),
    "scores doubles": (
        keys() | {"scores": kv_array("tokenizer.ggml.scores", craft.F64, [0.0] * 262)},
        "'tokenizer.ggml.scores' must be an array of f32 or i32",
    ),
    "types short": (
        keys() | {"token_type": kv_array("tokenizer.ggml.token_type", I32, [1] * 261)},
        "tokenizer.ggml.token_type has 261 values for 262 tokens",
    ),
    "types unsigned": (
        keys() | {"token_type": kv_array("tokenizer.ggml.token_type", U32, [1] * 262)},
        "'tokenizer.ggml.token_type' must be an array of i32",
    ),
    "byte too short": (
        keys() | {"token_type": kv_array("tokenizer.ggml.token_type", I32, [1] * 259 + [6, 1, 1])},
        "token 259 'a' is marked as a byte but is not like <0xNN>",
    ),
    "no merges": (keys() | {"merges": kv("x", U32, 1)}, "'tokenizer.ggml.merges' is missing"),
    "merge without space": (
        keys() | {"merges": kv_array("tokenizer.ggml.merges", STR, ["a b", "ab"])},
        "merge 1 'ab' has no space between its two parts",
    ),
    "id not u32": (keys(bos=number("bos", 1, I32)), "'tokenizer.ggml.bos_token_id' must be a u32"),
    "flag a number": (keys(add=kv("tokenizer.ggml.add_bos_token", U32, 1)), "is an integer, expected a bool"),
    "bos added, none": (
        short(11) | {"add": flag("add_bos_token")},
        "the tokenizer adds the token of tokenizer.ggml.bos",
    ),
    "bos out of range": (
        short(11) | {"add": flag("add_bos_token"), "bos": number("bos", 11)},
        "adds the token of tokenizer.ggml.bos_token_id, but the vocabulary has none",
    ),
    "eos added, none": (short(11) | {"add": flag("add_eos_token")}, "adds the token of tokenizer.ggml.eos_token_id"),
    "gemma4 without bos": (keys("gemma4"), "adds the token of tokenizer.ggml.bos_token_id"),
    "glm4 without bos": (
        keys(pre=kv("tokenizer.ggml.pre", STR, "glm4"), add=flag("add_bos_token")),
        "adds the token of tokenizer.ggml.bos_token_id",
    ),
    "bert without sep": (keys("bert", [f"t{i}" for i in range(102)]), "token of tokenizer.ggml.seperator_token_id"),
    "whitespace": (keys(pre=kv("tokenizer.ggml.pre", STR, "whitespace")), "'whitespace' is not supported"),
    "suppress strings": (
        keys(suppress=kv_array("tokenizer.ggml.suppress_tokens", STR, ["a"])),
        "'tokenizer.ggml.suppress_tokens' must be an array of i32",
    ),
}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[dict[str, bytes]], Any]:
    def make(records: dict[str, bytes]) -> Any:
        path = tmp_path / "v.gguf"
        path.write_bytes(model([ARCH, *records.values()]))
        return open_gguf(path)

    return make


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_abort_libllama_is_refused(case: str, opened: Callable[[dict[str, bytes]], Any]) -> None:
    """Expectation: the assertions and exceptions in llama_vocab::impl::load and the tokenizers of libllama."""
    records, fault = REFUSED[case]
    with pytest.raises(GGUFError) as caught:
        vocab_only_bytes(opened(records))
    assert fault in caught.value.message


ACCEPTED: dict[str, dict[str, bytes]] = {
    "plain": keys(),
    "spm": keys("llama"),
    "bert": keys("bert", [f"t{i}" for i in range(110)]),
    "gemma4": keys("gemma4", bos=number("bos", 1)),
    "no scores or types": {k: v for k, v in keys().items() if k not in ("scores", "token_type")},
    "integer scores": keys() | {"scores": kv_array("tokenizer.ggml.scores", I32, [-1] * 262)},
    "longer scores": keys() | {"scores": kv_array("tokenizer.ggml.scores", F32, [0.0] * 300)},
    "kimi without merges": keys(pre=kv("tokenizer.ggml.pre", STR, "kimi-k2")) | {"merges": kv("x", U32, 1)},
    "ids out of range": keys(bos=number("bos", 262), pad=number("padding", (1 << 32) - 1)),
    "types out of range": keys() | {"token_type": kv_array("tokenizer.ggml.token_type", I32, [99, -1] * 131)},
    "not utf-8": keys(tokens=[*TOKENS, b"\xff\xfe", b"\x80"]),
    "nested unknown key": keys(x=kv_array("tokenizer.x", craft.ARR, [craft.array(U32, [1])])),
    "phi-3 by name": keys(
        "llama", [*TOKENS, "<|endoftext|>"], name=kv("general.name", STR, "Phi-3 mini"), eos=number("eos", 2)
    ),
    "phi-3 by name alone": keys("llama", name=kv("general.name", STR, "Phi-3 mini")),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_libllama_takes_is_passed_on(case: str, opened: Callable[[dict[str, bytes]], Any]) -> None:
    """Oracle: libllama loads the header and tokenizes with it."""
    with from_bytes(vocab_only_bytes(opened(ACCEPTED[case]))) as vocab:
        assert llama_cpp.llama_vocab_n_tokens(vocab) == len(opened(ACCEPTED[case]).metadata["tokenizer.ggml.tokens"])
        ids = tokenize(vocab, b"ab a")
        assert all(0 <= token < llama_cpp.llama_vocab_n_tokens(vocab) for token in ids)


def test_a_header_of_the_largest_size(opened: Callable[[dict[str, bytes]], Any]) -> None:
    """262,144 tokens and 514,906 merges, as Gemma's: every string is found and the header is complete."""
    tokens = [f"token {i}" for i in range(262_144)]
    merges = [f"left{i} right{i}" for i in range(514_906)]
    found = opened(keys("gpt2", tokens) | {"merges": kv_array("tokenizer.ggml.merges", STR, merges)})
    assert found.metadata["tokenizer.ggml.tokens"].to_str() == tokens
    assert found.metadata["tokenizer.ggml.merges"][-1] == merges[-1]
    assert found.metadata["tokenizer.ggml.merges"].to_bytes()[100_000] == merges[100_000].encode()
    with from_bytes(vocab_only_bytes(found)) as vocab:
        assert llama_cpp.llama_vocab_get_text(vocab, 262_143) == b"token 262143"
