"""Constraints: llama.cpp's own grammar sampler is the oracle for GBNF and for the order that seeds depend on."""

from __future__ import annotations

import ctypes
import json
import re
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftgguf.engine.gbnf import GbnfError, to_lark
from ftgguf.engine.grammar import Constraint, GrammarCompiler
from ftgguf.engine.grammar_source import GrammarError, compile_grammar
from ftgguf.engine.messages import Grammar, SamplingParams
from ftgguf.engine.sampler import Sampler, SamplingError
from tests.engine.sampler_oracle import Oracle, oracle_vocab, rows
from tests.vocabs import vocab

COMPILERS = {name: GrammarCompiler(vocab(name)) for name in ("stories", "gpt-2", "phi-3")}


def constraint(text: str, kind: str = "gbnf", name: str = "stories", **options: Any) -> Constraint:
    return COMPILERS[name].compile(Grammar(kind=kind, text=text, **options))


def bits(mask: Any, n: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:n]).tolist())


def allowed(c: Constraint, name: str = "stories") -> set[int]:
    return bits(c.mask(0), vocab(name).n_vocab)


class LlamaGrammar:
    """llama.cpp's grammar sampler."""

    def __init__(self, text: str, name: str = "stories") -> None:
        self.n = vocab(name).n_vocab
        self.sampler = llama_cpp.llama_sampler_init_grammar(oracle_vocab(name), text.encode(), b"root")
        assert self.sampler, "llama.cpp does not take this grammar"

    def __del__(self) -> None:
        if getattr(self, "sampler", None):
            llama_cpp.llama_sampler_free(self.sampler)

    def allowed(self) -> set[int]:
        data = (llama_cpp.llama_token_data * self.n)(*((i, 0.0, 0.0) for i in range(self.n)))
        array = llama_cpp.llama_token_data_array(data, self.n, -1, False)
        llama_cpp.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return {data[i].id for i in range(self.n) if data[i].logit == 0.0}

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self.sampler, token)


JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS = {
    "word": 'root ::= "yes"',
    "choice": 'root ::= "yes" | "no" | "maybe" ("!" | "?")?',
    "greedy class": 'root ::= [a-z]+ "b" [0-9]*',
    "counted": 'root ::= [ab]{2,4} "c"{3} "d"{2,}',
    "escapes": r'root ::= "\u00e9\x41\n\"\\" [\t\r\U0001F600] [^a-z\]]',
    "any": "root ::= . [^\\x00-\\x7f] .*",
    "dash": 'root ::= [a-] [-b]+ "."',
    "rules": '# a\nroot ::= greeting ", " name-2 # b\ngreeting ::=\n  "hello" | # c\n  "hi"\nname-2 ::= [A-Z] [a-z]*\n',
    "empty": 'root ::= "" | "a" root-tail\nroot-tail ::= ("b" |)',
    "nested": 'root ::= "(" root ")" | [0-9]+ | "[" (root ("," root)*)? "]"',
    "json": JSON_GBNF,
    "arithmetic": 'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"\n',
}


def _usable() -> set[int]:
    v = vocab("stories")
    never = [bytes([b]) for b in (0, 0xC0, 0xC1, *range(0xF5, 0x100))]
    return {i for i in range(v.n_vocab) if v.piece(i) and v.piece(i) not in never and not v.is_special(i)} | v.eog_ids


@pytest.mark.parametrize("case", GRAMMARS)
def test_gbnf_allows_what_llama_cpp_allows(case: str) -> None:
    """Oracle: llama.cpp's grammar sampler on 6 random walks of 25 tokens: the same set of allowed tokens at each step.
    Left out are control tokens (llama.cpp spells them in letters; see the tests below), and tokens of bytes that no
    UTF-8 text has, which llama.cpp's decoder takes for characters, and the zero byte, which it refuses."""
    v, usable = vocab("stories"), _usable()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        ours, theirs = constraint(GRAMMARS[case]), LlamaGrammar(GRAMMARS[case])
        for _ in range(25):
            expected = theirs.allowed() & usable
            assert allowed(ours) & usable == expected
            for token in rng.choice(v.n_vocab, 20).tolist():
                if token in usable:
                    assert ours.allows(token) == (token in expected)
            # prefer long pieces, so that walks end in places of all kinds
            choices = sorted(expected - v.eog_ids, key=lambda i: (len(v.piece(i)), i))
            if not choices:
                break
            token = choices[-1] if rng.random() < 0.3 else int(rng.choice(choices))
            ours.accept(token)
            theirs.accept(token)


