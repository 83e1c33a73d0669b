"""One streamed request by the client's clock: when did each token arrive?

The standard library's HTTP client reads the stream: parsing a chunk costs it about 10 us, a tenth of what httpx takes,
on cores that the measured server may need. Three dialects: llama-server's `/completion` (token ids in and out), any
OpenAI server's `/v1/completions`, Ollama's `/api/generate` (text in, chunks out).
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

Dialect = Literal["native", "openai", "ollama"]
_DONE: dict[str, Any] = {}
"""Stands for the `[DONE]` of an OpenAI stream."""
Prompt = Sequence[int] | str
"""Token ids (native) or text."""
BURST_S = 50e-6
"""Tokens closer than this came in one piece: no engine decodes at 20,000 tokens a second here."""


class RequestFailed(RuntimeError):
    """The server refused, broke off or hung; one line."""


@dataclass(slots=True)
class Answer:
    """One completed request. Times in seconds since it was sent; `arrivals` one for each token.

    Where a server does not say which tokens a chunk holds, `arrivals` has one time for each chunk with text, and
    `n_gen` is the server's count: `counted` is False then.
    """

    arrivals: list[float] = field(default_factory=list)
    total: float = 0.0
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between the chosen token's log-probability and the next below it, in nats; -1 unknown. Only with n_probs."""
    pieces: list[str] = field(default_factory=list)
    """The text of each chunk."""
    piece_tokens: list[int] = field(default_factory=list)
    """How many tokens each chunk holds, where the server says it: a server that has several ready sends them in one."""
    prompt_n: int = 0
    cached_n: int = -1
    n_gen: int = 0
    counted: bool = True
    ended: bool = False
    """The server said that this is all."""
    reason: str = ""
    """Why it ended, in the server's word."""
    server: dict[str, float] = field(default_factory=dict)
    """The server's own `timings`, for a cross-check."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0]

    @property
    def first_piece(self) -> int:
        """How many of the arrivals came with the first: closer to each other than any engine decodes."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return next((i for i, (a, b) in enumerate(pairs, start=1) if b - a >= BURST_S), len(self.arrivals))

    @property
    def in_one_piece(self) -> bool:
        """The client got everything at once: `decode_rate` counts the prompt's time too then."""
        return len(self.arrivals) > 1 and self.first_piece == len(self.arrivals)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first piece: those that waited for it were not made in no time. 0 for fewer than
        two tokens."""
        if len(self.arrivals) < 2:
            return 0.0
        if self.in_one_piece:
            return self.n_gen / self.arrivals[-1]
        head = self.first_piece
        return (self.n_gen - head) / (self.arrivals[-1] - self.arrivals[head - 1])

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between arrivals."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to talk to it. `model` is what it calls the model."""

    url: str
    dialect: Dialect
    model: str = ""
    api_key: str = ""
    timeout: float = 600.0
    n_ctx: int = 0
    """Context to ask of Ollama, which else cuts prompts to its own default without a word; 0: its default."""
    strict: bool = False
    """It refuses fields that are not OpenAI's."""

    def headers(self) -> dict[str, str]:
        found = {"Content-Type": "application/json"}
        if self.api_key:
            found["Authorization"] = f"Bearer {self.api_key}"
        return found

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A plain JSON request. Raises RequestFailed."""
        try:
            reply = _http().post(self.url + path, json=body, headers=self.headers(), timeout=self.timeout)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{path}: {_why(error)}") from None
        if reply.status_code != 200:
            raise RequestFailed(f"{path} answered {reply.status_code}: {reply.text[:300]}")
        return _document(path, reply)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON document at `path`. Raises RequestFailed."""
        try:
            reply = _http().get(self.url + path, headers=self.headers(), timeout=30)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise RequestFailed(f"{path}: {_why(error)}") from None
        return _document(path, reply)

    def tokenize(self, text: str) -> list[int]:
        """llama-server's /tokenize with special tokens."""
        return [int(t) for t in self.post("/tokenize", {"content": text, "add_special": True})["tokens"]]

    def complete(self, prompt: Prompt, n: int, *, cache: bool = False, n_probs: int = 0) -> Answer:
        """Greedy, `n` tokens whatever they are where the server can be told so. Raises RequestFailed."""
        body = {"native": _native_body, "openai": _openai_body, "ollama": _ollama_body}[self.dialect]
        path = {"native": "/completion", "openai": "/v1/completions", "ollama": "/api/generate"}[self.dialect]
        return self.stream(path, body(self, prompt, n, cache, n_probs))

    def greedy(self, prompt: Prompt, n: int) -> Answer:
        """As `complete`, with the gap of every token where the server says it, and all tokens: a stream of llama-server
        leaves out those that end in the middle of a character. Raises RequestFailed."""
        answer = self.complete(prompt, n, n_probs=3)
        if self.dialect == "native" and len(answer.tokens) < answer.n_gen:
            whole = self.post("/completion", _native_body(self, prompt, n, False, 3) | {"stream": False})
            entries = iter(whole.get("completion_probabilities") or ())
            answer.tokens = [int(t) for t in whole.get("tokens") or ()]
            answer.gaps = []
            entry = next(entries, None)
            for token in answer.tokens:  # those left out have no entry
                known = entry is not None and entry.get("id") == token
                answer.gaps.append(_gap(entry) if known and entry is not None else -1.0)
                entry = next(entries, None) if known else entry
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> Answer:
        """Send `body` and read the stream to its end. Raises RequestFailed."""
        answer = Answer()
        read = {"native": _read_native, "openai": _read_openai, "ollama": _read_ollama}[self.dialect]
        payload = json.dumps(body).encode()
        started = at = time.perf_counter()
        try:
            for at, document in self._lines(path, payload):
                if document is _DONE:
                    answer.ended = True
                else:
                    read(answer, at - started, document)
        except (OSError, http.client.HTTPException, ValueError) as error:
            got = f" after {len(answer.arrivals)} tokens" if answer.arrivals else ""
            raise RequestFailed(f"{path}: {_why(error)}{got}") from None
        answer.total = time.perf_counter() - started
        if not answer.ended:
            raise RequestFailed(f"{path}: the stream broke off after {len(answer.arrivals)} tokens")
        if not answer.arrivals:
            # generated tokens that end in the middle of a character, or have no text, are not sent before the end
            answer.arrivals = [at - started] * answer.n_gen
        if not answer.arrivals:
            why = f" (its reason: {answer.reason})" if answer.reason else ""
            raise RequestFailed(f"{path}: the server ended its answer without having generated a token{why}")
        if not answer.n_gen:
            answer.n_gen = len(answer.arrivals)
        return answer

    def _lines(self, path: str, payload: bytes) -> Iterator[tuple[float, dict[str, Any]]]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        try:
            connection.request("POST", parts.path + path, payload, self.headers())
            reply = connection.getresponse()
            if reply.status != 200:
                text = reply.read(400).decode("utf-8", "replace")
                raise RequestFailed(f"{path} answered {reply.status}: {text}")
            deadline = time.perf_counter() + self.timeout
            while line := reply.readline():
                at = time.perf_counter()
                if at > deadline:  # pings keep a socket alive for ever
                    raise TimeoutError
                line = line.strip()
                if line.startswith(b"data:"):
                    line = line[5:].strip()
                elif not line.startswith(b"{"):
                    continue
                if line == b"[DONE]":
                    yield at, _DONE
                    continue
                document = json.loads(line)
                if "error" in document:
                    raise RequestFailed(f"{path}: {str(document['error'])[:300]}")
                yield at, document
        finally:
            connection.close()


