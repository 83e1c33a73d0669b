"""What public reports say went wrong in servers like this one, tried on the whole server with a small real model.

R numbers are the reports' (docs: the bug log); those about parsers, templates and wires are beside their code.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from compat.server import our_server
from ftgguf.pull.demo import resolve_stories

GREEDY = {"temperature": 0, "n_predict": 12}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    args = ["-c", "2048", "-np", "4", "-t", "1", "-a", "stories"]
    with our_server(resolve_stories(), args) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    response = http.post("/completion", json={"prompt": prompt, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


# ------------------------------------------------------------------------------------ B. sampling and logprobs


def test_r14_odd_logit_biases_harm_nobody(http: httpx.Client) -> None:
    """Unknown ids are dropped silently as llama-server drops them, and the next answer's numbers are fresh."""
    before = complete(http, n_probs=2, cache_prompt=False)
    for bias in ({"999999": 5}, {"-1": 5}, {"abc": 1}, [[15, False]], [[300, 1e9]], [["x"]], "text", 5):
        assert http.post("/completion", json={"prompt": "a", **GREEDY, "logit_bias": bias}).status_code == 200
    after = complete(http, n_probs=2, cache_prompt=False)
    assert after["completion_probabilities"] == before["completion_probabilities"]
    assert http.post("/completion", content=b'{"prompt": "a", "logit_bias": [[5, NaN]]}').status_code == 400


def test_r15_logprobs_are_probabilities(http: httpx.Client) -> None:
    """Over the raw logits: no sampler setting changes them, and they sum to at most one."""
    plain = complete(http, n_probs=8, cache_prompt=False)["completion_probabilities"]
    for entry in plain:
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1 + 1e-4
    cut = complete(http, n_probs=8, cache_prompt=False, top_k=1, top_p=0.1)["completion_probabilities"]
    assert cut == plain


def test_r16_repeat_penalty_one_is_off(http: httpx.Client) -> None:
    plain = complete(http)["content"]
    assert complete(http, repeat_penalty=1.0)["content"] == plain
    assert complete(http, top_k=1)["content"] == plain
    for penalty in (0, 0.5, 1.1, -1):
        assert http.post("/completion", json={"prompt": "a", **GREEDY, "repeat_penalty": penalty}).status_code in (
            200,
            400,
        )
    assert complete(http)["content"] == plain


def test_r17_openai_penalties_work_by_themselves(http: httpx.Client) -> None:
    """The look-back window is on by default; 0 turns it off."""
    loop = "the cat and the cat and the cat and the cat and"
    plain = complete(http, loop)["content"]
    assert complete(http, loop, frequency_penalty=2.0)["content"] != plain
    assert complete(http, loop, presence_penalty=2.0)["content"] != plain
    assert complete(http, loop, frequency_penalty=2.0, repeat_last_n=0)["content"] == plain
    assert http.post("/completion", json={"prompt": loop, "repeat_last_n": -1}).status_code == 400


def test_r18_seeds(http: httpx.Client) -> None:
    assert len({complete(http, seed=5)["content"] for _ in range(10)}) == 1
    hot = {"temperature": 1.2, "n_predict": 24}
    assert complete(http, **hot, seed=7)["content"] == complete(http, **hot, seed=7)["content"]
    assert len({complete(http, **hot, seed=-1)["content"] for _ in range(4)}) > 1


def test_r19_parallel_answers_are_the_lone_ones(http: httpx.Client) -> None:
    """Eight alike and eight different at once over four slots.

    A batch is summed in another order than a single row, so an answer may leave the lone one where two tokens are
    equally good, and then for the second best; never elsewhere, and never with another request's text.
    """
    names = ("cat", "dog", "bird", "boy", "girl", "man", "sun", "tree")
    prompts = ["Once upon a time"] * 8 + [f"The {name}" for name in names]
    extra = {"n_probs": 2, "cache_prompt": False}
    alone = [complete(http, prompt, **extra)["completion_probabilities"] for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: complete(http, prompt, **extra), prompts))
    equal = 0
    for lone, answer in zip(alone, answers, strict=True):
        pairs = zip(lone, answer["completion_probabilities"], strict=False)
        parted = next(((a, b) for a, b in pairs if a["id"] != b["id"]), None)
        equal += parted is None
        if parted is not None:
            first, second = parted[0]["top_logprobs"]
            assert parted[1]["id"] == second["id"]
            assert first["logprob"] - second["logprob"] < 0.25
    assert equal >= 12


