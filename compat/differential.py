"""Do two servers answer alike? The same requests to both, compared field by field.

`python -m compat.differential OURS PEER` prints the differences and ends with 1 if there are any;
`--record FILE PEER` writes one server's answers as JSON lines, to read what llama-server sends.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx


class Rule(Enum):
    """How two values of one field are compared; a field must exist on both sides unless it is IGNOREd."""

    EXACT = "exact"
    """Equal; numbers to a relative 1e-6, since float32 values are printed with different digits."""
    TYPE = "type"
    """Same JSON type; objects the same keys, their values and arrays' items by type too."""
    CLOSE = "close"
    """Numbers within 0.05 absolute, for log-probabilities; other types EXACT."""
    IGNORE = "ignore"


RULES: Mapping[str, Rule] = {
    "body.id": Rule.TYPE,
    "body.first.id": Rule.TYPE,
    "body.last.?.id": Rule.TYPE,
    "*tool_calls.*.id": Rule.TYPE,
    "*id_slot": Rule.TYPE,
    "body.output.*.id": Rule.TYPE,
    "*created": Rule.TYPE,
    "body.*ed_at": Rule.TYPE,
    "*timings*": Rule.TYPE,
    "*prompt_progress.*.time_ms": Rule.TYPE,
    "*model": Rule.TYPE,
    "*model_path": Rule.TYPE,
    "*model_alias": Rule.TYPE,
    "*models.*.name": Rule.TYPE,
    "*aliases*": Rule.TYPE,
    "*system_fingerprint": Rule.TYPE,
    "*build_info": Rule.TYPE,
    "*media_marker": Rule.TYPE,
    "*.logprob": Rule.CLOSE,
    "*.prob": Rule.CLOSE,
}
"""First match wins; paths are dotted (`body.choices.0.message.content`), patterns as in fnmatch. Others are EXACT."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. `rules` come before the general ones; `raw` is sent as it is instead of `body`."""

    name: str
    method: str
    path: str
    body: Any = None
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: `body` is parsed JSON, text, or for a stream its summary (`summarise`)."""

    status: int
    content_type: str
    body: Any

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, "content_type": self.content_type, "body": self.body}


@dataclass(frozen=True, slots=True)
class Difference:
    """Field `path` of request `request` is not alike; a side without it has the text `<absent>`."""

    request: str
    path: str
    ours: Any
    peer: Any

    def __str__(self) -> str:
        return f"{self.request}: {self.path}: ours {_short(self.ours)}, peer {_short(self.peer)}"


ABSENT = "<absent>"


def connect(url: str, timeout_s: float = 120.0) -> httpx.Client:
    """A client that opens a connection per request: llama-server closes kept ones after 100 requests or 5 seconds,
    and a request that is under way then is lost."""
    return httpx.Client(base_url=url, timeout=timeout_s, limits=httpx.Limits(max_keepalive_connections=0))


def ask(client: httpx.Client, request: Request) -> Answer:
    """Send `request` relative to the client's base URL and read the whole answer."""
    content: bytes | None = request.raw
    headers = dict(request.headers)
    if content is None and request.body is not None:
        content = json.dumps(request.body).encode()
    if content is not None:
        headers.setdefault("Content-Type", "application/json")
    response = client.request(request.method, request.path, content=content, headers=headers)
    content_type = response.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip()
    if kind == "text/event-stream":
        return Answer(response.status_code, content_type, summarise(parse_events(response.text)))
    if kind == "application/json":
        return Answer(response.status_code, content_type, response.json())
    return Answer(response.status_code, content_type, response.text)


def parse_events(text: str) -> list[Any]:
    """The `data:` payloads of a server-sent event stream, JSON parsed; comments (pings) are dropped."""
    events: list[Any] = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if lines:
            data = "\n".join(lines)
            events.append(json.loads(data) if data != "[DONE]" else data)
    return events


def summarise(events: Sequence[Any]) -> dict[str, Any]:
    """What must be alike in two streams however the text is cut into chunks.

    The first and the last two events as they are, the joined text per channel, which shapes occur between, and
    whether `[DONE]` closed the stream.
    """
    done = bool(events) and events[-1] == "[DONE]"
    objects = [e for e in events if isinstance(e, dict)]
    channels: dict[str, str] = {}
    for event in objects:
        for name, text in _texts(event):
            channels[name] = channels.get(name, "") + text
    shapes = sorted({json.dumps(_shape(event), sort_keys=True) for event in objects[1:-2]})
    return {
        "first": _without_text(objects[0]) if objects else None,
        "last": [_without_text(e) for e in objects[-2:]],
        "between": [json.loads(s) for s in shapes],
        "text": channels,
        "done": done,
    }


