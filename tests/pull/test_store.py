"""The store, names to files, `create`, and the commands, without a GPU or a server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from compat.registry import FakeSource, Running
from ftgguf.chat.template import ChatTemplate, ChatTemplateError
from ftgguf.flags.config import ModelConfig, ServerConfig
from ftgguf.pull import commands, resolve
from ftgguf.pull.create import create
from ftgguf.pull.demo import resolve_stories
from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import NameResolutionError, NotFound, PullError
from ftgguf.pull.layers import known_template
from ftgguf.pull.manifest import Layer, encode_manifest
from ftgguf.pull.modelfile import parse_modelfile, write_modelfile
from ftgguf.pull.names import HubName, OllamaName, parse
from ftgguf.pull.progress import Bars
from ftgguf.pull.session import Event, Session
from ftgguf.pull.sizes import ago, duration, human
from ftgguf.pull.store import Store, stored_name

pytestmark = pytest.mark.usefixtures("home")
Make = Callable[..., Session]


def put(store: Store, name: str, content: bytes = b"weights") -> None:
    """A model of one layer."""
    layer = Layer("model", store.add_blob(content), len(content))
    config = store.add_blob(b'{"model_format":"gguf"}')
    store.put(stored_name(name), encode_manifest(Layer("", config, 23), [layer]))


def test_names_ignore_case_and_keep_the_first_spelling(store: Store) -> None:
    """Ollama's getExistingName: the spelling on disk wins."""
    put(store, "User/Tiny:Q4")
    found = store.get(stored_name("user/tiny:q4"))
    assert found is not None
    assert str(found.name) == "User/Tiny:Q4"
    put(store, "user/tiny:q4", b"other")
    assert [str(entry.name) for entry in store.entries()] == ["User/Tiny:Q4"]


def test_rm_keeps_what_others_need(store: Store) -> None:
    """Layers are counted over all manifests; empty folders go."""
    put(store, "a:1")
    put(store, "b:1")
    store.delete(stored_name("a:1"))
    entry = store.get(stored_name("b:1"))
    assert entry is not None
    assert store.model_path(entry).read_bytes() == b"weights"
    store.delete(stored_name("b:1"))
    assert list((store.root / "blobs").iterdir()) == []
    assert list((store.root / "manifests").iterdir()) == []
    with pytest.raises(NotFound, match="model 'b:1' not found"):
        store.delete(stored_name("b:1"))


def test_an_unreadable_manifest_protects_all_blobs(store: Store) -> None:
    """What it needs is unknown, so nothing goes."""
    put(store, "a:1")
    broken = store.root / "manifests" / "registry.ollama.ai" / "library" / "b" / "1"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    assert [str(entry.name) for entry in store.entries()] == ["a:1"]
    store.delete(stored_name("a:1"))
    assert store.find_blob(Digest.of(b"weights")) is not None


def test_links_cannot_lead_out_of_the_store(store: Store, home: Path) -> None:
    """A planted link in place of a folder is refused; the target stays empty."""
    outside = home / "outside"
    outside.mkdir()
    (store.root / "manifests").mkdir(parents=True)
    (store.root / "manifests" / "registry.ollama.ai").symlink_to(outside)
    with pytest.raises(PullError, match="leads out of it"):
        put(store, "a:1")
    assert list(outside.iterdir()) == []
    layer = Layer("model", store.add_blob(b"weights"), 7, "x/m.gguf")
    config = Layer("", store.add_blob(b"{}"), 2)
    entry = store.put(HubName("u/r"), encode_manifest(config, [layer]))
    (store.root / "files" / entry.manifest.id.hex).mkdir(parents=True)
    (store.root / "files" / entry.manifest.id.hex / "x").symlink_to(outside)
    with pytest.raises(PullError, match="leads out of it"):
        store.model_path(entry)
    assert list(outside.iterdir()) == []


def test_a_damaged_small_blob_is_found(store: Store) -> None:
    """Texts are verified whenever they are read."""
    put(store, "a:1")
    entry = store.get(stored_name("a:1"))
    assert entry is not None
    store.blob_path(entry.manifest.config.digest).write_bytes(b'{"model_format":"xxxx"}')
    with pytest.raises(PullError, match="damaged"):
        store.read_blob(entry.manifest.config, 1000)


