"""docs/bug-log.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_named_test_exists() -> None:
    named = NAMED.findall((ROOT / "docs/bug-log.md").read_text(encoding="utf-8"))
    assert len(named) > 80
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_report_has_a_row_with_a_test() -> None:
    """A row without a test, or a report twice, is a fault of the page."""
    rows = [line for line in (ROOT / "docs/bug-log.md").read_text(encoding="utf-8").splitlines() if line[:3] == "| R"]
    numbers = [number for row in rows for number in re.findall(r"R\d\d", row.split("|")[1])]
    assert len(numbers) == len(set(numbers)) >= 60
    assert all(NAMED.search(row) for row in rows if not row.startswith("| Report"))
