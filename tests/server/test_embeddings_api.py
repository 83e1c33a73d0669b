"""/embedding(s), /v1/embeddings, /rerank and Ollama's embed: the same requests to us and to a real llama-server.

Where xllamacpp is missing, what needs it is skipped; the rest is held to what it answered when this was written.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_front import Front
from hypothesis import given
from hypothesis import strategies as st

from compat.differential import Request, Rule, run
from compat.oracle_states import pooled
from compat.peer import peer_server
from compat.reranker import TEMPLATE, copy_with
from compat.server import our_server
from compat.synth import make
from ftgguf.server.embeddings import normalised

BASE = ["-t", "1", "-np", "2", "-c", "1024", "-kvu", "--no-warmup"]
NUMBERS = {"*embedding*": Rule.CLOSE, "*score": Rule.CLOSE}
"""The peer's kernels are for AVX2."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    make("qwen3", folder / "plain.gguf", types="F16")
    copy_with(folder / "plain.gguf", folder / "mean.gguf", pooling="mean")
    copy_with(folder / "plain.gguf", folder / "rank.gguf", pooling="rank", labels=2, template=TEMPLATE)
    copy_with(folder / "plain.gguf", folder / "untold.gguf", pooling="rank", labels=1)
    return folder


@pytest.fixture(scope="module")
def mean(folder: Path) -> Iterator[httpx.Client]:
    """Our server with the mean of states."""
    with our_server(folder / "mean.gguf", [*BASE, "--embeddings"]) as url, httpx.Client(base_url=url) as http:
        yield http


def posts(path: str, *bodies: Any) -> list[Request]:
    return [Request(f"{path} {body}"[:90], "POST", path, body, rules=NUMBERS) for body in bodies]


LONG = "hello " * 60

OPENAI = posts(
    "/v1/embeddings",
    {"input": "hello world"},
    {"input": ["hello world", "hi", LONG], "model": "foo", "dimensions": 16, "user": "me"},
    {"content": "hello world"},
    {"input": [1, 2, 3]},
    {"input": [[1, 2, 3], [4, 5], "foo"]},
    {"input": ["a", 5, "b"]},
    {"input": {"prompt_string": "hi"}},
    {"input": "x", "embd_normalize": -1},
    {"input": "", "encoding_format": "float"},
    {"input": ["a", ""]},
    {"input": []},
    {"content": []},
    {"input": None},
    {"input": 5},
    {"input": True},
    {},
    [1],
    "x",
    {"input": [1000000]},
    {"input": [-1]},
    {"input": "a", "encoding_format": "foo"},
    {"input": "a", "encoding_format": 5},
    {"input": "a", "encoding_format": None},
    {"input": "a", "embd_normalize": "x"},
)
NATIVE = posts(
    "/embedding",
    {"content": "hello world"},
    {"input": ["hello world", "there"]},
    {"input": "hi", "encoding_format": "base64"},
    *({"input": "hi", "embd_normalize": norm} for norm in (-1, 1, 2, 3, 2.7)),
    {"input": "hi", "embd_normalize": [2]},
    {"input": ""},
    {"prompt": "hi"},
) + posts("/embeddings", {"content": "hi"})
RERANK = [
    *posts(
        "/rerank",
        {"query": "hi", "documents": ["a", "b hello", "c"]},
        {"query": "hi", "documents": ["a", LONG, "c"], "top_n": 2, "model": "m"},
        {"query": "hi", "documents": ["a", "b"], "top_n": 0},
        {"query": "hi", "documents": ["a", "b"], "top_n": 9},
        {"query": "hi", "documents": ["a", "b"], "top_n": "x"},
        {"query": "hi", "texts": ["a", "b hello"], "return_text": True},
        {"query": "hi", "texts": ["a", "b hello"]},
        {"query": "hi", "texts": ["a"], "documents": ["b"], "return_text": True},
        {"query": "hi", "documents": ["a"], "return_text": True, "return_documents": True},
        {"query": "hi", "documents": []},
        {"query": "hi", "documents": "a"},
        {"query": "hi", "documents": ["a", 5]},
        {"query": "", "documents": [""]},
        {"query": "hi"},
        {"documents": ["a"]},
        {"query": 5, "documents": ["a"]},
        [],
    ),
    *posts("/v1/reranking", {"query": "hi", "documents": ["a"]}),
    *posts("/completion", {"prompt": "hi", "n_predict": 3, "temperature": 0, "response_fields": ["tokens_evaluated"]}),
]
REFUSED = [
    *(Request(path, "POST", path, {"input": "x"}) for path in ("/embedding", "/embeddings", "/v1/embeddings")),
    *(Request(path, "POST", path, {"query": "x"}) for path in ("/rerank", "/v1/rerank", "/reranking", "/v1/reranking")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "flags", "requests"),
    [
        ("mean.gguf", ["--embeddings"], [*OPENAI, *NATIVE, *REFUSED[3:]]),
        ("mean.gguf", ["--embedding", "--pooling", "last", "--embd-normalize", "-1"], [*OPENAI[:5], *NATIVE[:9]]),
        ("mean.gguf", ["--embedding", "--pooling", "none"], [*OPENAI[:3], *NATIVE]),
        ("plain.gguf", ["--embedding", "--pooling", "cls"], NATIVE[:4]),
        ("rank.gguf", ["--reranking"], RERANK),
        ("rank.gguf", ["--embedding", "--pooling", "rank"], RERANK[:2]),
        ("untold.gguf", ["--reranking"], RERANK[:2]),
        ("plain.gguf", [], REFUSED),
    ],
)
def test_like_llama_server(folder: Path, file: str, flags: list[str], requests: list[Request]) -> None:
    """Status, words, keys in both directions, and numbers as far as the kernels agree."""
    pytest.importorskip("xllamacpp", reason="the real llama-server is an optional test dependency")
    path = folder / file
    with our_server(path, [*BASE, *flags]) as ours, peer_server(path, [*BASE, *flags]) as peer:
        found = run(ours, peer, requests)
    assert [str(each) for each in found] == []


