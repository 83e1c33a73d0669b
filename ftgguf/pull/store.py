"""Our own store of models on disk: blobs by digest, manifests by name. Laid out as Ollama lays out its own.

    manifests/{host}/{namespace}/{model}/{tag}    the manifest's bytes, exactly as received
    blobs/sha256-{64 hex}                         verified content
    partial/sha256-{64 hex}, ....json             a download under way, and its journal
    files/{id of the manifest}/{path}             links to blobs under the names that split models need
    urls/{hash of the address}.json               what a -mu address held when it was last fetched
    locks/                                        one per download

Content is verified before it gets a name under `blobs`. A blob that another program's store on this machine already
has is used from there (see `foreign`), and never written, moved or removed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ftgguf.pull import foreign
from ftgguf.pull.demo import cache_folder
from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import BadAnswer, NameResolutionError, NotFound, PullError
from ftgguf.pull.journal import Spans, remove
from ftgguf.pull.lock import hold
from ftgguf.pull.manifest import MAX_MANIFEST, Config, Layer, Manifest, parse_config, parse_manifest
from ftgguf.pull.names import BuiltinName, HubName, OllamaName, StoredName, parse, valid_repo

STALE_SECONDS = 14 * 24 * 3600.0
"""A partial download that nobody continued for so long is removed by the next pull."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that is on this disk. `owner`: `ftgguf` or `ollama`, whose store has the manifest."""

    name: StoredName
    manifest: Manifest
    modified: float
    """Seconds since 1970."""
    owner: str

    @property
    def id(self) -> str:
        return self.manifest.id.short


