"""`ftgguf run MODEL [PROMPT ...] [flags]`: arguments, loading with a progress bar, and the choice of mode."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftgguf.flags import ServerConfig
    from ftgguf.terminal.session import Session

USAGE = """usage: ftgguf run MODEL [PROMPT ...] [options] [llama-server flags]
       ftgguf run -m FILE | -hf REPO[:QUANT] [PROMPT ...]

With a prompt (or text piped in): one answer on standard output. Without: a chat; /help lists its commands.

  --verbose        print speeds after each answer
  --system TEXT    system message
  --raw            continue the prompt as it is, without the chat template

MODEL is a .gguf file, `demo`, `stories`, a name as Ollama has them (qwen3:30b), or hf.co/user/repo:Q4_K_M; it is pulled
if it is not here. Options and llama-server's flags (-c, -t, --temp, -n ...) may stand before, between and behind MODEL
and PROMPT; what follows `--` is the prompt, whatever it begins with.
"""


class UsageError(ValueError):
    """What is wrong with the arguments; one line."""


NAMES_MODEL = frozenset(("-m", "--model", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url"))
"""Flags that say which model it is, as llama.cpp's programs take it."""


@dataclasses.dataclass(slots=True)
class Arguments:
    """`model` is empty where a flag names it; `flags` is what llama-server's parser gets."""

    model: str
    prompt: str
    flags: list[str]
    verbose: bool = False
    system: str = ""
    """--system, else what the model comes with."""
    raw: bool = False
    examples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Messages that the model comes with: they stand before the conversation."""


def parse_arguments(argv: list[str]) -> Arguments:
    """Options and flags may stand anywhere; the first other word is the model, the rest the prompt.

    How many values a flag takes is in the flag table; an unknown flag is handed on, for the parser to refuse by name.
    """
    from ftgguf.flags.table import by_spelling

    table = by_spelling()
    words: list[str] = []
    out = Arguments("", "", [])
    named = False
    rest = iter(argv)
    for word in rest:
        known = table.get(word.replace("_", "-") if word.startswith("--") else word)
        if word == "--":
            words += rest
        elif word == "--verbose":
            out.verbose = True
        elif word == "--raw":
            out.raw = True
        elif word == "--system":
            out.system = next(rest, "")
            if not out.system:
                raise UsageError("--system needs a text")
        elif known is not None:
            flag = known[0]
            named = named or word in NAMES_MODEL
            out.flags += [word, *itertools.islice(rest, flag.takes_value + bool(flag.hint2))]
        elif word.startswith("-") and len(word) > 1:
            out.flags.append(word)
        else:
            words.append(word)
    if out.raw and out.system:
        raise UsageError("--raw has no place for a system message: write it into the prompt")
    if not words and not named:
        raise UsageError("no model given: ftgguf run MODEL [PROMPT]")
    if not named:
        out.model = words.pop(0)
        out.flags = ["-m", out.model, *out.flags]
    out.prompt = " ".join(words)
    return out


def main(argv: list[str]) -> int:
    """Exit status 0, 1 on an error (told on stderr), 130 when an answer was interrupted in one-shot mode."""
    from ftgguf.chat.template import ChatTemplateError
    from ftgguf.flags import ActionRequested, FlagError, parse_server
    from ftgguf.gguf import GGUFError
    from ftgguf.models.config import ModelError
    from ftgguf.pull.resolve import ONLY_OLLAMA, DemoError, NameResolutionError, served_with_bar
    from ftgguf.server.errors import ApiError
    from ftgguf.terminal import chat
    from ftgguf.terminal.session import AnswerError

    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 1
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        arguments = parse_arguments(argv)
        config = parse_server(["-np", "1", *arguments.flags], os.environ)
        told = config.warnings
        config, extras = served_with_bar(config)
        for warning in dict.fromkeys((*told, *config.warnings)):
            if not warning.endswith(ONLY_OLLAMA):
                print(warning, file=sys.stderr)
        arguments.system = arguments.system or extras.system
        arguments.examples = [dict(message) for message in extras.messages]
        piped = "" if sys.stdin.isatty() else sys.stdin.read()
        prompt = "\n".join(part for part in (arguments.prompt, piped.rstrip("\n")) if part)
        if not prompt and not sys.stdin.isatty():
            raise UsageError("the prompt is empty: nothing was given and nothing was piped in")
        session = open_session(config, arguments.raw, arguments.verbose)
        if prompt:
            return chat.one_shot(session, prompt, arguments)
        return chat.interactive(session, arguments)
    except ActionRequested as action:
        print(action.text)
        return 0
    except UsageError as error:
        print(f"ftgguf run: {error}", file=sys.stderr)
        return 1
    except (FlagError, NameResolutionError, DemoError, GGUFError, ModelError) as error:
        print(error, file=sys.stderr)
        return 1
    except (ChatTemplateError, AnswerError, ApiError, MemoryError, ValueError) as error:
        print(f"ftgguf run: {error}", file=sys.stderr)
        return 1


def open_session(config: ServerConfig, raw: bool, verbose: bool = False) -> Session:
    """Load the model in this process, with the file's sampling defaults where no flag was given."""
    from ftgguf.chat.request import ChatPlanner
    from ftgguf.engine.load import load_engine, open_model
    from ftgguf.engine.sampler import sampling_defaults
    from ftgguf.server.process import model_templates
    from ftgguf.server.startup import no_gpu, template_text
    from ftgguf.terminal.session import Session
    from ftgguf.vocab import Vocab

    gguf = open_model(config)
    given = {k: v for k, v in sampling_defaults(gguf).items() if f"sampling.{k}" not in config.given}
    config = dataclasses.replace(config, sampling=msgspec.structs.replace(config.sampling, **given))
    with _loading_bar() as progress:
        engine = load_engine(config, progress)
    if missing := no_gpu(config, engine.info):
        print(missing, file=sys.stderr)
    vocab = Vocab.load(gguf)
    templates = model_templates(config, gguf, vocab)
    if verbose:
        print(f"chat template: {template_text(config, templates)}", file=sys.stderr)
    planner = None if raw or not templates.explicit else ChatPlanner(templates, config.chat)
    if planner is None and not raw and sys.stderr.isatty():
        print("This model has no chat template: it continues your text as it is.", file=sys.stderr)
    return Session(engine, vocab, planner, config)


@contextmanager
def _loading_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr that goes when loading is done; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading", total=1.0)
        yield lambda stage, fraction: bars.update(task, description=stage, completed=fraction)
