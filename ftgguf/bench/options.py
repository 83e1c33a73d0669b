"""The command line of `ftgguf bench`: llama-bench's test flags, the comparison's own, any flag of `ftgguf serve`."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftgguf.arguments import at_least, seconds, whole
from ftgguf.bench.plan import SpeedTest, int_list, make_tests, pair
from ftgguf.flags.table import by_spelling

FORMATS = ("md", "csv", "json", "jsonl")
PEERS = ("llama.cpp", "ollama")

USAGE = """usage: ftgguf bench [-m FILE] [options]              speed of ftgguf here, as llama-bench measures it
       ftgguf bench [-m FILE] --against PEER ...     the same work on ftgguf and a peer, in turns
       ftgguf bench trace [TRACE ...] ...            replay agent sessions over HTTP, alone or against a peer
       ftgguf bench bw | cache | kernels ...         link and memory speed, expert caches, kernels: see their --help

-m takes a .gguf file, demo or stories (default: demo). Every flag of `ftgguf serve` may follow: it goes to our engine,
and to the peer where the peer has it.

tests (lists 1,2,4 and ranges 8-64*2 give one row each):
  -p, --n-prompt N        prompt tokens evaluated in batches (default: 512; over HTTP 512,8192,32768)
  -n, --n-gen N           tokens generated one by one (default: 128)
  -pg PP,TG               both in one test
  -d, --n-depth N         tokens of context before the test (default: 0; over HTTP 8192,32768)
  -r, --repetitions N     timed repetitions of each test; rounds of a comparison (default: 5; trace: 2)
  --no-warmup             no untimed run before the first repetition
  -b N  -ub N  -t N       batch, physical batch, threads; -ctk T -ctv T: type of the KV cache
  --seed N                of the random tokens (default: 1)

output:
  -o, --output FORMAT     md, csv, json or jsonl on standard output (default: md); a report has md and json
  --html FILE             the report as one self-contained page with plots
  --report FILE           the report as JSON, also when interrupted

comparison:
  --against PEER          llama.cpp, ollama, or the URL of any OpenAI server
  --llama-server PATH     the llama-server to compare with (default: the one on PATH, else libllama in process)
  --in-process            libllama of llama-cpp-python in process even where a llama-server is there
  --peer xllamacpp        the llama-server of the xllamacpp wheel (AVX2 build: no headline ratio on better machines)
  --peer-model NAME       what the peer calls the model (ollama, URL)
  --peer-key KEY          API key for the peer (URL); reports do not show it
  --peer-args "FLAGS"     further llama-server flags for the peer alone
  --workload LIST         over HTTP: pp, tg, depth, suffix, streams (default: all)
  --longest S             over HTTP: seconds that one prompt may take, by a first estimate; longer ones are left out
                          and named (default: 60)
  --limit S               no round but the first is begun that would end later than S seconds after the start; over
                          HTTP the search for the peer's placement takes half of them at most (default: no limit)
  --timeout S             seconds without an answer after which a side counts as hung (default: 600)