@pytest.mark.parametrize("case", ["greedy class", "json", "choice"])
@pytest.mark.parametrize("params", [SamplingParams(seed=3), SamplingParams(seed=4, top_k=5, repeat_penalty=1.2)])
def test_seeds_agree_with_llama_server_under_a_grammar(case: str, params: SamplingParams) -> None:
    """Oracle: llama-server's order (common_sampler_sample) built from libllama's parts: choose freely, test with the
    grammar, and only if refused apply it and choose again, so that the random numbers used are the same."""
    v = vocab("stories")
    grammar = Grammar(kind="gbnf", text=GRAMMARS[case])
    ours = Sampler(SamplingParams(**_fields(params) | {"grammar": grammar}), v, [1], COMPILERS["stories"])
    chain, theirs = Oracle(params, "stories"), LlamaGrammar(GRAMMARS[case])
    chain.accept(1)
    usable = _usable()
    for logits in rows(11, v.n_vocab, 25):
        logits[[i for i in range(v.n_vocab) if i not in usable]] = -50  # control tokens: see above
        chosen, _ = chain.apply(logits)
        fits = theirs.allowed()
        if chosen not in fits:
            masked = logits.copy()
            masked[[i for i in range(v.n_vocab) if i not in fits]] = -np.inf
            chosen, _ = chain.apply(masked)
        token, _ = ours.sample(logits)
        assert token == chosen
        if v.is_eog(token):
            break
        chain.accept(token)
        theirs.accept(token)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


# ------------------------------------------------------------------------------------------------ documents


def generate(grammar: Grammar, name: str, seed: int, steps: int = 400, **options: Any) -> str:
    """Text under `grammar` from random logits at temperature 1.5: a model with random weights."""
    v = vocab(name)
    params = SamplingParams(seed=seed, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, grammar=grammar, **options)
    sampler = Sampler(params, v, (), COMPILERS[name])
    rng = np.random.default_rng(seed)
    text = b""
    for _ in range(steps):
        logits = rng.normal(0, 2, v.n_vocab).astype(np.float32)
        logits[list(v.eog_ids)] += 15
        for quote in b'"}],0':  # or strings would never end
            logits[v.tokenize(bytes([quote]), False, False)[-1]] += 13
        token, _ = sampler.sample(logits)
        if v.is_eog(token):
            return text.decode()
        text += v.piece(token)
    raise AssertionError(f"no end after {steps} tokens: {text[-200:]!r}")


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name", "n"]},
    {"enum": ["red", "green", 7, None]},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "minItems": 1},
    {"type": "string", "minLength": 5, "maxLength": 30},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                                  "additionalProperties": False}]},
    {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
                     "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/n",
     "$schema": "http://json-schema.org/draft-07/schema#"},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize("name", ["stories", "gpt-2"])
def test_random_weights_give_valid_documents(schema: dict[str, Any], name: str) -> None:
    """Bug log R43: with random weights every answer is still a document of the schema."""
    for seed in range(4 if name == "stories" else 2):
        document = json.loads(generate(Grammar(kind="json_schema", text=json.dumps(schema)), name, seed))
        assert _fits(document, schema, schema)


def _fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Validity for the keywords used above."""
    if "$ref" in schema:
        return _fits(value, root["$defs"]["n"], root)
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return bool(value == schema["const"])
    if "anyOf" in schema:
        return any(_fits(value, one, root) for one in schema["anyOf"])
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return all(key in value for key in schema.get("required", ())) and all(
            _fits(item, properties[key], root) if key in properties else schema.get("additionalProperties", True)
            for key, item in value.items()
        )
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99) and all(
            _fits(item, schema["items"], root) for item in value
        )
    return not isinstance(value, str) or schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)


def test_grammar_yes() -> None:
    """Bug log R46."""
    assert generate(Grammar(kind="gbnf", text='root ::= "yes"'), "gpt-2", 1) == "yes"


def test_lark() -> None:
    text = generate(Grammar(kind="lark", text='start: "a" /[0-9]{2}/ "z"'), "gpt-2", 3)
    assert re.fullmatch(r"a\d\dz", text)


def test_json_white_space_is_bounded() -> None:
    """As in llama.cpp's schema grammars: at most two newlines, then 20 blanks."""
    text = generate(Grammar(kind="json_schema", text='{"type":"object"}'), "stories", 5)
    assert not re.search(r"\n{3}|  +[^ ]*\"", re.sub(r'"[^"]*"', '""', text)) or len(text) < 4000
    c = constraint('{"type":"object"}', "json_schema")
    for piece in ("{", "\n", "\n"):
        c.accept(_token(piece))
    assert not c.allows(_token("\n"))


def _token(piece: str, name: str = "stories") -> int:
    v = vocab(name)
    return next(i for i in range(v.n_vocab) if v.piece(i) == piece.encode() and not v.is_control(i))


