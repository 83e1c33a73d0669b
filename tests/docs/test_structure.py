"""docs/structure.md lists the modules that exist, with what each says of itself."""

from __future__ import annotations

import re

from compat.structure import PAGE, ROOT, updated


def test_list_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == updated(page), "run `python -m compat.structure`"


def test_every_file_named_in_the_text_exists() -> None:
    text = PAGE.read_text().partition("## Modules")[0]
    for name in re.findall(r"`([\w/]+\.(?:py|cpp|md))`", text):
        assert any((ROOT / base / name).exists() for base in (".", "ftgguf")), name
