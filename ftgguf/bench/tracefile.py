"""Agent sessions: from the package, from the user's recordings, or from any file of OpenAI messages.

A file is JSON lines (or one JSON array) of objects of two kinds: a whole session, `{"session": NAME, "messages":
[...], "tools": [...]}`, whose every assistant message is a turn; or a recorded request (`ftgguf serve --record`),
`{"at": SECONDS, "path": PATH, "body": {...}}`, where a request that continues the messages of an earlier one belongs
to its session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

Message = dict[str, Any]

DEFAULT_REPLY = 64
"""Tokens to generate where a recording does not say how long the answer was."""
CLIPS = (8000, 4000, 2000, 1000, 500, 250, 120, 60, 30)
"""Characters a message may keep, tried in order until the sessions fit a context."""


class TraceError(ValueError):
    """The file is no trace; one line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: what is sent, and how long the recorded answer was (`reply` text, or `n_gen` tokens).

    `kind`: `first`, `append` (the turn before with more at its end), `edited` (history changed in the middle), `side`
    (another conversation in between).
    """

    messages: tuple[Message, ...]
    kind: str = "append"
    reply: str = ""
    n_gen: int = 0
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, turn by turn."""

    name: str
    requests: tuple[Request, ...] = field(default=())


def load(paths: Sequence[str], *, variations: bool = True, turns: int | None = None) -> list[Session]:
    """The sessions of `paths`; those of the package if there are none. Raises TraceError.

    `variations` adds to each whole session an edited-history turn and a side request, which agents send and prefix
    caches stumble over. `turns`: of each session at most, variations included, which stay as long as there is room.
    """
    if not paths:
        folder = resources.files("ftgguf") / "data" / "traces"
        files = sorted(Path(str(f)) for f in folder.iterdir() if f.name.endswith(".jsonl"))
        if not files:
            raise TraceError("the package's traces are missing from the installation: install ftgguf again")
    else:
        files = [Path(p) for p in paths]
    sessions: list[Session] = []
    for file in files:
        sessions += _read(file, variations, turns)
    if not sessions:
        raise TraceError(f"{', '.join(map(str, files))}: no session with an answer in it")
    return sessions


def _read(file: Path, variations: bool, turns: int | None) -> list[Session]:
    sessions: list[Session] = []
    recorded: list[dict[str, Any]] = []
    for number, entry in _entries(file):
        if isinstance(entry.get("messages"), list):
            name = str(entry.get("session") or f"{file.stem}-{number}")
            session = _whole(name, entry["messages"], tuple(entry.get("tools") or ()))
            if session.requests:
                sessions.append(_varied(session, turns) if variations else _first(session, turns))
        elif isinstance(entry.get("body"), dict):
            recorded.append(entry)
        elif isinstance(entry.get("traj"), list):  # tau-bench's own files
            sessions.append(_first(_whole(f"{file.stem}-{number}", entry["traj"], ()), turns))
        else:
            raise TraceError(f"{file}: entry {number} is neither a session (messages) nor a recorded request (body)")
    return sessions + [_first(session, turns) for session in _recorded(file.stem, recorded)]


