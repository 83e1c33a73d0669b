"""Keeping ggml from AMX kernels that crash, for tests (see ftgguf.bench.amx)."""

from __future__ import annotations

from ftgguf.bench.amx import avoid_if_broken, broken

__all__ = ["avoid_if_broken", "broken"]
