"""A scripted engine process: speaks the front's protocol and does what the prompt says, without a model.

The vocabulary is bytes (see `FakeVocab`), so a prompt is text. Its last `[[...]]` block is a JSON object:
`pieces` (what is generated, one piece per token), `stop` (stop_type), `delay` (seconds before each piece), `prefill`
(seconds before the first), `die` (exit after that many pieces), `fail` ([code, type, message]), `hang`, `cached`.
Stop strings and `max_tokens` are honoured as the engine does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))
from ftgguf.engine import messages as m

DEFAULT = ["Hello", " ", "wor", "ld", "!"]


class Engine:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.cancelled: set[int] = set()
        self.running: set[int] = set()
        self.log: list[Any] = []

    def send(self, message: m.ToFront) -> None:
        data = m.encode(message)
        with self.lock:
            self.connection.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> bytes | None:
        head = self._exactly(4)
        return None if head is None else self._exactly(struct.unpack("<I", head)[0])

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            chunk = self.connection.recv(size - len(data))
            if not chunk:
                return None
            data += chunk
        return data

    def run(self) -> None:
        config = msgspec.msgpack.decode(self.receive() or b"\x80")
        start = config.get("start", {})
        self.send(m.Loading(stage="weights", fraction=0.5))
        time.sleep(start.get("load", 0))
        once = start.get("die_once")
        if once and not os.path.exists(once):
            open(once, "w").close()
            os._exit(3)
        if start.get("fatal"):
            self.send(m.Fatal(message=start["fatal"]))
            os._exit(1)
        info = {"file_type": "Q8_0", "n_vocab": 260, "n_embd": 64, "n_params": 1000, "size": 2000, "n_ctx_train": 2048}
        self.send(m.Ready(info=info, n_ctx=start.get("n_ctx", 4096), n_slots=4))
        while (frame := self.receive()) is not None:
            message = m.decode_to_engine(frame)
            if isinstance(message, m.Cancel):
                self.cancelled.add(message.id)
            elif isinstance(message, m.Control):
                self.control(message)
            else:
                threading.Thread(target=self.generate, args=(message,), daemon=True).start()

    def control(self, message: m.Control) -> None:
        if message.action == "slots":
            value: Any = [{"id": i, "is_processing": i < len(self.running)} for i in range(4)]
        elif message.action == "metrics":
            value = {"prompt_tokens_total": 7, "tokens_predicted_total": 9, "preemptions_total": 1}
        elif message.action == "cancelled":
            value = sorted(self.cancelled)
        else:
            self.send(m.Reply(id=message.id, ok=False, message=f"no {message.action}"))
            return
        self.send(m.Reply(id=message.id, ok=True, value=value))

    def generate(self, request: m.Generate) -> None:
        prompt = request.tokens.tolist()
        text = bytes(id - 3 for id in prompt if id >= 3).decode("utf-8", "replace")
        script: dict[str, Any] = {}
        if "[[" in text:
            script = json.loads(text.rsplit("[[", 1)[1].split("]]")[0])
        if script.get("fail"):
            code, kind, message = script["fail"]
            self.send(m.Failed(id=request.id, code=code, type=kind, message=message))
            return
        while script.get("hang"):
            time.sleep(0.05)
        if request.embed:
            data = struct.pack("<3f", len(prompt), prompt[0], prompt[-1])
            self.send(
                m.Embedded(id=request.id, slot=1, rows=1, columns=3, data=data, evaluated_n=len(prompt), timings={})
            )
            return
        self.running.add(request.id)
        cached = script.get("cached", 0)
        self.send(m.Started(id=request.id, slot=1, cached=cached))
        total = len(prompt)
        if request.return_progress:
            self.send(m.Progress(id=request.id, total=total, cache=cached, processed=total, time_ms=1.5))
        time.sleep(script.get("prefill", 0))
        self.emit(request, script, cached)
        self.running.discard(request.id)

    def emit(self, request: m.Generate, script: dict[str, Any], cached: int) -> None:
        pieces: list[str] = script.get("pieces", DEFAULT)
        pieces = pieces * script.get("repeat", 1)
        stop_type, word = script.get("stop", "eos"), ""
        whole = "".join(pieces)
        cut = len(whole)
        for stop in request.stop:
            at = whole.find(stop)
            if 0 <= at < cut:
                cut, stop_type, word = at, "word", stop
        sent, count = 0, 0
        limit = len(pieces) if request.max_tokens < 0 else request.max_tokens
        for piece in pieces[:limit]:
            time.sleep(script.get("delay", 0))
            if request.id in self.cancelled:
                return
            if script.get("die") == count:
                os._exit(9)
            count += 1
            text = piece[: max(0, cut - sent)]
            sent += len(piece)
            probs = ()
            if request.sampling.n_probs:
                one = m.TokenProb(id=100 + count, piece=piece.encode(), value=-0.5)
                other = m.TokenProb(id=5, piece=b"\xc3", value=float("-inf"))
                probs = (m.TokenProbs(chosen=one, top=(one, other)[: request.sampling.n_probs]),)
            if text or not word:
                self.send(
                    m.Delta(
                        id=request.id, text=text, tokens=(100 + count,), probs=probs if text else (),
                        predicted_n=count, timings=self.timings(request, cached, count),
                    )
                )  # fmt: skip
            if sent >= cut and word:
                break
        if limit < len(pieces) and not word:
            stop_type = "limit"
        self.send(
            m.Finished(
                id=request.id, slot=1, stop_type=stop_type, stopping_word=word, truncated=False,
                has_new_line="\n" in whole[:cut], predicted_n=count, evaluated_n=len(request.tokens),
                cached_n=len(request.tokens) + count, timings=self.timings(request, cached, count),
                seed=request.sampling.seed,
            )
        )  # fmt: skip

    @staticmethod
    def timings(request: m.Generate, cached: int, count: int) -> dict[str, float]:
        return {
            "cache_n": cached, "prompt_n": len(request.tokens) - cached, "prompt_ms": 10.0,
            "predicted_n": count, "predicted_ms": 20.0,
        }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    Engine(socket.socket(fileno=parser.parse_args().fd)).run()
