"""The command line, against llama-bench's documented forms."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ftgguf.bench.main import main
from ftgguf.bench.options import UsageError, check_transport, parse
from ftgguf.bench.plan import SpeedTest, int_list, make_tests, pair, random_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("1,2,4", [1, 2, 4]),
        ("8-11", [8, 9, 10, 11]),
        ("8-32+8", [8, 16, 24, 32]),
        ("8-64*2,100", [8, 16, 32, 64, 100]),
    ],
)
def test_lists_and_ranges(text: str, expected: list[int]) -> None:
    """The forms of llama-bench's help."""
    assert int_list(text) == expected


@pytest.mark.parametrize("text", ["", "x", "4-2", "1-8*1", "0-8*2", "1-8+0", "-3", "1.5"])
def test_empty_and_endless_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|number"):
        int_list(text)


def test_test_names_are_llama_benchs() -> None:
    names = [t.name for t in make_tests([512], [128], [(64, 16)], [0, 4096])]
    assert names[:3] == ["pp512", "tg128", "pp64+tg16"]
    assert names[3:] == ["pp512 @ d4096", "tg128 @ d4096", "pp64+tg16 @ d4096"]


def test_defaults_and_engine_flags_go_apart() -> None:
    options = parse(["-m", "x.gguf", "-t", "2", "--weights-layout", "plain", "-ngl", "20", "-fa", "on"])
    assert [t.name for t in options.tests] == ["pp512", "tg128"]
    assert options.repetitions == 5
    assert options.engine_lines() == [["--weights-layout", "plain", "-fa", "on", "-t", "2", "-ngl", "20"]]


def test_each_kind_of_test_has_its_own_default() -> None:
    """As llama-bench's: -p alone keeps tg128, -pg comes on top, 0 leaves a kind out."""
    assert [t.name for t in parse(["-p", "8"]).tests] == ["pp8", "tg128"]
    assert [t.name for t in parse(["-p", "0", "-pg", "8,4"]).tests] == ["tg128", "pp8+tg4"]


def test_files_that_cannot_be_written_are_found_before_anything_is_measured(tmp_path: Path) -> None:
    for flag in ("--html", "--report"):
        for name in (str(tmp_path), str(tmp_path / "no" / "x")):
            with pytest.raises(UsageError, match=f"{flag} .*: no file can be written there"):
                parse([flag, name])


def test_several_values_make_every_combination() -> None:
    lines = parse(["-t", "1,2", "-ctk", "f16,q8_0"]).engine_lines()
    assert lines == [["-t", t, "-ctk", k] for t in "12" for k in ("f16", "q8_0")]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--frob"], "unknown flag --frob"),
        (["-p"], "-p needs a value"),
        (["-p", "x"], "-p: 'x'"),
        (["-o", "xml"], "'xml' is none of md, csv, json, jsonl"),
        (["-r", "0"], "less than 1"),
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["--against", "vllm"], "llama.cpp, ollama or the URL"),
        (["--against", "llama.cpp", "-o", "csv"], "md or json"),
        (["--against", "llama.cpp", "-t", "1,2"], "one value"),
        (["model.gguf"], "goes after -m"),
        (["--workload", "pp,nope"], "'nope' is none of"),
        (["--timeout", "0"], "no number of seconds"),
        (["--llama-server", "x"], "--llama-server: only in a comparison, with --against PEER"),
        (["--against", "ollama", "--llama-server", "x"], "goes with --against llama.cpp"),
        (["--against", "llama.cpp", "--llama-server", "x", "--in-process"], "does not go with --in-process"),
        (["--limit", "5"], "--limit: only in a comparison, with --against PEER"),
        (["--timeout", "5", "--workload", "pp"], "--timeout, --workload: .*--against"),
        (["--longest", "5"], "--longest: .*--against"),
        (["--in-process"], "--in-process: .*--against"),
        (["--peer-args", "-ngl 3"], "--peer-args: .*--against"),
        (["--against", "llama.cpp", "--peer-model", "x"], "--peer-model: only with --against ollama or a URL"),
        (["--against", "http://x", "--peer-args", "x"], "--peer-args: only with --against llama.cpp"),
        (["--against", "llama.cpp", "--peer", "xllamacpp", "--in-process"], "does not go with --in-process"),
        (["--turns", "3"], "are for `ftgguf bench trace`"),
        (["--sessions", "3"], "are for `ftgguf bench trace`"),
    ],
)
def test_mistakes_are_named(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-p", "8"], "-p: of no effect on sessions"),
        (["--against", "llama.cpp", "--workload", "pp"], "--workload: of no effect"),
        (["--no-warmup", "--seed", "2"], "--no-warmup, --seed: of no effect"),
        (["--peer-key", "x"], "--peer-key: .*--against"),
        (["-t", "1,2"], "-t: a replay takes one value"),
        (["-o", "csv"], "sessions are printed as md or json"),
    ],
)
def test_what_sessions_have_no_use_for_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(argv, positional=True)
    assert parse(["--limit", "5", "--timeout", "9", "-n", "3"], positional=True).limit == 5


def test_flags_of_the_other_transport_are_refused() -> None:
    over = parse(["--against", "llama.cpp", "--longest", "5", "--peer-args", "-ngl 3"])
    check_transport(over, http=True)
    with pytest.raises(UsageError, match="--longest, --peer-args: only over HTTP"):
        check_transport(over, http=False)
    pairs = parse(["--against", "llama.cpp", "-pg", "8,4"])
    check_transport(pairs, http=False)
    with pytest.raises(UsageError, match="-pg: over HTTP"):
        check_transport(pairs, http=True)


def test_usage_error_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--frob"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--help"]) == 0
    assert "--against PEER" in capsys.readouterr().out


def test_random_tokens_are_the_same_for_a_seed_and_split_as_the_test_says() -> None:
    test = SpeedTest(5, 3, 7)
    a, b = random_tokens(test, 100, 1), random_tokens(test, 100, 1)
    assert a == b
    assert (len(a.depth), len(a.prompt), len(a.gen)) == (7, 5, 3)
    assert a != random_tokens(test, 100, 2)
    assert all(0 <= t < 100 for t in [*a.depth, *a.prompt, *a.gen])


def test_pair() -> None:
    assert pair("512,128") == (512, 128)
    with pytest.raises(ValueError, match="-pg"):
        pair("512")


def test_the_documented_commands_are_understood(tmp_path: Path) -> None:
    """The words that docs/measurements/cpu.sh gives to Python, taken down by a stand-in, parse as they are meant."""
    script = Path(__file__).parents[2] / "docs" / "measurements" / "cpu.sh"
    stand_in, log = tmp_path / "python", tmp_path / "log"
    stand_in.write_text(f'#!/bin/sh\nfor w in "$@"; do printf "%s\\t" "$w"; done >>"{log}"; echo >>"{log}"\n')
    stand_in.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(stand_in), "BIG": str(log), "THREADS": "2"}
    log.write_text("")
    done = subprocess.run(
        ["sh", str(script), str(tmp_path / "out")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    there, *commands = [line.rstrip("\t").split("\t") for line in log.read_text().splitlines()]
    assert there == ["-c", "import ftgguf._ggml_cpu"]  # before anything else: is it built here?
    assert [words[:3] for words in commands] == [["-m", "ftgguf", "bench"]] * 4
    for words in commands:
        trace = words[3] == "trace"
        options = parse(words[4:] if trace else words[3:], positional=trace)
        assert options.against == "llama.cpp"
        assert options.html
        assert options.report
        assert options.varied["-t"] == ["2"]
        assert options.traces == []
