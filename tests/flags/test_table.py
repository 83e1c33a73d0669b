"""The flag table against llama-server's own list of spellings (tests/data/llama_server_args.json, build b11434)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftgguf.flags import ActionRequested, FlagError, audit, doc, parse_server
from ftgguf.flags.help import field_default, flag_help, help_text
from ftgguf.flags.parse import parse
from ftgguf.flags.pending import PENDING
from ftgguf.flags.row import UNSET, Flag
from ftgguf.flags.table import FLAGS, GROUPS, by_spelling

ROOT = Path(__file__).parents[2]
PEER: list[dict[str, Any]] = json.loads((ROOT / "tests/data/llama_server_args.json").read_text())
TABLE = by_spelling()
LEGACY = {"legacy.mmap", "legacy.mlock", "legacy.dio", "legacy.escape"}
"""Pseudo-fields that resolve() turns into real ones."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """A valid value (or two) for every flag that takes one, by canonical spelling; "1" where none is listed."""
    folder = tmp_path_factory.mktemp("flags")
    for name, content in {
        "a.gbnf": 'root ::= "x"',
        "a.json": "{}",
        "a.jinja": "{{ x }}",
        "keys": "k\n",
        "a.pem": "x",
    }.items():
        (folder / name).write_text(content)
    here = str(folder)
    file = {suffix: str(folder / f"a.{suffix}") for suffix in ("gbnf", "json", "jinja", "pem")}
    return {
        "--override-kv": ["a.b=int:3,c=bool:true"],
        "--models-dir": [here],
        "--models-preset": [file["gbnf"]],
        "--override-tensor": ["exps=CPU"],
        "--spec-draft-override-tensor": ["exps=CPU"],
        "--fit": ["off"],
        "--load-mode": ["dio"],
        "--lazy-mode": ["on"],
        "--device": ["CUDA0"],
        "--spec-draft-device": ["none"],
        "--split-mode": ["none"],
        "--numa": ["isolate"],
        "--flash-attn": ["on"],
        "--cache-type-k": ["q8_0"],
        "--cache-type-v": ["q4_0"],
        "--spec-draft-type-k": ["q8_0"],
        "--spec-draft-type-v": ["q8_0"],
        "--slot-save-path": [here],
        "--rope-scaling": ["yarn"],
        "--cpu-range": ["0-0"],
        "--cpu-range-batch": ["0-0"],
        "--samplers": ["top_k;temperature"],
        "--sampler-seq": ["kt"],
        "--logit-bias": ["15043-inf"],
        "--grammar": ['root ::= "x"'],
        "--grammar-file": [file["gbnf"]],
        "--json-schema": ["{}"],
        "--json-schema-file": [file["json"]],
        "--chat-template-file": [file["jinja"]],
        "--chat-template-kwargs": ['{"a": 1}'],
        "--reasoning-format": ["deepseek"],
        "--reasoning": ["on"],
        "--path": [here],
        "--api-key-file": [str(folder / "keys")],
        "--ssl-key-file": [file["pem"]],
        "--ssl-cert-file": [file["pem"]],
        "--ui-config": ["{}"],
        "--ui-config-file": [file["json"]],
        "--pooling": ["mean"],
        "--lora-scaled": ["a.gguf:0.5"],
        "--control-vector-layer-range": ["1", "2"],
        "--log-colors": ["off"],
        "--spec-type": ["ngram-mod"],
        "--spec-draft-sampling": ["greedy"],
        "--moe-mode": ["hybrid"],
        "--expert-policy": ["lru"],
        "--weights-layout": ["plain"],
        "--allow-pull": ["on"],
    }


def values_of(flag: Flag, samples: dict[str, list[str]]) -> list[str]:
    return samples.get(flag.name, ["1"]) if flag.takes_value else []


def test_rows_match_the_peer_exactly() -> None:
    """Spellings, their order, negated forms and environment name of every registration of arg.cpp."""
    for entry in PEER:
        flag = TABLE[entry["args"][0]][0]
        assert (flag.names, flag.no, flag.env) == (tuple(entry["args"]), tuple(entry["neg"]), entry["env"])
    assert len(PEER) == 257


def test_no_env_name_serves_two_flags() -> None:
    """Two rows on one variable would be set together."""
    names = [name for flag in FLAGS for name in flag.env_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", PEER, ids=lambda entry: entry["args"][-1])
def test_every_spelling_follows_its_tier(entry: dict[str, Any], samples: dict[str, list[str]]) -> None:
    """Accepted with the words of its tier, or refused saying what to use instead; `_` reads as `-`."""
    flag = TABLE[entry["args"][0]][0]
    for spelling in [*entry["args"], *entry["neg"]]:
        positive = spelling in entry["args"]
        typed = "--" + spelling[2:].replace("-", "_") if spelling.startswith("--") else spelling
        argv = [typed, *values_of(flag, samples)]
        if flag.action:
            with pytest.raises(ActionRequested) as asked:
                parse(argv, {}, ())
            assert asked.value.action == flag.action.replace("-bash", "")
            continue
        tier = flag.tier if positive else flag.tier_off or ("A" if flag.tier == "D" else flag.tier)
        if tier == "D":
            with pytest.raises(FlagError, match=f'^error while handling argument "{spelling}": ') as refused:
                parse(argv, {}, ())
            assert flag.note
            assert str(flag.note) in str(refused.value)
            continue
        parsed = parse(argv, {}, ())
        silenced = [line for line in parsed.warnings if line.startswith(f"{spelling} has no effect: ")]
        assert len(silenced) == (tier == "C")
        assert parsed.assignments or tier == "C" or flag.tier == "D"


@pytest.mark.parametrize("entry", [e for e in PEER if e["env"]], ids=lambda entry: entry["env"])
def test_every_env_name_follows_its_tier(entry: dict[str, Any], samples: dict[str, list[str]]) -> None:
    """The environment gives what the argument gives."""
    flag = TABLE[entry["args"][0]][0]
    value = (values_of(flag, samples) or ["1"])[0]
    if flag.tier == "D":
        with pytest.raises(FlagError, match=f'^error while handling environment variable "{entry["env"]}": '):
            parse([], {entry["env"]: value}, ())
        return
    by_env = parse([], {entry["env"]: value}, ())
    by_argument = parse([flag.name, *values_of(flag, samples)], {}, ())
    assert by_env.assignments == by_argument.assignments
    if flag.is_switch:
        negated = entry["env"].replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
        off = parse([], {negated: "1"}, ())
        assert off.assignments == parse([flag.no[-1]], {}, ()).assignments
        assert off.assignments == parse([], {entry["env"]: "off"}, ()).assignments


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_what_a_row_sets_is_a_field(flag: Flag, samples: dict[str, list[str]]) -> None:
    """Every A and B row reaches a field of ServerConfig (or an action), so something can consume it."""
    if flag.action or (flag.tier in "CD" and not flag.to and flag.expand is None):
        return
    text = values_of(flag, samples)
    value = flag.parse(text[0], lambda line: None) if flag.parse is not None else flag.const
    changed = flag.assignments(value)
    assert changed
    for path, setting, mode in changed:
        if path in LEGACY:
            continue
        default = field_default(path)
        assert mode != "append" or isinstance(default, tuple)
        if default is not None and setting is not UNSET and "template_kwargs" not in path:
            kind = float if isinstance(default, float) else type(default)
            assert isinstance(setting, (kind, int) if kind is float else kind)


def test_a_field_given_shows_in_the_configuration(samples: dict[str, list[str]]) -> None:
    """End to end for plain rows: the parsed value is what the resolved configuration holds."""
    derived = {"cpu.threads", "cpu.threads_batch", "context.n_parallel", "http.ssl_key_file", "http.ssl_cert_file"}
    derived |= {"model.hf_file", "http.api_prefix", "context.kv_unified", "cpu.cpus", "context.n_ubatch"}
    checked = 0
    for flag in FLAGS:
        if not flag.to or flag.to in derived | LEGACY or flag.tier == "D":
            continue
        text = values_of(flag, samples)
        value = flag.parse(text[0], lambda line: None) if flag.parse is not None else flag.const
        config = parse_server([flag.name, *text], {}, ())
        at: Any = config
        for name in flag.to.split("."):
            at = getattr(at, name)
        assert at == value
        assert flag.to in config.given
        checked += 1
    assert checked > 100


def test_notes_are_there_where_a_tier_needs_them() -> None:
    """B says how, C why, D what instead."""
    for flag in FLAGS:
        assert flag.tier == "A" or flag.note
        assert flag.tier_off in (None, "A") or flag.note_off
        assert flag.help
        assert not flag.help.endswith(".")


def test_pending_names_rows() -> None:
    """A pending entry that names no flag would never be said."""
    assert set(PENDING) <= {flag.name for flag in FLAGS}


def test_help_has_every_flag_under_llama_servers_headings() -> None:
    """Headings as llama-server prints them, plus ours; every visible spelling is there."""
    text = help_text()
    assert [line for line in text.splitlines() if line.startswith("-----")] == [f"----- {h} -----" for _, h in GROUPS]
    assert text.startswith("----- common params -----\n\n-h,    --help, --usage                  ")
    for flag in FLAGS:
        assert (flag_help(flag) in text) != flag.hidden


def test_docs_are_up_to_date() -> None:
    """docs/flags.md is what the table gives now: `python -m ftgguf.flags.doc` writes it."""
    assert (ROOT / "docs/flags.md").read_text(encoding="utf-8") == doc.markdown()


def test_audit_finds_a_flag_that_nothing_reads() -> None:
    """One text that reads the port and, by its method, the context; nothing else."""
    texts = ["def bind(http: HttpConfig) -> int:\n    return http.port\n", "config.context.cells(512)"]
    fields = audit.unread(texts)
    assert not {"http.port", "context.size", "context.kv_unified"} & set(fields)
    assert {"http.hosts", "context.n_batch", "placement.moe_mode"} <= set(fields)
    idle = {flag.name for _, flag in audit.idle_flags(texts)}
    assert "--host" in idle
    assert "--spec-type" in idle
    assert not {"--port", *PENDING, "--threads-http", "--mmproj"} & idle  # read, pending, tier C, tier D


def test_every_flag_is_read_or_pending() -> None:
    """`python -m ftgguf.flags.audit` finds nothing: what a flag promises, something does, or the user is told."""
    texts = audit.sources()
    assert [f"{flag.name}: add it to ftgguf.flags.pending" for _, flag in audit.idle_flags(texts)] == []
    assert [f"{flag.name}: take it out of ftgguf.flags.pending" for _, flag in audit.built_flags(texts)] == []
