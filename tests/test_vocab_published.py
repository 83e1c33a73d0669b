"""All tokenizer vectors of llama-cpp-python's source package (llama.cpp's models/ggml-vocab-*), fetched when run."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ftgguf.gguf import GGUFError
from tests.vocabs import load

PACKAGE = "llama-cpp-python==0.3.36"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ftgguf" / "test-data"


@pytest.fixture(scope="module")
def models() -> Path:
    folder = _cache() / PACKAGE.replace("==", "-") / "vocab"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        done = subprocess.run([*command, "-d", folder.parent, PACKAGE], capture_output=True, text=True)
        found = sorted(folder.parent.glob("llama_cpp_python-*.tar.gz"))
        if not found:
            pytest.skip(f"the source package cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
        with tarfile.open(found[0]) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and "/llama.cpp/models/ggml-vocab-" in member.name:
                    source = archive.extractfile(member)
                    assert source is not None
                    (folder / name).write_bytes(source.read())
        (folder / "complete").touch()
    return folder


@pytest.mark.slow
def test_every_published_vector(models: Path) -> None:
    """Expected ids: the `.out` files, made by the models' original tokenizers."""
    checked, refused = [], []
    for path in sorted(models.glob("ggml-vocab-*.gguf")):
        inputs = path.with_name(path.name + ".inp")
        try:
            v = load(path)
        except GGUFError as error:
            refused.append((path.name, str(error)))
            continue
        if not inputs.exists():
            continue
        texts = inputs.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        lines = path.with_name(path.name + ".out").read_text().splitlines()
        for text, line in zip(texts, lines, strict=False):
            assert v.tokenize(text, False, False) == [int(part) for part in line.split()], (path.name, text)
        checked.append(path.name)
    assert len(checked) >= 14
    assert [name for name, _ in refused] in ([], ["ggml-vocab-nomic-bert-moe.gguf"])