def test_ollamas_store_when_asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--store ollama writes Ollama's layout where OLLAMA_MODELS says."""
    folder = home / "ollama"
    folder.mkdir()
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    store = Store("ollama")
    put(store, "a:1")
    assert (folder / "manifests/registry.ollama.ai/library/a/1").is_file()
    assert (folder / "blobs" / Digest.of(b"weights").file_name).read_bytes() == b"weights"


# ------------------------------------------------------------------------------------------------ from names to files


def test_every_kind_of_name(store: Store, source: FakeSource, server: Running, tmp_path: Path) -> None:
    """Path, built-in, blob, registry, Hub by flag, URL by flag: each ends in the model's bytes."""
    data = resolve_stories().read_bytes()
    source.add_model("library/tiny:latest", [("model", data)])
    source.add_repo("u/r", {"s-Q8_0.gguf": data})
    source.files["s.gguf"] = data
    where = {"store": str(store.root)}
    models = [
        ModelConfig(path=f"{server.host}/library/tiny", **where),
        ModelConfig(path="hf.co/u/r:Q8_0", **where),
        ModelConfig(path=f"{server.url}/files/s.gguf", **where),
        ModelConfig(path=str(Digest.of(data)), **where),
        ModelConfig(hf_repo="u/r", **where),
        ModelConfig(hf_repo="u/r", hf_file="s-Q8_0.gguf", **where),
        ModelConfig(url=f"{server.url}/files/s.gguf", **where),
        ModelConfig(path=str(resolve_stories())),
        ModelConfig(path="stories"),
    ]
    for model in models:
        assert resolve.resolve_model(model).read_bytes() == data
    assert len([seen for seen in source.seen if "/blobs/" in seen.path]) <= 2 * (-(-len(data) // (32 << 20)))
    source.seen.clear()
    for model in models:
        resolve.resolve_model(ServerConfig(model=model))
    assert source.seen == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelConfig(path="none.gguf"), "no such file"),
        (ModelConfig(path="./none"), "no such file"),
        (ModelConfig(path=""), "name is empty"),
        (ModelConfig(path="sha256:" + "0" * 64), "not on this disk"),
        (ModelConfig(path="tiny", offline=True), "tiny:latest is not on this disk, and --offline"),
        (ModelConfig(hf_file="x.gguf"), "--hf-repo"),
        (ModelConfig(docker_repo="x"), "Docker Hub"),
        (ModelConfig(hf_repo="u"), "hf.co/user/repo"),
        (ModelConfig(url="x.gguf"), "not an http or https address"),
        (ModelConfig(path="x" * 5000), "at most 80"),
        (ModelConfig(path="a\0b"), "no such file"),
    ],
)
def test_bad_names(model: ModelConfig, words: str) -> None:
    """One line each, with the cause."""
    with pytest.raises(NameResolutionError, match=words) as caught:
        resolve.resolve_model(model)
    assert "\n" not in str(caught.value)


def test_a_file_comes_before_every_other_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file called `demo`, or like a model; a folder with models in it is not one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_bytes(b"x")
    assert resolve.resolve_model("demo") == Path("demo")
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "a.gguf").write_bytes(b"x")
    with pytest.raises(NameResolutionError, match=r"is a folder: .* in it: a\.gguf$"):
        resolve.resolve_model("qwen3")


def test_show_says_that_a_folder_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    """By its path, and by a name that is a folder's with models in it."""
    (tmp_path / "empty").mkdir()
    assert commands.show([str(tmp_path / "empty")]) == 1
    assert "empty is a folder: give the .gguf file (of a split model any shard) in it: there is none" in (
        capsys.readouterr().err
    )
    for no in range(9):
        (tmp_path / f"{no}.gguf").write_bytes(b"x")
    assert commands.show([str(tmp_path)]) == 1
    assert "in it: 0.gguf, 1.gguf, " in (told := capsys.readouterr().err)
    assert told.endswith("7.gguf, ...\n")


