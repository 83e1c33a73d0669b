"""What the request handlers share: the configuration, the vocabulary, the engine and the chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request

from ftgguf import __version__
from ftgguf.chat.request import ChatPlanner
from ftgguf.chat.template import ChatTemplates
from ftgguf.flags.config import ServerConfig
from ftgguf.server.adapters import Adapters
from ftgguf.server.engine_client import EngineClient
from ftgguf.server.errors import ApiError, unavailable
from ftgguf.server.params import RequestParams
from ftgguf.server.prompts import RerankPrompt
from ftgguf.server.record import RequestLog
from ftgguf.server.replay import Sessions
from ftgguf.server.schema import Context, Vocabulary
from ftgguf.server.wire import parse_body, random_id

T = TypeVar("T")


class RunningChat(Protocol):
    """A chat completion that is being answered."""

    requests: list[int]
    """The engine's ids of its sequences."""
    controllable: bool
    """Its thinking may be ended from outside (`reasoning_control`)."""


BIG_BODY = 64 * 1024
"""Bytes of text from which parsing, rendering and tokenising leave the event loop (about 5 ms of work)."""
MAX_BODY = 512 * 1024 * 1024
"""Bytes of a request body; more is refused with 413."""
BUILD_INFO = f"b0-ftgguf-{__version__}"
"""`build_info` and `system_fingerprint`; llama-server's tests want a leading `b`."""


class ServerState:
    """One per front. `model` is filled when the engine reports `Ready`."""

    def __init__(
        self, config: ServerConfig, vocab: Vocabulary, engine: EngineClient, templates: ChatTemplates, name: str = ""
    ) -> None:
        self.config = config
        self.vocab = vocab
        self.engine = engine
        self.templates = templates
        control = {text.decode("utf-8", "replace"): id for text, id in vocab.control_texts.items()}
        self.planner = ChatPlanner(templates, config.chat, control)
        self.name = (config.model.aliases or (name or config.model.hf_repo or config.model.path,))[0]
        self.defaults = RequestParams.defaults(config)
        self.started_at = int(time.time())
        self.media_marker = f"<__media_{random_id()}__>"
        self.rerank = RerankPrompt()
        """How a reranker's prompts are written."""
        self.adapters = Adapters(config.model)
        self.eog = tuple(sorted(vocab.eog_ids))
        self.sessions = Sessions()
        self.request_log = RequestLog(config, vocab)
        self.chats: WeakValueDictionary[str, RunningChat] = WeakValueDictionary()
        """Running chat completions by id."""
        self._pool = ThreadPoolExecutor(2, "front")

    @property
    def context(self) -> Context:
        return Context(self.defaults, self.vocab, self.config.context.n_parallel, self.eog)

    @property
    def n_ctx(self) -> int:
        """Tokens that one request may occupy; 503 before the first `Ready`."""
        if self.engine.ready is None:
            raise unavailable("Loading model")
        return self.engine.ready.n_ctx

    @property
    def info(self) -> dict[str, Any]:
        return self.engine.ready.info if self.engine.ready is not None else {}

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread when it concerns `size` bytes that would hold the event loop for long."""
        if size < BIG_BODY:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def json(self, request: Request) -> tuple[Any, int]:
        """The request's JSON body and its size in bytes."""
        chunks: list[bytes] = []
        size = 0
        patience = self.config.http.timeout or None
        try:
            async with asyncio.timeout(patience) as limit:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > MAX_BODY:
                        raise ApiError(f"request body is larger than {MAX_BODY} bytes", code=413)
                    chunks.append(chunk)
                    if patience:
                        limit.reschedule(asyncio.get_running_loop().time() + patience)
        except TimeoutError:
            raise ApiError(f"no more of the request body came for {patience} seconds", code=408) from None
        body = b"".join(chunks)
        request.state.body = parsed = await self.run(size, lambda: parse_body(body))
        return parsed, size

    def close(self) -> None:
        self.sessions.close()
        self.request_log.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
