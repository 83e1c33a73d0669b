"""Flags that print something and end, as llama-server's do, instead of serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat import vocab
from compat.synth import make
from ftgguf import cli
from ftgguf.engine import devices


def test_list_devices_prints_every_gpu_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """llama-server's heading, then a line for each device that the driver shows (none on most test machines)."""
    assert cli.serve(["--list-devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Available devices:"
    found = devices.list_devices()
    assert lines[1:] == ([f"  {d.line()}" for d in found] or ["  (none)"])


@pytest.mark.parametrize("flag", ["--version", "--help", "--completion-bash", "--cache-list"])
def test_no_flag_that_only_prints_prints_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.serve([flag]) == 0
    assert capsys.readouterr().out.strip()


def test_built_in_models_are_shown_but_not_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    """`show --template` prints the file's own Jinja, `show` the file; `rm` and `cp` say what can be done instead."""
    assert cli.main(["show", "stories"]) == 0
    assert "stories260K-8x-top2-Q8_0.gguf" in capsys.readouterr().out
    for argv in (["rm", "stories"], ["cp", "stories", "mine"]):
        assert cli.main(argv) == 1
        assert "'stories' is built in" in capsys.readouterr().err


def test_show_prints_the_files_own_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("llama", tmp_path / "t.gguf")
    assert cli.main(["show", "--template", str(path)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == vocab.CHAT_TEMPLATE.rstrip("\n")