def test_resolve_config(store: Store, source: FakeSource, server: Running, stories_dense: Path) -> None:
    """Path, alias, the model's parameters under what the user gave, and the template's choice, each with its reason."""
    data = stories_dense.read_bytes()
    params = b'{"temperature":0.6,"top_k":20,"stop":["<|im_end|>"],"num_ctx":512,"num_gpu":99,"odd":1,"seed":"x"}'
    template = b"{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>{{ end }}"
    layers = [("model", data), ("params", params), ("template", template), ("system", b"Be brief.")]
    source.add_model("library/tiny:latest", layers)
    name = f"{server.host}/library/tiny"
    model = ModelConfig(path=name, store=str(store.root))
    config = resolve.resolve_config(ServerConfig(model=model, given=frozenset({"sampling.top_k"})))
    assert Path(config.model.path).read_bytes() == data
    assert config.model.aliases == (f"{name}:latest",)
    assert (config.sampling.temperature, config.sampling.top_k, config.context.size) == (0.6, 40, 512)
    assert config.chat.reverse_prompt == ("<|im_end|>",)
    assert config.chat.template == "chatml"
    assert "sampling.temperature" in config.given
    assert any("chatml" in reason for reason in config.reasons)
    assert sorted("odd" in w or "seed" in w or "system prompt" in w for w in config.warnings) == [True] * 3


def test_the_ggufs_own_template_comes_first(store: Store, source: FakeSource, server: Running) -> None:
    """As llama-server does, whatever the registry's template layer says."""
    template = b"{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>{{ end }}"
    source.add_model("library/tiny:latest", [("model", resolve_stories().read_bytes()), ("template", template)])
    model = ModelConfig(path=f"{server.host}/library/tiny", store=str(store.root))
    config = resolve.resolve_config(ServerConfig(model=model))
    assert config.chat.template == ""
    assert "chat template: the file's own" in config.reasons


def test_ids_are_llama_servers(store: Store, source: FakeSource) -> None:
    """First alias, else the Hub's repository, else the path; router mode is left alone."""
    source.add_repo("u/r", {"s-Q8_0.gguf": resolve_stories().read_bytes()})
    model = ModelConfig(hf_repo="u/r:Q8_0", store=str(store.root))
    found = resolve.resolve_config(ServerConfig(model=model)).model
    assert (found.aliases, found.hf_repo) == ((), "u/r:Q8_0")
    assert found.path.endswith("s-Q8_0.gguf")
    path = ModelConfig(path=str(resolve_stories()))
    assert resolve.resolve_config(ServerConfig(model=path)).model == path
    assert resolve.resolve_config(ServerConfig()) == ServerConfig()


def test_a_model_without_a_usable_template_refuses_chat(
    store: Store, source: FakeSource, server: Running, stories_dense: Path
) -> None:
    """Its Go template is not one we know: a chat request gets the reason and the flag, rendered by our own engine."""
    layers = [("model", stories_dense.read_bytes()), ("template", b"{{ .System }} ~~ {{ .Prompt }}")]
    source.add_model("library/odd:latest", layers)
    model = ModelConfig(path=f"{server.host}/library/odd", store=str(store.root))
    config = resolve.resolve_config(ServerConfig(model=model))
    assert any("--chat-template" in warning for warning in config.warnings)
    template = ChatTemplate(config.chat.template)
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        template.render([{"role": "user", "content": "hi"}])


def test_known_templates() -> None:
    """Marks of formats, as in Ollama's library; two formats in one template are none."""
    assert known_template("<|start_header_id|>user<|end_header_id|>{{ .Content }}<|eot_id|>") == "llama3"
    assert known_template("[INST] {{ .Prompt }} [/INST]") == "llama2"
    assert known_template("[INST] <<SYS>>{{ .System }}<</SYS>>{{ .Prompt }} [/INST]") is None
    assert known_template("{{ .Prompt }}") is None
    assert known_template("<|im_start|> <|im_end|> [INST] [/INST]") is None


# ---------------------------------------------------------------------------------------------------------- commands

