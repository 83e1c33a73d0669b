"""Vocabularies through libllama: the published vectors, special tokens, and inputs that libllama alone dies of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftgguf.vocab import VocabError, encode_text
from tests.vocabs import DATA, load, vocab, vocab_path

TEXTS = (DATA / "vocab" / "vectors.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")


@pytest.mark.parametrize("name", ["gpt-2", "phi-3"])
def test_published_vectors(name: str) -> None:
    """Expected ids: llama.cpp's ggml-vocab-*.gguf.out, made by the models' original tokenizers."""
    lines = (DATA / "vocab" / f"{name}.out").read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(TEXTS, lines, strict=False):
        assert vocab(name).tokenize(text, False, False) == [int(part) for part in line.split()], text


def test_special_ids_of_phi3() -> None:
    """Against the model's published tokenizer.json: bos 1, <|endoftext|> 32000, <|assistant|> 32001, <|end|> 32007."""
    v = vocab("phi-3")
    assert (v.type, v.n_vocab, v.bos, v.eos) == ("spm", 32064, 1, 32000)
    assert {32000, 32007} <= v.eog_ids
    assert not v.is_eog(32001)
    assert v.is_control(32001)
    assert not v.is_control(100)
    assert (v.add_bos, v.add_eos) == (True, False)
    assert v.fim_pre is None
    assert v.piece(32007) == b""
    assert v.piece(32007, special=True) == b"<|end|>"


def test_special_ids_of_gpt2() -> None:
    """Against GPT-2's encoder.json: one special token, <|endoftext|> = 50256."""
    v = vocab("gpt-2")
    assert (v.type, v.n_vocab, v.eos) == ("bpe", 50257, 50256)
    assert v.eog_ids == {50256}


@pytest.mark.parametrize("name", ["gpt-2", "phi-3", "stories"])
@pytest.mark.parametrize("special", [True, False])
def test_detokenize_joins_the_pieces(name: str, special: bool) -> None:
    """Oracle: the pieces one by one, of every id of the vocabulary in some order, and of few and none."""
    v = vocab(name)
    ids = np.random.default_rng(5).permutation(v.n_vocab).tolist()
    for some in (ids, ids[:1], ids[:70], [], [i for i in ids if len(v.piece(i, special)) > 40] * 9):
        assert v.detokenize(tuple(some), special) == b"".join(v.piece(i, special) for i in some)
    for wrong in (-1, v.n_vocab):
        with pytest.raises(IndexError):
            v.detokenize([1, wrong, 2], special)


def test_detokenize_takes_long_pieces() -> None:
    """One with more bytes than are set aside for a piece, at the start, in the middle and at the end."""
    v = vocab("gpt-2")
    longest = max(range(v.n_vocab), key=lambda i: len(v.piece(i, True)))
    assert len(v.piece(longest, True)) > 64
    for ids in ([longest] * 40, [5, longest, 5], [longest, 5, longest]):
        assert v.detokenize(ids, True) == b"".join(v.piece(i, True) for i in ids)


def test_add_and_parse_special() -> None:
    """Against libllama's documented flags: BOS only with add_special, a control token's text is one id only with
    parse_special."""
    v = vocab("phi-3")
    assert v.tokenize("hi", True, True)[0] == v.bos
    assert v.tokenize("hi", False, True)[0] != v.bos
    assert v.tokenize("<|end|>", False, True) == [32007]
    as_text = v.tokenize("<|end|>", False, False)
    assert 32007 not in as_text
    assert b"".join(v.piece(i) for i in as_text).strip() == b"<|end|>"


@settings(max_examples=150, deadline=None)
@example("\u2581", "stories")
@given(st.text(max_size=60), st.sampled_from(["gpt-2", "stories"]))
def test_round_trip(text: str, name: str) -> None:
    """Byte-level vocabularies lose nothing: pieces joined are the text (SPM with one space before it, and U+2581, which
    is how it writes a space, comes back as one: llama.cpp's `llama_unescape_whitespace`)."""
    v = vocab(name)
    joined = v.detokenize(v.tokenize(text, False, False))
    expected = encode_text(text.replace("\u2581", " ") if name == "stories" else text)
    assert joined == (b" " + expected if name == "stories" and text else expected)
    assert v.render(v.tokenize(text, False, False)) == expected


def test_embedded_nul_and_surrogates() -> None:
    """A NUL is an ordinary character; a lone surrogate is U+FFFD, a pair is its character (Unicode 3.9, D92)."""
    v = vocab("gpt-2")
    assert v.detokenize(v.tokenize("a\0b")) == b"a\0b"
    assert encode_text("x\ud800y") == "x\ufffdy".encode()
    assert encode_text("\ud83d\ude00") == "😀".encode()
    assert v.tokenize("x\ud800y") == v.tokenize("x\ufffdy")
    assert v.detokenize(v.tokenize(b"\xff\xfe")) == "\ufffd\ufffd".encode()  # more tokens than bytes


