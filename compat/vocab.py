"""Which vocabulary does a synthetic model carry? Byte-level BPE, made here or copied from another file.

`tiny` is the smallest that is still a real one: 256 bytes, a few dozen merges and the control tokens of a chat model
with thinking and tool calls. `plausible` has the size of a real model's, with merges over random syllables, so that
tables, masks and samplers cost what they cost in service.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""`tokenizer.ggml.token_type` values."""

END_OF_TEXT = "<|endoftext|>"
SPECIALS = (
    (END_OF_TEXT, CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
    ("<tool_call>", USER_DEFINED),
    ("</tool_call>", USER_DEFINED),
)
"""The marked tokens of ChatML models with thinking and Hermes-style tool calls, with the types Qwen's files give."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You can call these functions. Reply with {"name": ..., "arguments": ...} inside <tool_call></tool_call>:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{%- if message.role == 'assistant' and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n<tool_call>\\n' + {'name': function.name, 'arguments': function.arguments} | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

_MERGED = "the and ing ion er in on re at es st en or an ed it is al ar to of he nd th as ve ll ly"
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"


@dataclass(frozen=True, slots=True)
class Vocab:
    """The `tokenizer.*` metadata of a GGUF file: (key, value, type, element type of arrays)."""

    entries: tuple[tuple[str, Any, GGUFValueType, GGUFValueType | None], ...]
    size: int


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level BPE (GPT-2's mapping)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@lru_cache(maxsize=1)
def tiny() -> Vocab:
    """320 tokens: all bytes, merges for common English letter groups, `SPECIALS`, and unused ones to the end."""
    tokens, merges = _tiny_tokens()
    return _bpe(tokens, merges, 320, "qwen2")


def with_pieces(pieces: Sequence[bytes]) -> tuple[Vocab, list[int]]:
    """`tiny` with a token for each of `pieces` that no text is tokenised to, and the tokens' ids.

    A piece that is one of `SPECIALS` is that token. ValueError for pieces that are equal or ordinary tokens already.
    """
    tokens, merges = _tiny_tokens()
    alphabet = byte_alphabet()
    specials = [name.encode() for name, _ in SPECIALS]
    names = ["".join(alphabet[byte] for byte in piece) for piece in pieces if piece not in specials]
    taken = {*tokens}.intersection(names)
    if taken or len(set(pieces)) != len(pieces):
        raise ValueError(f"pieces must be distinct and no tokens already: {sorted(taken) or 'some are equal'}")
    ids = {name: len(tokens) + i for i, name in enumerate(names)}
    first_special = len(tokens) + len(names)
    size = -(-(first_special + len(SPECIALS)) // 32) * 32
    places = [
        first_special + specials.index(piece) if piece in specials else ids["".join(alphabet[b] for b in piece)]
        for piece in pieces
    ]
    return _bpe([*tokens, *names], merges, size, "qwen2"), places


def _tiny_tokens() -> tuple[list[str], list[str]]:
    """Tokens (all bytes first) and merges of `tiny`."""
    tokens, merges = byte_alphabet(), list[str]()
    seen = set(tokens)

    def merge(left: str, right: str) -> None:
        if left + right not in seen:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")

    for word in _MERGED.split():
        for end in range(2, len(word) + 1):
            merge(word[: end - 1], word[end - 1])
    for first in "tasiow":
        merge(byte_alphabet()[ord(" ")], first)
    return tokens, merges


@lru_cache(maxsize=2)
def plausible(size: int = 151_936, seed: int = 1) -> Vocab:
    """`size` tokens: bytes, `size` less a few hundred merges of letters and syllables, and `SPECIALS`."""
    rng = np.random.default_rng(seed)
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    tokens, merges, seen = list(alphabet), list[str](), set(alphabet)
    starts, parts = [space, *_LETTERS], list(_LETTERS)
    want = max(256, size - 256 - len(SPECIALS))
    n_merges = min(want, int(want * 0.9985))  # real vocabularies leave a few hundred ids unused
    while len(merges) < n_merges:
        # Early tokens are likelier, as frequent ones are in a trained vocabulary.
        draws = rng.random((4096, 2)) ** 2
        for a, b in draws.tolist():
            left, right = starts[int(a * len(starts))], parts[int(b * len(parts))]
            token = left + right
            if token in seen or len(token) > 16 or len(merges) == n_merges:
                continue
            seen.add(token)
            tokens.append(token)
            merges.append(f"{left} {right}")
            starts.append(token)
            if not token.startswith(space):
                parts.append(token)
    return _bpe(tokens, merges, size, "qwen2")


def from_gguf(path: str | os.PathLike[str]) -> Vocab:
    """The vocabulary of another file, as it is."""
    entries, size = [], 0
    for key, field in GGUFReader(os.fspath(path)).fields.items():
        if not key.startswith("tokenizer."):
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        value = field.contents()
        entries.append((key, value, field.types[0], element))
        if key == "tokenizer.ggml.tokens":
            size = len(value)
    if not size:
        raise ValueError(f"{path} holds no vocabulary (tokenizer.ggml.tokens)")
    return Vocab(tuple(entries), size)


def _bpe(tokens: list[str], merges: list[str], size: int, pre: str) -> Vocab:
    """Metadata of a byte-level BPE vocabulary: ordinary tokens, `SPECIALS`, unused ones up to `size`."""
    n = len(tokens)
    if n + len(SPECIALS) > size:
        raise ValueError(f"{n} tokens and {len(SPECIALS)} special ones do not fit {size}")
    ids = {name: n + i for i, (name, _) in enumerate(SPECIALS)}
    n_unused = size - n - len(SPECIALS)
    names = [*tokens, *(name for name, _ in SPECIALS), *(f"[PAD{size - n_unused + i}]" for i in range(n_unused))]
    types = [NORMAL] * n + [kind for _, kind in SPECIALS] + [UNUSED] * n_unused
    text, array, u32 = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.UINT32
    key = "tokenizer.ggml."
    return Vocab(
        (
            (key + "model", "gpt2", text, None),
            (key + "pre", pre, text, None),
            (key + "tokens", names, array, text),
            (key + "token_type", types, array, GGUFValueType.INT32),
            (key + "merges", merges, array, text),
            (key + "bos_token_id", ids[END_OF_TEXT], u32, None),
            (key + "eos_token_id", ids["<|im_end|>"], u32, None),
            (key + "padding_token_id", ids[END_OF_TEXT], u32, None),
            (key + "add_bos_token", False, GGUFValueType.BOOL, None),
            ("tokenizer.chat_template", CHAT_TEMPLATE, text, None),
        ),
        size,
    )
