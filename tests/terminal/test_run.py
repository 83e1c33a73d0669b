"""`ftgguf run` as a user meets it: real processes on the stories model; the text is libllama's (compat.oracle)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from compat.oracle import Oracle
from ftgguf.pull.demo import resolve_stories
from ftgguf.terminal.main import UsageError, parse_arguments

RUN = [sys.executable, "-m", "ftgguf", "run"]
ROOT = Path(__file__).parents[2]


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], input=text, capture_output=True, text=True, timeout=120, cwd=ROOT)


def story(prompt: str, n: int) -> str:
    with Oracle(resolve_stories(), n_ctx=256) as oracle:
        return oracle.greedy(oracle.tokenize(prompt), n).text.decode()


def test_one_answer_is_libllamas_text() -> None:
    done = run("stories", "Once", "upon a time", "-n", "40", "--temp", "0", "--raw", "--verbose")
    assert done.returncode == 0
    assert done.stdout == "Once upon a time" + story("Once upon a time", 40) + "\n"
    assert "generation: 40 tokens" in done.stderr


def test_piped_text_is_the_prompt() -> None:
    done = run("stories", "--raw", "-n", "10", "--temp", "0", text="Once upon a time\n")
    assert done.stdout == "Once upon a time" + story("Once upon a time", 10) + "\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stories"], "ftgguf run: the prompt is empty"),
        (["no-such-model.gguf", "hi"], "no-such-model.gguf"),
        ([str(ROOT / "pyproject.toml"), "hi"], "pyproject.toml"),
        (["stories", "hi", "--nonsense"], "error: invalid argument: --nonsense"),
        (["stories", "x " * 3000], "exceeds the available context size"),
    ],
)
def test_errors_are_one_line_and_status_1(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def chat(tmp_path: Path) -> pexpect.spawn:
    """A chat on a pseudo-terminal, its history file in a folder of its own."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TERM": "dumb"}
    arguments = ["-m", "ftgguf", "run", "stories", "--temp", "0"]
    child = pexpect.spawn(sys.executable, arguments, cwd=str(ROOT), env=env, encoding="utf-8", timeout=60, echo=False)
    child.expect(">>> ")
    return child


def test_chat_commands(chat: pexpect.spawn) -> None:
    for command, expected in (
        ("/help", "Ctrl-C stops an answer"),
        ("/nonsense", "Unknown command"),
        ("/verbose", "on"),
    ):
        chat.sendline(command)
        chat.expect(expected)
        chat.expect(">>> ")
    chat.sendline("/bye")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: pexpect.spawn) -> None:
    chat.sendline("Once upon a time")
    chat.expect("there was")
    chat.sendintr()
    chat.expect(">>> ")
    chat.sendline("/help")
    chat.expect("forget the conversation")
    chat.expect(">>> ")
    chat.sendeof()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


def test_arguments() -> None:
    """Our options anywhere, the prompt before the first flag, everything else handed on."""
    a = parse_arguments(["--verbose", "demo", "why", "blue?", "-c", "512", "--raw", "--temp", "0"])
    assert (a.model, a.prompt, a.verbose, a.raw) == ("demo", "why blue?", True, True)
    assert a.flags == ["-c", "512", "--temp", "0"]
    with pytest.raises(UsageError, match="no model"):
        parse_arguments(["--verbose"])
    with pytest.raises(UsageError, match="--system"):
        parse_arguments(["demo", "--system"])
