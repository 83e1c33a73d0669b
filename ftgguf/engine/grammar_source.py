"""From a request's grammar to what llguidance compiles: GBNF, JSON Schema and Lark in one form, checked and bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import llguidance

from ftgguf.engine.gbnf import OPTIONS, to_lark
from ftgguf.engine.messages import Grammar
from ftgguf.vocab import Vocab

MAX_SOURCE = 1 << 20
"""Characters of a grammar or schema."""
MAX_SCHEMA_DEPTH = 128
MAX_PROPERTIES = 1000
"""Of one object: what llguidance does with optional ones grows with their square (0.3 s for 1000, 7 s for 5000)."""
MAX_ALL_PROPERTIES = 10_000
"""Of a whole schema: 0.35 ms each."""
MAX_TRIGGERS = 256
JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""The white space that llama.cpp's schema grammars allow between JSON tokens: bounded, so that a weak model ends."""
KIND_NAMES = {"gbnf": "grammar", "json_schema": "JSON schema", "lark": "Lark grammar"}
_IGNORABLE = {
    *("uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
}
"""Keywords that llguidance cannot enforce and llama.cpp ignores: ignored here too, with a warning."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or followed; the text says why. It fails its request only."""


def limits() -> llguidance.LLParserLimits:
    """What a compiled grammar may cost while it is followed."""
    # A mask may cost 10 ms at most of parser items; a lexer state is 1-2 kB; an optional property is 4 items of a row.
    return llguidance.LLParserLimits(
        step_max_items=200_000, max_items_in_row=8 * MAX_PROPERTIES, max_lexer_states=50_000, verbose_errors=False
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar in llguidance's form, and what it does not enforce."""

    text: str
    warnings: tuple[str, ...] = ()


def short(message: str) -> str:
    """One line, without llguidance's excerpt of the source."""
    line = " ".join(re.split(r"\n\s*\d+ \| ", message)[0].split())
    line = line.removeprefix("at 2(8): failed to compile JSON schema: ")  # our own line round a schema
    return line if len(line) <= 300 else line[:297] + "..."


def _depth(value: object) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, depth = stack.pop()
        deepest = max(deepest, depth)
        if deepest > MAX_SCHEMA_DEPTH:
            break
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack += [(child, depth + 1) for child in children]
    return deepest


def _check_size(schema: object) -> None:
    """GrammarError for a schema with more properties than can be compiled in time."""
    total, stack = 0, [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            properties = item.get("properties")
            n = len(properties) if isinstance(properties, dict) else 0
            if n > MAX_PROPERTIES:
                raise GrammarError(f"an object with {n} properties, at most {MAX_PROPERTIES} are allowed")
            total += n
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    if total > MAX_ALL_PROPERTIES:
        raise GrammarError(f"{total} properties in all, at most {MAX_ALL_PROPERTIES} are allowed")


def _check(text: str) -> list[str]:
    """Warnings of a grammar in llguidance's form; GrammarError if it does not compile."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, None, limits=limits())
    if failed:
        raise GrammarError(short(messages[0]))
    return list(messages)


def _compile_schema(source: str) -> Compiled:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {short(str(error))}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema is an object or a boolean")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise GrammarError(f"nested deeper than {MAX_SCHEMA_DEPTH}")
    _check_size(schema)
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key not in ("$schema", "x-guidance")}
    ignored: tuple[str, ...] = ()
    for lenient in (False, True):
        options = {"whitespace_pattern": JSON_SPACE, "lenient": lenient}
        body = json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else {"x-guidance": options})
        if schema is False:
            raise GrammarError("the schema false allows nothing")
        made = llguidance.LLMatcher.grammar_from_lark(f"{OPTIONS}\nstart: %json {body}\n")
        try:
            return Compiled(made, (*ignored, *_check(made)))
        except GrammarError as error:
            # Only a schema whose fault is a keyword that llama.cpp ignores as well is tried again without it.
            named = re.search(r"Unimplemented keys: \[([^\]]*)\]", str(error))
            keys = set(re.findall(r'"([^"]+)"', named[1])) if named else set()
            ignorable = "Unknown format" in str(error) or (keys and keys <= _IGNORABLE)
            if lenient or not ignorable:
                raise
            ignored = (f"not enforced: {short(str(error))}",)
    raise AssertionError("unreachable")


def _token_names(vocab: Vocab | None, source: str) -> tuple[dict[str, int], Callable[[str], int]]:
    """What to_lark asks of a vocabulary: the control tokens that `source` spells, and `<text>` -> id."""
    if vocab is None:
        return {}, lambda text: 0
    spelled = {
        text: token
        for piece, token in vocab.control_texts.items()
        if not vocab.is_eog(token) and (text := piece.decode("utf-8", "ignore")) and text in source
    }

    def find(text: str) -> int:
        ids = vocab.tokenize(text, False, True)
        if len(ids) != 1:
            raise GrammarError(f"{text} is not a token of this model")
        return ids[0]

    return spelled, find


def compile_grammar(grammar: Grammar, vocab: Vocab | None = None) -> Compiled:
    """`grammar` in llguidance's form. GrammarError naming what is wrong.

    Needs no vocabulary, so a front can check a request with it; with one, GBNF literals also match the control tokens
    they spell, and `<token>` references are resolved.
    """
    name = KIND_NAMES.get(grammar.kind)
    if name is None:
        raise GrammarError(f"unknown kind of grammar {grammar.kind!r}")
    if len(grammar.text) > MAX_SOURCE:
        raise GrammarError(f"the {name} has {len(grammar.text)} characters, at most {MAX_SOURCE} are allowed")
    if len(grammar.triggers) > MAX_TRIGGERS or any(not trigger for trigger in grammar.triggers):
        raise GrammarError(f"triggers must be 1 to {MAX_TRIGGERS} non-empty strings")
    if grammar.lazy and not grammar.triggers:
        raise GrammarError("no triggers set for lazy grammar")
    try:
        if grammar.kind == "json_schema":
            return _compile_schema(grammar.text)
        if grammar.kind == "gbnf" and not grammar.text.lstrip().startswith("%llguidance"):
            lark = to_lark(grammar.text, *_token_names(vocab, grammar.text))
        else:
            lark = grammar.text
        made = llguidance.LLMatcher.grammar_from_lark(lark)
        return Compiled(made, tuple(_check(made)))
    except ValueError as error:
        raise GrammarError(f"failed to parse {name}: {error}") from None
