"""LoRA adapters in the engine: logits against libllama with the same files, and requests with other adapters apart."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import (
    CheckingExecutor,
    Collector,
    PickSampler,
    cell_value,
    check_idle,
    generate,
    logits_of,
    naive_values,
    run_all,
    toolkit,
)
from gguf import GGUFReader, GGUFWriter

from compat.adapters import ATTENTION, DENSE, make_adapter
from compat.oracle import nmse
from compat.oracle_states import adapted
from compat.synth import make
from ftgguf.engine import messages as m
from ftgguf.engine.config import EngineConfig
from ftgguf.engine.engine import Engine
from ftgguf.engine.load import load_engine
from ftgguf.engine.lora import read_adapter
from ftgguf.engine.request import used_adapters
from ftgguf.flags import parse_server
from ftgguf.gguf import GGUFError
from ftgguf.gguf.reader import open_gguf
from ftgguf.models.config import ModelError
from ftgguf.nouns import F32, Batch

EVERYTHING = (
    *ATTENTION,
    *DENSE,
    "output.weight",
    "token_embd.weight",
    "blk.*.ffn_gate_inp.weight",
    "blk.*shexp.weight",
)
FAMILIES = ("llama", "qwen3", "qwen3moe", "granitemoe", "glm4moe")
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 300, 60)]
GREEDY = m.SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name in FAMILIES:
        make(name, folder / f"{name}.gguf", types="Q8_0")
        tied = "output.weight" not in {t.name for t in GGUFReader(folder / f"{name}.gguf").tensors}
        wanted = [each for each in EVERYTHING if not (tied and each == "token_embd.weight")]
        make_adapter(folder / f"{name}.gguf", folder / f"{name}.a.gguf", tensors=wanted)
        make_adapter(folder / f"{name}.gguf", folder / f"{name}.b.gguf", tensors=ATTENTION, seed=2, rank=4, alpha=0.0,
                     type_="F16")  # fmt: skip
    return folder


def load(folder: Path, name: str, *flags: str) -> Engine:
    arguments = ["-m", str(folder / f"{name}.gguf"), "-t", "1", "--no-warmup", "--no-repack", "-c", "512", "-ngl", "0"]
    return load_engine(parse_server([*arguments, *flags], {}), lambda *_: None)


def logits(engine: Engine, scales: tuple[float, ...], cuts: list[int]) -> F32:
    """All logits of TOKENS, evaluated in the pieces that `cuts` gives, in cells 0 and on."""
    cells = np.arange(len(TOKENS), dtype=np.int32)
    out = []
    for start, stop in itertools.pairwise(cuts):
        rows = np.arange(stop - start, dtype=np.int32)
        batch = Batch(
            np.array(TOKENS[start:stop], np.int32), cells[start:stop], np.zeros_like(rows), cells[start:stop],
            (cells[:stop],), rows, adapters=scales,
        )  # fmt: skip
        out.append(engine.executor.forward(batch).copy())
    return np.concatenate(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_libllamas(folder: Path, family: str) -> None:
    """Prefill in one batch and decode one by one, with either adapter and scales of every kind: to the last digits.

    Without adapters the logits are far away, so that an adapter that does nothing would be found.
    """
    files = [folder / f"{family}.{each}.gguf" for each in "ab"]
    engine = load(folder, family, "--lora", ",".join(map(str, files)))
    plain = logits(engine, (), [0, 60])
    for scales in ((1.0,), (-0.3,), (0.0, 0.7)):
        with adapted(folder / f"{family}.gguf", [(f, s) for f, s in zip(files, scales, strict=False) if s]) as oracle:
            prefill, decode = oracle.prefill_logits(TOKENS), oracle.decode_logits(TOKENS)
        ours = logits(engine, scales, [0, 60])
        assert nmse(ours, prefill) < 1e-12, scales
        assert nmse(logits(engine, scales, list(range(61))), decode) < 1e-12, scales
        assert nmse(ours, plain) > 1e-4
    assert nmse(logits(engine, (), [0, 60]), plain) == 0.0


def test_two_adapters_at_once(folder: Path) -> None:
    """libllama adds two adapters in an order of its own (by address): float32 weights and cells are compared."""
    path = make("qwen3", folder / "exact.gguf", types="F32")
    files = [make_adapter(path, folder / f"exact.{seed}.gguf", seed=seed) for seed in (1, 2)]
    engine = load(folder, "exact", "--lora", ",".join(map(str, files)), "-ctk", "f32", "-ctv", "f32")
    for scales in ((1.0, 1.0), (0.5, -1.25)):
        with adapted(path, list(zip(files, scales, strict=True)), kv="f32") as oracle:
            assert nmse(logits(engine, scales, [0, 60]), oracle.prefill_logits(TOKENS)) < 1e-5


def test_pool_of_adapters_gives_the_solo_texts(folder: Path) -> None:
    """Requests of four adapter sets with one common prompt at once, and again, cached: each has its text of alone."""
    a, b = folder / "llama.a.gguf", folder / "llama.b.gguf"
    flags = ("--lora", f"{a},{b}", "-ctk", "f32", "-ctv", "f32")
    sets: list[tuple[float, ...]] = [(), (1.0,), (0.0, 1.0), (0.5, 0.25)]
    solo = []
    for scales in sets:
        fresh = load(folder, "llama", *flags, "-np", "1")
        fresh.submit(m.Generate(id=1, prompt=tuple(TOKENS), max_tokens=12, sampling=GREEDY, adapters=scales))
        solo.append(run_all(fresh).answers[1].tokens)
    assert len({tuple(tokens) for tokens in solo}) == len(sets)
    engine = load(folder, "llama", *flags, "-np", "4", "-kvu", "-ub", "32")
    for turn in range(2):
        for id, scales in enumerate(sets):
            engine.submit(m.Generate(id=id, prompt=tuple(TOKENS), max_tokens=12, sampling=GREEDY, adapters=scales))
        answers = run_all(engine).answers
        assert [answers[id].tokens for id in range(len(sets))] == solo
        started = [answers[id].started for id in range(len(sets))]
        assert [each.cached for each in started if each] == [len(TOKENS) - 1 if turn else 0] * len(sets)
    assert len(engine.cache.tree.roots) == len(sets)
    check_idle(engine)


class AdapterExecutor(CheckingExecutor):
    """Its cells and logits depend on the adapters of the batch that wrote them."""

    def forward(self, batch: Batch) -> F32:
        return super().forward(replace(batch, token=batch.token + shift(batch.adapters)))


def shift(adapters: tuple[float, ...]) -> np.int32:
    """A number of its own for every set."""
    return np.int32(sum(int(scale * 4) * 9**i for i, scale in enumerate(adapters)) * 1000)


def expected(request: m.Generate) -> list[int]:
    """The tokens of a request alone and from scratch."""
    by = int(shift(used_adapters(request.adapters)))
    sampler, known = PickSampler(request.sampling.seed), [t + by for t in request.prompt]
    values, out = naive_values(known), list[int]()
    while len(out) < request.max_tokens and (not out or out[-1] != 0):
        out.append(sampler.sample(logits_of(values[-1]))[0])
        values = np.append(values, cell_value(out[-1] + by, len(values), values))
    return out


@pytest.mark.parametrize("seed", range(4))
def test_no_cell_crosses_adapter_sets(seed: int) -> None:
    """Random requests of several sets in a pool that is too small for them: shared, split, evicted, preempted.

    Each cell of the executor is a hash of all it depends on, so that a prefix of another set or a batch with wrong
    scales changes the tokens.
    """
    rng = random.Random(seed)
    executor = AdapterExecutor(512, 48)
    engine = Engine(executor, toolkit(), EngineConfig(n_ctx=512, n_slots=5))
    base = [rng.randrange(1, 20) for _ in range(150)]
    sets: list[tuple[float, ...]] = [(), (0.0,), (1.0,), (1.0, 0.0), (0.0, 1.0), (0.25, 0.5)]
    requests = [
        generate(
            id,
            base[: rng.randrange(1, 150)] + [rng.randrange(1, 20) for _ in range(rng.randrange(1, 30))],
            seed=id,
            max_tokens=rng.randrange(1, 40),
            adapters=rng.choice(sets),
        )
        for id in range(40)
    ]
    waiting, collector = list(requests), Collector()
    while waiting or engine.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.submit(waiting.pop(0))
        collector.take(engine.step())
    for request in requests:
        assert collector.answers[request.id].tokens == expected(request), request.id
    assert engine.cache.tree.evicted_pages > 0
    check_idle(engine)


def test_sets_take_turns() -> None:
    """A long answer of one set does not hold up another's: steps alternate, as sets cannot be in one batch."""
    executor = AdapterExecutor(512, 16)
    engine = Engine(executor, toolkit(), EngineConfig(n_ctx=256, n_slots=2))
    engine.submit(generate(1, [3, 4], seed=1, max_tokens=100, adapters=()))
    engine.submit(generate(2, [5, 6], seed=1, max_tokens=3, adapters=(1.0,)))
    for _ in range(12):
        engine.step()
    assert [s.id for s in engine.scheduler.active] in ([1], [])


