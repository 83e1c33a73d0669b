"""`ftgguf serve` with experts in host memory on a CUDA device: in service, starts, modes, perplexity.

How to run it and what answers are checked against: see test_serve_gpu.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_helpers import CACHE, MIB, TOTAL, alone, experts, limits, not_alone  # noqa: F401  (a fixture)
from serve_helpers import (
    CONTEXT,
    FEW,
    LONG,
    MANY,
    REAL,
    ROOT,
    ROUGH,
    SIMULATED_MIB,
    SIZES,
    START_S,
    Server,
    command,
    cores,
    cpu,
    environment,
    greedy,
    locked,
    moe,
    prompt,
    reference,
    refusal,
    same,
    server,
    streamed,
)

pytestmark = pytest.mark.usefixtures("not_alone")
cached = pytest.mark.xdist_group("cached")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Experts that do not fit, with no flag but the budget; routes are recorded."""
    trace = tmp_path_factory.mktemp("routing") / "trace.npz"
    with server(moe(), *limits("--record-routing", str(trace), "--metrics")) as running:
        yield running


# --------------------------------------------------------------------------------------------------- in service


@cached
def test_what_does_not_fit_is_cached(hybrid: Server) -> None:
    status = experts(hybrid)
    assert status["enabled"]
    assert 0 < status["slots"] < TOTAL
    assert status["bank"]["unpinned_layers"] == 0
    assert "stay in host memory" in hybrid.log
    assert f"of {TOTAL} experts in" in hybrid.log


@cached
def test_a_long_prompt_then_decode(hybrid: Server) -> None:
    for length, n in ((LONG, FEW), (3, MANY)):
        same(greedy(hybrid, prompt(length), n), reference(moe(), prompt(length), n), ROUGH)
    status = experts(hybrid)
    assert status["experts"]["wanted"] >= MANY * SIZES["n_layer"]
    assert status["experts"]["misses"] == status["experts"]["fills"] + status["experts"]["cpu"]
    assert status["prefill"]["passes"] > 0
    assert status["error"] == ""
    assert hybrid.metrics()["ftgguf_expert_misses_total"] > 0


