"""The report as one self-contained page."""

from __future__ import annotations
from ftgguf.bench.report import Report


def page(report: Report) -> str:
    return ""
