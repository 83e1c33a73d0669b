"""Derived values, with what each was checked against in llama.cpp (b11434): server.cpp, llama-context.cpp, arg.cpp."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.engine.messages import Grammar
from ftgguf.flags import FlagError, ServerConfig, decode_config, encode_config, parse_server
from ftgguf.flags.config import ContextConfig, TensorOverride, pad
from ftgguf.flags.machine import Machine
from ftgguf.flags.parse import parse
from ftgguf.flags.resolve import resolve

EIGHT = Machine(allowed=tuple(range(16)), core_of={cpu: (0, cpu % 8) for cpu in range(16)})
"""8 cores, 16 hyper-threads."""


def config(*argv: str, machine: Machine = EIGHT, env: dict[str, str] | None = None) -> ServerConfig:
    return resolve(parse(argv, env or {}, ()), machine)


def failure(*argv: str) -> str:
    with pytest.raises(FlagError) as caught:
        config(*argv)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ slots and context


@pytest.mark.parametrize(
    ("argv", "slots", "unified"),
    [
        ("", 4, True),  # server.cpp: n_parallel < 0 -> 4 and kv_unified
        ("-np -1", 4, True),
        ("-np -7", 4, True),
        ("-np 1", 1, False),
        ("-np 3", 3, False),
        ("-np 3 -kvu", 3, True),
        ("-np 3 -no-kvu", 3, False),
        ("--no-kv-unified", 4, True),  # server.cpp overwrites it
        ("--gpt-oss-20b-default", 2, False),
        ("--gpt-oss-20b-default -np 5", 5, False),
        ("-np 5 --gpt-oss-20b-default", 2, False),  # presets apply where they stand
    ],
)
def test_slots(argv: str, slots: int, unified: bool) -> None:
    """n_parallel and kv_unified as llama-server ends up with them."""
    context = config(*argv.split()).context
    assert (context.n_parallel, context.kv_unified) == (slots, unified)


def test_slots_out_of_range() -> None:
    """LLAMA_MAX_SEQ is 256; 0 slots serve nobody."""
    assert failure("-np", "257") == "error: --parallel 257: n_seq_max must be <= 256"
    assert "at least 1 slot" in failure("-np", "0")
    assert config("-np", "256").context.n_parallel == 256
    assert any("no effect while --parallel is auto" in line for line in config("-no-kvu").warnings)


@pytest.mark.parametrize(
    ("argv", "train", "cells", "limit"),
    [
        ("", 32768, 32768, 32768),
        ("-c 8192", 32768, 8192, 8192),  # unified: each slot may use all
        ("-c 8192 -np 4", 32768, 8192, 2048),
        ("-c 1000 -np 3", 32768, 1536, 512),  # llama-context.cpp pads each sequence's share to 256
        ("-c 65536", 32768, 65536, 32768),  # capped at n_ctx_train
        ("--kv-unified-per-slot 1024", 32768, 4096, 1024),  # pool sized to slots x N
        ("--kv-unified-per-slot 1024 -c 2048", 32768, 2048, 1024),
        ("--kv-unified-per-slot 1024 -c 0", 32768, 32768, 1024),  # -c 0 pins the whole context
        ("--kv-unified-per-slot 9999 -c 2048", 32768, 2048, 2048),
    ],
)
def test_context_of_a_slot(argv: str, train: int, cells: int, limit: int) -> None:
    """n_ctx_slot = n_ctx / n_parallel (padded) unless unified, then the caps (server-context.cpp)."""
    context = config(*argv.split()).context
    assert context.cells(train) == cells
    assert context.slot_limit(context.cells(train), train) == limit


@given(st.integers(0, 10**6), st.integers(1, 64), st.booleans(), st.integers(1, 10**6))
def test_slot_limit_bounds(size: int, slots: int, unified: bool, train: int) -> None:
    """Whatever is asked: no slot exceeds the model or the pool, and non-unified slots fit side by side."""
    context = ContextConfig(size=size, n_parallel=slots, kv_unified=unified)
    cells = context.cells(train)
    limit = context.slot_limit(cells, train)
    assert 0 < limit <= train
    assert cells >= min(size or train, cells)
    assert cells == pad(cells)
    assert unified or limit * slots <= cells
    assert cells - (size or train) < 256 * (1 if unified else slots)


def test_context_zero_keeps_fit_from_shrinking_it() -> None:
    """arg.cpp: -c 0 sets fit_params_min_ctx to the maximum."""
    assert config("-c", "0").placement.fit_ctx == 2**32 - 1
    assert config().placement.fit_ctx == 4096


@pytest.mark.parametrize(
    ("argv", "batch", "ubatch"),
    [
        ("", 2048, 512),
        ("-b 256", 256, 256),
        ("-ub 4096", 2048, 2048),
        ("-b 64 -ub 0", 64, 64),
        ("-b 4096 -ub 1024", 4096, 1024),
    ],
)
def test_batches(argv: str, batch: int, ubatch: int) -> None:
    """llama-context.cpp: n_ubatch = min(n_batch, n_ubatch == 0 ? n_batch : n_ubatch)."""
    context = config(*argv.split()).context
    assert (context.n_batch, context.n_ubatch) == (batch, ubatch)


# ------------------------------------------------------------------------------------------------ placement


@pytest.mark.parametrize(
    ("argv", "mode"),
    [
        ("", "auto"),
        ("--mmap", "mmap"),
        ("--no-mmap", "none"),
        ("--mlock", "mmap+mlock"),
        ("--no-mmap --mlock", "mlock"),
        ("--mlock --no-mmap", "mlock"),
        ("--direct-io", "dio"),
        ("-dio --no-mmap", "dio"),
        ("--no-direct-io", "auto"),
        ("--no-mmap -lm mmap", "mmap"),
    ],
)
def test_removed_memory_flags(argv: str, mode: str) -> None:
    """The meaning they had before b10884 (use_mmap, use_mlock, use_direct_io), as one load mode."""
    assert config(*argv.split()).placement.load_mode == mode


def test_removed_memory_flags_from_the_environment() -> None:
    """Their old variables."""
    assert config(env={"LLAMA_ARG_MMAP": "0", "LLAMA_ARG_MLOCK": "1"}).placement.load_mode == "mlock"
    assert config(env={"LLAMA_ARG_NO_MMAP": "1"}).placement.load_mode == "none"


def test_overrides_keep_their_order() -> None:
    """arg.cpp pushes -ot, -cmoe and -ncmoe to one list; the loader takes the first regex that matches."""
    placement = config("-ot", r"blk\.1\.ffn_up=CUDA0", "-ncmoe", "2", "-cmoe").placement
    assert placement.overrides[0] == TensorOverride(r"blk\.1\.ffn_up", "CUDA0")
    assert placement.buffer_of("blk.1.ffn_up_exps.weight") == "CUDA0"
    assert placement.buffer_of("blk.1.ffn_down_exps.weight") == "CPU"
    assert placement.buffer_of("blk.9.ffn_gate_up_exps.weight") == "CPU"
    assert placement.buffer_of("blk.9.ffn_up_shexp.weight") is None
    only_two = config("-ncmoe", "2").placement
    assert [only_two.buffer_of(f"blk.{i}.ffn_gate_exps.weight") for i in (0, 1, 2, 10)] == ["CPU", "CPU", None, None]
    assert (placement.cpu_moe, placement.n_cpu_moe, only_two.cpu_moe) == (True, 2, False)


@pytest.mark.parametrize(("text", "layers"), [("auto", -1), ("all", -2), ("-1", -1), ("-5", -2), ("0", 0), ("99", 99)])
def test_gpu_layers(text: str, layers: int) -> None:
    """-1 is auto, below it all (common.h)."""
    assert config("-ngl", text).placement.gpu_layers == layers


def test_no_repack_means_plain_layout() -> None:
    """Unless the layout is named."""
    assert config("--no-repack").placement.weights_layout == "plain"
    assert config("--no-repack", "--weights-layout", "both").placement.weights_layout == "both"


# ------------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize(
    ("argv", "quota", "threads", "batch"),
    [
        ("", None, 8, 8),  # physical cores (common_cpu_get_num_math)
        ("", 4.0, 4, 4),
        ("", 2.5, 2, 2),
        ("", 0.5, 1, 1),
        ("-t 3", None, 3, 3),
        ("-t 3 -tb 6", None, 3, 6),
        ("-tb 6", None, 8, 6),
        ("-t 0", None, 16, 16),  # arg.cpp: <= 0 is hardware_concurrency
        ("-t -1 -tb 2", None, 16, 2),
        ("-t 12", 4.0, 12, 12),  # explicit beats derived
        ("-C f", None, 4, 4),
        ("-Cr 0-0", None, 1, 1),
        ("-C f00f -t 2", None, 2, 2),
    ],
)
def test_threads(argv: str, quota: float | None, threads: int, batch: int) -> None:
    """Defaults bounded by affinity, mask and quota; given values stand."""
    cpu = config(*argv.split(), machine=dataclasses.replace(EIGHT, quota=quota)).cpu
    assert (cpu.threads, cpu.threads_batch) == (threads, batch)


def test_thread_warnings_and_masks() -> None:
    """postprocess_cpu_params' warning; the two mask flags add up; a mask outside the affinity is refused."""
    got = config("-C", "0x3", "-Cr", "4-5", "-t", "6")
    assert got.cpu.cpus == (0, 1, 4, 5)
    assert any("Not enough set bits in CPU mask (4)" in line for line in got.warnings)
    assert failure("-Cr", "40-50") == "error: --cpu-mask and --cpu-range leave no CPU of this process (CPUs 0 to 15)"
    over = config("-t", "12", machine=dataclasses.replace(EIGHT, quota=4.0))
    assert any("more than the cgroup's quota of 4 CPUs" in line for line in over.warnings)