MODELFILE = '''# a comment
FROM stories.gguf
PARAMETER temperature 0.5
PARAMETER stop "<|end|>"
PARAMETER stop two
SYSTEM """You are
a pirate."""
TEMPLATE "{{ .Prompt }}"
MESSAGE user Hi there
LICENSE """MIT
text"""
'''


def test_modelfile_round_trip() -> None:
    """What `show --modelfile` writes says the same when it is read."""
    first = parse_modelfile(MODELFILE)
    assert first.params == {"temperature": 0.5, "stop": ["<|end|>", "two"]}
    assert first.system == "You are\na pirate."
    assert first.messages == [{"role": "user", "content": "Hi there"}]
    text = write_modelfile(
        first.source, first.params, first.template or "", first.system or "", first.messages, first.licenses
    )
    assert parse_modelfile(text) == first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no FROM line"),
        ("FROM a\nFROM b", "line 2: a second FROM"),
        ("FROM a\nPARAMETER tempo 1", "line 2: unknown parameter 'tempo'"),
        ("FROM a\nPARAMETER top_k 1.5", "line 2: '1.5' is not a value for top_k"),
        ("FROM a\nNONSENSE x", "line 2: unknown command 'NONSENSE'"),
        ('FROM a\nSYSTEM """x', "line 2: the text after"),
        ("FROM a\nMESSAGE robot hi", "line 2: MESSAGE"),
        ("FROM", "line 1: 'FROM' without an argument"),
    ],
)
def test_bad_modelfiles(text: str, words: str) -> None:
    """The line and what is wrong with it."""
    with pytest.raises(NameResolutionError, match=words):
        parse_modelfile(text)


