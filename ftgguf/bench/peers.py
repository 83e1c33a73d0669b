"""Which peer is meant, is it here, and is it what it should be? If not: the one command that installs it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftgguf.bench.child import end_group, exit_reason, heard
from ftgguf.bench.client import RequestFailed, Target, identify
from ftgguf.bench.options import Options

HELP_S = 60.0
"""For a llama-server to print its help: it looks for devices first."""
IS_ONE = ("--port", "--ctx-size")
"""Flags that llama-server's help has named since long ago, and that of no other program of llama.cpp both."""

Kind = Literal["llama-server", "xllamacpp", "ollama", "url"]


class NoPeer(RuntimeError):
    """There is nothing to compare with; one line with the cure."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer behind HTTP. `where`: the executable, or the URL of one that runs already."""

    kind: Kind
    where: str
    read_flags: tuple[str, ...] = ("--load-mode", "none")
    """What makes a llama-server read the file instead of mapping it."""


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
        return _llama_server(_executable(options.llama_server), f"--llama-server {options.llama_server}")
    if not options.in_process and (found := shutil.which("llama-server")):
        return _llama_server(found, f"{found} (on PATH)")
    if importlib.util.find_spec("llama_cpp") is None:
        raise NoPeer("no llama.cpp here: pip install llama-cpp-python==0.3.36, or give --llama-server PATH")
    return None


def find_served(options: Options) -> Peer:
    """The peer, behind HTTP: sessions are replayed over it. Raises NoPeer."""
    peer = find_peer(options)
    if peer is None:
        raise NoPeer(
            "sessions are replayed over HTTP and no llama-server is on PATH: give --llama-server PATH, or "
            "`pip install xllamacpp` and --peer xllamacpp"
        )
    return peer


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        path = Path(name)
        if path.is_dir():
            inside = shutil.which("llama-server", path=name)
            raise NoPeer(f"--llama-server {name}: it is a folder: give {inside or 'the program itself'}")
        if path.exists():
            what = f"it cannot be run: chmod +x {name}, if it is llama.cpp's llama-server"
        elif os.sep not in name:
            what = "no such program is on PATH: give the path of llama.cpp's llama-server"
        else:
            what = "it does not exist: give the path of llama.cpp's llama-server (build/bin/llama-server)"
        raise NoPeer(f"--llama-server {name}: {what}")
    return found


def _llama_server(where: str, named: str) -> Peer:
    """The llama-server at `where`, once its help shows that it is one. `named`: what the user knows it by."""
    command = [where, "--help"]
    try:
        process = heard(command)
    except OSError as error:
        raise NoPeer(
            f"{named}: it cannot be run ({error.strerror}): give a llama-server built for this machine"
        ) from None
    try:
        said = process.communicate(timeout=HELP_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        raise NoPeer(f"{named}: `--help` did not end within {HELP_S:.0f} s, so it is not llama-server") from None
    finally:
        end_group(process.pid)
        process.wait()
    if all(flag in said for flag in IS_ONE):
        return Peer("llama-server", where, ("--load-mode", "none") if "--load-mode" in said else ("--no-mmap",))
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "nothing")
    if "shared libraries" in last:
        raise NoPeer(
            f"{named}: it does not start ({last[-200:]}): set LD_LIBRARY_PATH to the folder with its libraries"
        )
    raise NoPeer(
        f"{named}: it is not llama-server: its --help {exit_reason(process.returncode)} and names no "
        f"{' and '.join(IS_ONE)} (last line: {last[-120:]}); give llama.cpp's llama-server with --llama-server, or "
        "--in-process to compare with libllama"
    )


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