@cached
def test_ctl_shows_and_changes_the_cache(hybrid: Server) -> None:
    where = ("--host", str(hybrid.client.base_url).rstrip("/"))
    code, said = command("ctl", *where, "cache", "status")
    assert code == 0, said
    for word in ("slots", "decode", "split", "prefill", "host"):
        assert word in said
    before = experts(hybrid)
    code, said = command("ctl", *where, "cache", "resize", str(before["budget_bytes"] // MIB // 2))
    assert code == 0, said
    assert experts(hybrid)["slots"] < before["slots"]
    code, said = command("ctl", *where, "cache", "resize", str(before["budget_bytes"] // MIB))
    assert code == 0, said
    code, said = command("ctl", *where, "cache", "rebuild")
    assert code == 0, said
    assert "experts moved" in said
    code, said = command("ctl", *where, "cache", "resize", "999999")
    assert code == 1
    assert "are left for them beside weights, KV and the workspace" in said
    assert same(greedy(hybrid, prompt(3), FEW), reference(moe(), prompt(3), FEW)) > 0


@cached
def test_resizes_during_an_answer_do_not_change_it(hybrid: Server) -> None:
    full = experts(hybrid)["budget_bytes"] // MIB
    done: list[dict[str, Any]] = []

    def resize() -> None:
        for part in (4, 1, 2, 1):
            done.append(hybrid.post("/v1/cache/rebuild", {"size_mib": max(1, full // part)}))
        done.append(hybrid.post("/v1/cache/rebuild", {}))

    thread = threading.Thread(target=resize)
    thread.start()
    got = streamed(hybrid, prompt(3), MANY, cache_prompt=False)
    thread.join()
    assert len(done) == 5
    assert done[0]["slots"] < done[1]["slots"]
    assert same(got, reference(moe(), prompt(3), MANY)) > 0


@cached
def test_answers_are_the_same_with_every_size(hybrid: Server) -> None:
    """From hardly a slot to nearly all that the budget holds, prompt and decode; the GPU's own answers as reference
    too: their prefills differ by the order of sums only."""
    full = experts(hybrid)["budget_bytes"] // MIB
    least = -(-experts(hybrid)["ring_bytes"] // MIB)
    for size in sorted({least, least + 1, full // 4, full // 2, full} - {0}):
        if size < least:
            continue
        hybrid.post("/v1/cache/rebuild", {"size_mib": size})
        got = greedy(hybrid, prompt(LONG), MANY if REAL else FEW, cache_prompt=False)
        same(got, reference(moe(), prompt(LONG), MANY if REAL else FEW), ROUGH)


@cached
def test_the_recorded_routes_are_what_bench_cache_reads(hybrid: Server) -> None:
    """The last of this server's tests: the file is complete when the server ends."""
    trace = hybrid.flags[hybrid.flags.index("--record-routing") + 1]
    assert hybrid.stop() == 0
    code, said = command("bench", "cache", "--trace", trace, "--percent", "25", "--tokens", "40", "--jobs", "1")
    assert code == 0, said
    assert "%" in said


# ------------------------------------------------------------------------------------------------------- starts


@pytest.mark.xdist_group("together")
def test_servers_that_start_together_cache_as_much_as_one_alone() -> None:
    """What others take while a server makes its context is not in its budget. On a device three at once; the simulated
    one loses 2000 MiB meanwhile. A budget is for CACHE MiB with the largest context that a plan counts with."""
    free: dict[str, Any] = {} if REAL else {"FTGGUF_TEST_FREE": f"{SIMULATED_MIB},{SIMULATED_MIB - 2000}"}
    started: list[Server] = []
    threads = [
        threading.Thread(target=lambda: started.append(Server(moe(), *limits(), **free)))
        for _ in range(3 if REAL else 1)
    ]
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(started) == len(threads), "a server did not come up"
        for running in started:
            assert experts(running)["enabled"], running.log
            assert experts(running)["budget_bytes"] >= CACHE * MIB
            assert same(greedy(running, prompt(3), FEW), reference(moe(), prompt(3), FEW)) > 0
    finally:
        for running in started:
            running.stop()


@pytest.mark.xdist_group("together")
def test_routes_of_a_model_in_two_parts_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Before anything is loaded."""
    said = refusal(moe(), "-ngl", "2", "-c", str(CONTEXT), "--record-routing", str(tmp_path / "t.npz"))
    kept = SIZES["n_layer"] - 1
    assert f"one device runs the whole model (-ngl keeps {kept} of {kept + 1} layers on the CPU)" in said
    assert "Traceback" not in said


# -------------------------------------------------------------------------------------------------------- modes

MODES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "offload": (("--moe-mode", "offload"), "fill"),
    "cpu": (("--moe-mode", "cpu"), "cpu"),
    "lru": (("--expert-policy", "lru", "--expert-cache", "1"), ""),
    "cmoe": (("-cmoe",), ""),
    "ncmoe": (("-ncmoe", "1"), ""),
    "ot": (("-ot", r"blk\.1\.ffn_.*_exps=CPU"), ""),
    "static": (("-cmoe", "--expert-cache", "0"), ""),
    "part": (("-ncmoe", "1", "--expert-cache", "0"), None),
    "pinned": (("--pin-budget", "1"), ""),
}
"""Name -> flags, and the arm in charge ("": whichever); None: no cache, whole blocks on the CPU."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(f"mode-{n}")) for n in MODES])
def test_every_placement_gives_the_same_answer(name: str) -> None:
    given, arm = MODES[name]
    budget = () if name == "part" else limits()[-2:]
    with server(moe(), "-c", str(CONTEXT), "-np", "2", *given, *budget) as running:
        got = greedy(running, prompt(LONG), FEW)
        same(got, reference(moe(), prompt(LONG), FEW), ROUGH)
        assert same(greedy(running, prompt(3), MANY), reference(moe(), prompt(3), MANY)) > 0
        status = experts(running)
        assert status["enabled"] is (arm is not None)
        if arm is None:
            return
        assert status["error"] == ""
        if arm:
            assert status["mode"] == arm
            assert status["experts"]["cpu" if arm == "fill" else "fills"] == 0
        if name == "static":
            assert status["slots"] == 0
        if name == "pinned":
            assert status["bank"]["unpinned_layers"] > 0
            assert "Cure" in status["bank"]["line"]


@pytest.mark.xdist_group("mode-resident")
def test_all_resident_where_it_is_asked_for() -> None:
    with server(moe(), "--moe-mode", "resident", "-c", str(CONTEXT), "-np", "2") as running:
        assert not experts(running)["enabled"]
        same(greedy(running, prompt(LONG), FEW), reference(moe(), prompt(LONG), FEW), ROUGH)
    # A context is measured on the whole device, where another server may give hundreds of MiB back meanwhile: half of
    # the budget is too little however small it looks.
    *flags, budget = limits()
    said = refusal(moe(), "--moe-mode", "resident", "-ngl", "all", *flags, str(int(budget) // 2))
    assert "do not fit on the GPU" in said
    assert "experts" in said


@pytest.mark.xdist_group("mode-disk")
def test_experts_from_the_file_where_host_memory_is_too_small() -> None:
    little: dict[str, Any] = {"FTGGUF_TEST_HOST_MEMORY": str(MIB)}
    said = refusal(moe(), *limits(), **little)
    assert "of host memory" in said
    assert "--expert-disk" in said
    with server(moe(), *limits("--expert-disk"), **little) as running:
        same(greedy(running, prompt(LONG), FEW), reference(moe(), prompt(LONG), FEW), ROUGH)
        assert same(greedy(running, prompt(3), MANY), reference(moe(), prompt(3), MANY)) > 0
        assert experts(running)["fallbacks"]["experts_on_disk"] == SIZES["n_layer"]


# --------------------------------------------------------------------------------------------------- perplexity


def written(path: Path) -> Path:
    """16 chunks of text in `path`, which the model itself wrote on the CPU with temperature 1."""
    chunks, length = (16, 256) if REAL else (2, 16)
    free = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "return_tokens": True, "ignore_eos": True}
    text = []
    for seed in range(chunks):
        body = {"prompt": prompt(1, seed), "n_predict": length, "seed": seed, **free}
        text.append(cpu(moe()).post("/completion", body)["tokens"])
    assert {len(chunk) for chunk in text} == {length}
    path.write_text(json.dumps(text))
    return path


def perplexity(text: Path, *flags: str) -> dict[str, Any]:
    """Of the chunks in `text` by perplexity_child.py, with the server's flags."""
    line = [sys.executable, str(Path(__file__).with_name("perplexity_child.py")), str(text)]
    with locked("memory", alone=False):
        done = subprocess.run(
            [*line, "-m", str(moe()), *flags], cwd=ROOT, env=environment(), capture_output=True, text=True,
            timeout=2 * START_S, preexec_fn=cores,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.xdist_group("perplexity")
def test_perplexity_with_and_without_the_cache(tmp_path: Path) -> None:
    """Within 0.1 % of all experts resident, as prompts and token by token (32 tokens in the simulation say less), and
    near the CPU's, which rounds a prompt's activations to 8 bits. The CPU's two weight layouts are 0.04 % apart."""
    text, bound = written(tmp_path / "text.json"), 1e-3 if REAL else 1e-2
    plain = ("-c", str(CONTEXT), "-np", "1", "-t", "4" if REAL else "1")
    host = perplexity(text, *plain, "-dev", "none")
    resident = perplexity(text, *plain, "--moe-mode", "resident")
    cached = perplexity(text, *plain, *limits()[-2:])
    print(f"CPU {host}\nresident {resident}\ncached {cached}")
    assert not host["slots"]
    assert not resident["slots"]
    assert 0 < cached["slots"] < TOTAL
    for way in ("prompt", "decode"):
        assert abs(cached[way] / resident[way] - 1) < bound
        assert abs(resident[way] / host[way] - 1) < 5 * bound
