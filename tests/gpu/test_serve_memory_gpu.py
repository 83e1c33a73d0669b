"""`ftgguf serve` with experts in host memory on a CUDA device: KV that grows, the budget, other programs, faults.

How to run it and what answers are checked against: see test_serve_gpu.py. Tests in `alone` have the device to
themselves, among the tests of these files.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from cache_helpers import CACHE, MIB, alone, experts, limits, not_alone  # noqa: F401  (a fixture)
from serve_helpers import (
    CONTEXT,
    FEW,
    LONG,
    REAL,
    ROUGH,
    Server,
    budget_for,
    greedy,
    locked,
    moe,
    prompt,
    question,
    reference,
    same,
    server,
)

from ftgguf.engine.devices import free_memory
from ftgguf.nouns import PAGE

pytestmark = pytest.mark.usefixtures("not_alone")
faulty = pytest.mark.xdist_group("faulty")


# ------------------------------------------------------------------------------------------------------ memory


@pytest.mark.xdist_group("elastic")
def test_kv_grows_into_the_experts_memory() -> None:
    """A context that nobody needs at first: prompts until the boundary moves; answers before, on the way and after."""
    cells = 32768 if REAL else 1024
    start = cells // 4
    fixed = ("-c", str(cells), "-np", "2", "-fitc", str(start), "--metrics")
    full = budget_for(moe(), 0, *fixed, cells=cells)
    with server(moe(), *fixed, "--vram-budget", str(full + (40 if REAL else 1))) as running:
        before = experts(running)
        assert before["boundary"]["cells"] == start, "every cell has memory from the start: nothing can be tested"
        assert same(greedy(running, prompt(3), FEW), reference(moe(), prompt(3), FEW)) > 0
        kept = prompt(2 * PAGE, seed=40)
        greedy(running, kept, 1)
        for seed in range(41, 44):
            greedy(running, prompt(start - 2 * PAGE, seed=seed), 1)
        now = experts(running)
        assert now["boundary"]["moves"] > 0
        assert now["boundary"]["cells"] > start
        assert now["arena_bytes"] < before["arena_bytes"]
        again = greedy(running, [*kept, 5], FEW)
        assert again.cached >= len(kept) - 1, "the prefix cache was lost"
        same(again, reference(moe(), [*kept, 5], FEW), ROUGH)
        assert same(greedy(running, prompt(3), FEW, cache_prompt=False), reference(moe(), prompt(3), FEW)) > 0


def device_mib() -> int:
    free = free_memory(0)
    assert free is not None
    return free // MIB


@alone
@pytest.mark.skipif(not REAL, reason="the memory of a real device is measured")
@pytest.mark.parametrize("what", ["resident", "cached"])
def test_the_budget_is_never_exceeded(what: str) -> None:
    """Free memory of the whole device by the driver, before the start and after prompts, decode and graphs of all
    sizes. Tolerance: 32 MiB, for what the driver keeps by itself."""
    moe()
    with locked("memory"):
        before = device_mib()
        flags: tuple[str, ...] = ("-c", str(CONTEXT), "-np", "4")
        cached = what == "cached"
        budget = budget_for(moe(), CACHE if cached else 400, *flags, cached=cached)
        running = Server(moe(), *flags, "--vram-budget", str(budget), shares=False)
        least = before
        try:
            for i, length in enumerate((3, 40, 300, 900, 1900)):
                greedy(running, prompt(length, seed=50 + i), FEW, cache_prompt=False)
                greedy(running, prompt(length, seed=60 + i), 2, cache_prompt=False)  # captured by now
                least = min(least, device_mib())
            held = before - least
            print(f"budget {budget} MiB, held {held} MiB at most")
            assert experts(running)["enabled"] is cached
            assert held <= budget + 32, f"the engine holds {held} MiB of a budget of {budget}"
            assert held > budget // 3, "the measurement is wrong"
        finally:
            running.stop()


HOG = """
import sys, time, torch
held = []
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    size = torch.cuda.mem_get_info()[0] - (24 << 20)
    while size > 2 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device='cuda'))
            break
        except torch.OutOfMemoryError:
            size //= 2
    print('full', flush=True)
    time.sleep(0.02)