def test_r20_cached_answers_are_the_fresh_ones(http: httpx.Client) -> None:
    prompt = [1, *(300 + i % 150 for i in range(400))]
    edited = [*prompt[:200], 301, *prompt[201:]]
    for tokens in (prompt, edited):
        fresh = complete(http, tokens, cache_prompt=False)["content"]
        assert [complete(http, tokens)["content"] for _ in range(3)] == [fresh] * 3
    assert complete(http, prompt)["timings"]["cache_n"] == len(prompt) - 1


def test_r21_odd_samplers(http: httpx.Client) -> None:
    for samplers in (["min_p", "temperature"], [], ["no_such"], "kt", "zz", ["temperature"] * 20):
        answer = http.post("/completion", json={"prompt": "a", "n_predict": 4, "samplers": samplers})
        assert answer.status_code == 200, samplers
    everything = [[token, False] for token in range(512)]
    refused = http.post(
        "/completion", json={"prompt": "a", **GREEDY, "logit_bias": everything, "grammar": 'root ::= "a"'}
    )
    assert refused.status_code in (400, 500)
    assert refused.json()["error"]["message"]
    assert complete(http)["content"]


# ---------------------------------------------------------------------------------------------- C. chat input


def test_r22_assistant_messages_without_content(http: httpx.Client) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    prompts = set()
    for extra in ({"content": None}, {}, {"content": ""}, {"content": []}):
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", **extra, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "y"},
        ]
        answer = http.post("/apply-template", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        prompts.add(answer.json()["prompt"])
    assert len(prompts) == 1


def test_r30_the_limit_of_a_request_is_shown(http: httpx.Client) -> None:
    """With an explicit `-np` the context is divided, as in llama-server; the numbers say so."""
    limit = http.get("/props").json()["default_generation_settings"]["n_ctx"]
    assert limit == 512
    assert {slot["n_ctx"] for slot in http.get("/slots").json()} == {limit}
    refused = http.post("/completion", json={"prompt": [300] * limit, "n_predict": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["n_ctx"] == limit
    last = complete(http, [300] * (limit - 1), n_predict=10)
    assert (last["stop_type"], last["truncated"], last["tokens_predicted"]) == ("limit", True, 1)


# ------------------------------------------------------------------------------------- D, E. tools and schemas

TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
    },
}
USER = [{"role": "user", "content": "Hi"}]


def test_r41_tools_without_a_template_for_them(http: httpx.Client) -> None:
    """This template never mentions tools; a required call is enforced all the same."""
    body = {"messages": USER, "tools": [TOOL], "tool_choice": "required", "max_tokens": 100, "temperature": 1.5}
    for seed in range(3):
        choice = http.post("/v1/chat/completions", json={**body, "seed": seed}).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "paint"
        assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
     "additionalProperties": False},
    {"enum": ["red", "green", {"x": 1}]},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "minItems": 1,
     "maxItems": 2},
]  # fmt: skip


FITS: list[Callable[[Any], bool]] = [
    lambda value: set(value) == {"a"} and value["a"] in range(10),
    lambda value: value in ("red", "green", {"x": 1}),
    lambda value: 1 <= len(value) <= 2 and all(len(v) <= 2 and all(isinstance(x, bool) for x in v) for v in value),
]


