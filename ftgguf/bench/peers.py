"""Which peer is meant, and is it here? If not: the one command that installs it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftgguf.bench.client import RequestFailed, Target, identify
from ftgguf.bench.options import Options

Kind = Literal["llama-server", "xllamacpp", "ollama", "url"]


class NoPeer(RuntimeError):
    """There is nothing to compare with; one line with the cure."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer behind HTTP. `where`: the executable, or the URL of one that runs already."""

    kind: Kind
    where: str


def find_peer(options: Options) -> Peer | None:
    """The peer of `--against`, `--llama-server` and `--peer`; None stands for libllama in process. Raises NoPeer."""
    if options.against.startswith(("http://", "https://")):
        # clients are told the address with OpenAI's prefix, so people give it so
        return _url(options.against.rstrip("/").removesuffix("/v1"), options)
    if options.against == "ollama":
        return _ollama(options)
    if options.peer == "xllamacpp":
        if importlib.util.find_spec("xllamacpp") is None:
            raise NoPeer("the peer xllamacpp is not installed: pip install xllamacpp")
        return Peer("xllamacpp", "xllamacpp")
    if options.llama_server:
        return Peer("llama-server", _executable(options.llama_server))
    if not options.in_process and (found := shutil.which("llama-server")):
        return Peer("llama-server", found)
    if importlib.util.find_spec("llama_cpp") is None:
        raise NoPeer("no llama.cpp here: pip install llama-cpp-python==0.3.36, or give --llama-server PATH")
    return None


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        what = "is a folder" if Path(name).is_dir() else "cannot be run" if Path(name).exists() else "does not exist"
        raise NoPeer(f"--llama-server {name}: it {what}")
    return found


def ollama_url() -> str:
    """Where Ollama's command line looks for its server: OLLAMA_HOST, else 127.0.0.1:11434."""
    host = os.environ.get("OLLAMA_HOST", "") or "127.0.0.1:11434"
    if "://" not in host:
        host = f"http://{host}"
    scheme, _, rest = host.partition("://")
    name, colon, port = rest.rstrip("/").rpartition(":")
    if not colon or not port.isdigit():
        name, port = rest.rstrip("/"), "11434"
    return f"{scheme}://{name.replace('0.0.0.0', '127.0.0.1') or '127.0.0.1'}:{port}"


def _url(url: str, options: Options) -> Peer:
    try:
        identify(url, options.peer_model, min(options.timeout, 30.0), options.peer_key)
    except RequestFailed as error:
        raise NoPeer(f"no OpenAI server answers at {url}: {error}") from None
    return Peer("url", url)


def _ollama(options: Options) -> Peer:
    url = ollama_url()
    if not options.peer_model:
        text = "name the model as Ollama has it with --peer-model (`ollama list`); one made of the same file is made "
        raise NoPeer(text + "by: ollama create NAME -f Modelfile, with the line FROM /path/to/file.gguf")
    target = Target(url, "ollama", options.peer_model, timeout=min(options.timeout, 30.0))
    try:
        target.get("/api/version")
    except RequestFailed:
        if shutil.which("ollama") is None:
            text = f"no Ollama answers at {url} and none is installed: curl -fsSL https://ollama.com/install.sh | sh"
            raise NoPeer(text) from None
        raise NoPeer(f"no Ollama answers at {url}: start it with `ollama serve`") from None
    try:
        target.post("/api/show", {"model": options.peer_model})
    except RequestFailed as error:
        raise NoPeer(f"Ollama at {url} does not have the model {options.peer_model} (`ollama list`): {error}") from None
    return Peer("ollama", url)
