"""Our command lines on bad usage: docs/bench.md's status 1, one line, and what was expected in words."""

from __future__ import annotations

import pytest

from ftgguf import ctl
from ftgguf.bench import bw, cache
from ftgguf.bench.main import main as bench
from ftgguf.cli import main


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["doctor", "foo"], "foo"),
        (["ctl", "cache", "resize", "much"], "expected a whole number, got 'much'"),
        (["ctl", "cache"], "required"),
        (["ps", "--port", "x"], "expected a whole number, got 'x'"),
        (["bench", "bw", "--foo"], "required"),
        (["bench", "bw", "-m", "stories", "--foo"], "--foo"),
        (["bench", "bw", "-m", "stories", "--seconds", "0"], "--seconds: 0 is no number of seconds"),
        (["bench", "bw", "-m", "stories", "--seconds", "-1"], "--seconds: -1 is no number of seconds"),
        (["bench", "bw", "-m", "stories", "-t", "0"], "--threads: 0 is less than 1"),
        (["bench", "bw", "-m", "stories", "-t", "x"], "expected a whole number, got 'x'"),
        (["bench", "cache", "--trace", "x", "--bp", "fast"], "expected a number, got 'fast'"),
        (["bench", "cache", "--trace", "x", "--bp", "nan"], "expected a number, got 'nan'"),
        (["bench", "cache"], "--trace"),
    ],
)
def test_bad_usage_ends_with_1_and_says_why(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert words in said
    assert argv[0] == "ps" or said.count("\n") == 1


@pytest.mark.parametrize("argv", [["--seed", "x"], ["-r", "x"], ["trace", "--turns", "x"]])
def test_numbers_of_bench_say_what_they_are(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(argv) == 1
    assert capsys.readouterr().err == f"ftgguf bench: {argv[-2]}: expected a whole number, got 'x'\n"


def test_help_is_no_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for parser in (bw.build_parser(), cache.build_parser(), ctl._parser()):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--help"])
        assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