"""
"""Takes whatever becomes free, for so many seconds."""


@alone
@pytest.mark.skipif(not REAL, reason="another program takes the memory of a real device")
def test_another_program_takes_the_memory() -> None:
    """Requests are answered from what the engine holds, or refused with what to do; afterwards all is well."""
    want = {length: reference(moe(), prompt(length), FEW) for length in (3, LONG)}
    with locked("memory"), server(moe(), "-c", str(CONTEXT), "-np", "2", shares=False) as running:
        other = subprocess.Popen([sys.executable, "-c", HOG, "15"], stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "full\n"
            threading.Thread(target=other.stdout.read, daemon=True).start()
            time.sleep(1)
            for i, length in enumerate((3, 40, 700, 2000)):
                for seed in (70 + i, 80 + i):
                    answer = running.client.post("/completion", json=question(prompt(length, seed=seed), 4))
                    if answer.status_code != 200:
                        message = answer.json()["error"]["message"]
                        assert "memory" in message, message
                        assert "-ub" in message or "--vram-budget" in message, message
                    assert running.get("/health") == {"status": "ok"}
        finally:
            other.kill()
            other.wait()
        for length, expected in want.items():
            same(greedy(running, prompt(length), FEW), expected, ROUGH)
        assert "restarting" not in running.log


# ------------------------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Callable[[str], None]]]:
    """A server, and what makes its next pass fail (hooks/sitecustomize.py)."""
    trap = tmp_path_factory.mktemp("faults") / "trap"

    def set_trap(what: str) -> None:
        trap.with_suffix(".new").write_text(what)
        trap.with_suffix(".new").rename(trap)

    with server(moe(), *limits("--metrics"), FTGGUF_TEST_FAULT=str(trap)) as running:
        yield running, set_trap


@faulty
def test_a_full_device_fails_a_request_and_not_the_server(trapped: tuple[Server, Callable[[str], None]]) -> None:
    """torch may take no more, and what it held in reserve is used up: prompts find no room for their rows,
    but in what the expert cache gives back."""
    running, trap = trapped
    assert same(greedy(running, prompt(3), FEW), reference(moe(), prompt(3), FEW)) > 0
    trap("full")
    greedy(running, prompt(2, seed=90), 1)
    slots = experts(running)["slots"]
    for seed, length in enumerate((2 * LONG, LONG, LONG // 2)):
        answer = running.client.post("/completion", json=question(prompt(length, seed=91 + seed), 2))
        if answer.status_code == 200:  # the expert cache gave some of its memory
            assert "the expert cache gave back" in running.log
            assert experts(running)["slots"] < slots
            continue
        message = answer.json()["error"]["message"]
        assert answer.status_code == 500
        assert "the GPU has no memory for" in message
        assert "--vram-budget" in message
    greedy(running, prompt(2, seed=95), 2)  # decode has its memory in its graph
    assert running.get("/health") == {"status": "ok"}
    trap("room")
    greedy(running, prompt(2, seed=94), 1)
    same(greedy(running, prompt(LONG), FEW), reference(moe(), prompt(LONG), FEW), ROUGH)
    assert running.metrics()["ftgguf_engine_restarts_total"] == 0


@faulty
def test_a_kernel_fault_restarts_the_engine(trapped: tuple[Server, Callable[[str], None]]) -> None:
    """A store to an illegal address: that request fails with a word about --debug-eager, /health is 503 until the
    engine is back, and the next request is answered."""
    running, trap = trapped
    trap("fault")
    code, message = running.refused("/completion", question(prompt(3), 2))
    assert code == 500
    assert "the GPU failed" in message
    assert "--debug-eager" in message
    running.wait("/health", 503, 15)
    assert running.client.post("/completion", json=question(prompt(3), 1)).status_code == 503
    running.wait("/health", 200)
    assert same(greedy(running, prompt(3), FEW), reference(moe(), prompt(3), FEW)) > 0
    assert running.metrics()["ftgguf_engine_restarts_total"] == 1
    assert "restarting it" in running.log