@pytest.mark.parametrize(("schema", "fits"), list(zip(SCHEMAS, FITS, strict=True)))
def test_r43_schemas_are_enforced(http: httpx.Client, schema: dict[str, Any], fits: Callable[[Any], bool]) -> None:
    """A model that would never write JSON, hot, twenty times."""
    for seed in range(20):
        answer = complete(http, json_schema=schema, temperature=1.5, seed=seed, n_predict=200)
        assert answer["stop_type"] == "eos"
        assert fits(json.loads(answer["content"])), answer["content"]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMAS[0], "strict": True}},
        {"type": "json_schema", "schema": SCHEMAS[0]},
        {"type": "json_object", "schema": SCHEMAS[0]},
    ],
)
def test_r44_all_shapes_of_response_format(http: httpx.Client, form: dict[str, Any]) -> None:
    body = {"messages": USER, "response_format": form, "temperature": 1.5, "max_tokens": 100}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"a"}


def test_r44_text_and_an_impossible_schema(http: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 4, "response_format": {"type": "text"}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "no-such-type"}}}
    assert http.post("/v1/chat/completions", json={**body, "response_format": bad}).status_code == 400
    assert http.post("/v1/chat/completions", json={**body, "response_format": {"type": "yaml"}}).status_code == 400


def test_r45_length_limits(http: httpx.Client) -> None:
    schema = {"type": "string", "minLength": 20, "maxLength": 60}
    answer = complete(http, json_schema=schema, temperature=1.0, seed=3, n_predict=300)
    assert 20 <= len(json.loads(answer["content"])) <= 60


def test_r46_grammars_on_every_route(http: httpx.Client) -> None:
    grammar = {"grammar": 'root ::= "yes"', "temperature": 1.5, "max_tokens": 9}
    assert http.post("/completion", json={"prompt": "x", **grammar}).json()["content"] == "yes"
    assert http.post("/v1/completions", json={"prompt": "x", **grammar}).json()["choices"][0]["text"] == "yes"
    chat = http.post("/v1/chat/completions", json={"messages": USER, **grammar}).json()
    assert chat["choices"][0]["message"]["content"] == "yes"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def wide(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}


