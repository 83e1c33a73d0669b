"""Peers that somebody else started: found or named as missing, the same file or another, strict or lenient."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from ftgguf.bench.client import Target, identify
from ftgguf.bench.identity import differs, figures
from ftgguf.bench.main import main
from ftgguf.bench.options import parse
from ftgguf.bench.peers import NoPeer, Peer, find_peer, ollama_url
from ftgguf.bench.recording import MASK, command_line
from ftgguf.bench.report import PEER_FAILED

from .stub_server import Script, stub

BLOB = "ab" * 32


def test_an_address_with_openais_prefix_is_the_servers() -> None:
    """As clients are configured with it."""
    with stub(Script()) as url:
        assert find_peer(parse(["--against", f"{url}/v1/"])) == Peer("url", url)


def test_nobody_or_something_else_at_the_url_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stub(Script()) as url:
        pass
    assert main(["-m", "stories", "--against", url]) == PEER_FAILED
    assert f"no OpenAI server answers at {url}" in capsys.readouterr().err
    with stub(Script()) as url, pytest.raises(NoPeer, match="no JSON object, so this is no model server"):
        find_peer(parse(["--against", f"{url}/html"]))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("box:80", "http://box:80"),
        ("https://box", "https://box:11434"),
    ],
)
def test_ollama_is_looked_for_where_its_own_client_looks(monkeypatch: pytest.MonkeyPatch, host: str, url: str) -> None:
    """The forms of OLLAMA_HOST in Ollama's FAQ."""
    monkeypatch.setenv("OLLAMA_HOST", host)
    assert ollama_url() == url


def program(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


HELP = 'echo "-c, --ctx-size N   size of the context"; echo "--port PORT"; echo "{}"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'hello from another program'; exit 3\n", r"is not llama-server: .* status 3 .*hello from another"),
        (HELP.format("-lm, --load-mode MODE"), ""),
        ("echo '--ctx-size N'\n", "is not llama-server"),
        ("echo 'x: error while loading shared libraries: libllama.so: no such file'; exit 127\n", "LD_LIBRARY_PATH"),
        ("sleep 60\n", "did not end within"),
    ],
)
def test_a_llama_server_that_is_none_is_found_before_anything_is_loaded(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and status 4, before the model is even looked for. A help that names llama-server's flags (as in
    tests/data/llama_server_args.json) is one's."""
    monkeypatch.setattr("ftgguf.bench.peers.HELP_S", 1.5)
    file = program(tmp_path / "llama", text)
    argv = ["--against", "llama.cpp", "--llama-server", file]
    if not words:
        assert find_peer(parse(argv)).where == file  # type: ignore[union-attr]
        return
    for command in (["-m", "/nowhere/m.gguf", *argv], ["trace", "-m", "/nowhere/m.gguf", *argv]):
        assert main(command) == PEER_FAILED
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(f"--llama-server {file}: .*{words}", said)


def test_a_path_that_cannot_be_a_llama_server_says_what_to_give(tmp_path: Path) -> None:
    """Missing, a name, a folder with one in it, a file that is no program, one for another machine."""
    inside = program(tmp_path / "llama-server", HELP)
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    plain.write_text("x")
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    for name, words in (
        ("/nowhere/x", "does not exist: give the path of llama.cpp's llama-server"),
        ("no-such-llama", "no such program is on PATH"),
        (str(tmp_path), f"is a folder: give {inside}"),
        (str(plain), "chmod [+]x"),
        (str(broken), "cannot be run .*built for this machine"),
    ):
        with pytest.raises(NoPeer, match=words):
            find_peer(parse(["--against", "llama.cpp", "--llama-server", name]))