# ------------------------------------------------------------------------------------------------ texts and files


def test_dry_breakers() -> None:
    """arg.cpp: the first one clears the defaults, `none` clears what there is; escapes are read unless --no-escape."""
    flag = "--dry-sequence-breaker"
    assert config(flag, r"\n", flag, "x").sampling.dry_sequence_breakers == ("\n", "x")
    assert config(flag, "none").sampling.dry_sequence_breakers == ()
    assert config(flag, "a", flag, "none", flag, "b").sampling.dry_sequence_breakers == ("b",)
    assert config("--no-escape", flag, r"\n", "-r", r"\t").sampling.dry_sequence_breakers == (r"\n",)
    assert config("-r", r"\t").chat.reverse_prompt == ("\t",)
    assert "--no-escape takes the text as it is" in failure("-r", r"\xff")


def test_template_variables() -> None:
    """arg.cpp: --reasoning sets enable_thinking, --reasoning-effort default removes it, preserve_reasoning is on."""
    assert config().chat.template_kwargs == {"preserve_reasoning": True}
    got = config(
        "--chat-template-kwargs", '{"a": [1], "reasoning_effort": "low"}', "-rea", "off", "--no-reasoning-preserve"
    )
    assert got.chat.template_kwargs == {
        "preserve_reasoning": False, "a": [1], "reasoning_effort": "low", "enable_thinking": False,
    }  # fmt: skip
    assert got.chat.reasoning == "off"
    got = config("--reasoning-effort", "high", "--reasoning-effort", "default", "-rea", "auto")
    assert got.chat.template_kwargs == {"preserve_reasoning": True}
    assert any("deprecated" in line for line in config("--chat-template-kwargs", '{"enable_thinking": false}').warnings)


