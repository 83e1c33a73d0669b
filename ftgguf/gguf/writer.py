"""A vocabulary-only GGUF for libllama: our own header around the model's validated `tokenizer.*` records.

libllama's vocabulary loader is given nothing else, so an architecture it does not know is no obstacle and no
unchecked byte reaches its parser. The checks are what its loader (`llama_vocab::impl::load`) asserts, which would
abort the process, or refuses without saying where; what it repairs by itself is left to it.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

import numpy as np

from .errors import shown
from .metadata import encode
from .reader import GGUFFile
from .values import StringArray, ValueType

log = logging.getLogger(__name__)

MODELS = ("llama", "gpt2", "gemma4", "bert")
"""Values of tokenizer.ggml.model that are supported."""
MAX_TEXT = 1 << 16
"""Bytes in one token or merge."""

_IDS = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"),
)
_ID_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in _IDS)
_BOOL_KEYS = tuple(
    f"tokenizer.ggml.{name}"
    for name in (
        *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
        *("normalizer.lowercase", "normalizer.strip_accents"),
    )
)
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_SCORES, _TYPES = "tokenizer.ggml.scores", "tokenizer.ggml.token_type"
_SUPPRESS, _TYPE_COUNT = "tokenizer.ggml.suppress_tokens", "tokenizer.ggml.token_type_count"
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_BYTE_TYPE = 6
"""LLAMA_TOKEN_TYPE_BYTE."""
_DEFAULT_IDS = {"llama": (1, 2), "gpt2": (11, 11), "gemma4": (None, None), "bert": (101, None)}
"""libllama's (bos, eos) where the file names none."""
_PRE_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")
_PRE_ADDING_BOS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
_PRE_ALWAYS_BOS = ("gemma4", "granite-embed-multi-311m")


def vocab_only_bytes(model: GGUFFile) -> bytes:
    """A GGUF v3 file without tensors that libllama loads with `vocab_only`: architecture `llama` and the model's
    tokenizer, overrides applied. Raises GGUFError naming the key that is wrong."""
    kind = model.require(_MODEL, str)
    if kind not in MODELS:
        known = ", ".join(MODELS)
        raise model.fail(_MODEL, f"tokenizer model {shown(kind)} is not supported; supported: {known}")
    pre = model.get(_PRE, "", str)
    if pre == "whitespace":  # of DNA models; libllama asserts that such a text has no spaces
        raise model.fail(_PRE, "pre-tokenizer 'whitespace' is not supported")
    texts = _check_tokens(model, kind)
    if kind in ("gpt2", "gemma4"):
        _check_merges(model, required=pre != "kimi-k2")
    keep = [key for key in (_MODEL, _PRE, _TOKENS, _SCORES, _TYPES, _TYPE_COUNT) if key in model.metadata]
    if kind in ("gpt2", "gemma4") and _MERGES in model.metadata:
        keep.append(_MERGES)
    keep += _checked_scalars(model, len(texts))
    _check_added_ids(model, kind, pre, len(texts))
    if _name_matters(model, texts):
        keep.append("general.name")
    wanted = set(keep)
    records = [record for key, record in model.raw_kv("") if key in wanted]
    records.insert(0, encode("general.architecture", "llama"))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(records)) + b"".join(records)


def _array(model: GGUFFile, key: str, elements: tuple[ValueType, ...]) -> int | None:
    """Length of the array `key`, checked to hold `elements`; None if the file has none."""
    record = model.record(key)
    if record is None:
        return None
    if record.kind != ValueType.ARR or record.element not in elements:
        names = " or ".join(element.name.lower() for element in elements)
        raise model.fail(key, f"metadata key {shown(key)} must be an array of {names}")
    return record.length


def _texts(model: GGUFFile, key: str) -> list[bytes]:
    """The strings of array `key`, none longer than MAX_TEXT."""
    array: StringArray = model.require(key, StringArray)
    longest = int(np.diff(array.offsets).max(initial=0)) - 8
    if longest > MAX_TEXT:
        raise model.fail(key, f"{key} has a string of {longest} bytes, at most {MAX_TEXT} are allowed")
    return array.to_bytes()