def test_roots_of_unused_sets_go() -> None:
    """A client that changes a scale with every request leaves no trace once its cells are evicted."""
    executor = AdapterExecutor(128, 32)
    engine = Engine(executor, toolkit(), EngineConfig(n_ctx=128, n_slots=1))
    for id in range(60):
        engine.submit(generate(id, [1 + id % 7] * 60, max_tokens=2, adapters=(id / 4 + 0.25,)))
        run_all(engine)
    assert len(engine.cache.tree.roots) <= 4
    check_idle(engine)


def test_a_slot_is_restored_with_its_adapters(folder: Path, tmp_path: Path) -> None:
    """A slot file knows what its cells were computed with, and is not taken by a server with other adapters."""
    a, b = folder / "llama.a.gguf", folder / "llama.b.gguf"
    request = m.Generate(id=1, prompt=tuple(TOKENS), max_tokens=4, sampling=GREEDY, adapters=(1.0,), id_slot=0)

    def control(engine: Engine, action: str) -> m.Reply:
        arguments = {"id_slot": 0, "filename": "s", "path": str(tmp_path / "s")}
        engine.control(m.Control(id=99, action=action, arguments=arguments))
        return run_all(engine).replies[99]

    first = load(folder, "llama", "--lora", str(a))
    first.submit(request)
    text = run_all(first).answers[1].text
    assert control(first, "slot_save").ok
    second = load(folder, "llama", "--lora", str(a))
    assert control(second, "slot_restore").ok
    for adapters, cached in (((), 0), ((1.0,), len(TOKENS) - 1)):
        second.submit(replace_adapters(request, adapters))
        answer = run_all(second).answers[1]
        assert answer.started is not None
        assert answer.started.cached == cached
    assert answer.text == text
    refused = control(load(folder, "llama", "--lora", str(b)), "slot_restore")
    assert not refused.ok
    assert "other LoRA adapters" in refused.message