# ------------------------------------------------------------------------------------- control tokens, sleeping


def test_control_tokens_are_not_text() -> None:
    """A free string may not hold control tokens, whose text would vanish from the answer and break minLength."""
    v = vocab("phi-3")
    c = constraint('{"type":"string"}', "json_schema", "phi-3")
    c.accept(_token('"', "phi-3"))
    assert not any(c.allows(token) for token in v.control_texts.values())
    assert c.allows(_token("hello", "phi-3"))


def test_gbnf_literals_match_the_control_token_they_spell() -> None:
    """As in llama.cpp, where tool grammars spell out their tags; letters are allowed as well, end tokens are not."""
    c = constraint('root ::= "x<|user|>" [0-9] | "<|end|>"', name="phi-3")
    assert not c.allows(32007)
    c.accept(_token("x", "phi-3"))
    assert c.allows(32010)
    assert c.allows(_token("<", "phi-3"))
    c.accept(32010)
    assert c.allows(_token("7", "phi-3"))
    assert not c.allows(_token("x", "phi-3"))


def test_gbnf_token_references() -> None:
    """llama.cpp's `<[id]>`, `<text>` and their negation."""
    c = constraint("root ::= <[32010]> <|assistant|> !<[5]>", name="phi-3")
    assert allowed(c, "phi-3") == {32010}
    c.accept(32010)
    assert allowed(c, "phi-3") == {32001}
    c.accept(32001)
    assert not c.allows(5)
    assert c.allows(6)


def feed(c: Constraint, name: str, *pieces: str) -> None:
    for piece in pieces:
        token = _token(piece, name)
        assert c.allows(token)
        c.accept(token)


def test_lazy_grammar_sleeps_until_its_trigger() -> None:
    """llama.cpp's lazy grammars: free text until the trigger, which is itself the grammar's beginning."""
    c = constraint('root ::= "call:" [0-9]+', name="gpt-2", lazy=True, triggers=("tool:", "call:"))
    feed(c, "gpt-2", "free", " text", " ca", "ll")
    assert c.allows(50256)
    assert not c.active
    feed(c, "gpt-2", ":")
    assert c.active
    assert not c.allows(50256)
    assert not c.allows(_token("x", "gpt-2"))
    feed(c, "gpt-2", "7")
    assert c.allows(50256)


def test_trigger_inside_a_token() -> None:
    """A token that ends before the trigger does not count; one that goes on behind it must fit the grammar."""
    c = constraint('root ::= "(" [(]', name="gpt-2", lazy=True, triggers=("(",))
    bad, good = _token("()", "gpt-2"), _token("((", "gpt-2")
    assert not c.allows(bad)
    mask = bits(c.mask(bad), vocab("gpt-2").n_vocab)
    assert bad not in mask
    assert {good, 50256} <= mask
    with pytest.raises(GrammarError, match="woke it"):
        c.accept(bad)
    c.accept(good)
    assert c.active
    assert allowed(c, "gpt-2") == {50256}


def test_sampler_avoids_a_token_that_wakes_the_grammar_wrongly() -> None:
    """The best token is refused, the next best that fits comes out."""
    v = vocab("gpt-2")
    grammar = Grammar(kind="gbnf", text='root ::= "(" [(]', lazy=True, triggers=("(",))
    sampler = Sampler(SamplingParams(temperature=0, grammar=grammar), v, (), COMPILERS["gpt-2"])
    logits = np.zeros(v.n_vocab, np.float32)
    logits[_token("()", "gpt-2")] = 9
    logits[_token('("', "gpt-2")] = 8
    logits[_token("((", "gpt-2")] = 7
    assert sampler.sample(logits)[0] == _token("((", "gpt-2")


def test_after_holds_the_constraint_back() -> None:
    """Thinking is free, may not simply end, and white space behind its end tag is no part of the document."""
    c = constraint('root ::= "yes"', name="gpt-2", after="</think>")
    feed(c, "gpt-2", "hm", "...")
    assert not c.allows(50256)
    assert 50256 not in bits(c.mask(50256), 50257)
    feed(c, "gpt-2", "</", "think", ">\n\n") if b">\n\n" in vocab("gpt-2").pieces() else feed(
        c, "gpt-2", "</", "think", ">"
    )
    assert c.active
    assert c.allows(_token("yes", "gpt-2"))
    assert not c.allows(_token("no", "gpt-2"))