def _check_tokens(model: GGUFFile, kind: str) -> set[bytes]:
    """The distinct token texts. libllama cuts a text at a zero byte, names an empty one `[EMPTY_i]`, and asserts that
    all differ."""
    _array(model, _TOKENS, (ValueType.STR,))
    tokens = _texts(model, _TOKENS)
    if not tokens:
        raise model.fail(_TOKENS, f"{_TOKENS} is empty")
    seen = [text.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i for i, text in enumerate(tokens)]
    distinct = set(seen)
    if len(distinct) != len(seen):
        first: dict[bytes, int] = {}
        again = next(i for i, text in enumerate(seen) if first.setdefault(text, i) != i)
        raise model.fail(_TOKENS, f"tokens {first[seen[again]]} and {again} have the same text {shown(seen[again])}")
    scores = _array(model, _SCORES, (ValueType.F32, ValueType.I32))
    types = _array(model, _TYPES, (ValueType.I32,))
    for key, length in ((_SCORES, scores), (_TYPES, types)):
        if length is not None and length < len(tokens):
            raise model.fail(key, f"{key} has {length} values for {len(tokens)} tokens")
    if types is not None:
        for i in np.flatnonzero(model.require(_TYPES, np.ndarray)[: len(tokens)] == _BYTE_TYPE).tolist():
            if kind == "bert" or len(seen[i]) < len("<0x"):
                raise model.fail(_TYPES, f"token {i} {shown(seen[i])} is marked as a byte but is not like <0xNN>")
    return distinct


def _check_merges(model: GGUFFile, required: bool) -> None:
    """Each merge is two token texts and a space between them."""
    if _array(model, _MERGES, (ValueType.STR,)) is None:
        if required:
            raise model.fail(_MERGES, f"metadata key {shown(_MERGES)} is missing: the tokenizer cannot be built")
        return
    for i, merge in enumerate(_texts(model, _MERGES)):
        if merge.find(b" ", 1) < 0:
            raise model.fail(_MERGES, f"merge {i} {shown(merge)} has no space between its two parts")


def _checked_scalars(model: GGUFFile, n_tokens: int) -> list[str]:
    """Keys of scalars to copy, types checked. An id outside the vocabulary is left out: libllama would ignore it."""
    keep: list[str] = []
    if _TYPE_COUNT in model.metadata:
        _check_kind(model, _TYPE_COUNT, int, ValueType.U32)
    for key in _ID_KEYS:
        if key not in model.metadata:
            continue
        _check_kind(model, key, int, ValueType.U32)
        value = model.require(key, int)
        if 0 <= value < n_tokens:
            keep.append(key)
        elif value not in (-1, 0xFFFFFFFF):  # a writer's -1: no such token
            log.warning("%s: %s is %d, outside the vocabulary of %d: ignored", model.path, key, value, n_tokens)
    for key in _BOOL_KEYS:
        if key in model.metadata:
            _check_kind(model, key, bool, ValueType.BOOL)
            keep.append(key)
    if _array(model, _SUPPRESS, (ValueType.I32,)) is not None:
        keep.append(_SUPPRESS)
    return keep


def _check_kind(model: GGUFFile, key: str, kind: type, wanted: ValueType) -> None:
    model.require(key, kind)
    record = model.record(key)
    if key not in model.metadata.overrides and record is not None and record.kind != wanted:
        raise model.fail(key, f"metadata key {shown(key)} must be a {wanted.name.lower()}")


def _check_added_ids(model: GGUFFile, kind: str, pre: str, n_tokens: int) -> None:
    """libllama asserts that a token it adds by itself exists."""

    def known(name: str, default: int | None) -> bool:
        value: Any = model.get(f"tokenizer.ggml.{name}_token_id")
        return (value is not None and 0 <= value < n_tokens) or (default is not None and default < n_tokens)

    def need(name: str, default: int | None) -> None:
        if not known(name, default):
            key = f"tokenizer.ggml.{name}_token_id"
            raise model.fail(key, f"the tokenizer adds the token of {key}, but the vocabulary has none")

    bos, eos = _DEFAULT_IDS[kind]
    if kind == "gpt2" and pre in _PRE_WITHOUT_BOS:
        bos = None
    adds_bos = bool(model.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _PRE_ADDING_BOS))
    if adds_bos or kind in ("gemma4", "bert") or (kind == "gpt2" and pre in _PRE_ALWAYS_BOS):
        need("bos", bos)
    if model.get("tokenizer.ggml.add_eos_token", False):
        need("eos", eos)
    if kind == "bert":
        need("seperator", 102)
        need("unknown", 100)


def _name_matters(model: GGUFFile, texts: set[bytes]) -> bool:
    """libllama strips spaces after Phi-3's special tokens if the model's name says so, and then needs four of them."""
    name = model.metadata.get("general.name")
    if not isinstance(name, str) or len(name) > 4096:
        return False
    needed = {b"</s>", b"<unk>", b"<s>", b"<|endoftext|>"}
    return ("phi-3" in name.lower() or "phi3" in name.lower()) and needed <= texts
