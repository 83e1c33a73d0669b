"""Which models are on this disk, by name: those of the stores, the built-in ones, and plain .gguf files.

For `list`, `show`, Ollama's /api/tags and the server's models on demand. Nothing here downloads or makes anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ftgguf.pull import demo
from ftgguf.pull.errors import NameResolutionError, NotFound
from ftgguf.pull.names import BlobName, BuiltinName, HubName, OllamaName, PathName, parse
from ftgguf.pull.ollama_gguf import open_model
from ftgguf.pull.store import Entry, Store


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded without the network. `entry` is its place in a store, else `file` is its GGUF."""

    name: str
    size: int
    """Bytes of all its files."""
    modified: float
    """Seconds since 1970."""
    digest: str
    """64 hex digits: of the manifest; for a plain file of its path, size and time, which change when it does."""
    entry: Entry | None = None
    file: Path | None = None

    def path(self, store: Store) -> Path:
        """The GGUF to open, its first shard if it is split. Raises NotFound if a blob is gone."""
        if self.entry is not None:
            return store.model_path(self.entry)
        assert self.file is not None
        return self.file


def of_entry(entry: Entry) -> LocalModel:
    """The model of a store's entry."""
    return LocalModel(str(entry.name), entry.manifest.size, entry.modified, entry.manifest.id.hex, entry)


def of_file(path: Path, name: str = "") -> LocalModel:
    """The model of a plain file; a split one's other shards count too. Raises NotFound, GGUFError."""
    try:
        status = path.stat()
    except OSError as error:
        raise NotFound(f"{path}: {(error.strerror or 'unreadable').lower()}") from None
    size = status.st_size
    if "-of-" in path.name:
        with open_model(path) as gguf:
            size = sum(shard.path.stat().st_size for shard in gguf.shards)
    identity = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape")
    return LocalModel(name or str(path), size, status.st_mtime, hashlib.sha256(identity).hexdigest(), file=path)


def builtin_models() -> list[LocalModel]:
    """`stories`, which is in the package, and `demo` once it was made."""
    found = [of_file(demo.resolve_stories(), "stories")]
    made = demo.cache_folder() / demo.DEMO_NAME
    return [*found, of_file(made, "demo")] if made.is_file() else found


def local_models(store: Store, prefix: str = "") -> list[LocalModel]:
    """Everything in the stores whose name begins with `prefix`, newest first, then the built-in models."""
    stored = [of_entry(entry) for entry in store.entries(prefix)]
    return stored + [model for model in builtin_models() if model.name.startswith(prefix.lower())]


def find_model(store: Store, text: str, files: bool = False) -> LocalModel | None:
    """The model that `text` names, None if it is not on this disk.

    `files`: a path is opened too; False for names that come over the network. Raises NameResolutionError for what
    cannot be a name.
    """
    name = parse(text)
    if isinstance(name, BuiltinName):
        return next((model for model in builtin_models() if model.name == name.name), None)
    if isinstance(name, PathName):
        path = Path(name.path).expanduser()
        return of_file(path) if files and path.is_file() else None
    if isinstance(name, BlobName):
        blob = store.find_blob(name.digest) if files else None
        return of_file(blob, text) if blob is not None else None
    if files and Path(text).is_file():
        return of_file(Path(text))
    if isinstance(name, OllamaName) and name.namespace == "library" and name.model.lower() in ("demo", "stories"):
        built = next((model for model in builtin_models() if model.name == name.model.lower()), None)
        if built is not None and name.tag == "latest":
            return built
    entry = store.get(name.stored if not isinstance(name, OllamaName | HubName) else name)
    if entry is None and isinstance(name, OllamaName) and name.host == "registry.ollama.ai":
        entry = _hub_entry(store, name)
    return of_entry(entry) if entry is not None else None


def _hub_entry(store: Store, name: OllamaName) -> Entry | None:
    """`user/repo:Q4_K_M` as llama-server names what came from the Hub."""
    if name.namespace == "library":
        return None
    try:
        return store.get(HubName(f"{name.namespace}/{name.model}", "" if name.tag == "latest" else name.tag))
    except NameResolutionError:
        return None
