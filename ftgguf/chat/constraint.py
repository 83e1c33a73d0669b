"""Grammars that make a model's tool calls well-formed."""

from __future__ import annotations

from typing import Any

from ftgguf.engine.messages import Grammar


def tool_grammar(
    format: str, tools: list[dict[str, Any]], choice: str, forced: str, parallel: bool, after: str
) -> Grammar | None:
    """The constraint of a request with `tools`, or None."""
    return None