def test_after_and_lazy() -> None:
    """A trigger inside the thinking does not count."""
    c = constraint('root ::= "#" [0-9]', name="gpt-2", after="</t>", lazy=True, triggers=("#",))
    feed(c, "gpt-2", "#", "x", "</", "t", ">", "#")
    assert c.active
    assert not c.allows(_token("x", "gpt-2"))
    assert c.allows(_token("4", "gpt-2"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "x"]), max_size=12), st.sampled_from(["aab", "abab", "b"])
)
def test_trigger_is_found_wherever_tokens_are_cut(pieces: list[str], trigger: str) -> None:
    """Against a search in the whole text."""
    c = constraint("root ::= .*", name="gpt-2", lazy=True, triggers=(trigger,))
    text = ""
    for piece in pieces:
        text += piece
        c.accept(vocab("gpt-2").tokenize(piece)[0])
        if len(vocab("gpt-2").tokenize(piece)) > 1:
            for token in vocab("gpt-2").tokenize(piece)[1:]:
                c.accept(token)
        assert c.active == (trigger in text)


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rule named root"),
        ('x ::= "a"', "no rule named root"),
        ("root ::= foo", "uses rule 'foo'"),
        ('root ::= "a', "ends inside"),
        ("root ::= [a", "ends inside"),
        ("root ::= (", "expected \\)"),
        ("root ::= )", "end of the line"),
        ('root ::= "a"{3,2}', "upper bound"),
        ('root ::= "a"{9999999999}', "over 100000"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\ud800"', "not a character"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root = 1", "expected ::="),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "nested deeper"),
        ("root ::= <|nothing|>", "is not a token"),
        ("\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0', "too large"),
        ("root ::= r0\n" + "\n".join(f'r{i} ::= "(" r{i + 1}' for i in range(5000)) + "\nr5000 ::= root", "nested too"),
        ('root ::= "' + "a" * (1 << 20) + '"', "characters, at most"),
    ],
)
def test_bad_gbnf(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        constraint(text, name="phi-3")


def test_error_in_request_form() -> None:
    """A sampler that cannot start says so in llama-server's words."""
    grammar = Grammar(kind="gbnf", text="root ::= foo")
    with pytest.raises(SamplingError, match="Failed to initialize samplers: failed to parse grammar"):
        Sampler(SamplingParams(grammar=grammar), vocab("stories"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[]", "object or a boolean"),
        ('{"type":"foo"}', "Invalid type"),
        ('{"$ref":"https://example.org/x"}', "registry|retriev"),
        ('{"not":{"type":"string"}}', "not"),
        ('{"type":"string","pattern":"(?=a)b"}', "look-around"),
        ('{"items":' * 300 + "{}" + "}" * 300, "nested deeper"),
        ("[" * 100_000, "not JSON|nested"),
    ],
)
def test_bad_schemas(schema: str, message: str) -> None:
    """What cannot be enforced is an error that names it, never free text."""
    with pytest.raises(GrammarError, match=message):
        constraint(schema, "json_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "string", "format": "phone"},
        {"type": "object", "properties": {"a": {"type": "string"}}, "if": {}, "then": {"required": ["a"]}},
    ],
)
def test_keywords_that_llama_cpp_ignores_are_ignored_with_a_warning(schema: dict[str, Any]) -> None:
    """Pydantic's sets and unknown formats must not fail a request that llama-server serves."""
    c = constraint(json.dumps(schema), "json_schema")
    assert any("not enforced" in warning for warning in c.warnings)


@pytest.mark.parametrize(
    "options",
    [{"lazy": True}, {"lazy": True, "triggers": ("",)}, {"lazy": True, "triggers": tuple(map(str, range(300)))}],
)
def test_bad_triggers(options: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="trigger"):
        constraint('root ::= "a"', **options)


def test_unknown_kind() -> None:
    with pytest.raises(GrammarError, match="unknown kind"):
        constraint("x", "regex")


def test_a_front_can_check_without_a_vocabulary() -> None:
    """The same faults, found without the model."""
    compile_grammar(Grammar(kind="gbnf", text=JSON_GBNF))
    compile_grammar(Grammar(kind="gbnf", text="root ::= <|user|>"))
    with pytest.raises(GrammarError, match="uses rule"):
        compile_grammar(Grammar(kind="gbnf", text="root ::= foo"))
    with pytest.raises(GrammarError, match="failed to parse Lark grammar"):
        compile_grammar(Grammar(kind="lark", text="start: ("))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='root:=|()[]{}*+?.,"\\^-<>! \n#a0x', max_size=60))
def test_gbnf_fuzz(text: str) -> None:
    """Any text gives a grammar that llguidance reads, or a GbnfError."""
    try:
        lark = to_lark("root ::= " + text)
    except GbnfError:
        return
    assert lark.startswith("%llguidance")
    try:
        compile_grammar(Grammar(kind="gbnf", text="root ::= " + text))
    except GrammarError as error:
        message = str(error)
        assert not re.search("lexer error|unexpected", message)
