"""Tool-call parsers, one per wire format; `tool_parser` picks by the dialect's key."""

from __future__ import annotations

from typing import Any

from ftgguf.chat.parser import OutputParser, PlainParser


def tool_parser(name: str, tools: list[dict[str, Any]], extract_reasoning: bool) -> OutputParser:
    """A parser of format `name` for the request's `tools` (empty: nothing is a call)."""
    return PlainParser()
