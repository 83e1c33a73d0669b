"""Shell completion: what is suggested, and that a real bash asks for it and shows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftgguf.pull.demo import resolve_stories
from ftgguf.terminal.completion import SCRIPTS, script, suggestions


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with one model, and no other."""
    from ftgguf.pull import commands

    for name in ("XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "Modelfile").write_text(f"FROM {resolve_stories()}\n")
    assert commands.create(["pirate:8x", "-f", str(tmp_path / "Modelfile")]) == 0
    return tmp_path


def test_suggestions() -> None:
    assert suggestions(["s"]) == ["serve", "show", "stop"]
    assert "complete" not in suggestions([""])
    assert suggestions(["run", "p"]) == ["pirate:8x"]
    assert set(suggestions(["run", ""])) == {"pirate:8x", "stories", "demo"}
    assert suggestions(["rm", ""]) == ["pirate:8x"]
    assert suggestions(["serve", "-m", "sto"]) == ["stories"]
    assert "--ctx-size" in suggestions(["serve", "--ctx"])
    assert suggestions(["rm", "--"]) == []
    assert suggestions(["completion", "z"]) == ["zsh"]


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert script(["tcsh"]) == 1
    assert "bash|zsh|fish" in capsys.readouterr().err
    assert script(["fish"]) == 0
    assert capsys.readouterr().out == SCRIPTS["fish"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "shown"), [("ftgguf sto", "stop"), ("ftgguf run pirate:", "8x"), ("ftgguf rm ", "pirate:8x")]
)
def test_bash(home: Path, line: str, shown: str) -> None:
    """With bash's own word breaks, which cut names at the colon."""
    command = home / "ftgguf"
    root = Path(__file__).parents[2]
    command.write_text(
        f"#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -c 'import sys; from ftgguf.cli import main; "
        'sys.exit(main(sys.argv[1:]))\' "$@"\n'
    )
    command.chmod(0o755)
    text = (
        SCRIPTS["bash"] + f"COMP_LINE='{line}'; COMP_POINT={len(line)}; _ftgguf; printf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    )
    env = os.environ | {"PATH": f"{home}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == shown, done.stderr
