"""Log lines as llama-server's flags ask for them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftgguf import logs
from ftgguf.flags.config import LogConfig


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("ftgguf").setLevel(logging.NOTSET)


def say(config: LogConfig) -> None:
    logs.set_up(config)
    log = logging.getLogger("ftgguf.test")
    log.debug("fine")
    log.info("hello")
    log.warning("careful \u2603")


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    for verbosity, expected in ((2, 1), (3, 2), (5, 3), (0, 0)):
        say(LogConfig(verbosity=verbosity, colors="off"))
        assert len(capsys.readouterr().err.splitlines()) == expected
    say(LogConfig(disable=True))
    assert capsys.readouterr().err == ""


def test_json_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    say(LogConfig(jsonl=True, colors="on", file=str(tmp_path / "log")))
    out = capsys.readouterr().out
    entries = [json.loads(line) for line in out.splitlines()]
    assert [(e["level"], e["message"]) for e in entries] == [("info", "hello"), ("warning", "careful \u2603")]
    assert (tmp_path / "log").read_text(encoding="utf-8") == out


def test_prefix_and_colours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    say(LogConfig(prefix=True, colors="on", file=str(tmp_path / "log")))
    assert capsys.readouterr().err.splitlines() == ["I hello", "\x1b[35mW careful \u2603\x1b[0m"]
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == ["I hello", "W careful \u2603"]


def test_what_is_announced_is_in_the_log_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal has it whatever the verbosity; a file as well, unless logging is off."""
    for verbosity, disable, there in ((3, False, True), (0, False, True), (3, True, False)):
        path = tmp_path / f"{verbosity}{disable}.log"
        config = LogConfig(verbosity=verbosity, disable=disable, file=str(path), colors="off")
        logs.set_up(config)
        logs.announce("address  http://here", config)
        assert capsys.readouterr().out == "address  http://here\n"
        assert ("address  http://here" in path.read_text()) == there