def test_create_list_show_cp_rm(tmp_path: Path, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    """The life of a model made from a file, by the commands; shapes are Ollama's."""
    data = resolve_stories().read_bytes()
    (tmp_path / "stories.gguf").write_bytes(data)
    (tmp_path / "Modelfile").write_text(MODELFILE)
    where = ["--store", str(home / "store")]

    def run(name: str, *args: str) -> str:
        assert commands.COMMANDS[name]([*args, *where]) == 0
        return capsys.readouterr().out

    run("create", "pirate", "-f", str(tmp_path / "Modelfile"))
    lines = run("list").splitlines()
    assert lines[0].split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert lines[1].startswith("pirate:latest    ")
    assert lines[1].split()[2:4] == human(len(data) + 200).split()
    assert lines[2].startswith("stories    ")
    tag, builtin = json.loads(run("list", "--json"))["models"]
    assert builtin["name"] == "stories"
    assert run("list", "pir").splitlines()[1:] == lines[1:2]
    assert tag["name"] == "pirate:latest"
    assert tag["digest"].startswith(lines[1].split()[1])
    assert tag["details"]["quantization_level"] == "Q8_0"
    text = run("show", "pirate")
    for words in ("architecture        llama", "2 of 8 a token", "temperature    0.5", "You are", "MIT", "This mach"):
        assert words in text
    shown = json.loads(run("show", "pirate", "--json"))
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["system"] == "You are\na pirate."
    assert shown["experts"]["count"] == 8
    assert parse_modelfile(run("show", "pirate", "--modelfile")).params["temperature"] == 0.5
    for plain in ("stories", str(tmp_path / "stories.gguf")):
        assert json.loads(run("show", plain, "--json"))["experts"] == shown["experts"]
    assert run("show", "pirate", "--system") == "You are\na pirate.\n"
    assert run("cp", "pirate", "user/copy:1") == "copied 'pirate' to 'user/copy:1'\n"
    (tmp_path / "Second").write_text("FROM user/copy:1\nPARAMETER top_k 7\n")
    run("create", "second", "-f", str(tmp_path / "Second"))
    assert json.loads(run("show", "second", "--json"))["parameters"].split() == [
        "stop", '"<|end|>"', "stop", '"two"', "temperature", "0.5", "top_k", "7",
    ]  # fmt: skip
    assert run("rm", "pirate", "user/copy:1") == "deleted 'pirate'\ndeleted 'user/copy:1'\n"
    store = Store(home / "store")
    entry = store.get(stored_name("second"))
    assert entry is not None
    assert store.model_path(entry).read_bytes() == data


def test_pull_command(source: FakeSource, server: Running, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    """The path on stdout, progress on stderr; --json as Ollama's stream; errors in one line and status 1."""
    data = resolve_stories().read_bytes()
    source.add_model("library/tiny:latest", [("model", data)])
    where = ["--store", str(home / "store")]
    assert commands.pull([f"{server.host}/library/tiny", *where]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).read_bytes() == data
    assert "pulling manifest" in err
    assert err.rstrip().endswith("success")
    assert commands.pull([f"{server.host}/library/tiny", "--json", *where]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-2] == {"status": "success"}
    assert {"digest", "total", "completed", "status"} in [set(line) for line in lines]
    assert commands.pull([f"{server.host}/library/none", *where]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("Error: ")
    with pytest.raises(SystemExit) as stop:
        commands.pull([])
    assert stop.value.code == 1


def test_errors_of_commands(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    """Status 1 and Ollama's words; rm goes on with the other names."""
    where = ["--store", str(home / "store")]
    put(Store(home / "store"), "a:1")
    assert commands.show(["none", *where]) == 1
    assert commands.cp(["none", "b", *where]) == 1
    assert commands.rm(["none", "a:1", *where]) == 1
    out, err = capsys.readouterr()
    assert out == "deleted 'a:1'\n"
    assert err.count("Error: model 'none") == 3
    assert commands.create(["x", "-f", str(home / "Nothing"), *where]) == 1


def test_create_refuses_a_file_that_is_no_model(session: Make, tmp_path: Path) -> None:
    """The header is checked before anything is copied."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(NameResolutionError, match=r"FROM x\.gguf: "):
        create(session(), stored_name("x"), parse_modelfile("FROM x.gguf"), tmp_path)
    with pytest.raises(NotFound):
        create(session(), stored_name("x"), parse_modelfile("FROM ./y.gguf"), tmp_path)


def test_progress_lines() -> None:
    """Ollama's line: percent, bar, sizes, rate, time left."""

    class Screen:
        def __init__(self) -> None:
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            """Nothing is kept back."""

    screen = Screen()
    bars = Bars(screen)  # type: ignore[arg-type]
    bars(Event("pulling manifest"))
    for gb in (0, 19):
        bars(Event("pulling 4824460d29f2", "sha256:48", 42 * 10**9, gb * 10**9))
    bars._samples[0] = (bars._samples[-1][0] - 2.0, 0)
    assert bars.line(Event("pulling 4824460d29f2", "x", 42 * 10**9, 19 * 10**9)).split("▏")[1].split() == [
        "19", "GB/", "42", "GB", "9.5", "GB/s", "2s",
    ]  # fmt: skip
    assert " 45% ▕" in bars.line(Event("pulling 4824460d29f2", "x", 42 * 10**9, 19 * 10**9))
    bars.close()
    assert screen.text.startswith("pulling manifest\n")


def test_words_for_sizes_and_times() -> None:
    """Examples of Ollama's format package."""
    assert [human(n) for n in (0, 999, 1000, 1500, 18556685856, 10**12)] == [
        "0 B", "999 B", "1 KB", "1.5 KB", "18 GB", "1 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 59, 450, 3900)] == ["0s", "59s", "7m30s", "1h5m"]
    assert [ago(s) for s in (0, 1, 30, 90, 600, 3600, 7200, 3 * 86400)] == [
        "Less than a second ago", "1 second ago", "30 seconds ago", "About a minute ago", "10 minutes ago",
        "About an hour ago", "2 hours ago", "3 days ago",
    ]  # fmt: skip


def test_no_torch_in_pulls() -> None:
    """The front and the command line import this package."""
    import subprocess
    import sys

    code = "import sys, ftgguf.pull.commands; print([m for m in sys.modules if m in ('torch', 'triton')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert found.stdout.strip() == "[]"
    assert isinstance(parse("qwen3"), OllamaName)