def test_the_one_on_path_is_looked_at_too_and_says_how_it_reads_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds before --load-mode have --no-mmap for it (llama.cpp's common/arg.cpp of 2025)."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for text, flags in (("-lm, --load-mode MODE", ("--load-mode", "none")), ("--no-mmap", ("--no-mmap",))):
        where = program(tmp_path / "llama-server", HELP.format(text))
        assert find_peer(parse(["--against", "llama.cpp"])) == Peer("llama-server", where, flags)
    program(tmp_path / "llama-server", "exit 1\n")
    with pytest.raises(NoPeer, match=r"llama-server \(on PATH\): it is not .* or --in-process"):
        find_peer(parse(["--against", "llama.cpp"]))


def test_sessions_need_a_peer_over_http(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert main(["trace", "-m", "/nowhere/m.gguf", "--against", "llama.cpp"]) == PEER_FAILED
    assert "give --llama-server PATH" in capsys.readouterr().err


def test_what_is_missing_of_ollama_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPeer, match=r"--peer-model .*ollama create NAME"):
        find_peer(parse(["--against", "ollama"]))
    named = parse(["--against", "ollama", "--peer-model", "m"])
    with stub(Script(status=404)) as url:
        monkeypatch.setenv("OLLAMA_HOST", url)
        with pytest.raises(NoPeer, match="does not have the model m"):
            find_peer(named)
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:1")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NoPeer, match=r"none is installed: curl"):
        find_peer(named)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/ollama")
    with pytest.raises(NoPeer, match=r"start it with `ollama serve`"):
        find_peer(named)


def test_the_file_of_a_server_on_this_machine_is_compared(tmp_path: Path) -> None:
    """By its hash, computed here from the bytes."""
    ours, copy, other = (tmp_path / n for n in ("a.gguf", "b.gguf", "c.gguf"))
    for file, data in ((ours, b"x" * 100), (copy, b"x" * 100), (other, b"y" * 100)):
        file.write_bytes(data)
    sha = hashlib.sha256(b"x" * 100).hexdigest()
    script = Script()
    with stub(script) as url:
        target = Target(url, "native")
        for file, another in ((ours, False), (copy, False), (other, True)):
            script.props = {"model_path": str(file)}
            found, words = differs(target, {}, ours, sha)
            assert found is another
            assert str(file) in words
        assert hashlib.sha256(b"y" * 100).hexdigest() in words


def test_figures_tell_files_apart_where_the_path_is_elsewhere(tmp_path: Path) -> None:
    script = Script(props={"model_path": "/elsewhere/m.gguf"}, meta={"n_params": 7, "size": 3})
    with stub(script) as url:
        target = Target(url, "native")
        assert figures(target) == {"n_params": 7, "size": 3}
        assert differs(target, {"n_params": 7, "size": 3}, tmp_path, "") == (
            False,
            "its file cannot be read from here; it agrees with ours in parameters, bytes of tensors",
        )
        found, words = differs(target, {"n_params": 7, "size": 4}, tmp_path, "")
        assert found
        assert "3 bytes of tensors, ours has 4" in words
        script.meta = {}
        assert "cannot be known" in differs(target, {"n_params": 7}, tmp_path, "")[1]


def test_ollama_names_its_blob(tmp_path: Path) -> None:
    """The form of `ollama show --modelfile`."""
    script = Script(
        modelfile=f"# Modelfile\nFROM /home/me/.ollama/models/blobs/sha256-{BLOB}\nTEMPLATE {{{{ .Prompt }}}}\n"
    )
    with stub(script) as url:
        target = Target(url, "ollama", "m")
        assert differs(target, {}, tmp_path, BLOB)[0] is False
        assert differs(target, {}, tmp_path, "cd" * 32)[0] is True
        script.modelfile = "FROM m\n"
        assert "names no blob" in differs(target, {}, tmp_path, BLOB)[1]


def test_a_server_that_refuses_unknown_fields_gets_openais_alone() -> None:
    """As OpenAI's own does; others get what makes them go on after the end, without penalties."""
    strict = Script(native=False, strict=True)
    with stub(strict) as url:
        target = identify(url, "", 5)
        assert target.strict
        strict.seen.clear()
        target.complete("a b", 3)
    assert set(strict.seen[0][1]) == {
        "model",
        "prompt",
        "max_tokens",
        "stream",
        "stream_options",
        "temperature",
        "seed",
    }
    lenient = Script(native=False)
    with stub(lenient) as url:
        identify(url, "", 5).complete("a b", 3)
    assert lenient.seen[-1][1]["ignore_eos"] is True
    assert lenient.seen[-1][1]["repeat_penalty"] == 1.0


def test_ollama_is_asked_for_the_context_and_no_penalties() -> None:
    script = Script()
    with stub(script) as url:
        Target(url, "ollama", "m", n_ctx=9000).complete("a", 3)
    options = script.seen[0][1]["options"]
    assert (options["num_ctx"], options["repeat_penalty"], options["temperature"]) == (9000, 1.0, 0)


def test_keys_do_not_reach_a_report() -> None:
    line = command_line(["ftgguf", "bench", "--peer-key", "s3cret", "--api-key=other", "-p", "1 2"])
    assert line == f"ftgguf bench --peer-key '{MASK}' '--api-key={MASK}' -p '1 2'"
