"""llama.cpp's GBNF grammars, written as Lark grammars for llguidance.

A rule that never reaches itself is regular, and becomes one regular expression: llguidance's lexer takes the longest
match of a terminal, so `[a-z]+ "b"` written as two terminals could never end, but as one expression it can. Only what
stands around recursion stays a grammar; there, neighbouring regular parts share one terminal.

In a literal that spells a control token, the token itself is accepted as well as its letters, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

MAX_DEPTH = 200
MAX_REPEAT = 100_000
MAX_REGEX = 1 << 20
"""Characters of the longest expression, after rules are inlined."""


OPTIONS = '%llguidance {"no_forcing": true}'
"""Where only one text can follow, llguidance would allow only one way to cut it into tokens; llama.cpp allows all."""


class GbnfError(ValueError):
    """The grammar is not GBNF, or too large; the text names the line."""


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """Code point ranges, both ends included; negated where `negated`."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class TokenRef:
    """One token by id, or by the text it is written as; any other token where `negated`."""

    token: int | str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None


Node = Literal | CharClass | Ref | TokenRef | Sequence | Choice | Repeat
_ANY = CharClass((), negated=True)


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX = {"x": 2, "u": 4, "U": 8}
"""Escape letter -> hexadecimal digits that follow."""


def _is_word(c: str) -> bool:
    return c != "" and ((c.isascii() and c.isalnum()) or c in "-_")