def _entries(file: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: {error}") from None
    try:
        if text.lstrip().startswith("["):
            found = list(enumerate(json.loads(text)))
        else:
            found = [(i, json.loads(line)) for i, line in enumerate(text.splitlines()) if line.strip()]
    except ValueError as error:
        raise TraceError(f"{file}: not JSON lines: {error}") from None
    for number, entry in found:
        if not isinstance(entry, dict):
            raise TraceError(f"{file}: entry {number} is no object")
    return found


def _whole(name: str, messages: list[Message], tools: tuple[Message, ...]) -> Session:
    """Every assistant message was once an answer to what stands before it."""
    requests: list[Request] = []
    for i, message in enumerate(messages):
        if i and message.get("role") == "assistant":
            kind = "append" if requests else "first"
            reply = text_of(message) or json.dumps(message.get("tool_calls") or "")
            requests.append(Request(tuple(messages[:i]), kind, reply, tools=tools))
    return Session(name, tuple(requests))


def _first(session: Session, turns: int | None) -> Session:
    return replace(session, requests=session.requests[:turns])


def _varied(session: Session, turns: int | None = None) -> Session:
    """In the middle: a side request (a title for the talk), then the turn again with its last message changed; only
    where that leaves four of `turns`."""
    requests = list(session.requests[: None if turns is None else max(0, turns - 2)])
    if len(requests) < 4:
        return _first(session, turns)
    middle = len(requests) // 2
    before = requests[middle]
    users = [m for m in before.messages if m.get("role") == "user"]
    title = "Write a title of at most five words for this conversation: "
    side = Request(({"role": "user", "content": title + text_of(users[0] if users else {})},), "side", n_gen=12)
    edited = list(before.messages)
    last = max(i for i, m in enumerate(edited) if m.get("role") != "assistant")
    edited[last] = edited[last] | {"content": "Correction: " + text_of(edited[last])}
    changed = replace(before, messages=tuple(edited), kind="edited")
    return Session(session.name, (*requests[: middle + 1], side, changed, *requests[middle + 1 :]))


def _recorded(stem: str, entries: list[dict[str, Any]]) -> list[Session]:
    """Group requests by which conversation they continue."""
    found: list[list[Request]] = []
    for entry in sorted(entries, key=lambda e: float(e.get("at", 0.0))):
        body = entry["body"]
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            continue
        n_gen = int(entry.get("predicted_n", 0) or body.get("max_tokens") or DEFAULT_REPLY)
        request = Request(tuple(messages), "first", n_gen=n_gen, tools=tuple(body.get("tools") or ()))
        home = max(found, key=lambda s: common(s[-1].messages, request.messages), default=None)
        kind = "first" if home is None else continues(home[-1].messages, request.messages)
        if home is None or kind == "first":
            found.append([request])
        else:
            home.append(replace(request, kind=kind))
    return [Session(f"{stem}-{i}", tuple(requests)) for i, requests in enumerate(found)]


def common(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Length of the common beginning."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def continues(before: Sequence[Message], now: Sequence[Message]) -> str:
    """How a request goes on from the one `before`: `append` (all of it and more), `repeat` (the same), `edited` (two
    messages in common at least: a system prompt alone is shared by strangers), `first` (not at all)."""
    shared = common(before, now)
    if shared and shared == len(before) == len(now):
        return "repeat"
    if shared and shared == len(before):
        return "append"
    return "edited" if shared >= 2 else "first"


# ------------------------------------------------------------------------------------------------------- fitting


def text_of(message: Message) -> str:
    """The text of a message: a string, or the text parts of a list."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def flattened(request: Request) -> Request:
    """The same with tool calls and results as plain text, for templates that know no tools."""
    messages = []
    for m in request.messages:
        text = text_of(m)
        if m.get("tool_calls"):
            text = f"{text}\n{json.dumps([c.get('function', c) for c in m['tool_calls']])}".strip()
        role = "user" if m.get("role") == "tool" else m.get("role", "user")
        messages.append({"role": role, "content": text})
    return replace(request, messages=tuple(messages), tools=())


def clipped(sessions: Sequence[Session], limit: int) -> list[Session]:
    """`sessions` with every message cut to `limit` characters."""

    def cut(message: Message) -> Message:
        text = text_of(message)
        return message if len(text) <= limit else message | {"content": text[:limit]}

    return [
        replace(s, requests=tuple(replace(r, messages=tuple(map(cut, r.messages))) for r in s.requests))
        for s in sessions
    ]


def fit(sessions: Sequence[Session], count: Callable[[str], int], room: int) -> tuple[list[Session], int | None, int]:
    """Sessions whose longest request has at most `room` tokens by an estimate, the clip that took (None: none), and
    the tokens of the longest.

    `count(text)` is the tokens of a text; 12 are added for each message's frame. Turns that do not fit at the
    smallest clip are left out.
    """
    known: dict[str, int] = {}

    def size(request: Request) -> int:
        total = 0
        for m in request.messages:
            text = text_of(m) + (json.dumps(m["tool_calls"]) if m.get("tool_calls") else "")
            if text not in known:
                known[text] = count(text)
            total += known[text] + 12
        return total

    for clip in (None, *CLIPS):
        tried = list(sessions) if clip is None else clipped(sessions, clip)
        longest = max(size(r) for s in tried for r in s.requests)
        if longest <= room:
            return tried, clip, longest
    kept = [replace(s, requests=tuple(r for r in s.requests if size(r) <= room)) for s in tried]
    kept = [s for s in kept if s.requests]
    if not kept:
        raise TraceError(f"no turn of these sessions fits a context of {room} tokens, however clipped")
    return kept, CLIPS[-1], max(size(r) for s in kept for r in s.requests)
