"""A small HTTP server that speaks the three dialects of the bench's client, with faults on demand."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """How the stub behaves. `token(prompt length, i)` is the i-th generated id."""

    token: Callable[[int, int], int] = lambda n, i: (n + 3 * i) % 50
    gap: float = 1.0
    """What its log-probabilities say the runner-up is behind, in nats."""
    delay: float = 0.0
    """Seconds before each token."""
    native: bool = True
    read_delay: float = 0.0
    """Seconds before the first token of a prompt that is longer than 100 tokens."""
    dies_at: int = 0
    """The process ends when a prompt of so many tokens comes."""
    strict: bool = False
    """Fields that OpenAI does not have are refused, as OpenAI does."""
    props: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, int] = field(default_factory=dict)
    modelfile: str = ""
    ends_after: int = -1
    """End the answer of its own accord after so many tokens, whatever was asked for."""
    fail_after: int = -1
    """Break the stream off after so many tokens."""
    status: int = 200
    speed: float = 5.0
    """Tokens a second in decode that its timings claim; 0: they say nothing."""
    hang: bool = False
    held_back: frozenset[int] = frozenset()
    """Which tokens of an answer end in the middle of a character: llama-server's stream leaves them out, and its
    probabilities do."""
    tokenize: Callable[[str], list[int]] = lambda text: [len(w) for w in text.split()]
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


@contextmanager
def stub(script: Script, port: int = 0) -> Iterator[str]:
    """The stub's base URL while it runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/props" and not script.native:
                self._json({"error": "no"}, 404)
            elif self.path.startswith("/html/"):
                self._raw(b"<html>hello</html>", 200)
            elif self.path == "/v1/models":
                self._json({"data": [{"id": "stub", "meta": script.meta}]})
            else:
                self._json({"status": "ok", "build_info": "b1-stub", "version": "0.9"} | script.props)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.seen.append((self.path, body))
            if script.hang:
                time.sleep(1)
            if script.status != 200:
                return self._json({"error": {"message": "stub says no"}}, script.status)
            if script.strict and "ignore_eos" in body:
                return self._json({"error": {"message": "Unrecognized request argument supplied: ignore_eos"}}, 400)
            if self.path == "/api/show":
                return self._json({"modelfile": script.modelfile})
            if self.path == "/tokenize":
                return self._json({"tokens": script.tokenize(body["content"])})
            if self.path == "/apply-template":
                return self._json({"prompt": " ".join(str(m.get("content") or "") for m in body["messages"])})
            if self.path == "/completion" and not body.get("stream", True):
                return self._json(self._whole(body))
            try:
                self._stream(body)
            except OSError:
                self.close_connection = True

        def _json(self, document: dict[str, Any], status: int = 200) -> None:
            self._raw(json.dumps(document).encode(), status)

        def _raw(self, data: bytes, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _chunk(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            prompt = body.get("prompt") or json.dumps(body.get("messages"))
            n_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
            if script.dies_at and n_prompt >= script.dies_at:
                os._exit(9)
            time.sleep(script.read_delay if n_prompt > 100 else 0)
            options = body.get("options", {})
            n = body.get("n_predict") or body.get("max_tokens") or options.get("num_predict", 4)
            n = min(n, script.ends_after) if script.ends_after >= 0 else n
            for i in range(n):
                if i == script.fail_after:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                time.sleep(script.delay)
                if i in script.held_back:
                    continue
                self._chunk(self._token(body, script.token(n_prompt, i), n_prompt))
            self._chunk(self._end(n_prompt, n))
            self.wfile.write(b"0\r\n\r\n")

        def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
            n_prompt, n = len(body["prompt"]), body["n_predict"]
            sent = [script.token(n_prompt, i) for i in range(n) if i not in script.held_back]
            entry = [{"id": -1, "logprob": -0.5 - script.gap}]
            probabilities = [{"id": t, "logprob": -0.5, "top_logprobs": entry} for t in sent]
            tokens = [script.token(n_prompt, i) for i in range(n)]
            return {"content": "", "tokens": tokens, "completion_probabilities": probabilities, "stop": True}

        def _token(self, body: dict[str, Any], token: int, n_prompt: int) -> str:
            text = f" t{token}"
            if self.path == "/completion":
                document: dict[str, Any] = {"content": text, "tokens": [token], "stop": False}
                if body.get("n_probs"):
                    best = [{"id": token, "logprob": -0.5}, {"id": token + 1, "logprob": -0.5 - script.gap}]
                    document["completion_probabilities"] = [{"id": token, "logprob": -0.5, "top_logprobs": best}]
                return f"data: {json.dumps(document)}\n\n"
            if self.path == "/api/generate":
                return json.dumps({"response": text, "done": False}) + "\n"
            choice = {"text": text} if self.path == "/v1/completions" else {"delta": {"content": text}}
            return f"data: {json.dumps({'choices': [choice]})}\n\n"

        def _end(self, n_prompt: int, n: int) -> str:
            if self.path == "/completion":
                end = {"content": "", "tokens": [], "stop": True, "tokens_predicted": n, "tokens_evaluated": n_prompt}
                end["stop_type"] = "eos" if script.ends_after >= 0 else "limit"
                timings = {"cache_n": n_prompt - 1, "predicted_per_second": script.speed}
                return f"data: {json.dumps(end | {'timings': timings})}\n\n"
            if self.path == "/api/generate":
                end = {"response": "", "done": True, "eval_count": n, "prompt_eval_count": n_prompt}
                return json.dumps(end | {"eval_duration": 10**9, "done_reason": "stop"}) + "\n"
            usage = {"completion_tokens": n, "prompt_tokens": n_prompt, "prompt_tokens_details": {"cached_tokens": 2}}
            return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
