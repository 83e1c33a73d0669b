"""`ftgguf serve` on a CUDA device, as users start it: resident models, parts on the CPU, KV types, refusals.

    pytest -n 4 --dist loadgroup tests/gpu/test_serve*.py

Answers are checked against this product's CPU server, which equals libllama to the bit (tests/models). With
FTGGUF_SIMULATE=1 and no device everything runs on a simulated one, smaller: see serve_helpers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_helpers import (
    CONTEXT,
    FEW,
    LONG,
    MANY,
    REAL,
    ROUGH,
    Answer,
    Server,
    command,
    cpu,
    greedy,
    locked,
    moe,
    prompt,
    question,
    reference,
    refusal,
    same,
    server,
    streamed,
)

from compat.adapters import ATTENTION, make_adapter
from ftgguf.nouns import PAGE
from ftgguf.pull.demo import resolve_stories

GPU = "NVIDIA" if REAL else "Simulated GPU"
resident = pytest.mark.xdist_group("resident")
flags = pytest.mark.xdist_group("flags")


@pytest.fixture(autouse=True)
def not_alone() -> Iterator[None]:
    """A test that needs the device for itself waits for this one, and this one for it."""
    with locked("memory", alone=False):
        yield


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every layer on the GPU, with no flag that says so."""
    saved = tmp_path_factory.mktemp("slots")
    with server(moe(), "-c", str(4 * CONTEXT), "-np", "4", "--slot-save-path", str(saved), "--metrics") as running:
        yield running


# ------------------------------------------------------------------------------------------------------- resident


@resident
def test_the_device_is_found_and_named(gpu: Server) -> None:
    assert gpu.get("/health") == {"status": "ok"}
    assert f"CUDA0 ({GPU}" in gpu.log
    assert "read to the GPU" in gpu.log
    assert gpu.get("/v1/models")["data"][0]["id"]
    status = gpu.get("/v1/cache/status")["experts"]
    assert status["enabled"] is False
    assert "resident" in status["reason"]


@resident
@pytest.mark.parametrize("length", [3, LONG])
def test_greedy_text_is_the_cpus(gpu: Server, length: int) -> None:
    """A prompt of decode's batch sizes, and one of a prompt's passes."""
    n = MANY if length == 3 else FEW
    same(greedy(gpu, prompt(length), n), reference(moe(), prompt(length), n), ROUGH)


@resident
def test_a_chat_streams(gpu: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": FEW, "temperature": 0, "ignore_eos": True}
    body["cache_prompt"] = False  # or the second evaluates one token, as decode does
    whole = gpu.post("/v1/chat/completions", body)
    events = list(gpu.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}))
    pieces = [c["delta"] for e in events for c in e.get("choices", ())]
    text = "".join((d.get("reasoning_content") or "") + (d.get("content") or "") for d in pieces)
    said = whole["choices"][0]["message"]
    assert text == (said.get("reasoning_content") or "") + (said.get("content") or "")
    assert len(pieces) > 2
    assert [c["finish_reason"] for e in events for c in e.get("choices", ())][-1] == "length"
    assert events[-1]["usage"]["completion_tokens"] == FEW == whole["usage"]["completion_tokens"]


def at_once(running: Server, prompts: list[list[int]], n: int) -> list[Answer]:
    """Streamed answers of all prompts together."""
    found: dict[int, Answer] = {}

    def ask(i: int) -> None:
        found[i] = streamed(running, prompts[i], n, cache_prompt=False)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == len(prompts), running.log[-3000:]
    return [found[i] for i in range(len(prompts))]


@resident
def test_four_streams_at_once_say_what_each_says_alone(gpu: Server) -> None:
    prompts = [prompt(5 + 3 * i, seed=10 + i) for i in range(4)]
    together = at_once(gpu, prompts, FEW)
    for tokens, got in zip(prompts, together, strict=True):
        same(got, reference(moe(), tokens, FEW), ROUGH)


@resident
def test_a_cancelled_request_leaves_a_slot_and_no_trace(gpu: Server) -> None:
    stream = gpu.events("/completion", question(prompt(9, 3), CONTEXT - 64))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 30
    while any(slot["is_processing"] for slot in gpu.get("/slots")):
        assert time.monotonic() < deadline, "the request was not cancelled"
        time.sleep(0.05)
    assert same(greedy(gpu, prompt(3), FEW), reference(moe(), prompt(3), FEW)) > 0


