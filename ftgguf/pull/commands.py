"""`ftgguf pull | list | show | rm | cp | create`: each takes its arguments and returns the exit status.

Output is Ollama's; errors are one line on stderr, `Error: ...`. Status: 0 done, 1 failed or wrong usage, 130
interrupted. `--json` writes what Ollama's HTTP API would answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ftgguf.arguments import BAD_USAGE, Parser
from ftgguf.flags.config import ModelConfig
from ftgguf.gguf import GGUFError
from ftgguf.pull import resolve
from ftgguf.pull.catalog import find_model, local_models
from ftgguf.pull.client import NetOptions
from ftgguf.pull.create import create as create_model
from ftgguf.pull.create import read_modelfile
from ftgguf.pull.demo import DemoError
from ftgguf.pull.errors import NameResolutionError, NotFound
from ftgguf.pull.modelfile import parameter_lines, parse_modelfile
from ftgguf.pull.names import HubName, OllamaName, UrlName
from ftgguf.pull.progress import Bars
from ftgguf.pull.session import Event, Report, Session
from ftgguf.pull.show import columns, describe_local, modelfile_of, show_json, show_text, tag_json
from ftgguf.pull.sizes import ago, human
from ftgguf.pull.store import Store, stored_name


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"Error: {message}\n{self.format_usage()}")


def _parser(name: str, description: str) -> _Parser:
    parser = _Parser(f"ftgguf {name}", description=description, allow_abbrev=False)
    parser.add_argument("--store", default="", metavar="DIR", help="folder of pulled models; 'ollama' is Ollama's own")
    return parser


def _network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--insecure", action="store_true", help="allow plain http to other machines")
    parser.add_argument("--offline", action="store_true", help="use what is on disk, never the network")
    parser.add_argument("-hft", "--hf-token", default="", metavar="TOKEN", help="token for Hugging Face (HF_TOKEN)")
    parser.add_argument("--json", action="store_true", help="progress as JSON lines on stdout")


def _run(action: Callable[[], int]) -> int:
    """`action()`, its errors in Ollama's words."""
    try:
        return action()
    except (NameResolutionError, DemoError, GGUFError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("", file=sys.stderr)
        return 130


def _json_report(event: Event) -> None:
    print(json.dumps(event_json(event)), flush=True)


def event_json(event: Event) -> dict[str, object]:
    """Ollama's progress object: zero fields are left out."""
    fields = {"status": event.status, "digest": event.digest, "total": event.total, "completed": event.completed}
    return {key: value for key, value in fields.items() if value}


def _session(args: argparse.Namespace, report: Report) -> Session:
    options = NetOptions(offline=args.offline, insecure=args.insecure)
    return Session(Store(args.store or None), options, report, args.hf_token)


def pull(argv: Sequence[str]) -> int:
    """`pull NAME`, or `pull -hf user/repo[:quant] [-hff FILE]`, or `pull -mu URL`: prints the file's path."""
    parser = _parser("pull", "Get a model, or what is missing or newer of it, and print its file's path.")
    parser.add_argument("name", nargs="?", default="", help="qwen3:30b, hf.co/user/repo:Q4_K_M, a URL, demo, stories")
    parser.add_argument("-hf", "-hfr", "--hf-repo", default="", metavar="REPO[:QUANT]", help="repository on the Hub")
    parser.add_argument("-hff", "--hf-file", default="", metavar="FILE", help="this file of the repository")
    parser.add_argument("-mu", "--model-url", default="", metavar="URL", help="a GGUF's address")
    _network(parser)
    args = parser.parse_args(argv)
    if bool(args.name) + bool(args.hf_repo) + bool(args.model_url) != 1:
        parser.error("give one model: NAME, -hf REPO or -mu URL")

    def action() -> int:
        bars = Bars()
        model = ModelConfig(path=args.name, url=args.model_url, hf_repo=args.hf_repo, hf_file=args.hf_file)
        try:
            with _session(args, _json_report if args.json else bars) as session:
                name = resolve.name_of(model)
                if isinstance(name, OllamaName | HubName | UrlName) and not args.offline:
                    path = session.store.model_path(resolve.fetch(session, name))
                else:
                    path = resolve.locate(session, name).path
        finally:
            bars.close()
        print(json.dumps({"path": str(path)}) if args.json else path)
        return 0

    return _run(action)


def list_models(argv: Sequence[str]) -> int:
    """`list [PREFIX]`: name, ID, size, age; newest first."""
    parser = _parser("list", "List the models on this disk: pulled, built in, and Ollama's.")
    parser.add_argument("prefix", nargs="?", default="", help="only names that begin with this")
    parser.add_argument("--json", action="store_true", help="as /api/tags answers")
    args = parser.parse_args(argv)

    def action() -> int:
        store = Store(args.store or None)
        if args.json:
            print(json.dumps({"models": [tag_json(store, model) for model in local_models(store, args.prefix)]}))
        else:
            print("\n".join(model_table(store, args.prefix)))
        return 0

    return _run(action)


def model_table(store: Store, prefix: str = "") -> list[str]:
    """The lines of `list`."""
    rows: list[tuple[str, ...]] = [("NAME", "ID", "SIZE", "MODIFIED")]
    now = time.time()
    for model in local_models(store, prefix):
        rows.append((model.name, model.digest[:12], human(model.size), ago(max(0.0, now - model.modified))))
    return columns(rows)


def show(argv: Sequence[str]) -> int:
    """`show NAME`: what is known about a model."""
    parser = _parser("show", "Show a model's numbers, experts, parameters, template and licence.")
    parser.add_argument("name")
    which = parser.add_mutually_exclusive_group()
    for part in ("license", "modelfile", "parameters", "system", "template"):
        which.add_argument(f"--{part}", dest="part", action="store_const", const=part, help=f"only the {part}")
    parser.add_argument("-v", "--verbose", action="store_true", help="all metadata, whole")
    parser.add_argument("--json", action="store_true", help="as /api/show answers")
    args = parser.parse_args(argv)

    def action() -> int:
        store = Store(args.store or None)
        resolve.meaning(args.name)  # a folder is no name, and says what is in it
        model = find_model(store, args.name, files=True)
        if model is None:
            raise NotFound(f"model '{args.name}' not found")
        found = describe_local(store, model, args.verbose)
        if args.json:
            print(json.dumps(show_json(found)))
            return 0
        texts = {
            "license": lambda: "\n".join(found.extras.licenses),
            "modelfile": lambda: modelfile_of(found),
            "parameters": lambda: "\n".join(parameter_lines(found.extras.params, 30)),
            "system": lambda: found.extras.system,
            "template": lambda: found.extras.template or found.jinja,
        }
        if args.part:
            print(texts[args.part]().rstrip("\n"))
            return 0
        path = str(model.path(store))
        print(f"{show_text(found)}  File\n    {path}\n\n{machine_text(path)}", end="")
        if args.verbose:
            print("  Metadata")
            print("\n".join(f"    {line}" for line in columns([(k, str(v)[:100]) for k, v in found.info.items()])))
        return 0

    return _run(action)


def machine_text(path: str) -> str:
    """`show`'s last section: where the model would go on this machine and how fast it would be (see `ftgguf plan`)."""
    from ftgguf.engine.plan import lines
    from ftgguf.flags import FlagError, parse_server
    from ftgguf.models.config import ModelError

    try:
        told = lines(parse_server(["-m", path], os.environ))[2:]
    except (FlagError, ModelError, GGUFError, MemoryError, OSError) as error:
        told = [f"it cannot be run: {error}"]
    return "  This machine\n" + "".join(f"    {line}\n" for line in told) + "\n"


def rm(argv: Sequence[str]) -> int:
    """`rm NAME...`: models of our store."""
    parser = _parser("rm", "Remove models, and the files that no other model needs.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    args = parser.parse_args(argv)

    def action() -> int:
        store, status = Store(args.store or None), 0
        for text in args.names:
            try:
                store.delete(stored_name(text))
                print(f"deleted '{text}'")
            except NameResolutionError as error:
                print(f"Error: {error}", file=sys.stderr)
                status = 1
        return status

    return _run(action)


def cp(argv: Sequence[str]) -> int:
    """`cp SOURCE TARGET`: another name for the same files."""
    parser = _parser("cp", "Give a model another name; nothing is copied but the name.")
    parser.add_argument("source")
    parser.add_argument("target")
    args = parser.parse_args(argv)

    def action() -> int:
        store = Store(args.store or None)
        source = store.get(stored_name(args.source))
        if source is None:
            raise NotFound(f"model '{args.source}' not found")
        store.copy(source, stored_name(args.target))
        print(f"copied '{args.source}' to '{args.target}'")
        return 0

    return _run(action)


def create(argv: Sequence[str]) -> int:
    """`create NAME -f Modelfile`."""
    parser = _parser("create", "Make a model from a Modelfile: FROM, ADAPTER, PARAMETER, SYSTEM, TEMPLATE, LICENSE ...")
    parser.add_argument("name")
    parser.add_argument("-f", "--file", default="Modelfile", metavar="FILE", help="the Modelfile")
    _network(parser)
    args = parser.parse_args(argv)

    def action() -> int:
        path, bars = Path(args.file), Bars()
        modelfile = parse_modelfile(read_modelfile(path))
        try:
            with _session(args, _json_report if args.json else bars) as session:
                create_model(session, stored_name(args.name), modelfile, path.absolute().parent)
        finally:
            bars.close()
        return 0

    return _run(action)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "pull": pull,
    "list": list_models,
    "ls": list_models,
    "show": show,
    "rm": rm,
    "cp": cp,
    "create": create,
}
