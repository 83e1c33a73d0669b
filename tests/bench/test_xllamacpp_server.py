"""The peer's command line where there is nothing to serve; what it serves: test_end_to_end.py."""

from __future__ import annotations

import pytest

from ftgguf.bench.xllamacpp_server import main


def test_questions_are_answered_without_the_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit statuses are llama-server's: 0 for what is printed, 1 for a flag that is refused."""
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "-m FILE" in said
    assert "--port" in said
    assert "--ctx-size" in said, "what tells a llama-server from other programs (bench/peers.py)"
    assert main(["--version"]) == 0
    assert "version" in capsys.readouterr().out
    assert main(["--list-devices"]) == 1
    assert "--list-devices is for ftgguf serve" in capsys.readouterr().err
    assert main(["--no-such-flag"]) == 1
    assert "--no-such-flag" in capsys.readouterr().err
