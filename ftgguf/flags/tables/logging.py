"""Help, logging and what is left."""

from __future__ import annotations

from ftgguf.flags import values as v
from ftgguf.flags.row import Assignment, Flag, switch, value, void

_ENV = "LLAMA_ARG_"
MAX_VERBOSITY = 2**31 - 1

FLAGS: tuple[Flag, ...] = (
    void("-h", "--help", "--usage", action="help", help="print this text and exit"),
    void("--version", action="version", help="print the version and exit"),
    void("--completion-bash", action="completion-bash", help="print a completion script for bash and exit"),
    void("--log-disable", to="log.disable", help="log nothing"),
    value("--log-file", hint="FNAME", parse=v.text, to="log.file", env=_ENV + "LOG_FILE", shown="none",
          help="log to this file too"),
    switch("--log-jsonl", no=("--no-log-jsonl",), to="log.jsonl", env=_ENV + "LOG_JSONL",
           help="log one JSON object a line to standard output, without colours"),
    value("--log-prompts-dir", hint="PATH", parse=v.text, to="log.prompts_dir", group="server", tier="B",
          note="each rendered prompt becomes a text file there, with its request id", shown="none",
          help="folder to log prompts to, made if missing"),
    value("--log-colors", hint="[on|off|auto]", parse=v.on_off_auto("--log-colors"), to="log.colors",
          env=_ENV + "LOG_COLORS", help="colours in the log: on, off, auto (a terminal)"),
    void("-v", "--verbose", "--log-verbose",
         expand=lambda _: (Assignment("log.verbosity", MAX_VERBOSITY),), shown="off", help="log everything"),
    value("-lv", "--verbosity", "--log-verbosity", hint="N", parse=v.stoi, to="log.verbosity",
          env=_ENV + "LOG_VERBOSITY", help="what to log: 0 output, 1 errors, 2 warnings, 3 info, 4 more, 5 debug"),
    switch("--log-prefix", no=("--no-log-prefix",), to="log.prefix", env=_ENV + "LOG_PREFIX",
           help="level letters before log lines"),
    switch("--log-timestamps", no=("--no-log-timestamps",), to="log.timestamps", env=_ENV + "LOG_TIMESTAMPS",
           help="times before log lines"),
    switch("--perf", no=("--no-perf",), env=_ENV + "PERF", tier="C", tier_off="C", shown="off",
           note="timings are always taken; they are in every response and in /metrics",
           note_off="timings are always taken; they cost nothing measurable", help="libllama's own timings"),
)  # fmt: skip