class Store:
    """One folder; safe for several processes at once. `Store(None)` is the default place, `ollama` Ollama's own."""

    def __init__(self, root: str | Path | None = None) -> None:
        if root == "ollama":
            found = foreign.ollama_roots()
            if not found:
                raise NameResolutionError("--store ollama: no Ollama store here; OLLAMA_MODELS names its folder")
            root = found[0]
        self.root = Path(root).expanduser().absolute() if root else cache_folder().parent
        self.foreign = [path for path in foreign.ollama_roots() if path != self.root]
        """Ollama's stores on this machine, read only."""

    # -------------------------------------------------------------------------------------------------------- paths

    def blob_path(self, digest: Digest) -> Path:
        return self.root / "blobs" / digest.file_name

    def _manifest_path(self, name: StoredName) -> Path:
        return self._inside("manifests", *name.parts)

    def _inside(self, *parts: str) -> Path:
        """A path below the root, links followed: whatever lies in the store, nothing is written outside it."""
        path = self.root.joinpath(*parts)
        real = os.path.realpath(path.parent)
        base = os.path.realpath(self.root)
        if any(part in ("", ".", "..") or "/" in part or "\\" in part or "\0" in part for part in parts):
            raise PullError("a name would leave the model store: refused")
        if os.path.commonpath((real, base)) != base:
            raise PullError("a link in the model store leads out of it: refused; remove it")
        return path

    def folder(self, name: str) -> Path:
        """A folder of the store, made if missing. Raises PullError."""
        path = self.root / name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PullError(f"cannot write to the model store: {error.strerror}; --store DIR names another") from None
        return path

    # -------------------------------------------------------------------------------------------------------- blobs

    def find_blob(self, digest: Digest, size: int | None = None) -> Path | None:
        """Where a blob lies, here or in another program's store; None if nowhere. A file of another size is none."""
        candidates: Iterator[Path] = iter((self.blob_path(digest),))
        for path in (*candidates, *foreign.blob_candidates(digest, self.foreign)):
            with suppress(OSError):
                status = path.stat()
                if path.is_file() and (size is None or status.st_size == size):
                    return path
        return None

    def read_blob(self, layer: Layer, limit: int) -> bytes:
        """A small blob's bytes, verified. Raises NotFound, BadAnswer."""
        path = self.find_blob(layer.digest, layer.size)
        if path is None or layer.size > limit:
            raise NotFound(f"{layer.digest} is not on this disk: pull the model again")
        data = path.read_bytes()
        if Digest.of(data) != layer.digest:
            raise BadAnswer(f"{layer.digest} is damaged on this disk: remove the model and pull it again")
        return data

    def add_blob(self, data: bytes) -> Digest:
        """Store bytes of our own."""
        digest = Digest.of(data)
        target = self.blob_path(digest)
        if not target.is_file():
            self.folder("blobs")
            _write_whole(target, data)
        return digest

    def adopt(self, partial: Path, digest: Digest) -> Path:
        """Give a verified, flushed file its final name."""
        target = self.folder("blobs") / digest.file_name
        os.replace(partial, target)
        target.chmod(0o644)
        _sync_folder(target.parent)
        return target

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """The lock of one download; `key` is made by us, never taken from outside."""
        with hold(self.folder("locks") / f"{key}.lock", waiting):
            yield

    def partial_progress(self, key: str) -> tuple[int, int]:
        """(bytes there, bytes in all) of a download that another thread or process does; zeros if unknown."""
        folder = self.root / "partial"
        spans = Spans.load(folder / f"{key}.json", folder / key)
        return (spans.completed, spans.total) if spans is not None else (0, 0)

    # ---------------------------------------------------------------------------------------------------- manifests

    def put(self, name: StoredName, raw: bytes) -> Entry:
        """Write a manifest, under the spelling that is on disk if the name is there in another case."""
        manifest = parse_manifest(raw)
        known = self._own(name)
        name = known.name if known is not None else name
        path = self._manifest_path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._inside("manifests", *name.parts)
            _write_whole(path, raw)
        except OSError as error:
            raise PullError(f"cannot write the manifest of {name}: {error.strerror}") from None
        return Entry(name, manifest, path.stat().st_mtime, "ftgguf")

    def get(self, name: StoredName) -> Entry | None:
        """The model of that name, ours first, then Ollama's; case does not matter. Broken manifests count as absent."""
        own = self._own(name)
        if own is not None:
            return own
        spellings = [name.parts]
        if isinstance(name, HubName):  # Ollama keeps apart what is one host
            spellings.append(("huggingface.co", *name.parts[1:]))
        for root in self.foreign:
            for parts in spellings:
                found = _find(root, parts)
                entry = _read_entry(root, found, "ollama") if found is not None else None
                if entry is not None:
                    return entry
        return None

    def _own(self, name: StoredName) -> Entry | None:
        found = _find(self.root, name.parts)
        return _read_entry(self.root, found, "ftgguf") if found is not None else None

    def entries(self, prefix: str = "") -> list[Entry]:
        """All models, newest first; a name that we and Ollama have is listed once, ours."""
        found: dict[str, Entry] = {}
        for root, owner in ((self.root, "ftgguf"), *((root, "ollama") for root in self.foreign)):
            for parts in _all_parts(root):
                entry = _read_entry(root, parts, owner)
                if entry is not None and str(entry.name).lower().startswith(prefix.lower()):
                    found.setdefault(str(entry.name).lower(), entry)
        return sorted(found.values(), key=lambda entry: (-entry.modified, str(entry.name)))

    def config(self, entry: Entry) -> Config:
        """The entry's config blob; the default where it is not on disk."""
        try:
            return parse_config(self.read_blob(entry.manifest.config, MAX_MANIFEST * 8))
        except PullError:
            return Config()

    def copy(self, source: Entry, target: StoredName) -> Entry:
        """`cp`: the manifest under another name; blobs of Ollama's store stay where they are."""
        return self.put(target, source.manifest.raw)

    def delete(self, name: StoredName) -> Entry:
        """`rm`: the manifest, empty folders above it, then blobs that no manifest of ours names. Raises NotFound.

        A model of Ollama's own store is not ours to remove.
        """
        entry = self._own(name)
        if entry is None:
            if self.get(name) is not None:
                raise PullError(f"model '{name}' belongs to Ollama's store: remove it with 'ollama rm {name}'")
            raise NotFound(f"model '{name}' not found")
        path = self._manifest_path(entry.name)
        path.unlink()
        for folder in list(path.parents)[:3]:
            with suppress(OSError):
                folder.rmdir()
        self.forget(entry.manifest)
        return entry

    def forget(self, manifest: Manifest) -> None:
        """Remove blobs and links of `manifest` that no manifest here needs any more."""
        kept = self._own_manifests()
        if kept is None:
            return
        for layer in manifest.all_layers:
            self._drop(layer.digest, kept)
        if all(manifest.id != other.id for other in kept):
            _remove_tree(self.root / "files" / manifest.id.hex)

    def drop_unused(self, digest: Digest) -> None:
        """Remove one blob of ours unless a manifest here names it."""
        kept = self._own_manifests()
        if kept is not None:
            self._drop(digest, kept)

    def _drop(self, digest: Digest, kept: list[Manifest]) -> None:
        if not any(layer.digest == digest for manifest in kept for layer in manifest.all_layers):
            remove(self.blob_path(digest), self.root / "blobs" / f"sha256:{digest.hex}")

    def _own_manifests(self) -> list[Manifest] | None:
        """All manifests; None if one cannot be read: what it needs is unknown, so nothing may go."""
        entries = [_read_entry(self.root, parts, "ftgguf") for parts in _all_parts(self.root)]
        return None if None in entries else [entry.manifest for entry in entries if entry is not None]

    def remove_stale(self) -> None:
        """Drop partial downloads that nobody continued for two weeks."""
        folder = self.root / "partial"
        limit = time.time() - STALE_SECONDS
        with suppress(OSError):
            for path in folder.iterdir():
                if path.stat().st_mtime < limit:  # one that is under way is written to all the time
                    remove(path)

    # ---------------------------------------------------------------------------------------------------- the file

    def model_path(self, entry: Entry) -> Path:
        """The GGUF to open: the blob, or for files with names (Hub, split models) a link of the right name.

        Raises NotFound if a blob is gone.
        """
        layers = entry.manifest.model
        paths = []
        for layer in layers:
            path = self.find_blob(layer.digest, layer.size)
            if path is None:
                raise NotFound(f"a file of {entry.name} is no longer on this disk: pull it again")
            paths.append(path)
        if not layers:
            raise NotFound(f"{entry.name} has no model file")
        if not layers[0].name:
            return paths[0]
        links = [self._link(entry.manifest.id, layer.name, path) for layer, path in zip(layers, paths, strict=True)]
        return links[0]

    def _link(self, manifest: Digest, name: str, target: Path) -> Path:
        """files/{manifest}/{name} -> the blob: a symlink, relative within the store; a hard link where those fail."""
        link = self._inside("files", manifest.hex, *name.split("/"))
        link.parent.mkdir(parents=True, exist_ok=True)
        self._inside("files", manifest.hex, *name.split("/"))
        inside = target.is_relative_to(self.root)
        wanted = os.path.relpath(target, link.parent) if inside else str(target)
        with suppress(OSError):
            if os.readlink(link) == wanted:
                return link
        fresh = link.with_name(f".{link.name}.{os.getpid()}-{time.monotonic_ns()}")
        try:
            os.symlink(wanted, fresh)
        except OSError:
            os.link(target, fresh)
        os.replace(fresh, link)
        return link


