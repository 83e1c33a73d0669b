"""llama-server's own API: completions in its native shape, tokens, properties, slots, metrics, adapters."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.engine import messages as m
from ftgguf.server import sse
from ftgguf.server.errors import FEATURE_DISABLED, ApiError, InvalidRequest, not_supported, server_error, unavailable
from ftgguf.server.generation import (
    Sequence,
    json_response,
    make_sequences,
    nested_fields,
    probs_json,
    progress_json,
    respond,
    timings_json,
)
from ftgguf.server.params import RequestParams
from ftgguf.server.prompts import plain_ids, tokenize_mixed, tokenize_prompts
from ftgguf.server.schema import evaluate
from ftgguf.server.state import BUILD_INFO, ServerState, state_of
from ftgguf.server.wire import as_int, as_list, as_object, lenient


class NativeFormat:
    """`/completion` and `/infill`: bare objects, no `[DONE]`."""

    ping = sse.PING

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def started(self, sequence: Sequence) -> bytes:
        return b""

    def progress(self, sequence: Sequence, message: m.Progress) -> bytes:
        # llama-server's chunk holds the token id that its token field starts with
        return sse.data(self._partial(sequence, "", [0]) | progress_json(sequence.params, message))

    def delta(self, sequence: Sequence, message: m.Delta) -> bytes:
        if not message.text and not message.tokens:
            return b""
        out = self._partial(sequence, message.text, list(message.tokens))
        if sequence.params.timings_per_token or message.stopped:
            out["timings"] = timings_json(message.timings)
        if message.probs:
            out["completion_probabilities"] = probs_json(message.probs, sequence.params.sampling["post_sampling_probs"])
        return sse.data(out)

    def finished(self, sequence: Sequence) -> bytes:
        return sse.data(final_document(self._state, sequence))

    def error(self, error: ApiError) -> bytes:
        return sse.data(error.document())

    def end(self) -> bytes:
        return b""

    def document(self, sequences: list[Sequence]) -> Any:
        documents = [final_document(self._state, sequence) for sequence in sequences]
        return documents[0] if len(documents) == 1 else documents

    @staticmethod
    def _partial(sequence: Sequence, content: str, tokens: list[int]) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": sequence.predicted_n,
            "tokens_evaluated": sequence.prompt_n,
        }


def final_document(state: ServerState, sequence: Sequence) -> dict[str, Any]:
    """The native final object; when streaming, the text and tokens were sent already and are empty here."""
    params, end = sequence.params, sequence.finished
    assert end is not None
    document: dict[str, Any] = {
        "index": sequence.index,
        "content": "" if params.stream else "".join(sequence.text),
        "tokens": sequence.tokens if params.return_tokens and not params.stream else [],
        "id_slot": end.slot,
        "stop": True,
        "model": state.name,
        "tokens_predicted": end.predicted_n,
        "tokens_evaluated": end.evaluated_n,
        "generation_settings": params.settings(),
        "prompt": state.vocab.detokenize(sequence.request.prompt, special=True).decode("utf-8", "replace"),
        "has_new_line": end.has_new_line,
        "truncated": end.truncated,
        "stop_type": end.stop_type,
        "stopping_word": end.stopping_word,
        "tokens_cached": end.cached_n,
        "timings": timings_json(end.timings),
    }
    if sequence.probs and not params.stream:
        document["completion_probabilities"] = probs_json(sequence.probs, params.sampling["post_sampling_probs"])
    return nested_fields(params.response_fields, document) if params.response_fields else document


async def parse_completion(state: ServerState, request: Request) -> tuple[RequestParams, list[Sequence]]:
    """The body of a text completion (native or OpenAI), as sequences ready to run."""
    parsed, size = await state.json(request)
    body = as_object(parsed, "prompt")

    def work() -> tuple[RequestParams, list[Sequence]]:
        prompts = tokenize_prompts(state.vocab, body["prompt"])
        params = evaluate(body, state.context)
        return params, make_sequences(state, prompts, params)

    return await state.run(size, work)


async def post_completion(request: Request) -> Response:
    state = state_of(request)
    _, sequences = await parse_completion(state, request)
    return await respond(state, request, sequences, NativeFormat(state))


# ----------------------------------------------------------------------------------------- tokens and text


async def post_tokenize(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    if not isinstance(body, dict) or "content" not in body:
        return json_response({"tokens": []})
    add_special = lenient(body, "add_special", False)
    parse_special = lenient(body, "parse_special", True)

    def work() -> list[Any]:
        try:
            tokens = tokenize_mixed(state.vocab, body["content"], add_special, parse_special)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if lenient(body, "with_pieces", False):
            return [{"id": id, "piece": _piece_json(state.vocab.piece(id, special=True))} for id in tokens]
        return tokens

    return json_response({"tokens": await state.run(size, work)})


def _piece_json(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def post_detokenize(request: Request) -> Response:
    state = state_of(request)
    body, size = await state.json(request)
    if not isinstance(body, dict) or "tokens" not in body:
        return json_response({"content": ""})

    def work() -> str:
        try:
            ids = plain_ids(body["tokens"]) or [as_int(id) for id in as_list(body["tokens"])]
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        n_vocab = state.vocab.n_vocab
        if ids and (min(ids) < 0 or max(ids) >= n_vocab):
            wrong = next(id for id in ids if not 0 <= id < n_vocab)
            # llama-server answers 500 with its container's range error; a wrong id is the client's fault
            raise InvalidRequest(f"token {wrong} is not in the vocabulary of {n_vocab} tokens")
        return state.vocab.detokenize(ids, special=True).decode("utf-8", "replace")

    return json_response({"content": await state.run(size, work)})


# --------------------------------------------------------------------------------------------- properties


async def get_health(request: Request) -> Response:
    return json_response({"status": "ok"})


async def get_props(request: Request) -> Response:
    state = state_of(request)
    http, templates = state.config.http, state.templates
    defaults = RequestParams.defaults(state.config)
    defaults.n_predict, defaults.n_keep, defaults.reasoning_format = -1, 0, "none"
    props: dict[str, Any] = {
        "default_generation_settings": {"params": defaults.settings(brief=True), "n_ctx": state.n_ctx},
        "total_slots": state.config.context.n_parallel,
        "model_alias": state.name,
        "model_ftype": state.info.get("file_type", ""),
        "model_path": state.config.model.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": state.media_marker,
        "endpoint_slots": http.slots,
        "endpoint_props": http.props,
        "endpoint_metrics": http.metrics,
        "ui": http.ui,
        "ui_settings": http.ui_config,
        "chat_template": templates.default.source,
        "chat_template_caps": templates.default.caps.as_dict(),
        "bos_token": templates.default.bos_token,
        "eos_token": templates.default.eos_token,
        "build_info": BUILD_INFO,
        "is_sleeping": state.engine.state == "sleeping",
        "cors_proxy_enabled": False,
    }
    if state.config.chat.jinja and templates.tool_use is not None:
        props["chat_template_tool_use"] = templates.tool_use.source
    return json_response(props)


async def post_props(request: Request) -> Response:
    if not state_of(request).config.http.props:
        raise not_supported("This server does not support changing global properties. Start it with `--props`")
    return json_response({"success": True})


async def get_slots(request: Request) -> Response:
    state = state_of(request)
    if not state.config.http.slots:
        raise not_supported("This server does not support slots endpoint. Start it with `--slots`")
    slots = await state.engine.control("slots")
    if request.query_params.get("fail_on_no_slot") and all(slot.get("is_processing") for slot in slots):
        raise unavailable("no slot available")
    return json_response(slots)


async def post_slots(request: Request) -> Response:
    """`/slots/:id?action=save|restore|erase`."""
    state = state_of(request)
    folder = state.config.context.slot_save_path
    if not folder:
        raise not_supported("This server does not support slots action. Start it with `--slot-save-path`")
    try:
        slot = int(request.path_params["id_slot"])
    except ValueError:
        raise InvalidRequest("Invalid slot ID") from None
    action = request.query_params.get("action", "")
    if action not in ("save", "restore", "erase"):
        raise InvalidRequest("Invalid action")
    if action == "erase":
        return json_response(await state.engine.control("slot_erase", id_slot=slot))
    body, _ = await state.json(request)
    name = lenient(body, "filename", "") if isinstance(body, dict) else ""
    if not name or name in (".", "..") or any(c in name for c in '/\\\0:*?"<>|') or name != name.strip(" ."):
        raise InvalidRequest("Invalid filename")
    answer = await state.engine.control(f"slot_{action}", id_slot=slot, filename=name, path=folder + name)
    return json_response(answer)


async def post_control(request: Request) -> Response:
    """`{id, action: "reasoning_end"}`: ends the thinking of a running chat completion (see `reasoning_control`)."""
    state = state_of(request)
    parsed, _ = await state.json(request)
    body = parsed if isinstance(parsed, dict) else {}
    id = lenient(body, "id", "")
    if not id:
        raise InvalidRequest("missing completion id")
    if lenient(body, "action", "") != "reasoning_end":
        raise InvalidRequest("unknown control action")
    running = state.chats.get(id)
    if running is None:
        return json_response({"success": False, "message": "no active completion for this id"})
    if not running.controllable:
        return json_response({"success": False, "message": "reasoning control not enabled for this completion"})
    replies = [await state.engine.control("reasoning_end", request=number) for number in running.requests]
    if not any(reply["success"] for reply in replies):
        return json_response({"success": False, "message": "the completion is not reasoning"})
    return json_response({"success": True})


# ------------------------------------------------------------------------------------ what we do not have


async def disabled(request: Request) -> Response:
    return json_response(FEATURE_DISABLED, 403)


def unsupported(message: str) -> Any:
    """A route that answers 501 with llama-server's sentence."""

    async def handler(request: Request) -> Response:
        raise not_supported(message)

    return handler


post_systemone = unsupported("This model is not a decision model")
post_transcriptions = unsupported("The current model does not support audio input.")


def internal(error: Exception) -> ApiError:
    """An unexpected exception as the client sees it."""
    return server_error(f"{type(error).__name__}: {error}")