def test_vectors_are_the_engines(folder: Path, mean: httpx.Client) -> None:
    """Over HTTP as in libllama, float and base64 alike, of unit length; usage counts every token."""
    tokens = [5, 9, 77, 130]
    (state,) = pooled(folder / "mean.gguf", [tokens], "mean")
    expected = state[0] / np.linalg.norm(state[0])
    plain = mean.post("/v1/embeddings", json={"input": [tokens, "x"]}).json()
    assert plain["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    np.testing.assert_allclose(plain["data"][0]["embedding"], expected, atol=1e-2)
    packed = mean.post("/v1/embeddings", json={"input": tokens, "encoding_format": "base64"}).json()["data"][0]
    found = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
    np.testing.assert_allclose(found, expected, atol=1e-2)
    assert abs(float(np.linalg.norm(found)) - 1.0) < 1e-5
    again = mean.post("/v1/embeddings", json={"input": tokens, "encoding_format": "float"}).json()["data"][0]
    assert again["embedding"] == found.tolist()


def test_openais_client(mean: httpx.Client) -> None:
    """The client asks for base64 unless told otherwise, and hands out floats either way."""
    openai = pytest.importorskip("openai", reason="the public clients are optional test dependencies")
    client = openai.OpenAI(base_url=f"{mean.base_url}/v1", api_key="none")
    packed = client.embeddings.create(model="m", input=["hello", "world"])
    plain = client.embeddings.create(model="m", input=["hello", "world"], encoding_format="float")
    assert [each.index for each in packed.data] == [0, 1]
    assert packed.usage.prompt_tokens == plain.usage.total_tokens > 0
    for one, other in zip(packed.data, plain.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-2)


def test_longer_than_the_physical_batch(folder: Path) -> None:
    """llama-server refuses these with 500 (`increase the physical batch size`); ours pools them batch by batch."""
    with our_server(folder / "mean.gguf", [*BASE, "--embeddings", "-ub", "32"]) as url:
        short = httpx.post(f"{url}/v1/embeddings", json={"input": "hello"}, timeout=30).json()
        long = httpx.post(f"{url}/v1/embeddings", json={"input": "hello " * 150}, timeout=30)
        assert long.status_code == 200
        assert long.json()["usage"]["prompt_tokens"] > 32
        assert len(long.json()["data"][0]["embedding"]) == len(short["data"][0]["embedding"])
        beyond = httpx.post(f"{url}/v1/embeddings", json={"input": ["x", "hello " * 1500]}, timeout=30)
        assert beyond.status_code == 400
        assert beyond.json()["error"]["type"] == "exceed_context_size_error"


def test_many_inputs_beside_a_stream(mean: httpx.Client) -> None:
    """A stream goes on to its end while 64 inputs are embedded, whose order is kept."""
    lines: list[str] = []
    body = {"prompt": "hi", "n_predict": 200, "stream": True, "ignore_eos": True, "temperature": 0}

    def read() -> None:
        with (
            httpx.Client(base_url=mean.base_url, timeout=60) as other,
            other.stream("POST", "/completion", json=body) as response,
        ):
            lines.extend(line for line in response.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    inputs = [[token, token + 1] for token in range(64)]
    answer = mean.post("/v1/embeddings", json={"input": inputs}, timeout=60).json()
    reader.join(60)
    assert '"stop":true' in lines[-1]
    assert '"tokens_predicted":200' in lines[-1]
    assert [each["index"] for each in answer["data"]] == list(range(64))
    one = mean.post("/v1/embeddings", json={"input": inputs[40]}, timeout=60).json()
    np.testing.assert_allclose(answer["data"][40]["embedding"], one["data"][0]["embedding"], atol=1e-2)


def test_scores_only(folder: Path) -> None:
    """A reranker has no embeddings: llama-server answers with zeros, ours says so. Negative counts are refused."""
    with our_server(folder / "rank.gguf", [*BASE, "--reranking"]) as url:
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "x"})
        assert answer.status_code == 400
        assert "use /rerank" in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/rerank", json={"query": "x", "documents": ["y"], "top_n": -1}).status_code == 400
        answer = httpx.post(f"{url}/api/embed", json={"model": "rank", "input": "x"})
        assert answer.status_code in (400, 404)


