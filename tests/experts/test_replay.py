"""`bench cache` on a real trace: orderings that theory demands, and the product's policy against the yardsticks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ftgguf.bench import cache, replay
from ftgguf.bench.replay import Machine, load_trace

TRACE = Path(__file__).parents[1] / "data" / "routing" / "gptoss20b_400.npz"
HALF = Machine(phi=0.5)


@pytest.fixture(scope="module")
def trace() -> replay.Trace:
    return load_trace(TRACE, 200, 200)


def test_trace() -> None:
    """The cut's shape and sessions, as its README says; skipping moves the sessions."""
    trace = load_trace(TRACE)
    assert trace.experts.shape == (400, 24, 4)
    assert trace.n_experts == 32
    assert trace.offsets == (0, 211, 312, 377, 400)
    assert load_trace(TRACE, 100, 250).offsets == (0, 62, 100)


@pytest.mark.parametrize("percent", [5, 37])
def test_default_beats_the_yardsticks(trace: replay.Trace, percent: int) -> None:
    """The shipped key against one half-life of 16 and LRU by transfers a token, and Belady above all by hits."""
    got = {p: replay.replay(trace, p, percent, HALF) for p in ("lru", "decay16", "decay", "decay-fill", "belady")}
    assert got["decay"].transfers < got["decay16"].transfers < got["lru"].transfers
    assert got["belady"].hit > got["decay-fill"].hit


def test_belady_against_brute_force() -> None:
    """Two layers of three experts, one of each routed, two slots: the fewest misses over all eviction choices."""
    rng = np.random.default_rng(4)
    experts = rng.integers(0, 3, (7, 2, 1))
    trace = replay.Trace(experts, (0, 7))
    uses = [layer * 3 + int(experts[t, layer, 0]) for t in range(7) for layer in range(2)]

    def fewest(i: int, held: frozenset[int]) -> int:
        if i == len(uses):
            return 0
        if uses[i] in held:
            return fewest(i + 1, held)
        full = held | {uses[i]}
        options = [full] if len(full) <= 2 else [full - {x} for x in full]
        return 1 + min(fewest(i + 1, o) for o in options)

    got = replay._belady(trace, 2, HALF)
    assert got.fills == fewest(0, frozenset())
    assert got.hits + got.fills == 14


def test_lru_below_one_token_hits_nothing(trace: replay.Trace) -> None:
    """The cyclic scan: fewer slots than layers x k, every miss filled, least recently used: no hit at all."""
    assert replay.replay(trace, "lru-fill", 11, HALF).hit == 0
    assert replay.replay(trace, "decay-fill", 11, HALF).hit > 0.3


def test_time_model() -> None:
    """Against the arithmetic of arXiv 2608.16157, by hand: 12 experts of 34 MB at 52.7 and 77.3 GB/s cost one pass
    through host memory up to q* = 8, and the pure fill 1.47 times that."""
    m = Machine(bp=52.7e9, bh=77.3e9, expert_bytes=34e6)
    floor = 12 * 34e6 / 77.3e9
    assert m.share() == pytest.approx(52.7 / 77.3)
    assert [m.seconds(q, 12 - q) for q in (0, 4, 8)] == pytest.approx([floor] * 3)
    assert m.seconds(12, 0) / floor == pytest.approx(77.3 / 52.7)


def test_whole_cache_and_none(trace: replay.Trace) -> None:
    """All experts resident: each is missed once. No slots: nothing hits, everything is on the CPU."""
    everything = replay.replay(trace, "decay", 100, HALF)
    distinct = sum(len(np.unique(trace.experts[:, layer])) for layer in range(24))
    assert round((1 - everything.hit) * trace.experts.size) <= 3 * distinct
    nothing = replay.replay(trace, "decay", 0, HALF)
    assert (nothing.hit, nothing.fills, nothing.cpu) == (0, 0, 96)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown, JSON and the page from the command line; both outputs carry the same figures."""
    common = [
        "--trace",
        str(TRACE),
        "--tokens",
        "60",
        "--percent",
        "11,37",
        "--policies",
        "decay,belady",
        "--jobs",
        "1",
    ]
    assert cache.main([*common, "--html", str(tmp_path / "x.html")]) == 0
    text = capsys.readouterr().out
    assert cache.main([*common, "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["trace"] == {"tokens": 60, "layers": 24, "experts": 32, "k": 4, "share": 25 / 60}
    first = data["results"][0]
    assert f"| decay (shipped) | {first['hit']:.3f} |" in text
    page = (tmp_path / "x.html").read_text()
    assert page.count("<polyline") == 4
    assert "<svg" in page


def test_what_nobody_gave_is_said_to_be_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The packaged trace has no size of an expert; a recorded one has, and a flag outdoes it."""
    few = ["--tokens", "20", "--percent", "25", "--policies", "decay", "--jobs", "1"]
    assert cache.main(["--trace", str(TRACE), *few, "--bh", "50"]) == 0
    text = capsys.readouterr().out
    assert "Link 25 GB/s (assumed), CPU 50 GB/s, 25 GB/s while filling (assumed)" in text
    assert "13.2 MB an expert (assumed)." in text
    own = tmp_path / "own.npz"
    with np.load(TRACE) as z:
        np.savez(own, experts=z["experts"][:40], expert_bytes=np.float64(2.5e6))
    rates = ["--bp", "20", "--bh", "50", "--dram", "60"]
    assert cache.main(["--trace", str(own), *few, *rates]) == 0
    text = capsys.readouterr().out
    assert "2.5 MB an expert." in text
    assert "assumed" not in text
    assert cache.main(["--trace", str(own), *few, *rates, "--expert-bytes", "4e6"]) == 0
    assert "4 MB an expert." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policies", "fifo"], "fifo"),
        (["--percent", "101"], "0..100"),
        (["--percent", "abc"], "--percent: expected a whole number, got 'abc'"),
        (["--skip", "400"], "fewer than"),
        (["--bp", "0"], "positive"),
        (["--trace", __file__], "not a readable npz"),
    ],
)
def test_bad_input(change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line naming the cause, status 1."""
    assert cache.main(["--trace", str(TRACE), "--jobs", "1", *change]) == 1
    assert message in capsys.readouterr().err
