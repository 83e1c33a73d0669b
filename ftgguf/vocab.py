"""The model's vocabulary: text to token ids and back, through libllama.

libllama gets only the tokenizer's own keys, checked and rewritten by `ftgguf.gguf`, so that a vocabulary also loads
for architectures libllama does not know and no hostile file reaches its parser.
"""

from __future__ import annotations

import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np

import ftgguf._libllama as _libllama
from ftgguf.gguf import GGUFFile
from ftgguf.gguf.writer import vocab_only_bytes
from ftgguf.retokenize import MIN_BYTES, Retokenizer

_ATTR_UNKNOWN, _ATTR_CONTROL, _ATTR_USER_DEFINED = 1 << 0, 1 << 3, 1 << 4
_ATTR_LSTRIP, _ATTR_RSTRIP = 1 << 7, 1 << 8
"""llama.h's llama_token_attr."""
_TYPES = ("none", "spm", "bpe", "wpm", "ugm", "rwkv", "plamo2")
"""By llama.h's llama_vocab_type."""
_CUTTING = ("llama", "gpt2", "gemma4")
"""`tokenizer.ggml.model`s whose texts are cut at control tokens, each stretch between them by itself."""
_SPACE = b" \t\n\v\f\r"


class VocabError(ValueError):
    """The model's tokenizer cannot be used here; the text names why."""


@contextmanager
def _as_path(data: bytes) -> Iterator[str]:
    """`data` as a file that libllama can open by name: an anonymous one where the system has memfd."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("ftgguf-vocab")
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(data)
            file.flush()
            yield file.name


def encode_text(text: str) -> bytes:
    """UTF-8. Surrogates that pair up become the character they mean; a lone one becomes U+FFFD."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")