def _texts(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(channel, piece) of every text that a chunk adds."""
    if isinstance(event.get("content"), str):
        yield "content", event["content"]
    for choice in event.get("choices") or []:
        index = choice.get("index", 0)
        if isinstance(choice.get("text"), str):
            yield f"{index}.text", choice["text"]
        delta = choice.get("delta") or {}
        for name in ("content", "reasoning_content"):
            if isinstance(delta.get(name), str):
                yield f"{index}.{name}", delta[name]
        for call in delta.get("tool_calls") or []:
            for name in ("name", "arguments"):
                piece = (call.get("function") or {}).get(name)
                if isinstance(piece, str):
                    yield f"{index}.tool_calls.{call.get('index', 0)}.{name}", piece


_CUT = {"content", "text", "reasoning_content", "arguments", "tokens", "tokens_predicted", "n_decoded"}
"""Fields that depend on where the stream is cut."""


def _without_text(value: Any) -> Any:
    """`value` with the cut-dependent fields reduced to their type."""
    if isinstance(value, dict):
        return {k: _type_name(v) if k in _CUT else _without_text(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_text(v) for v in value]
    return value


def _shape(value: Any) -> Any:
    """The keys and types of a JSON value; arrays by their first item, so that their length does not count."""
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return _type_name(value)


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def compare(request: Request, ours: Answer, peer: Answer) -> list[Difference]:
    """Where the two answers to `request` differ under its rules and the general ones."""
    rules = {**request.rules, **RULES}
    return list(_compare(request.name, rules, "", ours.as_json(), peer.as_json(), Rule.EXACT))


def _compare(
    name: str, rules: Mapping[str, Rule], path: str, ours: Any, peer: Any, inherited: Rule
) -> Iterator[Difference]:
    matched = next((rule for pattern, rule in rules.items() if fnmatchcase(path, pattern)), None)
    rule = matched or inherited
    if rule is Rule.IGNORE:
        return
    below = rule if rule is Rule.TYPE else Rule.EXACT
    prefix = f"{path}." if path else ""
    if isinstance(ours, dict) and isinstance(peer, dict):
        for key in [*peer, *(k for k in ours if k not in peer)]:
            yield from _compare(name, rules, prefix + key, ours.get(key, ABSENT), peer.get(key, ABSENT), below)
    elif isinstance(ours, list) and isinstance(peer, list):
        if len(ours) != len(peer) and rule is not Rule.TYPE:
            yield Difference(name, f"{path} (length)", len(ours), len(peer))
        for i, (a, b) in enumerate(zip(ours, peer, strict=False)):
            yield from _compare(name, rules, f"{prefix}{i}", a, b, below)
    elif not _alike(rule, ours, peer):
        yield Difference(name, path, ours, peer)


def _alike(rule: Rule, ours: Any, peer: Any) -> bool:
    if (ours == ABSENT) != (peer == ABSENT) or _type_name(ours) != _type_name(peer):
        return False
    if rule is Rule.TYPE:
        return True
    if isinstance(ours, int | float) and not isinstance(ours, bool):
        if rule is Rule.CLOSE:
            return math.isclose(ours, peer, abs_tol=0.05)
        return math.isclose(ours, peer, rel_tol=1e-6)
    return bool(ours == peer)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value != ABSENT else ABSENT
    return text if len(text) <= 200 else f"{text[:197]}..."


def run(ours: str, peer: str, requests: Iterable[Request], *, timeout_s: float = 120.0) -> list[Difference]:
    """Send every request to both base URLs, in order, and collect the differences."""
    found: list[Difference] = []
    with connect(ours, timeout_s) as a, connect(peer, timeout_s) as b:
        for request in requests:
            found += compare(request, ask(a, request), ask(b, request))
    return found


def record(url: str, requests: Iterable[Request], *, timeout_s: float = 120.0) -> dict[str, Any]:
    """One server's answers by request name, with what was sent."""
    with connect(url, timeout_s) as client:
        return {
            r.name: {
                "request": {"method": r.method, "path": r.path, "body": r.body},
                "answer": ask(client, r).as_json(),
            }
            for r in requests
        }


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    from compat.requests import REQUESTS, SCRIPTED

    parser = argparse.ArgumentParser(prog="python -m compat.differential", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="ours and the peer's base URL; one with --record")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--scripted", action="store_true", help="the requests for the scripted model")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="requests whose name matches")
    options = parser.parse_args(arguments)
    requests = [r for r in (SCRIPTED if options.scripted else REQUESTS) if fnmatchcase(r.name, options.only)]
    if options.record:
        lines = [
            json.dumps({"name": name, **both}, ensure_ascii=False)
            for name, both in record(options.urls[0], requests).items()
        ]
        options.record.write_text("\n".join(lines) + "\n")
        return 0
    if len(options.urls) != 2:
        parser.error("give two base URLs: ours and the peer's")
    found = run(options.urls[0], options.urls[1], requests)
    for difference in found:
        print(difference)
    print(f"{len(requests)} requests, {len(found)} differences", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    # as the module that compat.requests imports, so that there is one `Rule`
    from compat.differential import main as run_main

    sys.exit(run_main())