def test_ollama_embeds_without_a_flag(folder: Path) -> None:
    """/api/embed: unit length, order, `dimensions`, truncation; /api/embeddings: one vector, not normalised."""
    with our_server(folder / "plain.gguf", [*BASE, "-a", "m"]) as url, httpx.Client(base_url=url, timeout=30) as http:
        answer = http.post("/api/embed", json={"model": "m", "input": ["one", "two words"]}).json()
        assert list(answer) == ["model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"]
        assert np.allclose(np.linalg.norm(answer["embeddings"], axis=1), 1.0)
        single = http.post("/api/embed", json={"model": "m", "input": "two words"}).json()["embeddings"]
        np.testing.assert_allclose(single[0], answer["embeddings"][1], atol=1e-2)
        cut = http.post("/api/embed", json={"model": "m", "input": "one", "dimensions": 8}).json()["embeddings"][0]
        assert len(cut) == 8
        assert abs(np.linalg.norm(cut) - 1.0) < 1e-5
        raw = http.post("/api/embeddings", json={"model": "m", "prompt": "two words"}).json()["embedding"]
        np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), single[0], atol=1e-5)
        assert abs(np.linalg.norm(raw) - 1.0) > 0.1
        assert http.post("/api/embed", json={"model": "m", "input": []}).json()["embeddings"] == []
        assert http.post("/api/embeddings", json={"model": "m"}).json() == {"embedding": []}
        long = {"model": "m", "input": "hello " * 1500}
        assert http.post("/api/embed", json=long).status_code == 200
        refused = http.post("/api/embed", json={**long, "truncate": False})
        assert refused.status_code == 400
        assert refused.json() == {"error": "the input length exceeds the context length"}
        assert http.post("/api/embed", json={"model": "other", "input": "x"}).status_code == 404
        # OpenAI's route keeps to the flag
        assert http.post("/v1/embeddings", json={"input": "x"}).status_code == 501


def test_front_without_an_engine_that_pools(make_front: Any) -> None:
    """What the front alone decides, on the scripted engine (3 numbers: length, first and last token)."""
    with make_front(http={"embedding": True}) as front:
        running: Front = front
        answer = running.post("/embedding", {"content": ["ab", "c"], "embd_normalize": -1})
        assert answer.json() == [
            {"index": 0, "embedding": [[3.0, 1.0, 101.0]]},
            {"index": 1, "embedding": [[2.0, 1.0, 102.0]]},
        ]
        assert running.post("/v1/embeddings", {"input": "ab"}).status_code == 400  # no pooling


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), st.sampled_from((-1, 0, 1, 2, 3, 5)))
def test_norms(values: list[float], norm: int) -> None:
    """`common_embd_normalize` in exact arithmetic: direction kept, the norm 1 (0: largest 32760), zero stays zero."""
    vector = np.array(values, np.float32)
    out = normalised(vector, norm).astype(np.float64)
    wide = np.abs(vector.astype(np.float64))
    if norm == -1:
        assert out.tolist() == vector.tolist()
        return
    size = wide.max() / 32760 if norm == 0 else float((wide**norm).sum()) ** (1 / norm)
    if size < 1e-18:  # float32 squares vanish
        return
    np.testing.assert_allclose(out, vector / size, rtol=1e-4, atol=1e-30)