def test_files_are_read_while_parsing(tmp_path: Path) -> None:
    """Grammar, schema, template and key files; last of --grammar and --json-schema wins."""
    (tmp_path / "g").write_text('root ::= "é"\n')
    (tmp_path / "s").write_text('{"type": "object"}')
    (tmp_path / "t").write_text("{{ messages }}\n")
    (tmp_path / "k").write_text("# keys\r\none\r\n\r\ntwo\r\n")
    at = {name: str(tmp_path / name) for name in "gstk"}
    assert config("-j", "{}", "--grammar-file", at["g"]).sampling.grammar == Grammar(kind="gbnf", text='root ::= "é"\n')
    assert config("--grammar", "x", "-jf", at["s"]).sampling.grammar == Grammar(
        kind="json_schema", text='{"type": "object"}'
    )
    got = config("--chat-template-file", at["t"], "--api-key-file", at["k"], "--api-key", "three,one")
    assert (got.chat.template, got.chat.template_file) == ("{{ messages }}\n", at["t"])
    assert got.http.api_keys == ("one", "two", "three")
    assert config("--chat-template-file", at["t"], "--chat-template", "chatml").chat == dataclasses.replace(
        config().chat, template="chatml"
    )
    (tmp_path / "g").write_bytes(b"\xff")
    assert "is not UTF-8 text (byte 0)" in failure("--grammar-file", at["g"])
    assert "failed to open file" in failure("--chat-template-file", str(tmp_path))


