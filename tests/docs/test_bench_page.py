"""docs/bench.md against the command lines that it describes: every command and option is in it, and nothing that is
not one."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from ftgguf.bench import bw, cache, options, sweep
from ftgguf.bench.main import OTHERS
from ftgguf.flags.table import by_spelling
from ftgguf.proxy import main as proxy

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
OWN = options.OWN


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


def row(start: str) -> str:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(start)]
    return line


def test_every_option_of_bench_is_on_the_page_and_in_the_usage() -> None:
    words = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", PAGE.partition("## Options")[2]))
    assert words >= OWN
    assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", options.USAGE)) >= {f for f in OWN if f != "--model"}


def test_every_option_of_the_others_is_on_the_page() -> None:
    for parser, start in (
        (bw.build_parser(), "| `bench bw`"),
        (cache.build_parser(), "| `bench cache`"),
        (proxy._parser(), "| `proxy`"),
    ):
        shared = {"-o", "--output", "--html", "--report"}
        named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", row(start)))
        assert named | shared >= flags_of(parser)
        assert flags_of(parser) >= shared
        assert named <= flags_of(parser) | {"--record-routing"}


def test_the_options_of_the_kernels_are_on_the_page() -> None:
    for module in ("torch", "triton"):
        pytest.importorskip(module, reason="the kernels need it")
    kernels = pytest.importorskip("ftgguf.bench.kernels")
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", row("| `bench kernels`")))
    assert named == flags_of(kernels.build_parser())


def test_every_command_is_on_the_page() -> None:
    for name in (*OTHERS, "trace"):
        assert f"`ftgguf bench {name}" in PAGE


def test_nothing_on_the_page_is_no_option() -> None:
    """Flags of `ftgguf serve` and of llama-server apart."""
    parsers = flags_of(bw.build_parser()) | flags_of(cache.build_parser()) | flags_of(proxy._parser())
    known = OWN | parsers | set(by_spelling()) | {"--types", "--sweep", "--workers", "--json", "--help", "--no-mmap"}
    assert set(re.findall(r"`(--?[a-z][\w-]*)", PAGE)) <= known


def test_the_sweep_is_described_as_it_is() -> None:
    said = re.search(r"for each `-ub` of ([\d, and]+)", PAGE)
    assert said
    assert tuple(map(int, re.findall(r"\d+", said[1]))) == sweep.UBATCHES
    assert f"more than\n{round(100 - 100 * sweep.SLOWER)} %" in PAGE
    assert f"a prompt of {sweep.PROMPT} tokens" in PAGE
    assert f"at {sweep.GEN} generated" in PAGE


def test_the_kernels_are_measured_on_a_device_or_said_not_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """By way of `ftgguf bench`, which hands it its words."""
    torch = pytest.importorskip("torch", reason="the kernels need it")
    pytest.importorskip("triton", reason="the kernels need it")
    if torch.cuda.is_available():
        pytest.skip("it would measure (tests/gpu/run_kernels.sh)")
    from ftgguf.bench.main import main

    assert main(["kernels", "--types", "Q4_K"]) == 1
    assert "no CUDA device here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "--types", "Q9"])
    assert ended.value.code == 1
