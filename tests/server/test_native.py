"""llama-server's own routes on a scripted engine.

Expected shapes, texts and status codes were recorded from a real llama-server (xllamacpp 2026.10) answering the same
requests; where we differ on purpose, the test says so.
"""

from __future__ import annotations

import json

import pytest
from fake_front import Front, front, script

from ftgguf.server.generation import turn_ends

FINAL_KEYS = [
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
    "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
    "timings",
]  # fmt: skip
TIMING_KEYS = [
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
]  # fmt: skip


def error_of(response: object) -> tuple[int, str, str]:
    body = json.loads(response.content)["error"]  # type: ignore[attr-defined]
    return response.status_code, body["type"], body["message"]  # type: ignore[attr-defined]


def test_final_object_has_llama_servers_keys_in_its_order(server: Front) -> None:
    out = server.post("/completion", {"prompt": "hi", "return_tokens": True}).json()
    assert list(out) == FINAL_KEYS
    assert list(out["timings"]) == TIMING_KEYS
    assert out["content"] == "Hello world!"
    assert out["tokens"] == [101, 102, 103, 104, 105]
    assert out["prompt"] == "<s>hi"
    assert out["generation_settings"]["top_p"] == 0.949999988079071


def test_rates_of_generation_leave_out_the_first_token(server: Front) -> None:
    """The recorded server: 3 tokens in 0.701 ms gave 2853 tokens/s, that is 2 / 0.701 ms."""
    timings = server.post("/completion", {"prompt": "hi"}).json()["timings"]
    assert timings["predicted_n"] == 5
    assert timings["predicted_per_token_ms"] == pytest.approx(20.0 / 4)
    assert timings["predicted_per_second"] == pytest.approx(4 / 0.020)


def test_stream_joins_to_the_answer_and_has_no_done(server: Front) -> None:
    events = server.events("/completion", {"prompt": "hi"})
    assert "[DONE]" not in events
    assert "".join(event["content"] for event in events) == "Hello world!"
    assert [event["stop"] for event in events] == [False] * 5 + [True]
    assert list(events[0]) == ["index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"]
    assert events[0]["id_slot"] == -1
    assert events[-1]["content"] == ""
    assert events[-1]["tokens"] == []


def test_headers_of_a_stream(server: Front) -> None:
    with server.http.stream("POST", "/completion", json={"prompt": "hi", "stream": True}) as response:
        response.read()
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["server"] == "llama.cpp"


def test_probabilities(server: Front) -> None:
    """Recorded: keys id, token, bytes, logprob, top_logprobs; a probability of 0 is the lowest float."""
    out = server.post("/completion", {"prompt": "hi", "n_probs": 2, "n_predict": 1}).json()
    assert len(out["completion_probabilities"]) == 1
    entry = out["completion_probabilities"][0]
    assert list(entry) == ["id", "token", "bytes", "logprob", "top_logprobs"]
    assert entry["top_logprobs"][1] == {"id": 5, "token": "", "bytes": [195], "logprob": -3.4028234663852886e38}
    out = server.post("/completion", {"prompt": "hi", "n_probs": 1, "n_predict": 1, "post_sampling_probs": True}).json()
    assert list(out["completion_probabilities"][0]) == ["id", "token", "bytes", "prob", "top_probs"]
    streamed = server.events("/completion", {"prompt": "hi", "n_probs": 1})
    assert all("completion_probabilities" in event for event in streamed[:-1])
    assert "completion_probabilities" not in streamed[-1]


def test_stop_word_as_the_first_token_with_probabilities(server: Front) -> None:
    """Bug log R04: no crash, empty content, no probabilities."""
    prompt = script(pieces=["\n", "x"])
    out = server.post("/completion", {"prompt": prompt, "stop": ["\n"], "n_probs": 10}).json()
    assert (out["content"], out["stop_type"], out["stopping_word"]) == ("", "word", "\n")
    assert "completion_probabilities" not in out


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_stop_over_several_tokens_never_leaks(server: Front, path: str) -> None:
    """Bug log R01 and R03."""
    prompt = script(pieces=["K", " L", " M", " N", " O", " P", " Q", " R"])
    body = {"prompt": prompt, "stop": ["O P Q"]}
    whole = server.post(path, body).json()
    text = whole["content"] if path == "/completion" else whole["choices"][0]["text"]
    assert text == "K L M N "
    events = [event for event in server.events(path, body) if event != "[DONE]"]
    parts = [event["content"] if path == "/completion" else event["choices"][0]["text"] for event in events]
    assert "".join(parts) == text


def test_progress_and_timings_on_request(server: Front) -> None:
    events = server.events("/completion", {"prompt": "hi", "return_progress": True, "timings_per_token": True})
    assert events[0]["prompt_progress"] == {"total": 3, "cache": 0, "processed": 3, "time_ms": 1}
    assert list(events[1]["timings"]) == TIMING_KEYS


