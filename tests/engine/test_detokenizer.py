"""Incremental text: whole characters, no part of a stop string, and joined deltas that do not depend on streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.engine.detokenizer import Detokenizer, Piece
from ftgguf.engine.messages import TokenProb, TokenProbs
from tests.vocabs import vocab

END = 0


class Scripted:
    """A vocabulary whose token i+1 is the i-th given piece; token 0 ends generation."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"<end>", *pieces]

    def piece(self, token: int, special: bool = False) -> bytes:
        return self.pieces[token]

    def is_eog(self, token: int) -> bool:
        return token == END


def run(pieces: Sequence[bytes], stop: Sequence[str] = (), end: bool = False, **options: Any) -> list[Piece]:
    """All pieces that a sequence of tokens gives, up to a stop."""
    d = Detokenizer(Scripted(pieces), stop, **options)  # type: ignore[arg-type]
    sent = []
    for token in [*range(1, len(pieces) + 1), *([END] if end else [])]:
        probs = TokenProbs(TokenProb(token, b"", -1.0), ())
        sent.append(d.push(token, probs))
        if sent[-1].stop is not None or sent[-1].limit:
            return sent
    return [*sent, d.finish()]


def joined(sent: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in sent)


def test_stop_over_several_tokens() -> None:
    """Bug log R01: tokens K, L ... R with stop "O P Q" end at " N "."""
    sent = run([b"K", b" L", b" M", b" N", b" O", b" P", b" Q", b" R"], ["O P Q"])
    assert joined(sent) == "K L M N "
    assert sent[-1].stop == "O P Q"


@pytest.mark.parametrize(("pieces", "text"), [([b"STOP", b"x"], ""), ([b"a", b"STOP"], "a"), ([b"STOP"], "")])
def test_stop_first_last_and_all(pieces: list[bytes], text: str) -> None:
    """Bug log R03."""
    sent = run(pieces, ["STOP"])
    assert joined(sent) == text
    assert sent[-1].stop == "STOP"


def test_first_token_is_the_stop_with_probabilities() -> None:
    """Bug log R04: empty content and no probabilities, where a server once crashed."""
    (piece,) = run([b"\n"], ["\n"])
    assert piece == Piece("", (1,), (), stop="\n")