BRANCHES = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(40)}
HOSTILE: dict[str, tuple[dict[str, Any], int]] = {
    "deep": ({"json_schema": nested(200)}, 400),
    "wide": ({"json_schema": wide(5000)}, 400),
    "rather wide": ({"json_schema": wide(900)}, 200),
    "branching references": ({"json_schema": {"$defs": {**BRANCHES, "d40": {}}, "$ref": "#/$defs/d0"}}, 200),
    "a reference to itself": ({"json_schema": {"$ref": "#"}}, 400),
    "long strings": ({"json_schema": {"type": "string", "minLength": 10**5, "maxLength": 10**9}}, 200),
    "many items": ({"json_schema": {"type": "array", "items": wide(2), "minItems": 10**5}}, 200),
    "a slow pattern": ({"json_schema": {"type": "string", "pattern": "^((((a+)+)+)+)+$"}}, 200),
    "large": ({"json_schema": {"enum": [f"value {i} of many" for i in range(50_000)]}}, 400),
    "groups": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, 400),
    "doubling rules": (
        {"grammar": "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0'},
        400,
    ),
    "repeats of repeats": ({"grammar": 'root ::= ("a"{1,1000}){1,100}'}, 200),
    "left recursion": ({"grammar": 'root ::= root "a" | "a"'}, 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_harm_nobody(http: httpx.Client, name: str) -> None:
    """Each is bounded or refused in the request that brings it; somebody else's request runs beside it."""
    fields, code = HOSTILE[name]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(complete, http, n_predict=4)
        answer = http.post("/completion", json={"prompt": "a", **GREEDY, **fields})
        assert other.result()["tokens_predicted"] == 4
    assert answer.status_code == code, answer.text[:300]
    if code != 200:
        assert answer.json()["error"]["type"] == "invalid_request_error"


# ------------------------------------------------------------------------------------- G. connections and slots


def test_r56_a_large_limit_reserves_nothing(http: httpx.Client) -> None:
    """The prompt fills most of the context, and max_tokens is far beyond it."""
    answer = complete(http, [300] * 480, n_predict=32768)
    assert answer["stop_type"] in ("limit", "eos")


@pytest.mark.parametrize("border", [16, 64, 256, 510])
def test_r57_lengths_around_borders(http: httpx.Client, border: int) -> None:
    for length in (border - 1, border, border + 1):
        tokens = [1, *(300 + i % 90 for i in range(length - 1))]
        assert complete(http, tokens, n_predict=1)["tokens_evaluated"] == length


def test_r73_a_growing_conversation_keeps_its_prefix(http: httpx.Client) -> None:
    """Eight turns with a short request of somebody else between them: only the new turn is evaluated."""
    tokens, held = [1], 0
    for turn in range(8):
        tokens += [300 + (turn * 31 + i) % 150 for i in range(40)]
        answer = complete(http, tokens, n_predict=4, return_tokens=True)
        assert answer["timings"]["cache_n"] >= held - 32, turn
        tokens += answer["tokens"]
        held = len(tokens)
        complete(http, [1, *(460 - i for i in range(20))], n_predict=2)


def test_many_idle_connections_and_a_slow_reader(http: httpx.Client) -> None:
    """Nobody else waits for a client that sends nothing, or does not read what it asked for."""
    host, port = str(http.base_url).removeprefix("http://").rstrip("/").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(300)]
    body = json.dumps({"prompt": "Once", "n_predict": 400, "ignore_eos": True, "stream": True, "n_probs": 20}).encode()
    slow = idle[0]
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    try:
        assert [complete(http, n_predict=4)["tokens_predicted"] for _ in range(3)] == [4] * 3
    finally:
        for connection in idle:
            connection.close()
    assert complete(http)["content"]


# ----------------------------------------------------------------------------------------------- bad input

MANGLED = [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a"} trailing',
    b"[" * 100_000, b'{"a":' * 50_000, b'{"messages": 5}', b'{"messages": [5]}', b'{"messages": [[]]}',
    b'{"messages": [{"role": 5, "content": "x"}]}', b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": [{"role": "user", "content": [5]}]}', b'{"messages": [], "tools": 5}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [5]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
    b'{"prompt": [[[]]]}', b'{"prompt": [-1]}', b'{"prompt": [1.5]}', b'{"prompt": [true]}', b'{"prompt": {}}',
    b'{"input": 5}', b'{"input": [5]}', b'{"content": 5}', b'{"content": {"a": 1}}', b'{"tokens": "x"}',
    b'{"tokens": [null]}', b'{"tokens": [99999999999999999999]}',
]  # fmt: skip
ROUTES = (
    "/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses", "/v1/responses/input_tokens", "/infill", "/tokenize", "/detokenize", "/apply-template",
    "/v1/embeddings", "/v1/rerank", "/slots/0?action=save", "/lora-adapters", "/v1/chat/completions/control",
    "/v1/streams/lookup",
)  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_mangled_bodies_get_error_objects(http: httpx.Client, route: str) -> None:
    """Never a dropped connection, never another framework's error, never HTML; and the server goes on."""
    for body in MANGLED:
        response = http.post(route, content=body, headers={"Content-Type": "application/json"})
        assert response.headers["content-type"].startswith("application/json"), body[:60]
        if response.status_code != 200:
            error = response.json()["error"]
            assert {"code", "message", "type"} <= set(error), body[:60]
            assert error["code"] == response.status_code
            assert response.status_code in (400, 500, 501), body[:60]
            assert "Traceback" not in error["message"]
    assert http.get("/health").status_code == 200


def test_wrong_methods_are_not_found(http: httpx.Client) -> None:
    """llama-server knows no 405."""
    for method, path in (("GET", "/completion"), ("PUT", "/completion"), ("POST", "/health"), ("DELETE", "/props")):
        answer = http.request(method, path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "File Not Found"
