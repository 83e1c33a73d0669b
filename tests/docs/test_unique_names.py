"""pytest imports test modules by their bare name where a folder has no __init__.py: two of one name stop the run."""

from __future__ import annotations

from collections import Counter

from compat.structure import ROOT


def test_module_names_are_unique() -> None:
    bare = [p.name for p in (ROOT / "tests").rglob("*.py") if not (p.parent / "__init__.py").exists()]
    assert [name for name, n in Counter(bare).items() if n > 1 and name != "conftest.py"] == []