# ---------------------------------------------------------------------------------------------------------- helpers


def _all_parts(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """The names below `manifests`, by folder and file names only."""
    base = root / "manifests"
    try:
        paths = sorted(base.glob("*/*/*/*"))
    except OSError:
        return
    for path in paths:
        if path.is_file() and not path.name.startswith("."):
            host, namespace, model, tag = path.parts[-4:]
            yield host, namespace, model, tag


def _find(root: Path, parts: tuple[str, str, str, str]) -> tuple[str, str, str, str] | None:
    """The spelling on disk of a name, ignoring case: the exact one if it is there."""
    base = root / "manifests"
    if base.joinpath(*parts).is_file():
        return parts
    wanted = tuple(part.lower() for part in parts)
    return next((found for found in _all_parts(root) if tuple(part.lower() for part in found) == wanted), None)


def _read_entry(root: Path, parts: tuple[str, str, str, str], owner: str) -> Entry | None:
    """The entry of a manifest file; None if it is broken or not named as a model is."""
    path = root / "manifests" / Path(*parts)
    try:
        name = name_of(parts)
        status = path.stat()
        if status.st_size > MAX_MANIFEST:
            return None
        return Entry(name, parse_manifest(path.read_bytes()), status.st_mtime, owner)
    except (OSError, NameResolutionError):
        return None


def name_of(parts: tuple[str, str, str, str]) -> StoredName:
    """The name whose manifest has these path parts. Raises NameResolutionError."""
    host, namespace, model, tag = parts
    if host == "hf.co" and valid_repo(f"{namespace}/{model}"):
        return HubName(f"{namespace}/{model}", tag)
    return OllamaName(host, namespace, model, tag)


def stored_name(text: str) -> StoredName:
    """The name of something in a store, for list, show, rm, cp and create. Raises NameResolutionError."""
    name = parse(text)
    if isinstance(name, BuiltinName):
        raise NameResolutionError(
            f"'{text}' is built in and cannot be deleted, copied or replaced; FROM {text} in a Modelfile makes a model "
            f"of it ('ftgguf show {text}' says where its file is)"
        )
    if not isinstance(name, OllamaName | HubName):
        raise NameResolutionError(f"'{text}' is not a pulled model's name, for example qwen3:30b")
    return name


def _write_whole(path: Path, data: bytes) -> None:
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    except BaseException:
        remove(Path(fresh))
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_tree(folder: Path) -> None:
    """Remove a folder of links; the targets stay."""
    for path in sorted(folder.rglob("*"), key=lambda path: -len(path.parts)):
        with suppress(OSError):
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                path.rmdir()
    with suppress(OSError):
        folder.rmdir()