class _Parser:
    """Recursive descent over GBNF text, with llama.cpp's rules for where a line may end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def fail(self, message: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        near = self.text[self.at : self.at + 20]
        raise GbnfError(f"grammar line {line}: {message} at {near!r}")

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self, wanted: str) -> bool:
        if self.text.startswith(wanted, self.at):
            self.at += len(wanted)
            return True
        return False

    def space(self, newlines: bool) -> None:
        while (c := self.peek()) and (c in " \t#" or (newlines and c in "\r\n")):
            if c == "#":
                while self.peek() not in ("", "\r", "\n"):
                    self.at += 1
            else:
                self.at += 1

    def name(self) -> str:
        start = self.at
        while _is_word(self.peek()):
            self.at += 1
        if self.at == start:
            self.fail("expected a rule's name")
        return self.text[start : self.at]

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.space(True)
        while self.peek():
            name = self.name()
            self.space(False)
            if not self.take("::="):
                self.fail("expected ::=")
            self.space(True)
            found[name] = self.choice(nested=False)
            if self.peek() not in ("", "\r", "\n"):
                self.fail("expected the end of the line")
            self.space(True)
        return found

    def choice(self, nested: bool) -> Node:
        items = [self.sequence(nested)]
        while self.take("|"):
            self.space(True)
            items.append(self.sequence(nested))
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while (item := self.element()) is not None:
            self.space(nested)
            while (repeated := self.repeat(item)) is not None:
                item = repeated
                self.space(nested)
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def element(self) -> Node | None:
        c = self.peek()
        if self.take('"'):
            return self.literal()
        if self.take("["):
            return self.char_class()
        if self.take("."):
            return _ANY
        if self.take("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail(f"groups are nested deeper than {MAX_DEPTH}")
            self.space(True)
            group = self.choice(nested=True)
            if not self.take(")"):
                self.fail("expected )")
            self.depth -= 1
            return group
        if c in ("<", "!"):
            return self.token()
        return Ref(self.name()) if _is_word(c) else None

    def character(self) -> str:
        c = self.peek()
        if not c:
            self.fail("the grammar ends inside a literal or class")
        self.at += 1
        if c != "\\":
            return c
        kind = self.peek()
        self.at += 1
        if kind in _HEX:
            digits = self.text[self.at : self.at + _HEX[kind]]
            if len(digits) != _HEX[kind] or not all(d in "0123456789abcdefABCDEF" for d in digits):
                self.fail(f"\\{kind} needs {_HEX[kind]} hexadecimal digits")
            self.at += len(digits)
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                self.fail("not a character")
            return chr(code)
        if kind not in _ESCAPES:
            self.fail("unknown escape")
        return _ESCAPES[kind]

    def literal(self) -> Node:
        text: list[str] = []
        while not self.take('"'):
            text.append(self.character())
        return Literal("".join(text))

    def char_class(self) -> Node:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            low = high = ord(self.character())
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = ord(self.character())
            if high < low:
                self.fail("a range of characters ends before it begins")
            ranges.append((low, high))
        if not ranges and not negated:
            self.fail("an empty class matches nothing")
        return CharClass(tuple(ranges), negated)

    def token(self) -> Node:
        negated = self.take("!")
        if not self.take("<"):
            self.fail("expected < after !")
        end = self.text.find(">", self.at)
        if end < 0:
            self.fail("expected > after a token")
        body = self.text[self.at : end]
        self.at = end + 1
        if body.startswith("[") and body.endswith("]"):
            if not body[1:-1].isdecimal():
                self.fail("expected a token id")
            return TokenRef(int(body[1:-1]), negated)
        return TokenRef(f"<{body}>", negated)

    def repeat(self, item: Node) -> Node | None:
        if self.take("*"):
            return Repeat(item, 0, None)
        if self.take("+"):
            return Repeat(item, 1, None)
        if self.take("?"):
            return Repeat(item, 0, 1)
        if not self.take("{"):
            return None
        self.space(True)
        low = self.number()
        high: int | None = low
        self.space(True)
        if self.take(","):
            self.space(True)
            high = self.number() if self.peek().isdecimal() else None
            self.space(True)
        if not self.take("}"):
            self.fail("expected }")
        if high is not None and high < low:
            self.fail("a repetition's upper bound is below its lower one")
        return Repeat(item, low, high)

    def number(self) -> int:
        start = self.at
        while self.peek().isascii() and self.peek().isdecimal():
            self.at += 1
        if self.at == start:
            self.fail("expected a number")
        value = int(self.text[start : self.at]) if self.at - start < 8 else MAX_REPEAT + 1
        if value > MAX_REPEAT:
            self.fail(f"a repetition over {MAX_REPEAT}")
        return value


class _Writer:
    """Rules as Lark text. `tokens` maps the text of control tokens to ids; `token_id` finds the id of `<text>`."""

    def __init__(self, rules: dict[str, Node], tokens: Mapping[str, int], token_id: Callable[[str], int]) -> None:
        self.rules, self.tokens, self.token_id = rules, tokens, token_id
        self.known: dict[str, bool] = {}
        self.expressions: dict[str, str] = {}
        self.names = {name: "start" if name == "root" else f"r{i}" for i, name in enumerate(rules)}

    def grammar(self) -> str:
        wanted, lines, seen = ["root"], [OPTIONS], {"root"}
        while wanted:
            name = wanted.pop()
            lines.append(f"{self.names[name]}: {self.lark(self.rules[name])}")
            for other in _refs(self.rules[name]):
                if other not in seen and not self.regular_rule(other):
                    seen.add(other)
                    wanted.append(other)
        return "\n".join(lines) + "\n"

    def regular_rule(self, name: str) -> bool:
        if name not in self.known:
            self.known[name] = False  # a rule that is reached again while it is looked at is recursive
            self.known[name] = self.regular(self.rules[name])
        return self.known[name]

    def regular(self, node: Node) -> bool:
        match node:
            case Literal(text):
                return not any(token in text for token in self.tokens)
            case CharClass():
                return True
            case TokenRef():
                return False
            case Ref(name):
                return self.regular_rule(name)
            case Repeat(item):
                return self.regular(item)
            case Sequence(items) | Choice(items):
                return all(self.regular(item) for item in items)

    def regex(self, node: Node) -> str:
        match node:
            case Literal(text):
                made = "".join(f"\\x{{{ord(c):x}}}" for c in text)
            case CharClass(ranges, negated):
                body = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
                made = f"[{'^' * negated}{body}]" if ranges else "(?s:.)"
            case Ref(name):
                if name not in self.expressions:
                    self.expressions[name] = f"(?:{self.regex(self.rules[name])})"
                made = self.expressions[name]
            case Repeat(item, low, high):
                made = f"(?:{self.regex(item)}){_times(low, high)}"
            case Sequence(items):
                parts = (self.regex(item) for item in items)
                made = "".join(f"(?:{part})" if "|" in part else part for part in parts)
            case Choice(items):
                made = "|".join(self.regex(item) for item in items)
            case TokenRef():
                raise AssertionError("a token is not regular")
        if len(made) > MAX_REGEX:
            raise GbnfError("the grammar is too large once its rules are inlined")
        return made

    def lark(self, node: Node) -> str:
        if self.regular(node):
            return f"/{made}/" if (made := self.regex(node)) else '""'
        match node:
            case Literal(text):
                return self.spelled(text)
            case Ref(name):
                return self.names[name]
            case TokenRef(token, negated):
                number = token if isinstance(token, int) else self.token_id(token)
                return f"<[^{number}]>" if negated else f"<[{number}]>"
            case Repeat(item, low, high):
                return f"({self.lark(item)}){_times(low, high)}"
            case Choice(items):
                return "(" + " | ".join(self.lark(item) for item in items) + ")"
            case Sequence(items):
                return " ".join(self.lark(part) for part in self.grouped(items))
            case CharClass():
                raise AssertionError("a class is regular")

    def grouped(self, items: tuple[Node, ...]) -> list[Node]:
        """`items` with each run of regular neighbours as one Sequence."""
        parts: list[Node] = []
        run: list[Node] = []
        for item in items:
            if self.regular(item):
                run.append(item)
                continue
            if run:
                parts.append(Sequence(tuple(run)))
                run = []
            parts.append(item)
        return [*parts, Sequence(tuple(run))] if run else parts

    def spelled(self, text: str) -> str:
        """A literal whose control tokens may be themselves or their letters."""
        at, token = min((text.find(token), token) for token in self.tokens if token in text)
        before, after = text[:at], text[at + len(token) :]
        parts = [self.lark(Literal(before))] if before else []
        parts.append(f"(/{self.regex(Literal(token))}/ | <[{self.tokens[token]}]>)")
        if after:
            parts.append(self.lark(Literal(after)))
        return " ".join(parts)


def _times(low: int, high: int | None) -> str:
    if (low, high) in ((0, None), (1, None), (0, 1)):
        return "?" if high == 1 else "+" if low else "*"
    return f"{{{low},{'' if high is None else high}}}"


def _refs(node: Node) -> set[str]:
    match node:
        case Ref(name):
            return {name}
        case Repeat(item):
            return _refs(item)
        case Sequence(items) | Choice(items):
            return set().union(*(_refs(item) for item in items))
        case _:
            return set()


def _no_token(text: str) -> int:
    raise GbnfError(f"{text} is not a token of this model")


def to_lark(text: str, tokens: Mapping[str, int] | None = None, token_id: Callable[[str], int] = _no_token) -> str:
    """The Lark grammar (start rule `start`) that accepts what the GBNF grammar's `root` does.

    `tokens`: control tokens' text -> id. `token_id` gives the id of a token written `<text>`, or raises ValueError.
    Raises GbnfError.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GbnfError("the grammar has no rule named root")
    for node in rules.values():
        for name in sorted(_refs(node)):
            if name not in rules:
                raise GbnfError(f"the grammar uses rule {name!r} but does not define it")
    try:
        return _Writer(rules, tokens or {}, token_id).grammar()
    except RecursionError:
        raise GbnfError("the grammar's rules are nested too deeply") from None