def _document(path: str, reply: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer. Raises RequestFailed."""
    try:
        document = reply.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise RequestFailed(f"{path}: the answer is no JSON object, so this is no model server")
    return document


@cache
def _http() -> httpx.Client:
    """One client for all plain requests: making one costs 40 ms."""
    return httpx.Client()


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return "no answer in time: it hangs"
    return next(iter(str(error).splitlines()), "") or type(error).__name__


# ------------------------------------------------------------------------------------------------------- dialects


def _native_body(target: Target, prompt: Prompt, n: int, cache: bool, n_probs: int) -> dict[str, Any]:
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "n_predict": n,
        "stream": True,
        "temperature": 0,
        "top_k": 1,
        "seed": 1,
        "ignore_eos": True,
        "cache_prompt": cache,
        "return_tokens": True,
    } | ({"n_probs": n_probs} if n_probs else {})


def _openai_body(target: Target, prompt: Prompt, n: int, cache: bool, n_probs: int) -> dict[str, Any]:
    return {
        "model": target.model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": n,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 1,
    } | ({} if target.strict else GREEDY)


GREEDY: dict[str, Any] = {"ignore_eos": True, "top_k": 1, "repeat_penalty": 1.0, "repetition_penalty": 1.0}
"""Not OpenAI's: llama-server's, vLLM's and SGLang's way to go on after the end, and the penalties that some servers
have by default under either name. Most servers ignore what they do not know."""


def _ollama_body(target: Target, prompt: Prompt, n: int, cache: bool, n_probs: int) -> dict[str, Any]:
    options = {"temperature": 0, "top_k": 1, "seed": 1, "num_predict": n, "repeat_penalty": 1.0}
    options |= {"num_ctx": target.n_ctx} if target.n_ctx else {}
    return {"model": target.model, "prompt": prompt, "raw": True, "stream": True, "options": options}


def _read_native(answer: Answer, at: float, document: dict[str, Any]) -> None:
    tokens = document.get("tokens") or []
    answer.arrivals += [at] * len(tokens)
    answer.tokens += tokens
    if document.get("content") or tokens:
        answer.pieces.append(document.get("content", ""))
        answer.piece_tokens.append(len(tokens))
    answer.gaps += [_gap(p) for p in document.get("completion_probabilities") or []]
    if document.get("stop"):
        answer.ended = True
        timings = document.get("timings", {})
        answer.server = {k: float(v) for k, v in timings.items()}
        answer.n_gen = int(document.get("tokens_predicted", len(answer.arrivals)))
        answer.prompt_n = int(document.get("tokens_evaluated", 0))
        answer.cached_n = int(timings.get("cache_n", -1))
        answer.reason = str(document.get("stop_type") or "")


def _gap(entry: dict[str, Any]) -> float:
    """Chosen against the best below it: a token that was excluded (end of text) may stand above."""
    chosen = float(entry.get("logprob", 0.0))
    below = [float(t["logprob"]) for t in entry.get("top_logprobs", ()) if t["id"] != entry.get("id")]
    below = [x for x in below if x <= chosen]
    return chosen - max(below) if below else -1.0


def _read_openai(answer: Answer, at: float, document: dict[str, Any]) -> None:
    answer.counted = False
    for choice in document.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        answer.ended = answer.ended or bool(choice.get("finish_reason"))
        answer.reason = str(choice.get("finish_reason") or answer.reason)
        if text or delta.get("tool_calls"):
            answer.arrivals.append(at)
            answer.pieces.append(text)
    usage = document.get("usage")
    if usage:
        answer.n_gen = int(usage.get("completion_tokens", 0))
        answer.prompt_n = int(usage.get("prompt_tokens", 0))
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_n = int(details.get("cached_tokens", -1))
    if document.get("timings"):
        answer.server = {k: float(v) for k, v in document["timings"].items()}


def _read_ollama(answer: Answer, at: float, document: dict[str, Any]) -> None:
    answer.counted = False
    if document.get("response"):
        answer.arrivals.append(at)
        answer.pieces.append(document["response"])
    if document.get("done"):
        answer.ended = True
        answer.reason = str(document.get("done_reason") or "")
        answer.n_gen = int(document.get("eval_count", 0))
        answer.prompt_n = int(document.get("prompt_eval_count", 0))
        answer.server = {k: document[k] / 1e6 for k in ("prompt_eval_duration", "eval_duration") if k in document}


def identify(url: str, wanted: str, timeout: float, api_key: str = "") -> Target:
    """How to talk to the server at `url`: llama-server's own API where it has it, else OpenAI's. Raises RequestFailed.

    `wanted` is the model's name there; the first of /v1/models where it is empty.
    """
    target = Target(url, "openai", wanted, api_key, timeout)
    model = wanted
    if not model:
        listed = target.get("/v1/models").get("data") or []
        if not listed:
            raise RequestFailed(f"{url} lists no model: name one with --peer-model")
        model = str(listed[0].get("id", ""))
    native = True
    try:
        target.get("/props")
        target.tokenize("a")
    except RequestFailed:
        native = False
    if native:
        return Target(url, "native", model, api_key, timeout)
    target = Target(url, "openai", model, api_key, timeout)
    try:
        target.complete("a", 1)
    except RequestFailed as error:
        if " answered 4" not in str(error):
            raise
        target = replace(target, strict=True)
    return target


Sender = Callable[[], Answer]


def together(senders: Sequence[Sender]) -> list[Answer]:
    """All requests at once, a thread each. Raises the first RequestFailed."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(senders)) as pool:
        return [future.result() for future in [pool.submit(send) for send in senders]]