def test_secrets_are_not_in_the_repr() -> None:
    """A configuration may be logged."""
    text = repr(config("--api-key", "sesame", "-hft", "hf_secret"))
    assert "sesame" not in text
    assert "hf_secret" not in text


def test_pairs_and_paths(tmp_path: Path) -> None:
    """TLS needs both files; a file needs a repository; the prefix is tidied and said."""
    (tmp_path / "p").write_text("x")
    assert failure("--ssl-key-file", str(tmp_path / "p")) == "error: TLS needs both files: --ssl-cert-file is missing"
    assert failure("-hff", "x.gguf") == "error: --hf-file needs --hf-repo, the repository that the file is in"
    got = config("--api-prefix", "llm/", "--slot-save-path", str(tmp_path))
    assert got.http.api_prefix == "/llm"
    assert "--api-prefix: 'llm/' is read as '/llm'" in got.reasons
    assert got.context.slot_save_path == f"{tmp_path}/"


def test_speculation() -> None:
    """--spec-default is ngram-mod with match 24, 48 to 64 (arg.cpp); what is not built is said."""
    got = config("--spec-default", "--spec-type", "ngram-simple,ngram-mod", "--spec-ngram-simple-size-n", "8")
    assert got.spec.types == ("ngram-mod", "ngram-simple")
    assert (got.spec.ngram_mod.n_match, got.spec.ngram_mod.n_min, got.spec.ngram_mod.n_max) == (24, 48, 64)
    assert got.spec.ngram_simple.size_n == 8
    none = config("--spec-type", "none")
    assert none.spec.types == ()
    assert not any("--spec-type" in line for line in none.warnings)


def test_given_names_what_the_user_set() -> None:
    """So that a GGUF's sampling defaults and --fit leave those alone; derived fields are not in it."""
    got = config("--temp", "0", "-c", "4096", env={"LLAMA_ARG_TOP_K": "3"})
    assert got.given == {"sampling.temperature", "context.size", "sampling.top_k"}
    assert got.router
    assert not config("-m", "x").router


def test_reasons_say_what_was_derived() -> None:
    """One line each."""
    got = config("-ub", "4096", machine=dataclasses.replace(EIGHT, quota=4.0))
    assert "threads: 4 (8 physical cores, cut to the cgroup's quota of 4 CPUs)" in got.reasons
    assert "physical batch: 2048, cut from 4096 to --batch-size" in got.reasons
    assert "slots: 4, sharing one KV pool (--parallel is auto)" in got.reasons
    assert len(got.reasons) == len(set(got.reasons))


def test_configuration_survives_the_way_to_the_engine() -> None:
    """encode -> decode is the identity, infinities and nested groups included."""
    got = config("-l", "5-inf", "-ot", "x=CPU", "--override-kv", "a=int:3,b=float:0.5,c=bool:true,d=str:x",
                 "-dev", "none", "--chat-template-kwargs", '{"a": {"b": [1, null]}}', "-j", "{}")  # fmt: skip
    assert decode_config(encode_config(got)) == got
    assert got.sampling.logit_bias == ((5, -math.inf),)
    assert [type(item.value) for item in got.model.override_kv] == [int, float, bool, str]


def test_no_torch() -> None:
    """Policy is plain Python: importing the flags pulls in no torch and no triton."""
    code = "import sys, ftgguf.flags; sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_entry_point_reads_nothing_by_itself() -> None:
    """argv, env and files are what is given: the process's own environment is not looked at."""
    assert parse_server([], {}, ()).given == frozenset()
