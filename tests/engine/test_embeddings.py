"""Embeddings and scores of the engine, against libllama on the same file (`compat.oracle_states`)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from compat.oracle import nmse
from compat.oracle_states import pooled
from compat.reranker import TEMPLATE, copy_with
from compat.synth import make
from ftgguf.engine import messages as m
from ftgguf.engine.embeddings import Pooler
from ftgguf.engine.engine import Engine
from ftgguf.engine.load import load_engine
from ftgguf.flags import parse_server
from ftgguf.models.config import ModelError
from ftgguf.nouns import F32

POOLING = ("none", "mean", "cls", "last")
FAMILIES = ("llama", "qwen3", "qwen3moe", "granitemoe", "glm4moe")
EXACT = 1e-12
"""NMSE between equal graphs: pooling itself sums in another order."""
CLOSE = 1e-6
"""NMSE with float32 weights and cells but batches of other shapes, for which ggml has other attention kernels."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("embeddings")
    found = {name: make(name, folder / f"{name}.gguf", types="Q8_0") for name in FAMILIES}
    found["exact"] = make("qwen3", folder / "exact.gguf", types="F32")
    found["reranker"] = copy_with(found["qwen3"], folder / "reranker.gguf", pooling="rank", labels=2, template=TEMPLATE)
    found["mean"] = copy_with(found["llama"], folder / "mean.gguf", pooling="mean")
    return found


def engine_of(path: Path, *flags: str) -> Engine:
    arguments = ["-m", str(path), "-t", "1", "--no-warmup", "--no-repack", "-c", "1024", "-ngl", "0", *flags]
    return load_engine(parse_server(arguments, {}), lambda *_: None)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 300, n).tolist() for n in lengths]


def drain(engine: Engine) -> dict[int, m.ToFront]:
    """The last message about each request."""
    last: dict[int, m.ToFront] = {}
    for _ in range(5000):
        if not engine.has_work:
            return last
        for message in engine.step():
            last[message.id] = message  # type: ignore[union-attr]
    raise AssertionError("the engine does not come to an end")


def values_of(message: m.ToFront) -> F32:
    assert isinstance(message, m.Embedded), message
    return np.frombuffer(message.data, "<f4").reshape(message.rows, message.columns)


def embed(engine: Engine, given: list[list[int]], pooling: str = "model", together: bool = False) -> list[F32]:
    found: dict[int, m.ToFront] = {}
    for id, prompt in enumerate(given):
        engine.submit(m.Generate(id=id, prompt=tuple(prompt), embed=pooling))
        if not together:
            found |= drain(engine)
    found |= drain(engine)
    return [values_of(found[id]) for id in range(len(given))]


@pytest.mark.parametrize("family", FAMILIES)
def test_pooled_states_are_libllamas(models: dict[str, Path], family: str) -> None:
    """Every pooling type of every family, prompts alone in one batch as the oracle has them."""
    given = prompts(1, 7, 200)
    engine = engine_of(models[family], "--embedding")
    for pooling in POOLING:
        expected = pooled(models[family], given, pooling)
        for ours, theirs in zip(embed(engine, given, pooling), expected, strict=True):
            assert ours.shape == theirs.shape
            assert nmse(ours, theirs) < EXACT, pooling


@pytest.mark.parametrize("pooling", POOLING)
def test_long_inputs_and_many_at_once(models: dict[str, Path], pooling: str) -> None:
    """Prompts longer than the physical batch, and several in one batch, equal the oracle's single whole ones.

    float32 weights and cells, so that only the order of sums differs.
    """
    given = prompts(3, 500, 40, 129, 1)
    expected = pooled(models["exact"], given, pooling, kv="f32")
    engine = engine_of(models["exact"], "--embedding", "-ub", "64", "-ctk", "f32", "-ctv", "f32", "-np", "4", "-kvu")
    for ours, theirs in zip(embed(engine, given, pooling, together=True), expected, strict=True):
        assert ours.shape == theirs.shape
        assert nmse(ours, theirs) < CLOSE


def test_pooling_of_the_file_and_of_the_flag(models: dict[str, Path]) -> None:
    """`<arch>.pooling_type` counts where no flag is given (llama.cpp's `llama_context`)."""
    given = prompts(9)
    for flags, pooling in (((), "mean"), (("--pooling", "last"), "last")):
        engine = engine_of(models["mean"], "--embedding", *flags)
        assert engine.info["pooling"] == pooling
        assert nmse(embed(engine, given)[0], pooled(models["mean"], given, pooling)[0]) < EXACT
    assert engine_of(models["llama"]).info["pooling"] == "none"


def test_scores_are_libllamas(models: dict[str, Path]) -> None:
    """Rank pooling with Qwen3's head: both labels' probabilities."""
    given = prompts(1, 12, 300)
    expected = pooled(models["reranker"], given, "rank")
    engine = engine_of(models["reranker"], "--reranking")
    for ours, theirs in zip(embed(engine, given), expected, strict=True):
        assert ours.shape == (1, 2)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_generation_goes_on_beside_embeddings(models: dict[str, Path]) -> None:
    """Both kinds of request at once: the text and the vectors are those that each gives alone (float32: exact)."""
    engine = engine_of(models["exact"], "--embedding", "-ub", "32", "-ctk", "f32", "-ctv", "f32", "-np", "3", "-kvu")
    given = prompts(100, 20)
    greedy = m.SamplingParams(temperature=0.0)

    def text(id: int) -> m.Generate:
        return m.Generate(id=id, prompt=(5, 6, 7, 8), max_tokens=40, sampling=greedy, stream=False)

    def run(requests: list[m.Generate]) -> tuple[dict[int, tuple[int, ...]], dict[int, F32]]:
        for request in requests:
            engine.submit(request)
        tokens: dict[int, tuple[int, ...]] = {}
        states: dict[int, F32] = {}
        while engine.has_work:
            for message in engine.step():
                if isinstance(message, m.Delta):
                    tokens[message.id] = tokens.get(message.id, ()) + message.tokens
                elif isinstance(message, m.Embedded):
                    states[message.id] = values_of(message)
                else:
                    assert not isinstance(message, m.Failed)
        return tokens, states

    alone, _ = run([text(1)])
    wanted = embed(engine, given, "mean")
    both = [text(2), *(m.Generate(id=10 + i, prompt=tuple(p), embed="mean") for i, p in enumerate(given)), text(3)]
    tokens, states = run(both)
    assert tokens[2] == tokens[3] == alone[1]
    for i, each in enumerate(wanted):
        assert nmse(states[10 + i], each) < CLOSE


