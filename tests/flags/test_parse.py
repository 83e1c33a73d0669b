"""Parsing rules. Words and precedence were read from llama.cpp's common/arg.cpp and common/preset.cpp (b11434)."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.flags import (
    CacheListRequested,
    CompletionRequested,
    FlagError,
    HelpRequested,
    ListDevicesRequested,
    ServerConfig,
    VersionRequested,
    ini,
    parse_server,
)
from ftgguf.flags import values as v
from ftgguf.flags.help import bash_completion, fish_completion, zsh_completion


def config(*argv: str, env: dict[str, str] | None = None, files: tuple[Path, ...] = ()) -> ServerConfig:
    return parse_server(argv, env or {}, files)


def failure(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(FlagError) as caught:
        config(*argv, env=env)
    return str(caught.value)


def quiet(line: str) -> None:
    """Drops warnings."""


# ------------------------------------------------------------------------------------------------ errors


def test_unknown_argument() -> None:
    """llama.cpp: `error: invalid argument: X`, after `_` was read as `-`; ours adds a second line with a cure."""
    assert failure("--no_such_thing") == "error: invalid argument: --no-such-thing"
    assert failure("-zz") == "error: invalid argument: -zz"
    assert failure("model.gguf") == "error: invalid argument: model.gguf"
    assert failure("--ctx-siz", "3") == "error: invalid argument: --ctx-siz\ndid you mean --ctx-size?"


@pytest.mark.parametrize(
    "flag", ["--grp-attn-n", "-i", "--interactive", "-p", "--prompt", "--system-prompt-file", "--simple-io"]
)
def test_flags_that_only_other_programs_of_llama_cpp_have(flag: str) -> None:
    """Not in llama-server at all (arg.cpp excludes the server)."""
    assert failure(flag, "1").splitlines()[0] == f"error: invalid argument: {flag}"


def test_equals_form_is_refused_with_the_cure() -> None:
    """llama.cpp knows no --flag=value."""
    assert failure("--ctx_size=4096") == (
        "error: invalid argument: --ctx-size=4096\na value is the next argument: --ctx-size 4096"
    )
    assert failure("-c4096") == "error: invalid argument: -c4096\na value is the next argument: -c 4096"


def test_missing_value_and_usage() -> None:
    """The wrapper of arg.cpp around any exception of a handler, with the flag's usage."""
    text = failure("-m", "a", "-c")
    assert text.startswith(
        'error while handling argument "-c": expected value for argument\n\nusage:\n-c,    --ctx-size N '
    )
    assert text.endswith("\n\nto show complete usage, run with -h")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-c", "x"], "stoi"),
        (["-c", "99999999999"], "stoi"),
        (["--temp", "warm"], "stof"),
        (["--prio", "4"], "invalid value"),
        (["-ncmoe", "-1"], "invalid value"),
        (["-lm", "fast"], "invalid value"),
        (["-ctk", "q3_k"], "Unsupported cache type: q3_k"),
        (["-fa", "maybe"], "error: unknown value for --flash-attn: 'maybe'"),
        (["-fit", "maybe"], "error: unknown value for --fit: 'maybe'"),
        (["--host", ","], "--host requires at least one address"),
        (["--grammar-file", "/no/such"], "error: failed to open file '/no/such'"),
        (["--slot-save-path", "/no/such"], "not a directory: /no/such"),
        (["--repeat-last-n", "-1"], "error: invalid repeat-last-n = -1"),
        (["--repeat-penalty", "0"], "error: repeat-penalty must be finite and greater than 0"),
        (["--presence-penalty", "inf"], "error: presence-penalty must be finite"),
        (["-l", "x+1"], "invalid input format"),
        (["-C", "xyz"], "invalid cpumask"),
        (["-Cr", "3"], "invalid range"),
        (["-dev", "Vulkan0"], "invalid device: Vulkan0"),
        (["-ot", "exps"], "invalid value"),
        (["-ot", "exps=Metal"], "unknown buffer type"),
        (["--override-kv", "a=i8:3"], "error: Invalid type for KV override: a=i8:3"),
        (["--reasoning-format", "x"], "Unknown reasoning format: x"),
        (["--reasoning-budget", "-2"], "invalid value"),
        (["--sleep-idle-seconds", "0"], "invalid value: cannot be 0 or less than -1"),
        (["-cms", "-1"], "checkpoint-min-step must be non-negative"),
        (["--spec-type", "x"], "unknown speculative type: x"),
        (["--spec-ngram-mod-n-match", "0"], "ngram size N must be between 1 and 1024 inclusive"),
        (["--spec-ngram-simple-min-hits", "0"], "ngram min hits must be at least 1"),
        (["--draft-max", "8"], "the argument has been removed. use --spec-draft-n-max or --spec-ngram-mod-n-max"),
        (["-j", "{"], "parse error"),
        (["--chat-template-kwargs", "[1]"], "expected a JSON object"),
    ],
)
def test_checks_use_llama_cpps_words(argv: list[str], words: str) -> None:
    """Each text is thrown by the handler of that flag in arg.cpp."""
    assert failure(*argv).startswith(f'error while handling argument "{argv[0]}": {words}')