@pytest.mark.parametrize("bad", [-1, 512, 1 << 31, -(1 << 40)])
def test_ids_outside_are_errors(bad: int) -> None:
    """libllama aborts the process on some of these; here each is an IndexError or OverflowError-like TypeError."""
    v = vocab("stories")
    for call in (v.piece, v.is_control, lambda i: v.detokenize([i]), lambda i: v.render([i])):
        with pytest.raises((IndexError, TypeError)):
            call(bad)
    assert not v.is_eog(bad)


def test_long_run_without_white_space_does_not_overflow_the_stack() -> None:
    """libllama's std::regex fallback (pre-tokenizer deepseek-llm) recurses per character: 100 kB of one letter ends a
    process with an 8 MiB stack. Run apart, so that a failure is a failed test."""
    code = (
        "from tests.vocabs import load, vocab_path\n"
        "v = load(vocab_path('gpt-2'), {'tokenizer.ggml.pre': 'deepseek-llm'})\n"
        "for text in ('a' * 300_000, '\\n' * 100_000, '!?' * 50_000):\n"
        "    assert v.detokenize(v.tokenize(text)) == text.encode()\n"
        "try:\n"
        "    v.tokenize('a' * 3_000_000)\n"
        "except ValueError as error:\n"
        "    assert 'stretch' in str(error)\n"
        "    print('ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout == "ok\n", done.stderr


def test_unknown_pretokenizer_is_named() -> None:
    """What libllama does not know is a clear error, not a wrong tokenizer."""
    with pytest.raises(VocabError, match="unknown pre-tokenizer type: 'brand-new'"):
        load(vocab_path("gpt-2"), {"tokenizer.ggml.pre": "brand-new"})


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_list_of_end_ids(tmp_path: Path, dtype: type) -> None:
    """`tokenizer.ggml.eos_token_ids` ends generation at every id it names (a control token stored with empty text once
    did not stop: llama.cpp issue 6772)."""
    path = tmp_path / "v.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<end>", "<turn>"])
    writer.add_token_types([1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_key_value(
        "tokenizer.ggml.eos_token_ids",
        [int(i) for i in (3, 4)],
        gguf.GGUFValueType.ARRAY,
        sub_type=gguf.GGUFValueType.INT32 if dtype is np.int32 else gguf.GGUFValueType.UINT32,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    v = load(path)
    assert v.eog_ids == {3, 4}
    assert v.tokenize("ab") == [2]


# ------------------------------------------------------------------------------------------------ tokenize_parts

_PIECES = st.lists(
    st.tuples(st.sampled_from(["<|user|>", "<|end|>", "<|end", "|>", "\n", " ", "hi", "é", "", "<s>"]), st.booleans()),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(_PIECES, st.booleans())
def test_parts_equal_the_whole_where_all_may_be_special(parts: list[tuple[str, bool]], add: bool) -> None:
    """Against libllama on the joined text, with one flag for all parts."""
    v = vocab("phi-3")
    for flag in (True, False):
        same = [(text, flag) for text, _ in parts]
        assert v.tokenize_parts(same, add) == v.tokenize("".join(text for text, _ in parts), add, flag)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["<|user|>", "\n", "hi there", " é", "<|end|>"]), st.booleans()), max_size=8))
def test_user_text_stays_text(parts: list[tuple[str, bool]]) -> None:
    """Control ids come only from parts that may hold them; the slow path agrees with libllama without any."""
    v = vocab("phi-3")
    ids = v.tokenize_parts(parts)
    wanted = [text for text, special in parts if special and text in ("<|user|>", "<|end|>")]
    assert [v.piece(i, special=True).decode() for i in ids if v.is_control(i)] == wanted
    clean = [(text if special or not text.startswith("<") else "x", special) for text, special in parts]
    forced = [
        i
        for f in v._fragments([(t.encode(), s) for t, s in clean if t])
        for i in ([f] if isinstance(f, int) else v.tokenize(f, False, False))
    ]
    assert forced == v.tokenize("".join(text for text, _ in clean), False, True)


def test_injected_control_token() -> None:
    """A user's `<|end|>` between template parts: the template's tokens stay, the user's are letters."""
    v = vocab("phi-3")
    ids = v.tokenize_parts([("<|user|>\n", True), ("a <|end|> b", False), ("<|end|>\n<|assistant|>\n", True)], True)
    assert ids[:2] == [1, 32010]
    assert [i for i in ids if v.is_control(i)] == [1, 32010, 32007, 32001]
    assert b"a <|end|> b" in v.detokenize(ids)
