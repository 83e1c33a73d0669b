"""Modelfiles: FROM, PARAMETER, SYSTEM, TEMPLATE, MESSAGE, LICENSE, ADAPTER; read for `create`, written for `show`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ftgguf.pull.errors import NameResolutionError
from ftgguf.pull.layers import MACHINE_PARAMETERS, PARAMETERS, typed_parameter
from ftgguf.quoting import shown

_ROLES = ("system", "user", "assistant")


@dataclass
class Modelfile:
    """`source` is FROM's argument; texts are None where the file does not set them."""

    source: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    licenses: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)


def parse_modelfile(text: str) -> Modelfile:
    """Raises NameResolutionError, naming the line."""
    result = Modelfile()
    for number, command, value in _commands(text):
        if command == "FROM":
            if result.source:
                raise NameResolutionError(f"Modelfile line {number}: a second FROM")
            result.source = value
        elif command == "PARAMETER":
            _parameter(result, number, value)
        elif command == "MESSAGE":
            role, _, content = value.partition(" ")
            if role not in _ROLES:
                raise NameResolutionError(f"Modelfile line {number}: MESSAGE takes {', '.join(_ROLES)} and a text")
            result.messages.append({"role": role, "content": _unquoted(content.strip())})
        elif command == "SYSTEM":
            result.system = value
        elif command == "TEMPLATE":
            result.template = value
        elif command == "LICENSE":
            result.licenses.append(value)
        elif command == "ADAPTER":
            result.adapters.append(value)
        elif command != "REQUIRES":
            raise NameResolutionError(
                f"Modelfile line {number}: unknown command {shown(command)}; known are FROM, PARAMETER, SYSTEM, "
                "TEMPLATE, MESSAGE, LICENSE, ADAPTER"
            )
    if not result.source:
        raise NameResolutionError("the Modelfile has no FROM line: FROM ./model.gguf, or FROM a model's name")
    return result


def _commands(text: str) -> list[tuple[int, str, str]]:
    """(line, command in capitals, argument): quotes taken off, triple-quoted texts over several lines joined."""
    lines = text.replace("\r\n", "\n").split("\n")
    found, at = [], 0
    while at < len(lines):
        number, line = at + 1, lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        opening = rest.find('"""')
        if opening >= 0 and rest.count('"""') == 1:
            begun = lines[number - 1]
            parts = [begun[begun.index('"""') + 3 :]]
            while at < len(lines) and '"""' not in lines[at]:
                parts.append(lines[at])
                at += 1
            if at == len(lines):
                raise NameResolutionError(f'Modelfile line {number}: the text after """ has no end')
            parts.append(lines[at][: lines[at].index('"""')])
            at += 1
            rest = rest[:opening] + "\n".join(parts)
        else:
            rest = _unquoted(rest)
        if not rest and command.upper() not in ("SYSTEM", "TEMPLATE"):
            raise NameResolutionError(f"Modelfile line {number}: {shown(command)} without an argument")
        found.append((number, command.upper(), rest))
    return found


def _unquoted(text: str) -> str:
    for mark in ('"""', '"'):
        if len(text) >= 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            return text[len(mark) : -len(mark)]
    return text


def _parameter(result: Modelfile, number: int, value: str) -> None:
    key, _, text = value.partition(" ")
    text = _unquoted(text.strip())
    if key in MACHINE_PARAMETERS:
        result.params[key] = text
        return
    if key not in PARAMETERS:
        raise NameResolutionError(f"Modelfile line {number}: unknown parameter {shown(key)}; {', '.join(PARAMETERS)}")
    kind = PARAMETERS[key][1]
    if kind is list:
        result.params.setdefault(key, []).append(text)
        return
    try:
        typed = typed_parameter(kind, float(text))
    except (ValueError, OverflowError):
        typed = None
    if typed is None:
        raise NameResolutionError(f"Modelfile line {number}: {shown(text)} is not a value for {key}")
    result.params[key] = typed


def write_modelfile(
    source: str, params: dict[str, Any], template: str, system: str, messages: list[dict[str, str]], licenses: list[str]
) -> str:
    """What `show --modelfile` prints; `parse_modelfile` reads it back."""
    lines = [f"FROM {source}"]
    if template:
        lines.append(f"TEMPLATE {_quoted(template)}")
    if system:
        lines.append(f"SYSTEM {_quoted(system)}")
    lines += [f"PARAMETER {line}" for line in parameter_lines(params)]
    lines += [f"MESSAGE {message.get('role', '')} {_quoted(message.get('content', ''))}" for message in messages]
    lines += [f"LICENSE {_quoted(text)}" for text in licenses]
    return "\n".join(lines) + "\n"


def parameter_lines(params: dict[str, Any], width: int = 0) -> list[str]:
    """`key value`, one line each, the key padded to `width`; a list has a line an item, texts are quoted."""
    lines = []
    for key, value in sorted(params.items()):
        for item in value if isinstance(value, list | tuple) else [value]:
            shown_item = f'"{item}"' if isinstance(item, str) and key not in MACHINE_PARAMETERS else f"{item}"
            lines.append(f"{key:<{width}} {shown_item}")
    return lines


def _quoted(text: str) -> str:
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'
