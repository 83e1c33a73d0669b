"""`ftgguf run` as a user meets it: real processes on the stories model; the text is libllama's (compat.oracle)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from compat.oracle import Oracle
from ftgguf.pull.demo import resolve_stories
from ftgguf.terminal.chat import Chat
from ftgguf.terminal.main import UsageError, parse_arguments
from ftgguf.terminal.session import Answer, AnswerError, Show

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


@pytest.mark.parametrize(
    ("words", "model", "prompt", "flags"),
    [
        (["demo", "why", "blue?", "-c", "512", "--temp", "0"], "demo", "why blue?", "-m demo -c 512 --temp 0"),
        (["demo", "-n", "8", "-t", "1", "why blue?"], "demo", "why blue?", "-m demo -n 8 -t 1"),
        (["-n", "8", "demo", "why", "--temp", "0", "blue?"], "demo", "why blue?", "-m demo -n 8 --temp 0"),
        (["demo", "--no-mmap", "hi", "--n_predict", "3", "you"], "demo", "hi you", "-m demo --no-mmap --n_predict 3"),
        (["demo", "--control-vector-layer-range", "1", "2", "hi"], "demo", "hi",
         "-m demo --control-vector-layer-range 1 2"),
        (["demo", "-c", "512", "--", "-1 is", "--what?"], "demo", "-1 is --what?", "-m demo -c 512"),
        (["-m", "x.gguf", "-c", "8", "Hello", "you"], "", "Hello you", "-m x.gguf -c 8"),
        (["Hello", "-hf", "user/repo:Q8_0"], "", "Hello", "-hf user/repo:Q8_0"),
        (["demo", "hi", "--nonsense", "x"], "demo", "hi x", "-m demo --nonsense"),
    ],
)  # fmt: skip
def test_the_prompt_may_stand_anywhere(words: list[str], model: str, prompt: str, flags: str) -> None:
    """As `ollama run` takes its flags (cobra's interspersed ones); how many values a flag has is the flag table's."""
    a = parse_arguments(words)
    assert (a.model, a.prompt, " ".join(a.flags)) == (model, prompt, flags)


def test_our_own_options_may_stand_anywhere() -> None:
    a = parse_arguments(["--verbose", "demo", "-n", "8", "--system", "Be brief.", "hi"])
    assert (a.verbose, a.raw, a.system, a.prompt) == (True, False, "Be brief.", "hi")
    with pytest.raises(UsageError, match="no model"):
        parse_arguments(["--verbose"])
    with pytest.raises(UsageError, match="no place for a system"):
        parse_arguments(["demo", "--raw", "--system", "x"])
    with pytest.raises(UsageError, match="--system"):
        parse_arguments(["demo", "--system"])


def test_a_prompt_behind_the_flags() -> None:
    done = run("stories", "-n", "10", "--temp", "0", "--raw", "Once upon a time")
    assert done.stdout == "Once upon a time" + story("Once upon a time", 10) + "\n"


class Recorder:
    """Stands for a session: a token for each character, a context of 100; what was asked is in `asked`."""

    planner = object()
    n_ctx = 100

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def room(self) -> int:
        return 25

    def length(self, messages: list[dict[str, Any]]) -> int:
        return sum(len(message["content"]) for message in messages)

    def answer(self, messages: list[dict[str, Any]], show: Show) -> Answer:
        if self.length(messages) >= self.n_ctx:
            raise AnswerError("request exceeds the available context size")
        self.asked.append([message["content"] for message in messages])
        return Answer(text="a" * 10)


def test_a_full_context_forgets_the_oldest_turns_and_says_so() -> None:
    """The system message stays, whole turns go, what is left leaves a quarter of the context for the answer."""
    session, said = Recorder(), []
    chat = Chat(session, "SYSTEM", False, said.append)  # type: ignore[arg-type]
    for letter in "uvw":
        chat.say(letter * 14, lambda _text, _reasoning: None)
    assert said == []
    assert [len(asked) for asked in session.asked] == [2, 4, 6]
    chat.say("x" * 14, lambda _text, _reasoning: None)  # 6 + 3 * 24 + 14 = 92 > 75, without the first turn 68
    assert session.asked[-1] == ["SYSTEM", "v" * 14, "a" * 10, "w" * 14, "a" * 10, "x" * 14]
    assert said == ["(the oldest turn was forgotten: the context has 100 tokens, -c gives more)"]
    chat.say("y" * 60, lambda _text, _reasoning: None)
    assert session.asked[-1] == ["SYSTEM", "y" * 60]
    assert "3 turns were forgotten" in said[-1]


def test_a_question_longer_than_the_context_costs_no_turn() -> None:
    session, said = Recorder(), []
    chat = Chat(session, "", False, said.append)  # type: ignore[arg-type]
    chat.say("u" * 14, lambda _text, _reasoning: None)
    before = list(chat.messages)
    assert chat.say("z" * 200, lambda _text, _reasoning: None) is None
    assert chat.messages == before
    assert said == ["request exceeds the available context size; /clear starts over"]
    assert chat.say("z" * 90, lambda _text, _reasoning: None) is not None  # no room is left, but it fits
    assert len(session.asked[-1]) == 1


def test_what_a_model_comes_with_is_applied(tmp_path: Path) -> None:
    """SYSTEM and MESSAGE of a Modelfile, as `ollama run` applies them; --system replaces the one and not the other.

    The template writes every role, so that the prompt's length in tokens tells which messages are there; it is what
    libllama counts for the same text.
    """
    (tmp_path / "Modelfile").write_text(
        "FROM stories\nSYSTEM once upon a time\nMESSAGE user hi\nMESSAGE assistant ho\n"
    )
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    store = ["--store", str(tmp_path / "store")]
    made = subprocess.run(
        [sys.executable, "-m", "ftgguf", "create", "kind", "-f", str(tmp_path / "Modelfile"), *store],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    asked = ["kind", "you", *store, "--chat-template", template, "-n", "1", "-t", "1", "--verbose"]
    for options, text in (
        ([], "system once upon a time user hi assistant ho user you "),
        (["--system", "be"], "system be user hi assistant ho user you "),
    ):
        done = run(*asked, *options)
        with Oracle(resolve_stories()) as oracle:
            count = len(oracle.tokenize(text))
        assert f"prompt:     {count} tokens" in done.stderr, done.stderr
        assert "chat template: the one given by --chat-template" in done.stderr
        assert "only Ollama's API" not in done.stderr


def test_a_long_chat_goes_on(tmp_path: Path) -> None:
    """The real thing: six turns in a context that holds three, without an error."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TERM": "dumb"}
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    arguments = ["-m", "ftgguf", "run", "stories", "-c", "256", "-n", "20", "--chat-template", template, "-t", "1"]
    child = pexpect.spawn(sys.executable, arguments, cwd=str(ROOT), env=env, encoding="utf-8", timeout=60, echo=False)
    child.expect(">>> ")
    for _ in range(6):
        child.sendline("once upon a time there was a little girl who " * 3)
        child.expect(">>> ")
        assert "exceeds" not in child.before
    assert "forgotten: the context has 256 tokens" in child.before
    child.sendline("/bye")
    child.expect(pexpect.EOF)
