"""Prompts in all the forms llama-server takes, as token ids.

A prompt is a string, a list of ids, a list mixing strings and ids, an object with `prompt_string`, or a list of
those (several prompts). BOS is added only in front of a string that comes first (`tokenize_mixed`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from ftgguf.nouns import I32
from ftgguf.server.errors import InvalidRequest, exceeds_context
from ftgguf.server.schema import Vocabulary
from ftgguf.server.wire import as_int, as_str

BAD_PROMPT = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, or a list of '
    "mixed strings & tokens."
)

_Ids = list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
_FIELD = re.compile(r"\{(query|document)\}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def plain_ids(value: Any) -> list[int] | None:
    """`value` as a new list, where it is a list of 32-bit integers and nothing else; else None.

    Long prompts come as ids, and each of several thousand costs when it is looked at in Python.
    """
    if not isinstance(value, list) or not value or not _is_id(value[0]):
        return None
    try:
        ids: list[int] = msgspec.convert(value, _Ids)
    except msgspec.ValidationError:
        return None
    return ids


def tokenize_mixed(vocab: Vocabulary, value: Any, add_special: bool, parse_special: bool) -> list[int]:
    """Ids of a string or of a list of strings and ids; raises `WrongType` in llama-server's words for anything else."""
    if not isinstance(value, list):
        return vocab.tokenize(as_str(value), add_special=add_special, parse_special=parse_special)
    plain = plain_ids(value)
    if plain is not None:
        return plain
    ids: list[int] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            ids += vocab.tokenize(item, add_special=add_special and index == 0, parse_special=parse_special)
        else:
            ids.append(as_int(item))
    return ids


def _tokenize_one(vocab: Vocabulary, prompt: Any, add_special: bool) -> list[int]:
    if isinstance(prompt, str):
        return tokenize_mixed(vocab, prompt, add_special, True)
    plain = plain_ids(prompt)
    if plain is not None:
        return plain
    if isinstance(prompt, list) and all(_is_id(item) for item in prompt):
        return [as_int(item) for item in prompt]
    if isinstance(prompt, list) and any(_is_id(x) for x in prompt) and any(isinstance(x, str) for x in prompt):
        return tokenize_mixed(vocab, prompt, add_special, True)
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if "multimodal_data" in prompt:
            raise InvalidRequest("Multimodal data provided, but model does not support multimodal requests.")
        return tokenize_mixed(vocab, prompt["prompt_string"], add_special, True)
    raise InvalidRequest(BAD_PROMPT)


def tokenize_prompts(vocab: Vocabulary, prompt: Any, add_special: bool = True) -> list[list[int]]:
    """The prompts of a request body's `prompt`, each a list of ids (not checked yet, see `check_prompt`)."""
    plain = plain_ids(prompt)
    if plain is not None:
        return [plain]
    try:
        if isinstance(prompt, list) and not any(_is_id(item) for item in prompt):
            prompts = [_tokenize_one(vocab, item, add_special) for item in prompt]
        else:
            prompts = [_tokenize_one(vocab, prompt, add_special)]
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if not prompts:
        raise InvalidRequest('"prompt" must not be empty')
    return prompts


def check_prompt(vocab: Vocabulary, ids: list[int] | I32, n_ctx: int) -> None:
    """Refuse ids outside the vocabulary and prompts that leave no room in the context."""
    found = np.asarray(ids, np.int32)
    if len(found) and (found.min() < 0 or found.max() >= vocab.n_vocab):
        raise InvalidRequest("Prompt contains invalid tokens")
    if len(ids) >= n_ctx:
        raise exceeds_context(len(ids), n_ctx)


@dataclass(frozen=True, slots=True)
class RerankPrompt:
    """How a query and a document become one prompt."""

    template: str = ""
    """`tokenizer.chat_template.rerank` with `{query}` and `{document}`; empty: the two with special tokens between."""
    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def tokens(self, vocab: Vocabulary, query: str, document: str) -> list[int]:
        if self.template:
            texts = {"query": query, "document": document}
            text = _FIELD.sub(lambda found: texts[found[1]], self.template)
            return vocab.tokenize(text, add_special=False, parse_special=True)
        parts = [vocab.tokenize(text, add_special=False, parse_special=False) for text in (query, document)]
        return [*self.before, *parts[0], *self.between, *parts[1], *self.after]
