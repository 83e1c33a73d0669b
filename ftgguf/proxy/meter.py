"""Reads along in a model server's answer, whatever API it speaks, and notes when text came and what was counted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

KEEP_TEXT = 1 << 20
"""Characters of an answer that are kept for comparing; more are counted only."""


@dataclass(slots=True)
class Meter:
    """Fed with the bytes of one answer and the seconds since its request was sent.

    Knows the streams of llama-server's own API, OpenAI's three (completions, chat, responses), Anthropic's and
    Ollama's two, and their whole answers. Counts are -1 where the server did not say.
    """

    first: float = -1.0
    """Seconds to the first text (or tool call)."""
    last: float = -1.0
    events: int = 0
    """Pieces of text."""
    whole: bool = False
    """The text came in one document, not streamed: when its first token was made is not known."""
    text: str = ""
    prompt_n: int = -1
    cached_n: int = -1
    predicted_n: int = -1
    evaluated_only: bool = False
    """`prompt_n` may be without what came from a cache: Ollama's count does not say."""
    error: str = ""
    _rest: bytes = b""
    _lines: list[bytes] = field(default_factory=list)

    def feed(self, data: bytes, at: float) -> None:
        """The next bytes, `at` seconds after the request."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._line(line.strip(), at)

    def end(self, at: float) -> None:
        """The answer is complete."""
        if self._rest.strip():
            self._line(self._rest.strip(), at)
            self._rest = b""
        if self._lines:  # a whole answer, pretty-printed
            self._read(b"\n".join(self._lines), at)

    def _line(self, line: bytes, at: float) -> None:
        event = line.startswith(b"data:")
        if event:
            line = line[5:].strip()
        elif line.startswith((b"event:", b"id:", b"retry:", b":")):
            return
        if line and line != b"[DONE]" and not self._read(line, at, event):
            self._lines.append(line)

    def _read(self, line: bytes, at: float, event: bool = False) -> bool:
        try:
            document = json.loads(line)
        except ValueError:
            return False
        if isinstance(document, dict):
            before = self.events
            self._document(document, at)
            # Ollama streams lines without `data:`, each but the last with `done` false
            self.whole = self.whole or (self.events > before and not event and document.get("done") is not False)
        return True

    def _document(self, document: dict[str, Any], at: float) -> None:
        error = document.get("error")
        if error:
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)[:300]
        found = _text(document)
        if found is not None:
            tokens = document.get("tokens")
            self.events += len(tokens) if isinstance(tokens, list) and tokens else 1
            if len(self.text) < KEEP_TEXT:
                self.text += found
            self.first = at if self.first < 0 else self.first
            self.last = at
        for place in (document, document.get("response"), document.get("message")):
            if isinstance(place, dict):
                self._counts(place)

    def _counts(self, place: dict[str, Any]) -> None:
        usage = place.get("usage")
        timings = place.get("timings")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            self._set("predicted_n", usage, "completion_tokens", "output_tokens")
            self._set("prompt_n", usage, "prompt_tokens", "input_tokens")
            if "cache_read_input_tokens" in usage and "input_tokens" in usage:
                # Anthropic counts what it had, and what it stores, apart
                self._set("cached_n", usage, "cache_read_input_tokens")
                created = usage.get("cache_creation_input_tokens")
                self.prompt_n = self.prompt_n + self.cached_n + (created if isinstance(created, int) else 0)
            self._set("cached_n", details, "cached_tokens")
        if isinstance(timings, dict):
            self._set("predicted_n", timings, "predicted_n")
            self._set("cached_n", timings, "cache_n")
            if "prompt_n" in timings:  # evaluated ones only: the cached are counted apart
                self.prompt_n = int(timings["prompt_n"]) + max(0, self.cached_n)
        self._set("predicted_n", place, "eval_count")
        self._set("prompt_n", place, "prompt_eval_count")
        self.evaluated_only = self.evaluated_only or "prompt_eval_count" in place

    def _set(self, name: str, place: dict[str, Any], *keys: str) -> None:
        for key in keys:
            if isinstance(place.get(key), int):
                setattr(self, name, int(place[key]))

    @property
    def n_gen(self) -> int:
        """Generated tokens: as the server counted, else pieces of text."""
        return self.predicted_n if self.predicted_n >= 0 else self.events


def _text(document: dict[str, Any]) -> str | None:
    """The text that a document brings, "" for a tool call, None for neither."""
    for choice in document.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or part.get("content") or part.get("reasoning_content") or ""
        if text or part.get("tool_calls"):
            return str(text)
    kind = str(document.get("type", ""))
    delta = document.get("delta")
    if kind.endswith("delta") and delta:
        if isinstance(delta, dict):
            return str(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
        return str(delta)
    message = document.get("message")
    if isinstance(message, dict) and "content" in message and not kind and message["content"]:
        return str(message["content"])  # Ollama's chat
    content = document.get("content", document.get("response"))
    if isinstance(content, str) and content:
        return content
    if isinstance(content, list):  # Anthropic's whole answer
        return "".join(str(c.get("text", "")) for c in content if isinstance(c, dict)) or None
    return None