@resident
def test_a_known_prefix_is_not_evaluated_again(gpu: Server) -> None:
    """The continuation's answer is the CPU's, which evaluated everything."""
    first = prompt(max(LONG // 2, 2 * PAGE), seed=5)
    whole = first + prompt(20, seed=6)
    greedy(gpu, first, 1)
    got = greedy(gpu, whole, FEW)
    assert got.cached >= len(first) - 1
    same(got, reference(moe(), whole, FEW), ROUGH)


@resident
def test_a_slot_goes_to_disk_and_back(gpu: Server) -> None:
    tokens = prompt(max(LONG // 2, 2 * PAGE), seed=7)
    greedy(gpu, tokens, FEW, id_slot=2)
    want = greedy(gpu, tokens, FEW, id_slot=2)  # the last token alone is evaluated, as after the restore
    saved = gpu.post("/slots/2?action=save", {"filename": "one.bin"})
    assert saved["n_saved"] >= len(tokens)
    gpu.post("/slots/2?action=erase", {})
    assert greedy(gpu, tokens, FEW, id_slot=2).cached < len(tokens) // 2
    gpu.post("/slots/2?action=erase", {})
    restored = gpu.post("/slots/2?action=restore", {"filename": "one.bin"})
    assert restored["n_restored"] == saved["n_saved"]
    got = greedy(gpu, tokens, FEW, id_slot=2)
    assert got.cached >= len(tokens) - 1
    assert same(got, want, 1e-5) == FEW


@resident
def test_a_slot_of_another_placement_is_refused(gpu: Server) -> None:
    """On the CPU cells lie in another order: their bytes would be taken for ours without a word."""
    where = Path(gpu.flags[gpu.flags.index("--slot-save-path") + 1])
    with server(moe(), "-dev", "none", "-c", "512", "-np", "1", "--slot-save-path", str(where)) as other:
        greedy(other, prompt(2 * PAGE, seed=8), 1)
        other.post("/slots/0?action=save", {"filename": "cpu.bin"})
    code, message = gpu.refused("/slots/0?action=restore", {"filename": "cpu.bin"})
    assert code == 400
    assert "another model or other KV" in message


# -------------------------------------------------------------------------------------------------------- servers


@pytest.mark.xdist_group("eager")
def test_without_capture_the_text_is_the_same() -> None:
    with server(moe(), "-c", str(CONTEXT), "-np", "1", "--debug-eager") as running:
        assert same(greedy(running, prompt(3), MANY), reference(moe(), prompt(3), MANY)) > 0
        same(greedy(running, prompt(LONG), FEW), reference(moe(), prompt(LONG), FEW), ROUGH)


@pytest.mark.xdist_group("drafts")
def test_drafts_change_nothing() -> None:
    """A text that repeats itself, so that n-grams are found; the CPU answers without drafts."""
    tokens = prompt(24, seed=4) * 3
    kinds = ("--spec-type", "ngram-simple,ngram-mod", "--spec-ngram-simple-size-n", "2")
    with server(moe(), "-c", str(CONTEXT), "-np", "1", *kinds) as running:
        got = greedy(running, tokens, MANY)
        same(got, reference(moe(), tokens, MANY), ROUGH)
        assert got.drafted > 0 or not REAL  # six tokens may repeat nothing


@pytest.mark.xdist_group("kv")
def test_q8_0_cells_and_pages_that_come_back_from_host_memory() -> None:
    """Prompts that push each other out of the device's cells: the first one's pages are found again. Against the CPU
    with the same cells; both round K and V to 8 bits, of values that differ a little."""
    kv = ("-ctk", "q8_0", "-ctv", "q8_0")
    length = CONTEXT // 2 + PAGE
    with server(moe(), "-c", str(CONTEXT), "-np", "1", "-cram", "512", "--metrics", *kv) as running:
        want = reference(moe(), prompt(LONG), FEW, *kv)
        same(greedy(running, prompt(LONG), FEW), want, 0.12)
        first = greedy(running, prompt(length, seed=1), 1)
        for seed in (2, 3):
            greedy(running, prompt(length, seed=seed), 1)
        again = greedy(running, prompt(length, seed=1), 1)
        assert running.metrics()["ftgguf_host_recalled_pages_total"] > 0
        assert again.cached >= CONTEXT // 2 - PAGE
        same(again, first, 0.06)


@pytest.mark.xdist_group("embeddings")
def test_embeddings_are_the_cpus() -> None:
    texts = ["once upon a time", "the end"]
    with server(moe(), "--embeddings", "--pooling", "mean", "-c", str(CONTEXT), "-np", "2") as running:
        got = running.post("/v1/embeddings", {"input": texts})["data"]
    with server(moe(), "--embeddings", "--pooling", "mean", "-c", "512", "-dev", "none") as other:
        want = other.post("/v1/embeddings", {"input": texts})["data"]
    for a, b in zip(got, want, strict=True):
        cosine = sum(x * y for x, y in zip(a["embedding"], b["embedding"], strict=True))  # both have norm 1
        assert cosine > 0.9995


@pytest.mark.xdist_group("split")
def test_some_layers_on_the_cpu() -> None:
    """`-ngl 2`: the output and the last block on the GPU, the others on the CPU."""
    with server(moe(), "-ngl", "2", "-c", str(CONTEXT), "-np", "2") as running:
        layers = 8 if REAL else 2
        assert f"CUDA0 ({GPU}" in running.log
        assert f"1 of {layers} blocks" in running.log
        for length, n in ((3, MANY), (LONG, FEW)):
            same(greedy(running, prompt(length), n), reference(moe(), prompt(length), n), ROUGH)


@pytest.mark.xdist_group("stories")
def test_the_packages_own_model_tells_its_story() -> None:
    """`-m stories`, what a newcomer runs first: heads of 8 elements, rows of 64, trained weights."""
    body = {"prompt": "Once upon a time", "n_predict": 64 if REAL else 4, "temperature": 0}
    with server("stories", "-c", "512") as running:
        assert f"CUDA0 ({GPU}" in running.log
        assert (
            running.post("/completion", body)["content"] == cpu(resolve_stories()).post("/completion", body)["content"]
        )


# ---------------------------------------------------------------------------------------------------- on the CPU


@flags
@pytest.mark.parametrize("given", [("-ngl", "0"), ("-dev", "none")])
def test_the_cpu_where_it_is_asked_for(given: tuple[str, str]) -> None:
    with server(moe(), *given, "-c", "512", "-np", "1") as running:
        assert f"CPU ({' '.join(given)})" in running.log
        assert same(greedy(running, prompt(3), FEW), reference(moe(), prompt(3), FEW)) == FEW


@flags
def test_devices_are_listed() -> None:
    code, said = command("serve", "--list-devices")
    assert code == 0
    assert f"CUDA0: {GPU}" in said
    assert "MiB free" in said


@flags
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("-dev", "CUDA7"), ("-dev CUDA7", "there are: CUDA0")),
        (("-mg", "7"), ("-mg 7", "there are: CUDA0")),
        (("-dev", "Vulkan0"), ("Vulkan0", "CUDA0")),
        (("-dev", "CUDA0,CUDA1"), ("one GPU is supported",)),
        (("-sm", "row"), ("row splits over several GPUs", "use layer or none")),
        (("-ts", "3,1"), ("one GPU is supported", "-mg or -dev")),
        (("-ngl", "all", "--vram-budget", "300"), ("do not fit", "300 MiB", "--vram-budget")),
        (("--moe-mode", "hybrid", "--vram-budget", "300"), ("does not fit", "300 MiB", "--vram-budget")),
        (("-ngl", "1", "--record-routing", "{tmp}/t.npz", "-c", "512"), ()),
    ],
)
def test_what_cannot_be_is_refused_in_words(given: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    if not words:  # -ngl 1 is the output alone, which stays on the CPU with all blocks: nothing to refuse
        with server(moe(), *[g.format(tmp=tmp_path) for g in given]) as running:
            assert "no whole layer goes on the GPU" in running.log
        return
    said = refusal(moe(), *given)
    for word in words:
        assert word in said, said
    assert "Traceback" not in said


@flags
def test_a_budget_for_no_layer_runs_on_the_cpu_and_says_why() -> None:
    """`-ngl auto`: as llama.cpp's --fit, with the numbers."""
    with server(moe(), "--vram-budget", "300", "-c", "512") as running:
        assert "no layer fits into 300 MiB of GPU memory" in running.log
        assert "--vram-budget without effect" in running.log


@flags
def test_adapters_are_refused_on_the_gpu(tmp_path: Path) -> None:
    adapter = make_adapter(moe(), tmp_path / "a.gguf", tensors=ATTENTION)
    said = refusal(moe(), "--lora", str(adapter))
    assert "applied on the CPU only" in said
    assert "-ngl 0" in said
    with server(moe(), "--lora", str(adapter), "-ngl", "0", "-c", "512") as running:
        assert running.get("/lora-adapters")[0]["path"] == str(adapter)


@flags
def test_doctor_and_plan_name_the_machine() -> None:
    code, said = command("doctor")
    assert code == 0, said
    for word in (GPU, "driver", "PCIe", "locked memory", "compute capability", "triton"):
        assert word in said
    code, said = command("plan", str(moe()), "--vram-budget", "2000", "-c", "2048")
    assert code == 0, said
    for word in (GPU, "2000 MiB: --vram-budget", "KV of 2048 tokens", "tokens/s", "layers 0 to"):
        assert word in said
    code, said = command("plan", str(moe()), "--moe-mode", "hybrid", "--expert-cache", "1", "-c", "2048")
    assert code == 0, said
    for word in ("misses of the expert cache", "host memory", "predicted decode"):
        assert word in said