def test_env_failure_names_the_variable() -> None:
    """`error while handling environment variable "X": ...` (arg.cpp)."""
    assert failure(env={"LLAMA_ARG_CTX_SIZE": "x"}).startswith(
        'error while handling environment variable "LLAMA_ARG_CTX_SIZE": stoi'
    )
    assert failure(env={"LLAMA_ARG_KV_UNIFIED": "yes"}).startswith(
        'error while handling environment variable "LLAMA_ARG_KV_UNIFIED": invalid boolean value'
    )
    assert failure(env={"LLAMA_ARG_MMPROJ": "x.gguf"}).startswith(
        'error while handling environment variable "LLAMA_ARG_MMPROJ": not supported: images'
    )


def test_refused_by_value() -> None:
    """Some values only: -sm row, several devices, draft types."""
    assert config("-sm", "layer").placement.split_mode == "layer"
    assert "one is supported" in failure("-sm", "row")
    assert config("-ts", "1,0").placement.tensor_split == (1.0, 0.0)
    assert "one GPU is supported" in failure("-ts", "3,1")
    assert "draft-eagle3 is not supported" in failure("--spec-type", "ngram-mod,draft-eagle3")
    assert config("--no-agent", "--no-ui-mcp-proxy", env={"LLAMA_ARG_MMPROJ_OFFLOAD": "off"}).warnings == ()


def test_bytes_that_are_no_text() -> None:
    """Python gives undecodable argv bytes as lone surrogates, which no message to the engine can carry."""
    assert "is not UTF-8 text" in failure("-m", b"/m/\xff.gguf".decode("utf-8", "surrogateescape"))
    assert "is not UTF-8 text" in failure(env={"LLAMA_ARG_ALIAS": "\udcff"})
    assert failure("--\udcff").startswith("error: invalid argument: --")


# ------------------------------------------------------------------------------------------------ repetition, sources


def test_repeated_flag_warns_and_last_wins() -> None:
    """arg.cpp warns; flags that push_back (-r, -l, -ot, --api-key) keep all."""
    got = config("-c", "1", "--ctx-size", "2")
    assert got.context.size == 2
    assert got.warnings[0].startswith("DEPRECATED: argument '--ctx-size' specified multiple times, use comma-separated")
    got = config(
        "-r",
        "a",
        "-r",
        "b",
        "-l",
        "1+1",
        "-l",
        "2-inf",
        "-a",
        "z,b",
        "-a",
        "a",
        "--api-key",
        "k",
        env={"LLAMA_API_KEY": "e"},
    )
    assert got.chat.reverse_prompt == ("a", "b")
    assert got.sampling.logit_bias == ((1, 1.0), (2, -math.inf))
    assert got.model.aliases == ("a", "b", "z")
    assert got.http.api_keys == ("e", "k")


def test_overriding_the_environment_is_said() -> None:
    """arg.cpp's warning to stderr."""
    got = config("--port", "2", env={"LLAMA_ARG_PORT": "1"})
    assert got.http.port == 2
    assert got.warnings == (
        "LLAMA_ARG_PORT environment variable is set, but will be overwritten by command line argument --port",
    )


