"""What the HTTP front costs: CPU time per token and stream, what streams add to the engine's steps, a 1 MB chat body.

`python -m compat.http_cost VOCAB.gguf` prints a Markdown table for docs/measurements/http.md. The engine runs a script
(`ftgguf.engine.scripted`), so that its steps cost nothing but a fixed delay; VOCAB is a GGUF with a tokenizer and a
chat template. Costs are CPU seconds of the front process, which a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from compat.server import our_server

STEP_MS = 20
"""The scripted engine's step: about what 32 sequences cost a small model on two cores."""


@contextmanager
def _server(vocab: Path, delay_ms: float) -> Iterator[tuple[str, psutil.Process, psutil.Process]]:
    """(address, front process, engine process) of a server that says a few words for ever."""
    with tempfile.TemporaryDirectory() as folder:
        script = {"vocab": str(vocab), "delay_ms": delay_ms, "scripts": [{"text": " and so on", "loop": True}]}
        path = Path(folder, "script.json")
        path.write_text(json.dumps(script))
        before = {p.pid for p in psutil.Process().children()}
        with our_server(f"scripted:{path}", ["-c", "131072", "-np", "32", "-kvu", "-b", "4096"]) as url:
            (front,) = (p for p in psutil.Process().children() if p.pid not in before)
            yield url, front, front.children()[0]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _chat(n_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": n_tokens,
        "stream": stream,
        "ignore_eos": True,
    }


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_raw():
            pass


async def _together(url: str, n: int, body: dict[str, Any]) -> float:
    """Seconds until `n` requests at once are answered."""
    limits = httpx.Limits(max_connections=n + 1)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        started = time.monotonic()
        await asyncio.gather(*(_ask(client, body) for _ in range(n)))
        return time.monotonic() - started


def per_token(vocab: Path, streams: int, n_tokens: int) -> float:
    """Milliseconds of the front's CPU time per token and stream."""
    with _server(vocab, 1.0) as (url, front, _):
        asyncio.run(_together(url, streams, _chat(8, True)))
        before = _cpu(front)
        asyncio.run(_together(url, streams, _chat(n_tokens, True)))
        return (_cpu(front) - before) * 1e3 / (streams * n_tokens)


def step_overhead(vocab: Path, streams: int, n_tokens: int, rounds: int) -> tuple[float, float]:
    """Milliseconds per step with `streams` sequences that do not stream, and with as many that do (medians)."""
    with _server(vocab, STEP_MS) as (url, _, _engine):
        asyncio.run(_together(url, streams, _chat(8, True)))
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for stream in (False, True):
                seconds = asyncio.run(_together(url, streams, _chat(n_tokens, stream)))
                times[stream].append(seconds * 1e3 / n_tokens)
        return statistics.median(times[False]), statistics.median(times[True])


async def _big_body(url: str, size: int) -> tuple[float, int, float]:
    """(seconds until the answer to a chat body of `size` bytes, its status, the longest pause of another stream)."""
    words = "The quick brown fox jumps over the lazy dog; then it naps. "
    body = _chat(1, False)
    body["messages"] = [{"role": "user", "content": words * (size // len(words))}]
    data = json.dumps(body).encode()
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def other() -> None:
            last = time.monotonic()
            async with client.stream("POST", "/v1/chat/completions", json=_chat(400, True)) as response:
                async for _ in response.aiter_raw():
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

        task = asyncio.create_task(other())
        await asyncio.sleep(1.0)
        gaps.clear()
        started = time.monotonic()
        answer = await client.post("/v1/chat/completions", content=data)
        took = time.monotonic() - started
        pause = max(gaps)
        task.cancel()
    return took, answer.status_code, pause


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m compat.http_cost", description=__doc__)
    parser.add_argument("vocab", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    vocab = options.vocab.resolve()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}\n")
    print("| What | Measured | Goal |\n|---|---|---|")
    for streams in (1, 32):
        cost = per_token(vocab, streams, options.tokens)
        print(f"| front, CPU per token and stream, {streams} at once | {cost:.3f} ms | < 0.2 ms |", flush=True)
    whole, streamed = step_overhead(vocab, 32, options.tokens // 2, options.rounds)
    added = streamed / whole - 1
    print(f"| a step of 32 sequences, streamed against not | {streamed:.1f} / {whole:.1f} ms: {added:+.1%} | < 10 % |")
    with _server(vocab, STEP_MS) as (url, _, _engine):
        took, status, pause = asyncio.run(_big_body(url, 1_000_000))
    print(f"| a chat body of 1 MB, until it is answered ({status}) | {took:.2f} s | < 1 s |")
    print(f"| longest pause of another stream meanwhile (a step is {STEP_MS} ms) | {pause * 1e3:.0f} ms | none |")


if __name__ == "__main__":
    main()