def test_last_pooling_reuses_prefixes_and_whole_pooling_leaves_none(models: dict[str, Path]) -> None:
    """A common instruction is evaluated once where only the last state counts, and with the same result."""
    engine = engine_of(models["exact"], "--embedding", "-ctk", "f32", "-ctv", "f32")
    (base,) = prompts(100)
    given = [[*base, 1, 2, 3], [*base, 4, 5]]
    expected = pooled(models["exact"], given, "last", kv="f32")
    cached = []
    for id, prompt in enumerate(given):
        engine.submit(m.Generate(id=id, prompt=tuple(prompt), embed="last"))
        answer = drain(engine)[id]
        assert isinstance(answer, m.Embedded)
        cached.append(answer.timings["cache_n"])
        assert answer.evaluated_n == len(prompt)
        assert nmse(values_of(answer), expected[id]) < CLOSE
    assert cached == [0, 100]
    fresh = engine_of(models["exact"], "--embedding")
    embed(fresh, given, "mean")
    assert fresh.cache.tree.n_nodes == 0


def test_crowded_pool(models: dict[str, Path]) -> None:
    """More prompts than cells: each waits, is preempted or evicts, and nothing is left locked."""
    engine = engine_of(models["exact"], "--embedding", "-c", "256", "-np", "4", "-kvu", "-ub", "32", "-ctk", "f32",
                       "-ctv", "f32")  # fmt: skip
    given = prompts(*[100, 180, 30, 200, 5, 250, 90, 60])
    for pooling in ("mean", "last"):
        expected = pooled(models["exact"], given, pooling, kv="f32")
        for id in range(3):
            engine.submit(
                m.Generate(
                    id=100 + id, prompt=(7, 8, 9 + id), max_tokens=60, sampling=m.SamplingParams(temperature=0.0)
                )
            )
        for ours, theirs in zip(embed(engine, given, pooling, together=True), expected, strict=True):
            assert nmse(ours, theirs) < CLOSE
        assert not engine.scheduler.active
        assert all(node.locks == 0 for node in engine.cache.tree.nodes())


def test_what_cannot_be(models: dict[str, Path], tmp_path: Path) -> None:
    """One clear error each: at load for the file, as `Failed` for a request."""
    with pytest.raises(ModelError, match="architecture llama have no classification head"):
        engine_of(models["llama"], "--reranking")
    with pytest.raises(ModelError, match=r"no tensor 'cls\.output\.weight'"):
        engine_of(models["qwen3"], "--reranking")
    with pytest.raises(ModelError, match=r"'cls\.output\.weight' has shape \[2, 256\], expected \[3, 256\]"):
        engine_of(copy_with(models["reranker"], tmp_path / "l.gguf", names=["a", "b", "c"]), "--reranking")
    engine = engine_of(models["reranker"])  # without the flag: generates
    for request, text in (
        (m.Generate(id=1, prompt=(1,), embed="model"), "start it with --reranking"),
        (m.Generate(id=1, prompt=(1,), embed="median"), "unknown pooling type 'median'"),
        (m.Generate(id=1, prompt=(1,) * 1024, embed="mean"), "exceeds the available context size"),
        (m.Generate(id=1, prompt=(1 << 20,), embed="mean"), "Prompt contains invalid tokens"),
        (m.Generate(id=1, prompt=(), embed="mean"), "holds no tokens"),
    ):
        engine.submit(request)
        failed = drain(engine)[1]
        assert isinstance(failed, m.Failed)
        assert failed.code == 400
        assert text in failed.message


def test_encoders_are_refused_by_name(tmp_path: Path) -> None:
    """bert and its kin are other graphs: an error with the name and the list of those that run."""
    import gguf

    path = tmp_path / "bert.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="unknown model architecture 'bert'; ftgguf runs: "):
        engine_of(path, "--embedding")


def test_pooler_takes_batches_of_any_size() -> None:
    """The wanted positions of any cut of a prompt are those of the whole, and pool to its NumPy definition."""
    states = np.random.default_rng(3).standard_normal((50, 8), np.float32)
    whole = {"none": states, "mean": states.mean(axis=0)[None], "cls": states[:1], "last": states[-1:]}
    for pooling, expected in whole.items():
        for cuts in ([0, 50], [0, 1, 2, 50], [0, 49, 50], [0, 17, 31, 50]):
            pooler = Pooler(pooling)
            pooler.take(states[:0])
            for start, stop in itertools.pairwise(cuts):
                wanted = pooler.wanted(start, stop, 50)
                assert all(start <= at < stop for at in wanted)
                pooler.take(states[list(wanted)])
            np.testing.assert_allclose(pooler.result(), expected, rtol=1e-6, atol=1e-6)