@given(st.permutations(range(4)), st.integers(1, 15))
def test_precedence(order: list[int], given_sources: int) -> None:
    """system file < user file < environment < command line, whichever of them are there."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files, env, argv, ports = [], {}, [], {}
        for source in order:
            if not given_sources >> source & 1:
                continue
            ports[source] = 1000 + source
            if source < 2:
                path = Path(folder) / f"{source}.ini"
                path.write_text(f"port = {ports[source]}\n")
                files.append(path)
            elif source == 2:
                env["LLAMA_ARG_PORT"] = str(ports[source])
            else:
                argv = ["--port", str(ports[source])]
        assert config(*argv, env=env, files=tuple(sorted(files))).http.port == ports[max(ports)]


def test_default_config_files(tmp_path: Path) -> None:
    """~/.config/llama.cpp/config.ini, or below XDG_CONFIG_HOME (fs_get_config_directory)."""
    assert ini.config_paths({"HOME": "/h"})[1] == Path("/h/.config/llama.cpp/config.ini")
    assert ini.config_paths({"HOME": "/h", "XDG_CONFIG_HOME": "/x"})[1] == Path("/x/llama.cpp/config.ini")
    assert ini.config_paths({}) == (Path("/etc/llama.cpp/config.ini"),)
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "config.ini").write_text("top-k = 7\n")
    assert parse_server([], {"XDG_CONFIG_HOME": str(tmp_path)}).sampling.top_k == 7


def test_config_file_sections_and_keys(tmp_path: Path) -> None:
    """preset.cpp: [*] before [default], models' sections not for us, unknown keys warned about, `version` skipped."""
    path = tmp_path / "config.ini"
    path.write_text(
        "version = 1\n; comment\nport = 1 # why\nno-cont-batching = true\nLLAMA_ARG_TOP_K=5\n"
        "[*]\nport = 2\nctx-size = 512\nmetrics = on\nprops = off\nbogus = 1\n[some/model:Q4_K_M]\nport = 3\n"
    )
    got = config(files=(path,))
    assert (got.http.port, got.context.size, got.sampling.top_k) == (1, 512, 5)
    assert (got.context.cont_batching, got.http.metrics, got.http.props) == (False, True, False)
    assert f"ignoring option 'bogus' from {path}: not supported by this program" in got.warnings


def test_broken_config_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    """llama.cpp: failed to parse server config file; ours names the line."""
    path = tmp_path / "config.ini"
    path.write_text("port = 1\nport 2\n")
    with pytest.raises(FlagError, match=r"^error: failed to parse server config file: .*config.ini \(line 2"):
        config(files=(path,))
    path.write_text("port = x\n")
    with pytest.raises(FlagError, match=r"^error while handling option 'port' of config file .*: stoi"):
        config(files=(path,))
    path.write_bytes(b"port = \xff\n")
    with pytest.raises(FlagError, match="not UTF-8"):
        config(files=(path,))


_key = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,8}", fullmatch=True)
_text = st.text(st.characters(codec="utf-8", exclude_characters="\r\n;#", exclude_categories=["Cs"]), max_size=12).map(
    lambda text: text.strip(" \t")
)