class Vocab:
    """One loaded vocabulary; thread-safe, and holds no Python lock while it tokenizes.

    Ids are ints in 0..n_vocab-1; an id outside raises IndexError. Special ids are None where the model has none.
    """

    def __init__(self, native: _libllama.Vocab, extra_eog: Iterable[int] = (), *, model: str = "") -> None:
        self.native = native
        self.n_vocab: int = native.n_vocab
        self.type: str = _TYPES[native.type] if native.type < len(_TYPES) else "other"
        self.bos, self.eos, self.eot = _id(native.bos), _id(native.eos), _id(native.eot)
        self.sep, self.nl, self.pad = _id(native.sep), _id(native.nl), _id(native.pad)
        self.fim_pre, self.fim_suf, self.fim_mid = _id(native.fim_pre), _id(native.fim_suf), _id(native.fim_mid)
        self.fim_pad, self.fim_rep, self.fim_sep = _id(native.fim_pad), _id(native.fim_rep), _id(native.fim_sep)
        self.add_bos: bool = native.add_bos
        self.add_eos: bool = native.add_eos
        self._extra_eog = frozenset(i for i in extra_eog if 0 <= i < self.n_vocab)
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self._cuts = model in _CUTTING

    @classmethod
    def load(cls, gguf: GGUFFile) -> Vocab:
        """The vocabulary of an open model. GGUFError for a key that is wrong; VocabError with libllama's reason for a
        tokenizer that this libllama does not know."""
        with _as_path(vocab_only_bytes(gguf)) as path:
            try:
                native = _libllama.Vocab(path)
            except RuntimeError as error:
                reason = re.sub(r"^(error loading model( vocabulary)?: )+", "", str(error).strip())
                raise VocabError(
                    f"{gguf.path}: this build of libllama cannot load the model's tokenizer: {reason}"
                ) from None
        listed = gguf.metadata.get("tokenizer.ggml.eos_token_ids")
        extra = listed.tolist() if isinstance(listed, np.ndarray) and listed.dtype.kind in "iu" else ()
        model = gguf.metadata.get("tokenizer.ggml.model")
        return cls(native, extra, model=model if isinstance(model, str) else "")

    # ---------------------------------------------------------------------------------------------------- to ids

    def tokenize(self, text: str | bytes, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `add_special` adds what the model wants around a prompt (BOS, EOS, CLS, SEP);
        `parse_special` reads control tokens written in the text as those tokens, else they stay text. The defaults are
        those of llama-server's /tokenize; its prompts use True for both. ValueError for a text over 256 MiB."""
        data = text if isinstance(text, bytes) else encode_text(text)
        if self._cuts and parse_special and len(data) >= MIN_BYTES and not (add_special and self.add_eos):
            return self._retokenizer.tokenize(data, add_special)
        ids: list[int] = self.native.tokenize(data, add_special, parse_special)
        return ids

    @cached_property
    def _retokenizer(self) -> Retokenizer:
        """For long texts, which often begin as one before them did."""
        kinds = _ATTR_CONTROL | _ATTR_UNKNOWN | _ATTR_USER_DEFINED
        specials = [self.piece(i, special=True) for i, value in enumerate(self._attributes) if value & kinds]
        borders = {text: id for text, id in self.control_texts.items() if not self._attributes[id] & _ATTR_RSTRIP}
        return Retokenizer(
            lambda data, add_special: self.native.tokenize(data, add_special, True), borders, specials, self.n_vocab
        )

    def tokenize_parts(self, parts: Iterable[tuple[str, bool]], add_special: bool = False) -> list[int]:
        """Ids of the joined texts of `parts`, where control tokens are read only in parts with True.

        A template's own text is such a part, a message's content is not: `<|im_end|>` typed by a user stays text.
        Borders between parts are no borders for the tokenizer. With one flag for all parts this is `tokenize`.
        """
        runs = groupby(((encode_text(text), bool(special)) for text, special in parts if text), key=itemgetter(1))
        texts = [(b"".join(text for text, _ in run), special) for special, run in runs]
        joined = b"".join(text for text, _ in texts)
        if not any(special for _, special in texts):
            return self.tokenize(joined, add_special, False)
        if not self._control_outside(texts, joined):
            return self.tokenize(joined, add_special, True)
        body: list[int] = []
        for fragment in self._fragments(texts):
            if isinstance(fragment, int):
                body.append(fragment)
            else:
                body += self.tokenize(fragment, False, False)
        if not add_special:
            return body
        around = self.tokenize(b"", True, False)  # BOS and EOS, each only where the model wants it
        if len(around) == 2:
            return [around[0], *body, around[1]]
        return body + around if self.add_eos and not self.add_bos else around + body

    def _control_outside(self, texts: Sequence[tuple[bytes, bool]], joined: bytes) -> bool:
        """Whether a control token's text stands anywhere but wholly inside a part that may hold some."""
        if self._control_pattern is None:
            return False
        spans, start = [], 0
        for text, special in texts:
            if special:
                spans.append((start, start + len(text)))
            start += len(text)
        begins = [begin for begin, _ in spans]
        for match in self._control_pattern.finditer(joined):
            index = bisect_right(begins, match.start()) - 1
            if index < 0 or match.end() > spans[index][1]:
                return True
        return False

    def _fragments(self, texts: Sequence[tuple[bytes, bool]]) -> Iterator[bytes | int]:
        """The joined texts cut at control tokens: raw bytes and token ids in turn, with the white space that a token's
        lstrip and rstrip attributes swallow taken off its neighbours."""
        raw = b""
        strip = False
        for text, special in texts:
            cuts = self._control_pattern.finditer(text) if special and self._control_pattern else ()
            position = 0
            for match in cuts:
                token = self.control_texts[match.group()]
                raw, strip = raw + _left(text[position : match.start()], strip), False
                attributes = self._attributes[token]
                if attributes & _ATTR_LSTRIP:
                    raw = raw.rstrip(_SPACE)
                if raw:
                    yield raw
                yield token
                raw, strip, position = b"", bool(attributes & _ATTR_RSTRIP), match.end()
            rest = _left(text[position:], strip)
            strip = strip and not rest
            raw += rest
        if raw:
            yield raw

    # -------------------------------------------------------------------------------------------------- to bytes

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token, not always whole characters; control tokens are empty unless `special`."""
        table = self._pieces[special]
        found = table.get(token)
        if found is None:
            found = table[token] = self.native.piece(token, special)
        return found

    def pieces(self, special: bool = True) -> list[bytes]:
        """All pieces, by id. Built at each call (about 20 ms for 150k ids)."""
        all_pieces: list[bytes] = self.native.pieces(special)
        return all_pieces

    def detokenize(self, ids: Sequence[int], special: bool = True) -> bytes:
        """The pieces joined, as llama-server's /detokenize gives them."""
        joined: bytes = self.native.join_pieces(list(ids), special)
        return joined

    def render(self, ids: Sequence[int], remove_special: bool = False, special: bool = True) -> bytes:
        """libllama's own inverse of `tokenize`: the space that SPM puts before a text is taken off and WPM's spaces are
        cleaned. llama-server shows a prompt this way."""
        text: bytes = self.native.detokenize(list(ids), remove_special, special)
        return text

    # --------------------------------------------------------------------------------------------------- special

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Every id that ends generation: libllama's, and those of the list `tokenizer.ggml.eos_token_ids`."""
        return self._extra_eog.union(i for i in range(self.n_vocab) if self.native.is_eog(i))

    def is_eog(self, token: int) -> bool:
        return token in self.eog_ids

    def is_control(self, token: int) -> bool:
        return bool(self._attributes[self._checked(token)] & _ATTR_CONTROL)

    def is_special(self, token: int) -> bool:
        """Control, unknown or user-defined: written in a text, such a token stands for itself."""
        wanted = _ATTR_CONTROL | _ATTR_UNKNOWN | _ATTR_USER_DEFINED
        return bool(self._attributes[self._checked(token)] & wanted)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token id {token} is outside 0..{self.n_vocab - 1}")
        return token

    @cached_property
    def _attributes(self) -> list[int]:
        values: list[int] = self.native.attributes()
        return values

    @cached_property
    def control_texts(self) -> dict[bytes, int]:
        """Text -> id of the control and unknown tokens: those that only `parse_special` finds in a text."""
        hidden = _ATTR_CONTROL | _ATTR_UNKNOWN
        return {
            text: i
            for i, value in enumerate(self._attributes)
            if value & hidden and (text := self.piece(i, special=True))
        }

    @cached_property
    def _control_pattern(self) -> re.Pattern[bytes] | None:
        longest_first = sorted(self.control_texts, key=len, reverse=True)
        return re.compile(b"|".join(map(re.escape, longest_first))) if longest_first else None


def _left(text: bytes, strip: bool) -> bytes:
    return text.lstrip(_SPACE) if strip else text


def _id(value: int) -> int | None:
    return None if value < 0 else value
