"""A model family we do not have is refused by its name with the list of those we have, whatever else the file lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftgguf.gguf import GGUFError
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import ModelError, read_numbers
from ftgguf.pull.demo import resolve_stories

ROOT = Path(__file__).parents[2]


def changed(tmp_path: Path, old: bytes, new: bytes) -> Path:
    """The stories model with its architecture's name (a value of the same length) replaced."""
    data = resolve_stories().read_bytes()
    at = data.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    assert data[at : at + 5] == old
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:at] + new + data[at + 5 :])
    return path


def test_named_with_the_list_of_known_ones(tmp_path: Path) -> None:
    path = changed(tmp_path, b"llama", b"bloom")
    with pytest.raises(ModelError, match=r"unknown model architecture .*bloom.*ftgguf runs: .*qwen3moe"):
        read_numbers(open_gguf(path))


def test_a_name_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 once broke the message itself, and the server tried again and again."""
    path = changed(tmp_path, b"llama", b"\xff\xfe\xfd\xfc\xfb")
    with pytest.raises((ModelError, GGUFError)):
        read_numbers(open_gguf(path))
    command = [sys.executable, "-m", "ftgguf", "serve", "-m", str(path), "-t", "1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert "unknown model architecture" in done.stderr
    assert "Traceback" not in done.stderr
