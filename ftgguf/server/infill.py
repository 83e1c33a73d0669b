"""`/infill`: fill-in-the-middle prompts, as llama-server builds them (repository-level form of Qwen's FIM paper).

[REPO]myproject [SEP]filename0 chunk0 ... [SEP]filename [PRE]prefix[SUF]suffix[MID]prompt
"""

from __future__ import annotations

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.errors import InvalidRequest, not_supported
from ftgguf.server.generation import Sequence, make_sequences, respond
from ftgguf.server.native import NativeFormat
from ftgguf.server.prompts import tokenize_mixed
from ftgguf.server.schema import Vocabulary, evaluate
from ftgguf.server.state import ServerState, state_of
from ftgguf.server.wire import lenient

SNIPPET = "\n\n--- snippet ---\n\n"
"""Between extra chunks where the vocabulary has no separator token."""


class FimVocabulary(Vocabulary, Protocol):
    """A vocabulary with the fill-in-the-middle ids (None where it has none)."""

    fim_pre: int | None
    fim_suf: int | None
    fim_mid: int | None
    fim_rep: int | None
    fim_sep: int | None
    bos: int | None
    add_bos: bool


def infill_prompt(
    vocab: FimVocabulary, body: dict[str, Any], *, n_batch: int, n_predict: int, n_ctx: int, spm: bool
) -> list[int]:
    """The prompt's ids. Prefix and suffix are cut 3:1 to fit a batch; extra chunks fill the rest of the context."""

    def ids(text: Any) -> list[int]:
        return tokenize_mixed(vocab, text, False, False)

    prompt = tokenize_mixed(vocab, lenient(body, "prompt", ""), False, True)
    prefix, suffix = ids(body["input_prefix"]), ids(body["input_suffix"])
    extra: list[int] = []
    if vocab.fim_rep is not None:
        extra += [vocab.fim_rep, *ids("myproject\n")]
    for chunk in body.get("input_extra") or []:
        if vocab.fim_sep is not None:
            extra += [vocab.fim_sep, *ids(lenient(chunk, "filename", "tmp") + "\n")]
        else:
            extra += ids(SNIPPET)
        extra += ids(chunk["text"])
    if vocab.fim_sep is not None:
        extra += [vocab.fim_sep, *ids("filename\n")]
    n_prefix = min(len(prefix), 3 * (n_batch // 4))
    n_suffix = min(len(suffix), max(0, n_batch // 4 - (2 + len(prompt))))
    n_extra = min(max(0, n_ctx - n_batch - 2 * n_predict), len(extra))
    assert vocab.fim_pre is not None
    assert vocab.fim_suf is not None
    assert vocab.fim_mid is not None
    head = [vocab.fim_pre, *prefix[len(prefix) - n_prefix :], *prompt]
    tail = [vocab.fim_suf, *suffix[:n_suffix]]
    if spm:
        head, tail = tail, head
    if vocab.add_bos and vocab.bos is not None:
        head.insert(0, vocab.bos)
    return [*extra[len(extra) - n_extra :], *head, *tail, vocab.fim_mid]


def check_infill(given: Any) -> dict[str, Any]:
    """A body with llama-server's checks and texts."""
    body: dict[str, Any] = given if isinstance(given, dict) else {}
    if "prompt" in body and not isinstance(body["prompt"], str):
        raise InvalidRequest('"prompt" must be a string')
    for key in ("input_prefix", "input_suffix"):
        if key not in body:
            raise InvalidRequest(f'"{key}" is required')
    extra = body.get("input_extra")
    if extra is not None and not isinstance(extra, list):
        raise InvalidRequest('"input_extra" must be an array of {"filename": string, "text": string}')
    for chunk in extra or []:
        if not isinstance(chunk, dict) or not isinstance(chunk.get("text"), str):
            raise InvalidRequest('extra_context chunk must contain a "text" field with a string value')
        if "filename" in chunk and not isinstance(chunk["filename"], str):
            raise InvalidRequest('extra_context chunk\'s "filename" field must be a string')
    return body


def missing_tokens(vocab: Any) -> str:
    """What a vocabulary lacks for infill, in llama-server's words; empty if nothing."""
    names = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
    return "".join(f"{name} token is missing. " for key, name in names if getattr(vocab, key, None) is None)


async def post_infill(request: Request) -> Response:
    state = state_of(request)
    missing = missing_tokens(state.vocab)
    if missing:
        raise not_supported(f"Infill is not supported by this model: {missing}")
    parsed, size = await state.json(request)
    body = check_infill(parsed)
    sequences = await state.run(size, lambda: _sequences(state, body))
    return await respond(state, request, sequences, NativeFormat(state))


def _sequences(state: ServerState, body: dict[str, Any]) -> list[Sequence]:
    context = state.config.context
    vocab: Any = state.vocab
    try:
        prompt = infill_prompt(
            vocab,
            body,
            n_batch=context.n_batch,
            n_predict=context.n_predict,
            n_ctx=state.n_ctx,
            spm=state.config.chat.spm_infill,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return make_sequences(state, [prompt], evaluate(body, state.context))
