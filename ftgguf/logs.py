"""Logging as llama-server's flags say (`--log-file`, `--log-jsonl`, `--log-colors` ...), for front and engine alike."""

from __future__ import annotations

import json
import logging
import sys

from ftgguf.flags.config import LogConfig

_LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}
_COLOURS = {logging.WARNING: "\033[35m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
_RESET = "\033[0m"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": round(record.created, 3),
            "level": record.levelname.lower(),
            "source": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class ColourFormatter(logging.Formatter):
    """Warnings and errors in colour."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        colour = _COLOURS.get(record.levelno, "")
        return f"{colour}{text}{_RESET}" if colour else text


def announce(text: str, config: LogConfig) -> None:
    """Tell the user at the terminal, whatever the verbosity, and the log file where there is one."""
    if config.jsonl:  # standard output is for objects then
        logging.getLogger("ftgguf.server").info("%s", text)
        return
    print(text, flush=True)
    record = logging.LogRecord("ftgguf.server", logging.INFO, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and not config.disable:
            handler.handle(record)


def set_up(config: LogConfig) -> None:
    """Replace this process's log handlers. OSError if the log file cannot be opened."""
    level = _LEVELS.get(config.verbosity, logging.DEBUG if config.verbosity > 3 else logging.CRITICAL)
    if config.disable:
        level = logging.CRITICAL + 1
    form = "%(asctime)s " if config.timestamps else ""
    form += "%(levelname).1s %(message)s" if config.prefix else "%(message)s"
    stream = logging.StreamHandler(sys.stdout if config.jsonl else sys.stderr)
    coloured = config.colors == "on" or (config.colors == "auto" and sys.stderr.isatty())
    if config.jsonl:
        stream.setFormatter(JsonFormatter())
    else:
        stream.setFormatter(ColourFormatter(form) if coloured else logging.Formatter(form))
    handlers: list[logging.Handler] = [stream]
    if config.file:
        file = logging.FileHandler(config.file, encoding="utf-8")
        file.setFormatter(JsonFormatter() if config.jsonl else logging.Formatter(form))
        handlers.append(file)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.getLogger("ftgguf").setLevel(level)