def test_response_fields_pick_and_lift(server: Front) -> None:
    body = {"prompt": "hi", "response_fields": ["content", "generation_settings/n_predict", "nope"]}
    assert server.post("/completion", body).json() == {"content": "Hello world!", "generation_settings/n_predict": -1}


def test_several_prompts_and_copies(server: Front) -> None:
    out = server.post("/completion", {"prompt": ["a", [4, 5], [6, "b"], {"prompt_string": "c"}]}).json()
    assert [item["index"] for item in out] == [0, 1, 2, 3]
    assert [item["prompt"] for item in out] == ["<s>a", "\x01\x02", "\x03b", "<s>c"]
    out = server.post("/completion", {"prompt": "a", "n": 3, "seed": 7}).json()
    assert [item["index"] for item in out] == [0, 1, 2]
    events = server.events("/completion", {"prompt": ["a", "b"]})
    for index in (0, 1):
        mine = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in mine) == "Hello world!"
        assert mine[-1]["stop"] is True


BAD = [
    ("/completion", b"{bad", "[json.exception.parse_error.101] parse error at line 1, column 2"),
    (
        "/completion",
        b"",
        "[json.exception.parse_error.101] parse error at line 1, column 1: attempting to parse an empty",
    ),
    ("/completion", b"[]", "[json.exception.type_error.304] cannot use at() with array"),
    ("/completion", b"5", "[json.exception.type_error.304] cannot use at() with number"),
    ("/completion", b"{}", "[json.exception.out_of_range.403] key 'prompt' not found"),
    ("/v1/completions", b"{}", "[json.exception.out_of_range.403] key 'prompt' not found"),
    ("/completion", b'{"prompt": NaN}', "[json.exception.parse_error.101]"),
    ("/completion", b'{"prompt": "\\ud800"}', "[json.exception.parse_error.101]"),
    ("/completion", b'{"prompt": "\xff"}', "[json.exception.parse_error.101]"),
    ("/completion", b"[" * 100000, "[json.exception.parse_error.101]"),
    ("/completion", b'{"prompt":[]}', '"prompt" must not be empty'),
    ("/completion", b'{"prompt":null}', '"prompt" elements must be a string, a list of tokens'),
    ("/completion", b'{"prompt":5}', '"prompt" elements must be a string, a list of tokens'),
    ("/completion", b'{"prompt":{"a":1}}', '"prompt" elements must be a string, a list of tokens'),
    ("/completion", b'{"prompt":[1,999999]}', "Prompt contains invalid tokens"),
    ("/completion", b'{"prompt":[1,-1]}', "Prompt contains invalid tokens"),
    ("/completion", b'{"prompt":{"prompt_string":"x","multimodal_data":[]}}', "Multimodal data provided, but model"),
    ("/tokenize", b'{"content":5}', "[json.exception.type_error.302] type must be string, but is number"),
    ("/tokenize", b'{"content":null}', "[json.exception.type_error.302] type must be string, but is null"),
    ("/detokenize", b'{"tokens":5}', "[json.exception.type_error.302] type must be array, but is number"),
    ("/detokenize", b'{"tokens":["a"]}', "[json.exception.type_error.302] type must be number, but is string"),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_bad_bodies_are_400_with_llama_servers_words(server: Front, path: str, body: bytes, message: str) -> None:
    response = server.http.post(path, content=body)
    code, kind, text = error_of(response)
    assert (code, kind) == (400, "invalid_request_error")
    assert text.startswith(message)
    assert response.headers["content-type"] == "application/json; charset=utf-8"


FIELDS = [
    ({"n_predict": "5"}, "Field 'n_predict': [json.exception.type_error.302] type must be number, but is string"),
    ({"max_tokens": -2}, "Field 'max_tokens': Value must be between -1 <= value <= 2147483647, but got -2"),
    ({"n_predict": 2147483648}, "Field 'n_predict': Value must be between -1 <= value <= 2147483647, but got -214"),
    ({"temperature": "1"}, "Field 'temperature': [json.exception.type_error.302] type must be number, but is string"),
    ({"stream": "a"}, "Field 'stream': [json.exception.type_error.302] type must be boolean, but is string"),
    ({"cache_prompt": 1}, "Field 'cache_prompt': [json.exception.type_error.302] type must be boolean, but is number"),
    ({"n": 5}, "Field 'n': Value must be between 1 <= value <= 4, but got 5"),
    ({"n_cmpl": 0}, "Field 'n_cmpl': Value must be between 1 <= value <= 4, but got 0"),
    ({"repeat_last_n": -1}, "Field 'repeat_last_n': Value must be between 0 <= value <= 2147483647, but got -1"),
    ({"adaptive_decay": 2}, "Field 'adaptive_decay': Value must be between 0.000000 <= value <= 0.990000, but"),
    ({"dry_sequence_breakers": []}, "Field 'dry_sequence_breakers': Error: dry_sequence_breakers must be a non-empty"),
    ({"lora": 5}, "Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields"),
    ({"stop": [5]}, "Field 'stop': [json.exception.type_error.302] type must be string, but is number"),
    ({"reasoning_format": "foo"}, "Field 'reasoning_format': Unknown reasoning format: foo"),
    ({"sse_ping_interval": -5}, "Field 'sse_ping_interval': Value must be between -1 <= value <= 2147483647, but"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_hard_limits_and_types(server: Front, fields: dict[str, object], message: str) -> None:
    code, kind, text = error_of(server.post("/completion", {"prompt": "x", **fields}))
    assert (code, kind) == (400, "invalid_request_error")
    assert text.startswith(message)


SETTINGS = [
    ({"n_predict": 1.5}, {"n_predict": 1}),
    ({"n_predict": True}, {"n_predict": 1, "max_tokens": 1}),
    ({"n_predict": 3, "max_tokens": 7}, {"n_predict": 3}),
    ({"max_tokens": None}, {"n_predict": -1}),
    ({"top_p": 7, "min_p": -3, "temperature": -1}, {"top_p": 1.0, "min_p": 0.0, "temperature": 0.0}),
    ({"mirostat": 9}, {"mirostat": 2}),
    ({"seed": -1}, {"seed": 4294967295}),
    ({"dry_base": 0.5}, {"dry_base": 1.75}),
    ({"samplers": ["foo", "top_k", "NUCLEUS"]}, {"samplers": ["top_k", "top_p"]}),
    ({"samplers": "kpz"}, {"samplers": ["top_k", "top_p"]}),
    ({"logit_bias": 5, "stop": 5}, {"logit_bias": [], "stop": []}),
    ({"logit_bias": [[5, False], [999999, 1], [7, True], "x"]}, {"logit_bias": [{"bias": None, "token": 5}]}),
    ({"logit_bias": {"5": 1.5, "-1": 2, "a": 1}}, {"logit_bias": [{"bias": 1.5, "token": 5}, {"bias": 1, "token": 100}]}),  # noqa: E501
    ({"ignore_eos": True}, {"logit_bias": [{"bias": None, "token": 2}], "ignore_eos": True}),
    ({"stop": "a"}, {"stop": ["a"]}),
    ({"stop": ["", "b"]}, {"stop": ["b"]}),
    ({"grammar": "root ::= \"a\"", "json_schema": {}}, {"grammar": "root ::= \"a\""}),
    ({"lora": [{"id": 3}, {"id": 0, "scale": 1}, 5]}, {"lora": [{"id": -1, "scale": 0.0}, {"id": 0, "scale": 1.0},
                                                                  {"id": 3, "scale": 0.0}]}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), SETTINGS)
def test_soft_limits_aliases_and_conversions(
    server: Front, fields: dict[str, object], expected: dict[str, object]
) -> None:
    settings = server.post("/completion", {"prompt": "x", **fields}).json()["generation_settings"]
    assert {key: settings[key] for key in expected} == expected


def test_null_is_absent_for_every_optional_field(server: Front) -> None:
    """Bug log R13: what SDKs send when nothing is set."""
    names = [
        "max_tokens",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "n",
        "logit_bias",
        "user",
        "stream_options",
        "logprobs",
    ]
    assert server.post("/v1/completions", {"prompt": "x"} | dict.fromkeys(names)).status_code == 200
    chat = dict.fromkeys([*names, "tools", "tool_choice", "response_format", "top_logprobs"])
    body = {"messages": [{"role": "user", "content": "x"}]} | chat
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("n", [0, 1, 2])
def test_exact_token_counts(server: Front, n: int) -> None:
    """Bug log R12. A real server generates one token for 0; its own documentation says none, and so do we."""
    assert server.post("/completion", {"prompt": "x", "n_predict": n}).json()["tokens_predicted"] == n
    usage = server.post("/v1/completions", {"prompt": "x", "max_tokens": n}).json()["usage"]
    assert usage["completion_tokens"] == n


def test_prompt_that_does_not_fit_is_refused_before_the_stream(server: Front) -> None:
    """Bug log R29; recorded text and extra fields."""
    for n, code in ((4094, 200), (4095, 400), (9000, 400)):
        response = server.post("/completion", {"prompt": "x" * n, "stream": True})
        assert response.status_code == code
        if code == 400:
            assert response.json() == {
                "error": {
                    "code": 400,
                    "message": f"request ({n + 1} tokens) exceeds the available context size (4096 tokens), "
                    "try increasing it",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": n + 1,
                    "n_ctx": 4096,
                }
            }


def test_an_engines_refusal_is_a_plain_error_also_when_streaming(server: Front) -> None:
    prompt = script(fail=[400, "invalid_request_error", "Failed to initialize samplers: failed to parse grammar"])
    for stream in (False, True):
        code, kind, text = error_of(server.post("/completion", {"prompt": prompt, "stream": stream}))
        assert (code, kind) == (400, "invalid_request_error")
        assert text == "Failed to initialize samplers: failed to parse grammar"


def test_tokenize_and_back(server: Front) -> None:
    assert server.post("/tokenize", {"content": "aé"}).json() == {"tokens": [100, 198, 172]}
    assert server.post("/tokenize", {"content": "a", "add_special": True}).json() == {"tokens": [1, 100]}
    assert server.post("/tokenize", {"content": "</s>", "parse_special": False}).json()["tokens"][0] == 63
    assert server.post("/tokenize", {"content": ["a", 5, "b"]}).json() == {"tokens": [100, 5, 101]}
    pieces = server.post("/tokenize", {"content": "é", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 198, "piece": [195]}, {"id": 172, "piece": [169]}]
    assert server.post("/detokenize", {"tokens": [1, 100, 198, 172]}).json() == {"content": "<s>aé"}
    assert server.post("/tokenize", {}).json() == {"tokens": []}
    assert server.post("/detokenize", {}).json() == {"content": ""}
    # a real server answers 500 with its container's range error
    assert error_of(server.post("/detokenize", {"tokens": [99999]}))[0] == 400


def test_props_has_llama_servers_keys(server: Front) -> None:
    props = server.http.get("/props").json()
    assert list(props) == [
        "default_generation_settings", "total_slots", "model_alias", "model_ftype", "model_path", "modalities",
        "media_marker", "endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "ui_settings", "chat_template",
        "chat_template_caps", "bos_token", "eos_token", "build_info", "is_sleeping", "cors_proxy_enabled",
    ]  # fmt: skip
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert "stop" not in props["default_generation_settings"]["params"]
    assert props["build_info"].startswith("b")


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/props", "This server does not support changing global properties. Start it with `--props`"),
        ("GET", "/metrics", "This server does not support metrics endpoint. Start it with `--metrics`"),
        ("POST", "/embedding", "This server does not support embeddings. Start it with `--embeddings`"),
        ("POST", "/v1/embeddings", "This server does not support embeddings. Start it with `--embeddings`"),
        ("POST", "/rerank", "This server does not support reranking. Start it with `--reranking`"),
        (
            "POST",
            "/slots/0?action=erase",
            "This server does not support slots action. Start it with `--slot-save-path`",
        ),
        ("POST", "/v1/systemone", "This model is not a decision model"),
        ("POST", "/v1/audio/transcriptions", "The current model does not support audio input."),
    ],
)
def test_disabled_endpoints_are_501(server: Front, method: str, path: str, message: str) -> None:
    response = server.http.request(method, path, json={})
    assert error_of(response) == (501, "not_supported_error", message)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_wrong_methods_and_paths_are_404(server: Front, method: str) -> None:
    for path in ("/completion", "/nope"):
        response = server.http.request(method, path)
        assert response.status_code == 404
        assert response.json() == {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}


def test_slots_metrics_and_lora() -> None:
    with front(http={"metrics": True}) as running:
        assert len(running.http.get("/slots").json()) == 4
        assert running.http.get("/slots?fail_on_no_slot=1").status_code == 200
        assert running.http.get("/lora-adapters").json() == []
        assert running.post("/lora-adapters", []).json() == {"success": True}
        response = running.http.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4"
        assert int(response.headers["process-start-time-unix"]) > 0
        lines = response.text.splitlines()
        assert "# TYPE llamacpp:prompt_tokens_total counter" in lines
        assert "llamacpp:prompt_tokens_total 7" in lines
        assert "ftgguf_preemptions_total 1" in lines
        assert "llamacpp:requests_deferred 0" in lines
    with front(http={"slots": False}) as running:
        assert running.http.get("/slots").status_code == 501


def test_turn_ends_are_told_to_the_engine() -> None:
    """Where a later request may part from this one: after each end-of-turn token, not at the very end."""
    assert turn_ends([1, 5, 2, 6, 2, 7], frozenset((2,))) == (3, 5)
    assert turn_ends([5, 2], frozenset((2,))) == ()
    many = turn_ends([2, 3] * 100, frozenset((2,)))
    assert len(many) == 33
    assert many[0] == 1
    assert many[-1] == 199
