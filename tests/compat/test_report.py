"""docs/compat.md says what the code does now."""

from __future__ import annotations

import json
from pathlib import Path

from compat import report
from ftgguf.flags.table import FLAGS
from ftgguf.server.app import GET, POST
from ftgguf.server.schema import FIELDS

ROOT = Path(__file__).parents[2]


def test_the_file_is_up_to_date() -> None:
    """`python -m compat.report` writes it."""
    assert (ROOT / "docs/compat.md").read_text(encoding="utf-8") == report.markdown()


def test_everything_is_listed_once() -> None:
    """Every route, schema field and flag has a row; notes name only what exists."""
    routes = [row[0].strip("`") for row in report.endpoints()]
    assert len(routes) == len(set(routes))
    assert {f"GET {path}" for path, _ in GET} | {f"POST {path}" for path, _ in POST} <= set(routes)
    assert set(report.ENDPOINTS) <= set(routes)
    fields = json.dumps(report.fields())
    assert all(f"`{name}`" in fields for field in FIELDS for name in field.names)
    assert all(f"`{name}`" in fields for name in report.FIELD_NOTES)
    text = report.markdown()
    assert all(f"`{name}`" in text for flag in FLAGS if not flag.hidden for name in flag.names)


def test_every_difference_has_a_reason() -> None:
    """`different` and `mapped` rows say why."""
    rows = [*report.endpoints(), *(row[1:] for row in report.fields())]
    assert [row for row in rows if row[1] != "same" and not row[2]] == []
    assert {row[1] for row in rows} <= {"same", "mapped", "different", "ours"}