trace (TRACE: recordings of `ftgguf serve --record`, or files of OpenAI messages; default: the package's sessions):
  --sessions N            the first N sessions alone
  --turns N               N turns of each session at most, the edited and the side request in its middle included
  -n N                    tokens generated for a turn at most (default: 128)

exit status: 0 measured and the outputs agree; 1 bad usage or our side failed; 2 the outputs differ by more than noise;
3 not comparable (file, tokens, budget or instruction sets differ); 4 no peer, or the peer failed; 130 interrupted.
"""

WORKLOADS = ("pp", "tg", "depth", "suffix", "streams")
HTTP_PROMPTS = (512, 8192, 32768)
"""Prompt lengths of a comparison over HTTP; deeper contexts and short suffixes go on top of these."""


class UsageError(ValueError):
    """The command line is wrong; the text is one line."""


@dataclass(slots=True)
class Options:
    """The parsed command line. `engine` holds the flags of `ftgguf serve`, in order."""

    model: str = "demo"
    prompts: list[int] = field(default_factory=list)
    gens: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    repetitions: int = 0
    """0 until `parse` sets the default: 5, sessions 2."""
    warm_up: bool = True
    seed: int = 1
    output: str = "md"
    html: str = ""
    report: str = ""
    against: str = ""
    llama_server: str = ""
    in_process: bool = False
    peer: str = ""
    peer_model: str = ""
    peer_key: str = ""
    peer_args: str = ""
    workloads: tuple[str, ...] = WORKLOADS
    timeout: float = 600.0
    longest: float = 60.0
    limit: float = math.inf
    started: float = field(default_factory=time.monotonic)
    traces: list[str] = field(default_factory=list)
    sessions: int | None = None
    turns: int | None = None
    """Of each session at most, as `--sessions` bounds them; None: all."""
    given: set[str] = field(default_factory=set)
    """Flags of ours as they were spelled."""
    engine: list[str] = field(default_factory=list)
    varied: dict[str, list[str]] = field(default_factory=dict)
    """Engine flags that were given several values (`-t 1,2`): one instance of the engine for each combination."""

    @property
    def tests(self) -> tuple[SpeedTest, ...]:
        return make_tests(self.prompts or [512], self.gens or [128], self.pairs, self.depths or [0])

    def time_for(self, seconds: float) -> bool:
        """Whether what takes `seconds` from now on ends within `--limit`."""
        return time.monotonic() + seconds <= self.started + self.limit

    def engine_lines(self) -> list[list[str]]:
        """Engine flags of each combination of the varied ones."""
        lines = []
        for values in itertools.product(*self.varied.values()):
            given = [[flag, value] for flag, value in zip(self.varied, values, strict=True)]
            lines.append([*self.engine, *itertools.chain(*given)])
        return lines


def _choice(allowed: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"'{text}' is none of {', '.join(allowed)}")
        return text

    return parse


_positive = at_least(1)


def _workloads(text: str) -> tuple[str, ...]:
    return tuple(_choice(WORKLOADS)(part) for part in text.split(","))


_LISTS = {"-p": "prompts", "--n-prompt": "prompts", "-n": "gens", "--n-gen": "gens", "-d": "depths"}
_LISTS["--n-depth"] = "depths"
_SWITCHES: dict[str, tuple[str, bool]] = {"--no-warmup": ("warm_up", False), "--in-process": ("in_process", True)}
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "-m": ("model", str),
    "--model": ("model", str),
    "-r": ("repetitions", _positive),
    "--repetitions": ("repetitions", _positive),
    "--seed": ("seed", whole),
    "-o": ("output", _choice(FORMATS)),
    "--output": ("output", _choice(FORMATS)),
    "--html": ("html", str),
    "--report": ("report", str),
    "--against": ("against", str),
    "--llama-server": ("llama_server", str),
    "--peer": ("peer", _choice(("xllamacpp",))),
    "--peer-model": ("peer_model", str),
    "--peer-key": ("peer_key", str),
    "--peer-args": ("peer_args", str),
    "--workload": ("workloads", _workloads),
    "--sessions": ("sessions", _positive),
    "--turns": ("turns", _positive),
    "--timeout": ("timeout", seconds),
    "--longest": ("longest", seconds),
    "--limit": ("limit", seconds),
}
_VARIED = (
    *("-b", "--batch-size", "-ub", "--ubatch-size", "-t", "--threads", "-ctk", "--cache-type-k", "-ctv"),
    *("--cache-type-v", "-ngl", "--n-gpu-layers", "-ncmoe", "--n-cpu-moe"),
)


OWN = frozenset((*_LISTS, *_SWITCHES, *_VALUES, "-pg"))
"""Our flags; the others are the server's."""
_PEER = ("--llama-server", "--in-process", "--peer", "--peer-model", "--peer-key", "--peer-args")
_HTTP = ("--workload", "--longest")
_SPEED = ("-p", "--n-prompt", "-d", "--n-depth", "-pg", "--no-warmup", "--seed", "--in-process")
"""What sessions have no use for."""


def parse(argv: Sequence[str], *, positional: bool = False) -> Options:
    """The options of `argv`. `positional`: bare words are trace files. Raises UsageError."""
    options = Options()
    default = 2 if positional else 5
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if flag in OWN:
            options.given.add(flag)
        if flag in _SWITCHES:
            setattr(options, *_SWITCHES[flag])
        elif not flag.startswith("-"):
            if not positional:
                raise UsageError(f"'{flag}' is no flag: the model goes after -m")
            options.traces.append(flag)
        elif flag in _LISTS or flag in _VALUES or flag == "-pg" or flag in _VARIED:
            if not rest:
                raise UsageError(f"{flag} needs a value")
            _take(options, flag, rest.pop(0))
        else:
            _engine_flag(options, flag, rest)
    if not positional and (options.sessions or options.turns):
        raise UsageError("--sessions and --turns are for `ftgguf bench trace`")
    options.repetitions = options.repetitions or default
    for name in ("prompts", "gens", "depths"):  # a length given twice is one row
        setattr(options, name, list(dict.fromkeys(getattr(options, name))))
    _check_given(options, positional)
    _check(options, positional)
    return options


def _take(options: Options, flag: str, text: str) -> None:
    try:
        if flag in _LISTS:
            getattr(options, _LISTS[flag]).extend(int_list(text))
        elif flag == "-pg":
            options.pairs.append(pair(text))
        elif flag in _VARIED:
            options.varied.setdefault(flag, []).extend(text.split(","))
        else:
            name, convert = _VALUES[flag]
            setattr(options, name, convert(text))
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _engine_flag(options: Options, flag: str, rest: list[str]) -> None:
    found = by_spelling().get(flag.replace("_", "-") if flag.startswith("--") else flag)
    if found is None:
        raise UsageError(f"unknown flag {flag}: see `ftgguf bench --help`; the flags of `ftgguf serve` go too")
    options.engine.append(flag)
    if found[0].takes_value:
        if not rest:
            raise UsageError(f"{flag} needs a value")
        options.engine.append(rest.pop(0))


def _check_given(options: Options, trace: bool) -> None:
    """No flag is without effect. Raises UsageError."""
    against, named = options.against, options.given.intersection
    if trace and (odd := named((*_SPEED, *_HTTP))):
        raise UsageError(f"{_words(odd)}: of no effect on sessions (`ftgguf bench trace`)")
    if not against and (odd := named(_PEER if trace else (*_PEER, *_HTTP, "--limit", "--timeout"))):
        raise UsageError(f"{_words(odd)}: only in a comparison, with --against PEER")
    if against in PEERS[:1] and (odd := named(("--peer-model", "--peer-key"))):
        raise UsageError(f"{_words(odd)}: only with --against ollama or a URL")
    if against and against not in PEERS[:1] and (odd := named(("--in-process", "--peer", "--peer-args"))):
        raise UsageError(f"{_words(odd)}: only with --against llama.cpp")
    if options.in_process and options.peer:
        raise UsageError("--peer is a peer over HTTP: it does not go with --in-process")


def check_transport(options: Options, http: bool) -> None:
    """No flag of a comparison is without effect over HTTP (`http`), or in process. Raises UsageError."""
    if http and "-pg" in options.given:
        raise UsageError("-pg: over HTTP there is no such test; give -p and -n, or --in-process")
    if not http and (odd := options.given.intersection((*_HTTP, "--peer-args"))):
        raise UsageError(
            f"{_words(odd)}: only over HTTP, and libllama is measured in process here; give --llama-server PATH"
        )


def _words(flags: Iterable[str]) -> str:
    return ", ".join(sorted(flags))


def _check(options: Options, trace: bool) -> None:
    against = options.against
    if against and against not in PEERS and not against.startswith(("http://", "https://")):
        raise UsageError(f"--against takes llama.cpp, ollama or the URL of a server, not '{against}'")
    if options.llama_server and (against != "llama.cpp" or options.peer):
        raise UsageError("--llama-server goes with --against llama.cpp, and without --peer")
    if options.llama_server and options.in_process:
        raise UsageError("--llama-server is a peer over HTTP: it does not go with --in-process")
    for flag, name in (("--html", options.html), ("--report", options.report)):
        if name and (Path(name).is_dir() or not os.access(Path(name).parent, os.W_OK)):
            raise UsageError(f"{flag} {name}: no file can be written there")
    if not options.tests:
        raise UsageError("nothing to measure: -p and -n are 0")
    report = "sessions are" if trace else "a comparison is"
    if (against or trace) and options.output in ("csv", "jsonl"):
        raise UsageError(f"-o {options.output}: {report} printed as md or json")
    if (against or trace) and any(len(values) > 1 for values in options.varied.values()):
        flag = next(flag for flag, values in options.varied.items() if len(values) > 1)
        raise UsageError(f"{flag}: {'a replay' if trace else 'a comparison'} takes one value")
