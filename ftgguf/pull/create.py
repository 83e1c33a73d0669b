"""`create`: a model of our store from a Modelfile, out of a GGUF file or another model."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import msgspec

from ftgguf.gguf import GGUFError, open_gguf
from ftgguf.pull.digest import Digest
from ftgguf.pull.disk import check_space, disk_error
from ftgguf.pull.errors import NameResolutionError, NotFound, PullError
from ftgguf.pull.hub import describe
from ftgguf.pull.manifest import Layer, encode_manifest
from ftgguf.pull.modelfile import Modelfile
from ftgguf.pull.names import BlobName, BuiltinName, HubName, OllamaName, PathName, StoredName, UrlName, parse
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.pull.resolve import fetch, locate, meaning
from ftgguf.pull.session import Event, Session
from ftgguf.pull.store import Entry
from ftgguf.quoting import shown

_COPY = 1 << 22
_REPLACED = {"params": "params", "system": "system", "template": "template", "messages": "messages"}


def create(session: Session, target: StoredName, modelfile: Modelfile, folder: Path | None) -> Entry:
    """Make `target`. Paths in the Modelfile are relative to `folder`; a model's name in FROM is pulled if missing.

    Without a folder FROM is never a path: a name, or the digest of a blob, as it may come over the network.
    Parameters add to those of the model it is made from; texts replace them. Raises PullError, NameResolutionError.
    """
    session.report(Event("gathering model components"))
    layers, config = _base(session, modelfile.source, folder)
    layers += [_adapter(session, text, folder, layers) for text in modelfile.adapters]
    texts = _texts(session, modelfile, layers)
    replaced = {kind for kind in _REPLACED if kind in texts}
    layers = [layer for layer in layers if layer.kind not in replaced]
    for kind, contents in texts.items():
        for content in contents:
            data = content.encode()
            session.report(Event("creating new layer " + str(Digest.of(data))))
            layers.append(Layer(kind, session.store.add_blob(data), len(data)))
    session.report(Event("writing manifest"))
    raw = encode_manifest(config or describe(session.store, layers), layers, {"kind": "create"})
    before = session.store.get(target)
    entry = session.store.put(target, raw)
    if before is not None and before.owner == "ftgguf" and before.manifest.id != entry.manifest.id:
        session.store.forget(before.manifest)
    session.report(Event("success"))
    return entry


def _base(session: Session, source: str, folder: Path | None) -> tuple[list[Layer], Layer | None]:
    """FROM's layers, and its config where it has one."""
    if folder is not None:
        path = folder / Path(source).expanduser()
        if path.is_file():
            return _from_file(session, path), None
    name = parse(source) if folder is None else meaning(source)
    if isinstance(name, PathName):
        raise NotFound(f"FROM {source}: no such file")
    if isinstance(name, BuiltinName | BlobName):
        return _from_file(session, locate(session, name).path), None
    if not isinstance(name, OllamaName | HubName | UrlName):
        raise NameResolutionError(f"FROM {source}: give a .gguf file or a model's name")
    entry = session.store.get(name.stored if isinstance(name, UrlName) else name) or fetch(session, name)
    return list(entry.manifest.layers), entry.manifest.config


def _from_file(session: Session, path: Path) -> list[Layer]:
    """The GGUF (all shards of a split one) copied into the store, after its header was checked."""
    try:
        with open_model(path) as gguf:
            shards = [shard.path for shard in gguf.shards]
    except GGUFError as error:
        raise NameResolutionError(f"FROM {path.name}: {error.message}") from None
    return [_copied(session, shard, shard.name if len(shards) > 1 else "") for shard in shards]


def _adapter(session: Session, text: str, folder: Path | None, layers: list[Layer]) -> Layer:
    """ADAPTER's file in the store, after a look at whether it is one for this model; its tensors are checked when it is
    loaded. Without a folder it is the digest of a blob. Raises PullError, NameResolutionError."""
    path = _adapter_file(session, text, folder)
    weights = next(layer for layer in layers if layer.kind == "model")
    base = session.store.find_blob(weights.digest, weights.size)
    try:
        with open_gguf(path) as adapter:
            if adapter.get("general.type") != "adapter" or adapter.get("adapter.type") != "lora":
                raise NameResolutionError(f"ADAPTER {text}: not a LoRA adapter, its general.type is not 'adapter'")
            if base is not None and not weights.name:
                with open_model(base) as model:
                    if adapter.architecture != model.architecture:
                        raise NameResolutionError(
                            f"ADAPTER {text}: it was made for architecture {shown(adapter.architecture)}, the model is "
                            f"{shown(model.architecture)}"
                        )
    except GGUFError as error:
        raise NameResolutionError(f"ADAPTER {text}: {error.message}") from None
    return replace(_copied(session, path, ""), kind="adapter")


def _adapter_file(session: Session, text: str, folder: Path | None) -> Path:
    if folder is None:
        name = parse(text)
        found = session.store.find_blob(name.digest) if isinstance(name, BlobName) else None
        if found is None:
            raise NotFound(f"ADAPTER {shown(text)}: no such blob here: send it to /api/blobs first")
        return found
    path = folder / Path(text).expanduser()
    if path.is_dir() or path.suffix in (".safetensors", ".bin"):
        raise NameResolutionError(f"ADAPTER {text}: only GGUF adapters are read: convert it (convert_lora_to_gguf.py)")
    if not path.is_file():
        raise NotFound(f"ADAPTER {text}: no such file")
    return path


def _copied(session: Session, path: Path, name: str) -> Layer:
    """Copy a file into the store, hashing it on the way; the original stays the user's to change."""
    size = path.stat().st_size
    check_space(session.store.folder("blobs"), size, path.name)
    key = f"copy-{Digest.of(str(path.resolve()).encode()).hex}"
    with session.store.locked(key):
        partial = session.store.folder("partial") / key
        hasher, done = hashlib.sha256(), 0
        try:
            with path.open("rb") as source, partial.open("wb") as target:
                while chunk := source.read(_COPY):
                    hasher.update(chunk)
                    target.write(chunk)
                    done += len(chunk)
                    session.report(Event(f"copying {path.name}", "", max(size, done), done))
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise disk_error(error, path.name) from None
        digest = Digest(hasher.hexdigest())
        if session.store.find_blob(digest, done) is None:
            session.store.adopt(partial, digest)
        else:
            partial.unlink()
    return Layer("model", digest, done, name)


def _texts(session: Session, modelfile: Modelfile, layers: list[Layer]) -> dict[str, list[str]]:
    """The layers that the Modelfile sets, by kind."""
    texts: dict[str, list[str]] = {}
    if modelfile.params:
        params: dict[str, object] = {}
        for layer in layers:
            if layer.kind == "params":
                params |= msgspec.json.decode(session.store.read_blob(layer, layer.size), type=dict[str, object])
        texts["params"] = [msgspec.json.encode(params | modelfile.params).decode()]
    if modelfile.messages:
        texts["messages"] = [msgspec.json.encode(modelfile.messages).decode()]
    for kind, text in (("system", modelfile.system), ("template", modelfile.template)):
        if text is not None:
            texts[kind] = [text]
    if modelfile.licenses:
        texts["license"] = modelfile.licenses
    return texts


def read_modelfile(path: Path) -> str:
    """The text of a Modelfile. Raises NotFound, PullError."""
    try:
        if path.stat().st_size > _COPY:
            raise PullError(f"{path.name} is too large for a Modelfile")
        return path.read_text()
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise NotFound(f"no Modelfile at {path}: -f FILE names it") from None
        raise PullError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PullError(f"{path} is not a text file") from None