@given(
    st.dictionaries(_key, _text, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from(["", " ", "\t "])
)
def test_ini_round_trip(section: dict[str, str], newline: str, space: str) -> None:
    """What is written as key = value with any line ending, spacing and comments is read back."""
    lines = [
        "[model/x:Q8_0] ; here",
        *(f"{key}{space}={space}{value}{space}# note" for key, value in section.items()),
        "",
    ]
    assert ini.parse_ini(newline.join(lines), "x") == {"model/x:Q8_0": section}


def test_section_becomes_arguments() -> None:
    """A preset's section as the child's arguments (llama.cpp's common_preset::to_args)."""
    args = ini.section_args(
        {"model": "a b.gguf", "c": "4096", "no-mmap": "true", "jinja": "false", "metrics": "1", "props": "0",
         "load-on-startup": "1", "LLAMA_ARG_TOP_K": "3", "LLAMA_ARG_NO_KV_OFFLOAD": "1"}
    )  # fmt: skip
    values = ["--model", "a b.gguf", "--ctx-size", "4096"]
    assert args == [*values, "--no-mmap", "--no-jinja", "--metrics", "--top-k", "3", "--no-kv-offload"]
    with pytest.raises(FlagError, match="option 'bogus' not recognized"):
        ini.section_args({"bogus": "1"})


@pytest.mark.parametrize("word", v.TRUE_WORDS)
def test_boolean_env_words(word: str) -> None:
    """true/1/on/enabled (is_truthy); a flag without a negated form ignores other words."""
    got = config(env={"LLAMA_ARG_ENDPOINT_METRICS": word, "LLAMA_ARG_CACHE_PROMPT": word})
    assert got.http.metrics
    assert got.context.cache_prompt
    off = v.FALSE_WORDS[v.TRUE_WORDS.index(word)]
    got = config(env={"LLAMA_ARG_ENDPOINT_METRICS": off, "LLAMA_ARG_CACHE_PROMPT": off})
    assert not got.http.metrics
    assert not got.context.cache_prompt
    assert not config(env={"LLAMA_ARG_NO_CACHE_PROMPT": "0"}).context.cache_prompt  # its value is not looked at


# ------------------------------------------------------------------------------------------------ actions


def test_actions() -> None:
    """version, device and cache lists at once; help and completion after the line was checked (arg.cpp)."""
    with pytest.raises(VersionRequested) as version:
        config("--version", "--bogus")
    assert version.value.text.startswith("version: ")
    with pytest.raises(ListDevicesRequested):
        config("--list-devices")
    with pytest.raises(CacheListRequested):
        config("-cl")
    with pytest.raises(HelpRequested, match="----- common params -----"):
        config("-h", "-c", "1")
    assert failure("-h", "--bogus") == "error: invalid argument: --bogus"
    with pytest.raises(CompletionRequested) as completion:
        config("--completion-bash")
    assert completion.value.text == bash_completion()


def test_bash_completion_works_in_bash() -> None:
    """bash itself sources it and completes."""
    script = bash_completion() + (
        '\nCOMP_WORDS=(ftgguf-server --expert-p); COMP_CWORD=1; _ftgguf_completions; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "--expert-policy"


def test_other_completions_list_every_supported_flag() -> None:
    """One entry a spelling."""
    assert "'--expert-policy[" in zsh_completion()
    assert "complete -c ftgguf-server -l expert-policy -x -d '" in fish_completion()
    assert "mmproj-url" not in zsh_completion() + fish_completion()


# ------------------------------------------------------------------------------------------------ as a whole


def test_a_number_with_a_tail_is_said() -> None:
    """llama.cpp reads 8k as 8 without a word; we say it."""
    got = config("-c", "8k")
    assert got.context.size == 8
    assert got.warnings == ("-c: '8k' is read as 8: llama.cpp ignores what follows a number",)


_FLAGS = {
    "--ctx-size": ("context", "size", st.integers(0, 2**31 - 1)),
    "--top-k": ("sampling", "top_k", st.integers(-5, 1000)),
    "--top-p": ("sampling", "top_p", st.floats(0, 1)),
    "--alias": ("model", "aliases", st.from_regex(r"[a-z]{1,4}", fullmatch=True)),
    "--metrics": ("http", "metrics", st.none()),
    "--no-slots": ("http", "slots", st.none()),
    "--cache-type-k": ("context", "type_k", st.sampled_from(["f16", "q8_0", "q4_0"])),
}


@given(
    st.lists(
        st.sampled_from(sorted(_FLAGS)).flatmap(lambda flag: st.tuples(st.just(flag), _FLAGS[flag][2])), max_size=8
    )
)
def test_any_command_line_of_valid_flags(line: list[tuple[str, object]]) -> None:
    """Each field holds the last value given, lists all of them, and nothing else changes."""
    argv = [part for flag, value in line for part in ([flag] if value is None else [flag, str(value)])]
    got, expected = config(*argv), {}
    for flag, value in line:
        group, name, _ = _FLAGS[flag]
        expected[group, name] = {"--metrics": True, "--no-slots": False}.get(flag, value)
        if flag == "--alias":
            expected[group, name] = tuple(sorted({str(x) for f, x in line if f == flag}))
    for (group, name), value in expected.items():
        assert getattr(getattr(got, group), name) == value
    untouched = config()
    for group, name, _ in _FLAGS.values():
        if (group, name) not in expected:
            assert getattr(getattr(got, group), name) == getattr(getattr(untouched, group), name)
