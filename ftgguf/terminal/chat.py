"""What `ftgguf run` shows and reads: one answer, or a chat with history and commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftgguf.server.errors import ApiError
from ftgguf.terminal.session import Answer, AnswerError, Session, Show, speeds

if TYPE_CHECKING:
    from ftgguf.terminal.main import Arguments

HELP = """/help            this list
/clear           forget the conversation (the system message stays)
/system TEXT     set the system message and start over; without TEXT, show it
/verbose         turn speeds after each answer on or off
/bye             leave (also Ctrl-D)
\"\"\"             begin a message of several lines; end it with \"\"\"
Ctrl-C stops an answer, not the program."""

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def printer() -> Show:
    """Text to stdout as it comes; reasoning dimmed, and only where a person reads."""
    tty = sys.stdout.isatty()
    dim = False

    def show(text: str, reasoning: bool) -> None:
        nonlocal dim
        if reasoning and not tty:
            return
        if reasoning != dim:
            sys.stdout.write(DIM if reasoning else PLAIN + "\n")
            dim = reasoning
        sys.stdout.write(text)
        sys.stdout.flush()

    return show


def one_shot(session: Session, prompt: str, arguments: Arguments) -> int:
    """Answer `prompt` on stdout; 130 if it was interrupted."""
    if session.planner is None:
        print(prompt, end="", flush=True)
        messages = []  # plain text goes on as it is
    else:
        messages = head(arguments.system, arguments.examples)
    answer = session.answer([*messages, {"role": "user", "content": prompt}], printer())
    _end(answer, arguments.verbose)
    return 130 if answer.interrupted else 0


def head(system: str, examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What stands before every conversation: the system message, then the model's own messages."""
    return [*([{"role": "system", "content": system}] if system else []), *examples]


def _end(answer: Answer, verbose: bool) -> None:
    if sys.stdout.isatty() and answer.reasoning and not answer.text:
        sys.stdout.write(PLAIN)
    print(flush=True)
    if answer.full:
        print("(cut off: the context is full; -c gives a larger one)", file=sys.stderr)
    if verbose:
        print(speeds(answer), file=sys.stderr)


class Chat:
    """The state of an interactive chat: messages so far, and the commands that change it."""

    def __init__(
        self,
        session: Session,
        system: str,
        verbose: bool,
        write: Callable[[str], Any] = print,
        examples: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.session = session
        self.system = system
        self.verbose = verbose
        self.write = write
        self.examples = examples
        self.messages: list[dict[str, Any]] = []

    def command(self, line: str) -> bool:
        """Run a line that begins with `/`; False to leave."""
        name, _, argument = line.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name in ("/help", "/?"):
            self.write(HELP)
        elif name == "/clear":
            self.messages = []
            self.write("Conversation forgotten.")
        elif name == "/system":
            if argument.strip():
                self.system, self.messages = argument.strip(), []
                self.write("System message set; conversation forgotten.")
            else:
                self.write(self.system or "No system message.")
        elif name == "/verbose":
            self.verbose = not self.verbose
            self.write(f"Speeds {'on' if self.verbose else 'off'}.")
        else:
            self.write(f"Unknown command '{name}'; /help lists them.")
        return True

    def say(self, text: str, show: Show) -> Answer | None:
        """Ask and answer; on an error the question is taken back and the reason written."""
        question = {"role": "user", "content": text}
        try:
            turns = self._fitting([*self.messages, question])
            if forgotten := (len(self.messages) + 1 - len(turns)) // 2:
                turn = "turn was" if forgotten == 1 else f"{forgotten} turns were"
                self.write(f"(the oldest {turn} forgotten: the context has {self.session.n_ctx} tokens, -c gives more)")
            answer = self.session.answer([*self._head(), *turns], show)
        except (AnswerError, ApiError) as error:
            self.write(f"{error}" + ("; /clear starts over" if self.messages else ""))
            return None
        self.messages = turns
        if self.session.planner is None:
            self.messages = []  # plain continuation: no turns to remember
        else:
            self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def _head(self) -> list[dict[str, Any]]:
        return head(self.system, self.examples) if self.session.planner is not None else []

    def _fitting(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The latest of `turns` that leave room for an answer beside the system message: whole turns go, oldest first.

        All of them where even the question alone has no place, for the error to say so.
        """
        most = self.session.n_ctx - self.session.room()
        for first in range(0, len(turns), 2):
            length = self.session.length([*self._head(), *turns[first:]])
            if length <= most or (first == len(turns) - 1 and length < self.session.n_ctx):
                return turns[first:]
        return turns


def interactive(session: Session, arguments: Arguments) -> int:
    """The chat loop on a terminal."""
    _history()
    chat = Chat(session, arguments.system, arguments.verbose, examples=arguments.examples)
    print("Type a message; /help for commands.")
    while True:
        try:
            line = _read()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /bye leaves)")
            continue
        if not line.strip():
            continue
        if line.startswith("/"):
            if not chat.command(line.strip()):
                return 0
            continue
        answer = chat.say(line, printer())
        if answer is not None:
            _end(answer, chat.verbose)


def _read() -> str:
    line = input(">>> ")
    if not line.startswith('"""'):
        return line
    lines = [line[3:]]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(input("... "))
    return "\n".join(lines).rstrip()[:-3]


def _history() -> None:
    """Line editing with a history file, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    import atexit
    import contextlib

    from ftgguf.pull.demo import cache_folder

    path = cache_folder().parent / "history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        readline.read_history_file(path)
    readline.set_history_length(1000)

    def save() -> None:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)

    atexit.register(save)
