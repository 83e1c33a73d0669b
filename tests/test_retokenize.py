"""Texts that begin as earlier ones did: their ids are libllama's, whatever was tokenized before."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf import retokenize
from ftgguf.retokenize import Retokenizer
from ftgguf.vocab import Vocab
from tests.vocabs import load, vocab, vocab_path

CONTROL, USER = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
EXTRA = {
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    # what overlaps them: longer, as long, shorter; at their start, at their end, within, around
    "<|im_end|>\n\n": USER,
    "x<|im_end|": CONTROL,
    "|>user<|im": USER,
    ">\n<": USER,
    "end": USER,
    "<|im_end|><|im_end|>": CONTROL,
    "aXa": CONTROL,
    "  ": USER,
    "\n\n": USER,
}
_made = tempfile.TemporaryDirectory(prefix="ftgguf-retokenize-")


@functools.cache
def chatml(spm: bool) -> Vocab:
    """gpt-2's vocabulary, or that of stories (SPM, puts a space before texts), with ChatML's tokens and some that
    stand in their way."""
    source = gguf.GGUFReader(vocab_path("stories" if spm else "gpt-2"))
    fields = source.fields
    pieces: list[str] = fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    n = len(pieces)
    for text, kind in EXTRA.items():
        if text in pieces:
            kinds[pieces.index(text)] = int(kind)
        else:
            pieces.append(text)
            kinds.append(int(kind))
    path = Path(_made.name) / f"chatml-{spm}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if spm else "gpt2")
    if not spm:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    else:
        writer.add_token_scores([*fields["tokenizer.ggml.scores"].contents(), *[0.0] * (len(pieces) - n)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load(path)


@functools.cache
def named(name: str) -> Vocab:
    return chatml(name == "chatml-spm") if name.startswith("chatml") else vocab(name)


NAMES = ["chatml", "chatml-spm", "gpt-2", "phi-3", "stories"]
PARTS = [
    *EXTRA, "<|endoftext|>", "<s>", "</s>", "<|end|>", "<|im_", "<|", "|>", "\n", " ", "  \n", "user", "assistant", "é",
    "日本語", "Hello there", "end", "x", "aXaXa", "123", "\U0001f600", "\x00",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=14).map("".join)


def fresh(v: Vocab) -> None:
    """Forget what was tokenized."""
    v.__dict__.pop("_retokenizer", None)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.lists(TEXT, min_size=1, max_size=4), st.booleans())
def test_any_texts_with_common_beginnings(name: str, stem: list[str], tails: list[str], add_special: bool) -> None:
    """Oracle: libllama on each text alone. All beginnings of a text, then other endings behind it, in one memory."""
    v = named(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retokenize, "MIN_BYTES", 0)
        patch.setattr("ftgguf.vocab.MIN_BYTES", 0)
        fresh(v)
        texts = ["".join(stem[:n]) for n in range(1, len(stem) + 1)]
        for text in [*texts, *("".join(stem) + tail for tail in tails), *texts]:
            assert v.tokenize(text, add_special, True) == v.native.tokenize(text.encode(), add_special, True), text
    fresh(v)


@pytest.mark.parametrize("name", ["chatml", "chatml-spm"])
def test_a_conversation_is_tokenized_once(name: str) -> None:
    """Turn after turn, and two conversations in turns: only what is new goes to libllama, and the ids are its own."""
    v = named(name)
    fresh(v)
    system = "<|im_start|>system\n" + "You are a helpful assistant. " * 100 + "<|im_end|>\n"
    talks = [system, system]
    rng = np.random.default_rng(3)
    seen: list[int] = []
    for turn in range(12):
        talks[turn % 2] += f"<|im_start|>user\nWhat about {rng.integers(10**9)}, and  why?<|im_end|>\n<|im_start|>bot\n"
        text = talks[turn % 2].encode()
        before = v._retokenizer.reused_bytes
        assert v.tokenize(text, True, True) == v.native.tokenize(text, True, True)
        seen.append(len(text) - (v._retokenizer.reused_bytes - before))
        talks[turn % 2] += f"Because {turn}.<|im_end|>\n"
    assert max(seen[1:]) < 400 < len(system) < seen[0]
    fresh(v)


def test_the_vocabularies_have_what_the_tests_are_about() -> None:
    """Else they would show nothing: the tokens are special here, and the overlapping ones do win."""
    v = chatml(False)
    ids = {text.decode(): id for text, id in v.control_texts.items()}
    assert v.tokenize("a<|im_end|>b") == [*v.tokenize("a"), ids["<|im_end|>"], *v.tokenize("b")]
    assert ids["<|im_end|>"] not in v.tokenize("<|im_end|>\n\n")
    assert ids["<|im_end|><|im_end|>"] in v.tokenize("<|im_end|><|im_end|>")
    assert set(v._retokenizer._borders.values()) >= {b"<|im_end|>", b"<|im_start|>"}
    assert b"aXa" not in v._retokenizer._borders.values()  # two of it overlap
    assert vocab("phi-3")._retokenizer._borders.keys().isdisjoint({32007})  # swallows the white space behind it


def test_what_ends_differently_is_no_border() -> None:
    """A longer token that begins only where the texts part takes the place of the one before."""
    v = chatml(False)
    fresh(v)
    stem = "<|im_start|>" + "word " * 600 + "<|im_end|>"
    for tail in ("", "\n", "\n\n", "<|im_end|>", "\n<", "x", "\n\n"):
        text = (stem + tail).encode()
        assert v.tokenize(text) == v.native.tokenize(text, False, True), tail
    fresh(v)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest texts go first, by number and by size; one that is continued makes no second entry."""
    calls: list[bytes] = []

    def tokenize(data: bytes, add_special: bool) -> list[int]:
        calls.append(data)
        out: list[int] = []
        for part in data.split(b"#EOT")[:-1]:
            out += [*part, 300]
        return out + list(data.split(b"#EOT")[-1])

    monkeypatch.setattr(retokenize, "MIN_BYTES", 8)
    monkeypatch.setattr(retokenize, "MAX_TEXTS", 3)
    monkeypatch.setattr(retokenize, "MAX_BYTES", 4000)
    made = Retokenizer(tokenize, {b"#EOT": 300}, [b"#EOT"], 301)
    texts = [b"%d" % i * 40 + b"#EOT" + b"tail%d" % i for i in range(5)]
    for text in texts:
        assert made.tokenize(text, False) == tokenize(text, False)
    assert [text.data for text in made._texts] == texts[2:]
    calls.clear()
    longer = texts[4] + b" and more"
    assert made.tokenize(longer, False) == [*(b"4" * 40), 300, *b"tail4 and more"]
    assert calls == [b"tail4 and more"]
    assert [text.data for text in made._texts] == [*texts[2:4], longer]
    made.tokenize(b"y" * 3900 + b"#EOT", False)
    assert [len(text.data) for text in made._texts] == [len(longer), 3904]
    made.tokenize(b"z" * 5000, False)  # more than all that is remembered
    assert [len(text.data) for text in made._texts] == [len(longer), 3904]
    calls.clear()
    made.tokenize(b"4" * 40 + b"#EOTtail4", True)  # BOS may come with it: another text
    assert calls == [b"4" * 40 + b"#EOTtail4"]