def test_emoji_in_four_tokens() -> None:
    """Bug log R05: one delta with the character, none with U+FFFD; every id comes at once."""
    sent = run([b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"])
    assert [piece.text for piece in sent] == ["", "", "", "😀", "!", ""]
    assert [piece.tokens for piece in sent] == [(1,), (2,), (3,), (4,), (5,), ()]
    assert sent[0].held


def test_held_text_comes_at_the_end() -> None:
    """llama-server's whole answer has what was held for a stop string when the limit comes; so do the deltas here."""
    sent = run([b"ab", b"cST", b"O"], ["STOP"])
    assert [piece.text for piece in sent] == ["ab", "c", "", "STO"]
    assert [piece.tokens for piece in sent] == [(1,), (2,), (3,), ()]
    assert [len(piece.probs) for piece in sent] == [1, 0, 0, 2]


def test_false_alarm_is_released() -> None:
    sent = run([b"S", b"T", b"x"], ["STOP"])
    assert [piece.text for piece in sent] == ["", "", "STx", ""]


def test_end_token_releases_and_has_no_text() -> None:
    """llama-server does not hold text back on an end token, and its probabilities are reported."""
    sent = run([b"a", b"ST"], ["STOP"], end=True)
    assert [piece.text for piece in sent] == ["a", "", "ST", ""]
    assert [piece.tokens for piece in sent[1:3]] == [(2,), (END,)]
    assert len(sent[2].probs) == 2


def test_incomplete_character_at_the_end_is_dropped() -> None:
    """Text leaves only as whole characters; invalid bytes in the middle are U+FFFD, as in llama-server's JSON."""
    assert joined(run([b"a\xff", b"b", b"\xe2\x82"])) == "a\ufffdb"


def test_earliest_stop_wins_and_the_list_breaks_ties() -> None:
    """llama-server's find_stopping_strings: the first position; at one position the one listed first."""
    assert run([b"abcd"], ["cd", "bc"])[-1].stop == "bc"
    assert run([b"a\n\nb"], ["\n\n", "\n"])[-1].stop == "\n\n"
    assert run([b"a\n\nb"], ["\n", "\n\n"])[-1].stop == "\n"


def test_probabilities_belong_to_text_that_is_sent() -> None:
    """A token that reaches into the stop keeps its probabilities, one wholly inside loses them."""
    sent = run([b"hello", b" wor", b"ld", b"STOP"], ["worldSTOP"])
    assert joined(sent) == "hello "
    assert [p.chosen.id for piece in sent for p in piece.probs] == [1, 2]
    assert [token for piece in sent for token in piece.tokens] == [1, 2, 3, 4]


def test_empty_stop_strings_are_ignored() -> None:
    assert joined(run([b"ab"], ["", "b"])) == "a"
    assert joined(run([b"ab"], [""])) == "ab"


PIECES = st.lists(st.sampled_from([b"a", b"b", b"ab", b"aba", "é".encode(), b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80",
                                   b"\xff", b"", b"\n", "😀b".encode()]), max_size=14)  # fmt: skip
STOPS = st.lists(st.sampled_from(["ab", "ba", "aab", "é", "b\n", "😀", "bab", "\ufffd", "aé"]), max_size=3)


@settings(max_examples=600, deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_deltas_are_the_whole_answer(pieces: list[bytes], stop: list[str], end: bool) -> None:
    """Against a naive reading: after every token, decode all bytes so far (without a cut character at the end) and
    look for the earliest stop string in the whole of it."""
    expected, word, wholes = "", None, []
    data = b""
    for piece in pieces:
        data += piece
        text = _whole(data)
        wholes.append(text)
        hits = [(text.find(w), i, w) for i, w in enumerate(stop) if w in text]
        if hits:
            at, _, word = min(hits)
            expected = text[:at]
            break
        expected = text
    sent = run(pieces, stop, end)
    assert joined(sent) == expected
    assert sent[-1].stop == word
    so_far = ""
    for piece, text in zip(sent, wholes[: len(wholes) - (word is not None)], strict=False):
        so_far += piece.text
        partial = max((n for w in stop for n in range(len(w)) if text.endswith(w[:n])), default=0)
        assert so_far == text[: len(text) - partial]  # all but the longest suffix that could begin a stop string


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab\né😀", max_size=30), st.sampled_from(["ab", "é\n", "aba", "bb", "😀a"]), st.data())
def test_any_split_gives_the_same_text(text: str, stop: str, data: st.DataObject) -> None:
    """The text does not depend on where the bytes are cut into tokens (one stop string)."""
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert joined(run(pieces, [stop])) == text.split(stop)[0]
    assert joined(run([bytes([b]) for b in raw], [stop])) == text.split(stop)[0]


@settings(max_examples=200, deadline=None)
@given(PIECES, STOPS, st.booleans())
def test_every_token_is_reported_once_in_order(pieces: list[bytes], stop: list[str], end: bool) -> None:
    sent = run(pieces, stop, end)
    tokens = [token for piece in sent for token in piece.tokens]
    pushed = len(sent) if sent[-1].stop is not None else len(sent) - 1
    assert tokens == [*range(1, len(pieces) + 1), *([END] if end else [])][:pushed]
    probs = [p.chosen.id for piece in sent for p in piece.probs]
    assert probs == [t for t in tokens if t in probs]
    if sent[-1].stop is None:
        assert probs == tokens


def test_special_and_preserved_tokens() -> None:
    """Against libllama's pieces of Phi-3: control tokens have no text unless asked for; an end token never has."""
    v = vocab("phi-3")
    hello, assistant, end = v.tokenize("hi", False, False)[-1], 32001, 32007
    for options, text in [
        ({}, "hi"),
        ({"preserved": (assistant,)}, "<|assistant|>hi"),
        ({"special": True}, "<|assistant|>hi<|end|>"),
    ]:
        d = Detokenizer(v, **options)  # type: ignore[arg-type]
        sent = [d.push(token) for token in (assistant, hello, end)]
        assert (joined(sent) + d.finish().text).replace(" ", "") == text


def test_indentation_stop() -> None:
    """llama-server's n_indent: a line after the first that is indented by fewer blanks ends the text, after its own
    blanks; an empty line does too."""
    lines = [b"def f():\n", b"    x", b" = 1\n", b"  ", b"y"]
    assert joined(run(lines, n_indent=4)) == "def f():\n    x = 1\n  "
    assert run(lines, n_indent=4)[-1].limit
    assert joined(run([b"a\n", b"\t\tb\n\n", b"\t\tc"], n_indent=2)) == "a\n\t\tb\n"
    assert joined(run([b"a\n    b"], n_indent=4)) == "a\n    b"


def test_time_limit_waits_for_a_newline() -> None:
    """llama-server's t_max_predict_ms: checked only where a newline is sent."""
    d = Detokenizer(Scripted([b"a", b"b\nc", b"d"]), t_max_predict_ms=100)  # type: ignore[arg-type]
    assert not d.push(1, elapsed_ms=500).limit
    piece = d.push(2, elapsed_ms=600)
    assert piece.limit
    assert piece.text == "b\nc"
    assert d.has_new_line


def _whole(data: bytes) -> str:
    for cut in (3, 2, 1):
        if len(data) >= cut and _begins_character(data[len(data) - cut :]):
            return data[: len(data) - cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def _begins_character(tail: bytes) -> bool:
    """Whether `tail` is a proper beginning of some UTF-8 character (Unicode 15, table 3-7)."""
    for size in (1, 2, 3):
        for filler in (b"\x80\x80\x80", b"\xa0\x80\x80", b"\x90\x80\x80", b"\xbf\xbf\xbf"):
            try:
                (tail + filler[:size]).decode()
            except UnicodeDecodeError:
                continue
            return len((tail + filler[:size]).decode()) == 1
    return False
