"""Flags that print something and end, as llama-server's do, instead of serving."""

from __future__ import annotations

import pytest

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
