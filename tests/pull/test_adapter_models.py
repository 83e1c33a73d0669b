"""Models with a LoRA adapter of their own: made by ADAPTER in a Modelfile, over HTTP, or pulled with an adapter layer.

What they say is libllama's text with the same adapter (compat.oracle_states); an adapter is never left out silently.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compat.adapters import ATTENTION, make_adapter
from compat.oracle import Oracle
from compat.oracle_states import adapted
from compat.registry import FakeSource, Running
from ftgguf.flags import parse_server
from ftgguf.pull import commands, resolve
from ftgguf.pull.create import create
from ftgguf.pull.demo import resolve_stories
from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import NameResolutionError, NotFound
from ftgguf.pull.modelfile import Modelfile, parse_modelfile
from ftgguf.pull.names import parse
from ftgguf.pull.session import Session
from ftgguf.pull.store import Store, stored_name
from ftgguf.server.ollama_store import creation

ROOT = Path(__file__).parents[2]
PROMPT, N = "Once upon a time", 20
Make = Callable[..., Session]

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(resolve_stories(), tmp_path_factory.mktemp("lora") / "a.gguf", tensors=ATTENTION)


def test_a_modelfiles_adapter_is_applied(adapter: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """create, show and run: the text is libllama's with the adapter, and not the base model's."""
    store = ["--store", str(home / "store")]
    (home / "Modelfile").write_text(f"FROM stories\nADAPTER {adapter}\n")
    assert commands.create(["tuned", "-f", str(home / "Modelfile"), *store]) == 0
    (home / "Second").write_text("FROM tuned\nPARAMETER temperature 0\n")
    assert commands.create(["again", "-f", str(home / "Second"), *store]) == 0
    capsys.readouterr()
    assert commands.show(["again", *store]) == 0
    assert "Adapters\n    LoRA" in capsys.readouterr().out
    command = [sys.executable, "-m", "ftgguf", "run", "again", "--raw", "-n", str(N), "-t", "1", "-ngl", "0", *store]
    done = subprocess.run([*command, PROMPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    with adapted(resolve_stories(), [(adapter, 1.0)]) as oracle:
        wanted = oracle.greedy(oracle.tokenize(PROMPT), N).text.decode()
    with Oracle(resolve_stories()) as oracle:
        base = oracle.greedy(oracle.tokenize(PROMPT), N).text.decode()
    assert done.stdout == f"{PROMPT}{wanted}\n", done.stderr
    assert wanted != base


def test_a_pulled_adapter_is_found_or_missed(adapter: Path, source: FakeSource, server: Running, session: Make) -> None:
    """The server's configuration has it before the user's; a model whose adapter is gone is not run without it."""
    layers = [("model", resolve_stories().read_bytes()), ("adapter", adapter.read_bytes())]
    source.add_model("library/tuned:latest", layers)
    name = f"{server.host}/library/tuned"
    current = session()
    found = parse(name)
    resolve.locate(current, found)
    argv = ["-m", name, "--store", str(current.store.root), "--offline", "--lora", str(adapter)]
    config = resolve.resolve_config(parse_server(argv, {}, ()))
    digest = Digest.of(adapter.read_bytes())
    assert [each.path for each in config.model.lora] == [str(current.store.blob_path(digest)), str(adapter)]
    assert any("a LoRA adapter of" in reason for reason in config.reasons)
    current.store.blob_path(digest).unlink()
    with pytest.raises(NotFound, match=r"an adapter of .* is no longer on this disk"):
        resolve.resolve_config(parse_server(argv, {}, ()))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("none.gguf", "ADAPTER none.gguf: no such file"),
        ("weights.safetensors", "only GGUF adapters are read"),
        ("folder", "only GGUF adapters are read"),
        ("model.gguf", "not a LoRA adapter"),
        ("other.gguf", "made for architecture 'qwen3', the model is 'llama'"),
        ("text.gguf", "this is a text file"),
    ],
)
def test_what_is_no_adapter_for_the_model(file: str, words: str, session: Make, tmp_path: Path) -> None:
    """Known before anything is stored."""
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.gguf").write_bytes(resolve_stories().read_bytes())
    (tmp_path / "text.gguf").write_text("hello there")
    make_adapter(resolve_stories(), tmp_path / "other.gguf", tensors=ATTENTION,
                 metadata={"general.architecture": "qwen3"})  # fmt: skip
    current = session()
    with pytest.raises(NameResolutionError, match=words):
        create(current, stored_name("x"), parse_modelfile(f"FROM stories\nADAPTER {file}"), tmp_path)
    assert current.store.entries() == []


def test_over_http_it_is_the_digest_of_a_blob(adapter: Path, session: Make) -> None:
    """Ollama's `adapters` field: names and digests; a path is none, whatever lies there."""
    body = {"from": "stories", "adapters": {"a.gguf": f"sha256:{Digest.of(adapter.read_bytes()).hex}"}}
    target, modelfile = creation(body, "tuned")
    current = session()
    with pytest.raises(NotFound, match="send it to /api/blobs first"):
        create(current, target, modelfile, None)
    current.store.add_blob(adapter.read_bytes())
    entry = create(current, target, modelfile, None)
    assert len(entry.manifest.of_kind("adapter")) == 1
    for wrong in (str(adapter), "x.gguf", 7):
        with pytest.raises(Exception, match="digests of blobs"):
            creation({"from": "stories", "adapters": {"a.gguf": wrong}}, "tuned")
    path = Modelfile(source="stories", adapters=[str(adapter)])
    with pytest.raises(NotFound, match="no such blob"):
        create(current, target, path, None)
    assert isinstance(Store(current.store.root).get(stored_name("tuned")), type(entry))
