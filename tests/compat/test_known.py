"""Every request of `compat.requests` to our server and to a real llama-server (xllamacpp), compared field by field.

The differences that may be are in `compat.known`, each with its reason; any other one fails, and so does an entry that
no longer occurs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.differential import Difference, run
from compat.known import KNOWN, SCRIPTED_KNOWN, unexpected
from compat.peer import peer_server
from compat.requests import REQUESTS, SCRIPT, SCRIPTED
from compat.scripted import make_scripted
from compat.server import our_server
from ftgguf.pull.demo import resolve_stories

pytest.importorskip("xllamacpp", reason="the peer is the llama-server inside xllamacpp")
ARGS = ["-c", "1024", "-t", "1", "-a", "stories"]


def test_only_known_differences() -> None:
    with our_server(resolve_stories(), ARGS) as ours, peer_server(resolve_stories(), ARGS) as peer:
        assert unexpected(run(ours, peer, REQUESTS)) == []


def test_only_known_differences_on_the_scripted_model(tmp_path: Path) -> None:
    """Thinking, its budget, tool calls, cut characters and stop strings, with a model that says exactly its script."""
    model = tmp_path / "scripted.gguf"
    make_scripted(model, SCRIPT)
    args = ["-c", "2048", "-t", "1", "-a", "scripted"]
    with our_server(model, args) as ours, peer_server(model, args) as peer:
        assert unexpected(run(ours, peer, SCRIPTED), SCRIPTED_KNOWN) == []


def test_only_known_differences_without_jinja(tmp_path: Path) -> None:
    """No tools, no thinking, a built-in template in place of the model's."""
    model = tmp_path / "scripted.gguf"
    make_scripted(model, SCRIPT)
    args = ["-c", "2048", "-t", "1", "-a", "scripted", "--no-jinja"]
    known = {key: why for key, why in SCRIPTED_KNOWN.items() if "tool" not in key[0]}
    with our_server(model, args) as ours, peer_server(model, args) as peer:
        assert unexpected(run(ours, peer, SCRIPTED), known) == []


def test_the_table_is_checked_both_ways() -> None:
    """A difference of no entry is reported, and an entry without its difference."""
    (first, *others) = KNOWN
    strange = Difference("health", "status", 500, 200)
    found = [strange, *(Difference(name, path, 1, 2) for name, path in others)]
    lines = unexpected(found)
    assert lines == [str(strange), f"{first[0]}: {first[1]}: listed in compat/known.py, but alike"]
    assert unexpected([Difference(*key, 1, 2) for key in KNOWN]) == []
