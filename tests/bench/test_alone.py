"""`ftgguf bench` on the stories model, and the executor it drives against libllama."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from ftgguf.bench import amx, llama_bench
from ftgguf.bench.alone import config_for
from ftgguf.bench.llama_bench import FIELDS, Result
from ftgguf.bench.main import main
from ftgguf.bench.plan import SpeedTest, Tokens, random_tokens
from ftgguf.bench.report import from_json
from ftgguf.bench.stepper import LibllamaStepper, OursStepper, Stepper, Timer, parse_isa, resident
from ftgguf.pull.demo import resolve_stories

STORIES = str(resolve_stories())


@pytest.fixture(scope="module")
def ours() -> OursStepper:
    amx.avoid_if_broken()
    return OursStepper(config_for(STORIES, ["-t", "1", "-ub", "16"], (SpeedTest(64, 0),)))


@pytest.fixture(scope="module")
def libllama() -> Stepper:
    return LibllamaStepper(config_for(STORIES, ["-t", "1"], (SpeedTest(64, 0),)), "plain")


def test_greedy_outputs_equal_libllamas(ours: OursStepper, libllama: Stepper) -> None:
    """The story that libllama tells, token for token, from a prompt longer than one physical batch."""
    prompt = ours.tokenize("Once upon a time, there was a little girl called Lily. She liked to play in the park.")
    assert prompt == libllama.tokenize(
        "Once upon a time, there was a little girl called Lily. She liked to play in the park."
    )
    assert len(prompt) > 16
    a, b = Timer(ours).greedy(prompt, 24), Timer(libllama).greedy(prompt, 24)
    assert [t for t, _ in a] == [t for t, _ in b]
    assert [g for _, g in a] == pytest.approx([g for _, g in b], abs=2e-2)


def test_a_test_at_depth_leaves_the_logits_of_its_whole_sequence(ours: OursStepper, libllama: Stepper) -> None:
    """Two repetitions at depth 40: the second reuses the context, and both end in libllama's logits."""
    test = SpeedTest(20, 3, 40)
    tokens = random_tokens(test, ours.facts.n_vocab, 1)
    libllama.rewind(0)
    libllama.prefill([*tokens.depth, *tokens.prompt, *tokens.gen])
    expected = libllama.logits().copy()
    timer = Timer(ours)
    for _ in range(2):
        assert timer.run(test, tokens) > 0
        assert ours.n_past == test.n_ctx
        error = ((ours.logits() - expected) ** 2).sum() / (expected**2).sum()
        assert error < 1e-5


class Counting:
    """A stepper that only keeps books."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.n_past = 0

    def rewind(self, length: int) -> None:
        self.calls.append(("rewind", length))

    def prefill(self, tokens: list[int]) -> None:
        self.calls.append(("prefill", len(tokens)))

    def step(self, token: int) -> None:
        self.calls.append(("step", token))


def test_what_is_timed_and_what_is_not() -> None:
    """llama-bench's protocol: the context outside the clock and once, prompt in one go, tokens one by one."""
    stepper = Counting()
    ticks = iter(range(0, 1000, 10))

    def clock() -> int:
        stepper.calls.append(("clock", 0))
        return next(ticks)

    timer = Timer(stepper, clock)  # type: ignore[arg-type]
    tokens = Tokens([1, 2, 3], [4, 5], [6, 7])
    assert timer.run(SpeedTest(2, 2, 3), tokens) == 10
    timer.run(SpeedTest(2, 2, 3), tokens)
    timed = [("clock", 0), ("prefill", 2), ("step", 6), ("step", 7), ("clock", 0)]
    assert stepper.calls == [("rewind", 0), ("prefill", 3), *timed, ("rewind", 3), *timed]


def test_json_has_llama_benchs_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "stories", "-p", "16", "-n", "4", "-r", "2", "-t", "1", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["n_prompt"] for d in found] == [16, 0]
    for d in found:
        assert list(d)[: len(FIELDS)] == list(FIELDS)
        n = d["n_prompt"] + d["n_gen"]
        assert d["samples_ts"] == pytest.approx([n / ns * 1e9 for ns in d["samples_ns"]])
        assert d["avg_ts"] == pytest.approx(np.mean(d["samples_ts"]))
        assert d["stddev_ts"] == pytest.approx(np.std(d["samples_ts"], ddof=1))
    assert found[0]["n_threads"] == 1
    assert found[0]["model_n_params"] == 1604800