def replace_adapters(request: m.Generate, adapters: tuple[float, ...]) -> m.Generate:
    return m.Generate(
        id=request.id, prompt=request.prompt, max_tokens=request.max_tokens, sampling=GREEDY, adapters=adapters
    )


def test_more_scales_than_adapters_fail_the_request(folder: Path) -> None:
    """The front never sends them; the engine says so and goes on."""
    engine = load(folder, "llama")
    engine.submit(m.Generate(id=1, prompt=(1, 2), max_tokens=1, adapters=(1.0,)))
    failed = run_all(engine).answers[1].failed
    assert failed is not None
    assert "no LoRA adapters are loaded" in failed.message
    engine.submit(m.Generate(id=2, prompt=(1, 2), max_tokens=1, sampling=GREEDY))
    assert run_all(engine).answers[2].finished is not None


def written(path: Path, tensors: dict[str, tuple[int, ...]], **keys: str) -> Path:
    """An adapter for `llama` with zeros of these shapes (NumPy's order)."""
    fields = {"general.type": "adapter", "adapter.type": "lora"} | {k.replace("__", "."): v for k, v in keys.items()}
    writer = GGUFWriter(path, fields.pop("general.architecture", "llama"))
    for key, value in fields.items():
        writer.add_string(key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q = "blk.0.attn_q.weight"
GOOD = {f"{Q}.lora_a": (4, 256), f"{Q}.lora_b": (256, 4)}
BAD: list[tuple[dict[str, tuple[int, ...]], dict[str, str], str]] = [
    (GOOD, {"general__type": "model"}, "key 'general.type' must be 'adapter', but is 'model'"),
    (GOOD, {"adapter__type": "dora"}, "key 'adapter.type' must be 'lora', but is 'dora'"),
    (GOOD, {"general__architecture": "qwen3"}, "made for architecture qwen3, the model is llama"),
    (GOOD, {"adapter__alora__invocation_tokens": "x"}, "aLoRA"),
    ({}, {}, "holds no tensors"),
    ({f"{Q}.lora_a": (4, 256)}, {}, f"tensor '{Q}.lora_b' is missing"),
    ({f"{Q}.lora_b": (256, 4)}, {}, f"tensor '{Q}.lora_a' is missing"),
    ({**GOOD, "blk.0.attn_q.bias": (4,)}, {}, "neither .lora_a nor .lora_b"),
    ({"blk.77.attn_q.weight.lora_a": (4, 256), "blk.77.attn_q.weight.lora_b": (256, 4)}, {}, "has no tensor"),
    ({f"{Q}.lora_a": (4, 128), f"{Q}.lora_b": (256, 4)}, {}, r"do not fit|not fit"),
    ({f"{Q}.lora_a": (4, 256), f"{Q}.lora_b": (128, 4)}, {}, "another base model"),
    ({f"{Q}.lora_a": (4, 256), f"{Q}.lora_b": (256, 5)}, {}, "another base model"),
    ({f"{Q}.lora_a": (256,), f"{Q}.lora_b": (256, 4)}, {}, "is no matrix"),
    ({"blk.0.ffn_up_exps.weight.lora_a": (8, 4, 256), "blk.0.ffn_up_exps.weight.lora_b": (8, 256, 4)}, {},
     "adapters of experts are not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "keys", "text"), BAD)
def test_adapters_that_do_not_fit(
    folder: Path, tmp_path: Path, tensors: dict[str, Any], keys: dict[str, str], text: str
) -> None:
    """Each fault of a file is one line that names the tensor or key (llama.cpp's checks in `llama-adapter.cpp`)."""
    path = written(tmp_path / "bad.gguf", tensors, **keys)
    with open_gguf(folder / "llama.gguf") as model, pytest.raises(ModelError, match=text) as caught:
        read_adapter(str(path), model)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_norms_are_passed_over_and_damage_is_found(folder: Path, tmp_path: Path) -> None:
    """An adapter's norms are left out, as in llama.cpp. A file that is none, or cut off, is an error of the reader."""
    with open_gguf(folder / "llama.gguf") as model:
        path = written(tmp_path / "norm.gguf", {**GOOD, "blk.0.attn_norm.weight": (256,)})
        assert list(read_adapter(str(path), model).pairs) == [Q]
        whole = path.read_bytes()
        for data in (b"", b"GGUF", whole[: len(whole) // 2], b"x" * 100):
            path.write_bytes(data)
            with pytest.raises(GGUFError):
                read_adapter(str(path), model)
        with pytest.raises(GGUFError, match="missing"):
            read_adapter(str(tmp_path / "missing.gguf"), model)


def test_tied_embeddings_take_no_adapter_of_their_own(tmp_path: Path) -> None:
    """Where one tensor is read by look-up and by product, no pair of matrices fits both."""
    base = make("qwen3", tmp_path / "untied.gguf", types="F16")
    with open_gguf(base) as model:
        names = set(model.tensors)
    tied = base
    if "output.weight" in names:
        reader = GGUFReader(base)
        tied = tmp_path / "tied.gguf"
        writer = GGUFWriter(tied, "qwen3")
        for tensor in reader.tensors:
            if tensor.name != "output.weight":
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    adapter = make_adapter(tied, tmp_path / "a.gguf", tensors=["token_embd.weight"])
    with open_gguf(tied) as model, pytest.raises(ModelError, match="output layer of this model too"):
        read_adapter(str(adapter), model)
