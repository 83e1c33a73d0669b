"""The front process: vocabulary, engine, HTTP server, signals.

`serve` binds first (a taken port is told at once), then loads the vocabulary and starts the engine; HTTP answers 503
until the engine is ready. The first SIGINT or SIGTERM ends streams and leaves in order, a second one leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp

from ftgguf import logs
from ftgguf.chat.template import ChatTemplateError, ChatTemplates, load_templates
from ftgguf.flags.config import HttpConfig, ServerConfig, encode_config
from ftgguf.gguf import GGUFError, GGUFFile
from ftgguf.pull.layers import NO_EXTRAS, Extras
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.server import startup, vertex
from ftgguf.server.app import build_app
from ftgguf.server.engine_client import EngineClient
from ftgguf.server.errors import ApiError
from ftgguf.server.prompts import RerankPrompt
from ftgguf.server.sockets import BindError, Listener, bind_all
from ftgguf.server.state import ServerState

log = logging.getLogger("ftgguf.server")

GRACE_S = 5
"""How long requests may take to end after the first signal."""


class _Server(uvicorn.Server):
    """uvicorn with our signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServerConfig, extras: Extras = NO_EXTRAS) -> int:
    """Run the HTTP server of `config` until a signal; returns the process's exit status.

    `extras`: what came with a model from a registry; Ollama's API applies its system prompt and messages.
    """
    try:
        logs.set_up(config.log)
    except OSError as error:
        print(f"error: the log file cannot be opened: {error}", file=sys.stderr)
        return 1
    for warning in config.warnings:
        log.warning("%s", warning)
    for reason in config.reasons:
        log.debug("%s", reason)
    if vertex.enabled() and config.http.port != vertex.port():
        log.warning("AIP_HTTP_PORT %d is used instead of port %d", vertex.port(), config.http.port)
        config = replace(config, http=replace(config.http, port=vertex.port()))
    try:
        listeners = bind_all(config.http)
    except BindError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        gguf = open_model(_model_file(config.model.path), {o.key: o.value for o in config.model.override_kv})
        state = make_state(config, gguf)
        app = build_app(state, extras)
    except (GGUFError, ChatTemplateError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        return asyncio.run(_serve(state, app, listeners))
    finally:
        state.close()
        for listener in listeners:
            listener.socket.close()
            if listener.path:
                with contextlib.suppress(OSError):
                    os.unlink(listener.path)


def _model_file(path: str) -> str | Path:
    """The GGUF with the vocabulary of the model at `path`: itself, unless it is a script."""
    if not path.startswith("scripted:"):
        return path
    from ftgguf.engine import scripted

    return scripted.read(path)[0]


def make_state(config: ServerConfig, gguf: GGUFFile) -> ServerState:
    """The front's state for an open model: vocabulary, templates, an engine client that is not started.

    The file's sampling defaults (`general.sampling.*`) apply where no flag was given, as in llama-server.
    """
    from ftgguf.engine.sampler import sampling_defaults
    from ftgguf.vocab import Vocab

    fields = {k: v for k, v in sampling_defaults(gguf).items() if f"sampling.{k}" not in config.given}
    if fields:
        config = replace(config, sampling=msgspec.structs.replace(config.sampling, **fields))
    vocab = Vocab.load(gguf)
    engine = EngineClient(encode_config(config))
    state = ServerState(config, vocab, engine, model_templates(config, gguf, vocab))
    state.rerank = rerank_prompt(gguf, vocab)
    return state


def rerank_prompt(gguf: GGUFFile, vocab: Any) -> RerankPrompt:
    """How a file's reranker is asked: by its own template, else with special tokens (`format_prompt_rerank`)."""
    template = gguf.metadata.get("tokenizer.chat_template.rerank")

    def ids(wanted: Any, token: int | None) -> tuple[int, ...]:
        return () if token is None or not wanted else (token,)

    end = ids(vocab.add_eos, vocab.sep if vocab.eos is None else vocab.eos)
    return RerankPrompt(
        template if isinstance(template, str) else "",
        before=ids(vocab.add_bos, vocab.bos),
        between=end + ids(gguf.metadata.get("tokenizer.ggml.add_sep_token"), vocab.sep),
        after=end,
    )


def model_templates(config: ServerConfig, gguf: GGUFFile, vocab: Any) -> ChatTemplates:
    """The chat templates of `config` and the file (see `load_templates`)."""

    def text(key: str) -> str:
        value = gguf.metadata.get(key)
        return value if isinstance(value, str) else ""

    def piece(token: int | None) -> str:
        return "" if token is None else vocab.piece(token, special=True).decode("utf-8", "replace")

    return load_templates(
        config.chat.template,
        text("tokenizer.chat_template"),
        text("tokenizer.chat_template.tool_use"),
        bos_token=piece(vocab.bos),
        eos_token=piece(vocab.eos),
        add_bos=vocab.add_bos,
        add_eos=vocab.add_eos,
        jinja=config.chat.jinja,
    )


def http_server(http: HttpConfig, app: ASGIApp) -> uvicorn.Server:
    """uvicorn for `app`; its sockets are given to `serve`."""
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            timeout_graceful_shutdown=GRACE_S,
            ssl_keyfile=http.ssl_key_file or None,
            ssl_certfile=http.ssl_cert_file or None,
        )
    )


async def _serve(state: ServerState, app: ASGIApp, listeners: list[Listener]) -> int:
    http = state.config.http
    server = http_server(http, app)
    install_signals(server, state.engine.refuse)
    await state.engine.start()
    serving = asyncio.create_task(server.serve(sockets=[listener.socket for listener in listeners]))
    starting = asyncio.create_task(_announce(state, listeners))
    idle = http.sleep_idle_seconds
    sleeper = asyncio.create_task(state.engine.sleep_when_idle(idle)) if idle > 0 else None
    status = 0
    try:
        done, _ = await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting in done and not starting.result():
            status = 1
            server.should_exit = True
        await serving
    finally:
        starting.cancel()
        if sleeper is not None:
            sleeper.cancel()
        await state.engine.stop()
    return status


async def _announce(state: ServerState, listeners: list[Listener]) -> bool:
    """Show the load's progress, then the start-up block; False if the engine cannot start."""
    while state.engine.state == "loading":
        startup.show_progress(state.engine.loading)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.engine.wait_progress(), 0.2)
    startup.end_progress()
    try:
        ready = await state.engine.wait_ready()
    except ApiError as error:
        if state.engine.state == "failed":
            print(f"error: {error.message}", file=sys.stderr)
        return False
    urls = [listener.url for listener in listeners]
    if missing := startup.no_gpu(state.config, ready.info):
        log.warning("%s", missing)
    for text in (
        startup.block(ready, state.name, urls, startup.template_text(state.config, state.templates)),
        startup.example(urls[0], bool(state.config.http.api_keys)),
    ):
        logs.announce(text, state.config.log)
    return True


def install_signals(server: uvicorn.Server, end_streams: Callable[[], None]) -> None:
    """The first SIGINT or SIGTERM has `server` end in order, the second ends the process.

    `end_streams` gives every running answer its last event, an error.
    """
    loop = asyncio.get_running_loop()

    def leave() -> None:
        if server.should_exit:
            os._exit(130)  # the engine sees its socket close and leaves too
        server.should_exit = True
        end_streams()
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading our log any more
            print("stopping; once more to leave at once", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