def _result(test: SpeedTest, **settings: object) -> Result:
    known: dict[str, object] = dict.fromkeys(FIELDS, 0)
    known |= {"model_type": "llama Q8_0", "model_size": 5 << 30, "model_n_params": 2_000_000_000, "backends": "CPU"}
    known |= {"n_threads": 2, "type_k": "f16", "type_v": "f16", "n_batch": 2048, "n_ubatch": 512, "n_gpu_layers": -1}
    return Result(known | settings, test, "2026-01-01T00:00:00Z", (10**9, 2 * 10**9))


def test_md_columns_are_llama_benchs() -> None:
    text = llama_bench.markdown([_result(SpeedTest(100, 0)), _result(SpeedTest(0, 8, 64))])
    head, rule, first, second = text.splitlines()
    assert [c.strip() for c in head.strip("|").split("|")] == [
        *("model", "size", "params", "backend", "threads", "test", "t/s"),
    ]
    assert [c.strip() for c in first.strip("|").split("|")] == [
        *("llama Q8_0", "5.00 GiB", "2.00 B", "CPU", "2", "pp100", "75.00 ± 35.36"),
    ]
    assert "tg8 @ d64" in second
    assert len({len(line) for line in (head, rule, first, second)}) == 1


def test_a_setting_that_varies_gets_a_column() -> None:
    text = llama_bench.markdown([_result(SpeedTest(8, 0)), _result(SpeedTest(8, 0), type_k="q8_0")])
    assert "type_k" in text.splitlines()[0]


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(llama_bench.to_csv([_result(SpeedTest(8, 0))]))))
    assert list(rows[0]) == list(FIELDS)
    assert float(rows[0]["avg_ts"]) == pytest.approx(6.0)


def test_isa_of_llama_cpps_line() -> None:
    line = (
        "n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | REPACK = 1 | "
    )
    assert parse_isa(line) == ("sse3", "avx2")


def test_resident_set_is_that_of_proc() -> None:
    import psutil

    found = resident()
    assert found["peak"] >= found["now"]
    assert found["now"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_the_amx_probe_runs_where_amx_is_left_out(tmp_path: object) -> None:
    """A trial that fails for another reason than AMX would call a healthy machine broken."""
    from ftgguf.bench.libllama import Libllama

    path = Path(str(tmp_path)) / "probe.gguf"
    amx._write_probe(path)
    with Libllama(path, 64, 1, repack=False) as session:
        session.append([1] * 48)
        assert np.isfinite(session.last_logits()).all()


def test_an_interrupted_test_keeps_the_repetitions_it_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C in the fourth repetition of the second test: five of the first, three of the second, in every output."""
    run, runs = Timer.run, iter(range(100))

    def interrupted(self: Timer, test: SpeedTest, tokens: Tokens) -> int:
        if next(runs) == 8:
            raise KeyboardInterrupt
        return run(self, test, tokens)

    monkeypatch.setattr(Timer, "run", interrupted)
    saved, page = tmp_path / "r.json", tmp_path / "r.html"
    argv = ["-m", "stories", "-t", "1", "-p", "8", "-n", "2", "-o", "json", "--report", str(saved), "--html", str(page)]
    assert main(argv) == 130
    out, errors = capsys.readouterr()
    assert [len(r["samples_ns"]) for r in json.loads(out)] == [5, 3]
    assert "tg2: 3 of 5" in errors
    report = from_json(saved.read_bytes())
    assert report.interrupted
    assert [(r.workload, len(r.samples["ftgguf"])) for r in report.rows] == [("pp8", 5), ("tg2", 3)]
    assert report.progress == "repetitions of pp8: 5 of 5, tg2: 3 of 5"
    assert f"Interrupted: what was measured until then is shown ({report.progress})." in page.read_text()
