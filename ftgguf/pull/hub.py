"""Pulls from the Hugging Face Hub: the commit behind `main`, its files, the ones of a quantisation, verified.

The three addresses are llama.cpp's: `api/models/{repo}/refs`, `.../tree/{commit}` and `{repo}/resolve/{commit}/{path}`.
A file's content is known beforehand by its LFS sha256 (or, outside LFS, by git's own hash).
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import msgspec

from ftgguf.gguf import GGUFError, open_gguf
from ftgguf.pull import foreign
from ftgguf.pull.client import Origin, parse_url
from ftgguf.pull.digest import Digest, GitOid
from ftgguf.pull.errors import BadAnswer, NameResolutionError, NotFound, Unauthorized
from ftgguf.pull.manifest import CONFIG_TYPE, Layer, encode_manifest
from ftgguf.pull.names import HubName, check_subpath
from ftgguf.pull.quants import choose, choose_file
from ftgguf.pull.registry import finish_any
from ftgguf.pull.session import Event, Session
from ftgguf.pull.sizes import human
from ftgguf.pull.store import Entry, Store
from ftgguf.pull.transfer import MAX_SIZE

_MAX_REFS = 4 << 20
_MAX_TREE = 32 << 20
_MAX_FILES = 100_000
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Ref(msgspec.Struct):
    name: str
    targetCommit: str


class _Refs(msgspec.Struct):
    branches: list[_Ref]


class _Lfs(msgspec.Struct):
    oid: str
    size: int


class _File(msgspec.Struct):
    path: str
    type: str = "file"
    size: int = 0
    oid: str = ""
    lfs: _Lfs | None = None


class RepoFile(msgspec.Struct, frozen=True):
    """A file of a repository: its safe path, its size in bytes and what names its content."""

    path: str
    size: int
    check: Digest | GitOid


def pull_hub(session: Session, name: HubName) -> Entry:
    """Fetch the files that `name` means, or what is missing of them. Raises PullError."""
    session.check_host(name)
    session.report(Event("pulling manifest"))
    if token := session.token():
        session.client.allow_credential(session.endpoint, f"Bearer {token}")
    commit = _commit(session, name)
    files = {file.path: file for file in _tree(session, name, commit)}
    what = f"hf.co/{name.repo}"
    paths = choose_file(files, name.file, what) if name.file else choose(files, name.quant, what)
    chosen = [files[path] for path in paths]
    total = sum(file.size for file in chosen)
    session.say(f"found {paths[0]}" + (f" and {len(paths) - 1} more parts" * (len(paths) > 1)) + f", {human(total)}")
    known = [Layer("model", file.check, file.size) for file in chosen if isinstance(file.check, Digest)]
    session.check_space(tuple(known), what)
    layers = []
    for file in chosen:
        url = f"{session.endpoint}/{name.repo}/resolve/{commit}/{quote(file.path)}"
        digest, size = session.fetch(url, file.check, file.size, "" if isinstance(file.check, Digest) else file.path)
        layers.append(Layer("model", digest, size, file.path))
    source = {"kind": "hub", "repo": name.repo, "commit": commit, "endpoint": session.endpoint}
    return finish_any(session, name, encode_manifest(describe(session.store, layers), layers, source))


def describe(store: Store, layers: list[Layer]) -> Layer:
    """A config blob for files that came without one: family, size and quantisation as the GGUF says.

    Raises BadAnswer if the first file is no GGUF: a name must not point to a file that cannot be used.
    """
    weights = [layer for layer in layers if layer.kind == "model"]
    path = store.find_blob(weights[0].digest, weights[0].size)
    if path is None:
        raise NotFound(f"{weights[0].digest} is no longer on this disk: pull it again")
    data = msgspec.json.encode({"model_format": "gguf"} | _facts(path, split=len(weights) > 1))
    return Layer("", store.add_blob(data), len(data), "", CONFIG_TYPE)


def _facts(path: Path, split: bool) -> dict[str, str]:
    if split:  # a blob does not have the name by which its siblings are found
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BadAnswer("what came is not a GGUF file")
        return {}
    try:
        with open_gguf(path) as gguf:
            return {
                "model_family": str(gguf.get("general.architecture", "")),
                "model_type": parameters(gguf.n_params),
                "file_type": gguf.file_type.split(" - ")[0].removeprefix("(guessed) "),
            }
    except GGUFError as error:
        raise BadAnswer(f"what came is not a usable GGUF file: {error.message}") from None


def parameters(n: int) -> str:
    """A parameter count as Ollama writes it: `30.5B`, `135M`."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.2f}{unit}" if unit in "MK" and n < 10 * size else f"{n / size:.1f}{unit}"
    return str(n)


def local_hub(name: HubName, first_choice_only: bool) -> Path | None:
    """The model in the Hugging Face cache, if a program put it there; None if not, or not whole.

    `first_choice_only`: for a name without quant, only what would also be chosen from the whole repository.
    """
    files = foreign.hub_snapshot(name.repo)
    if files is None:
        return None
    quant = name.quant or ("Q4_K_M" if first_choice_only else "")
    try:
        paths = choose_file(files, name.file, name.repo) if name.file else choose(files, quant, name.repo)
    except NameResolutionError:
        return None
    return files[paths[0]]


# --------------------------------------------------------------------------------------------------------------- API


def _get(session: Session, name: HubName, url: str, limit: int) -> tuple[bytes, str]:
    """(body, `Link` header) of an API call; errors in words."""
    status, headers, body = session.client.read(url, limit)
    if status in (401, 403):
        have = "the token given may not read it" if session.token() else "no token was given"
        raise Unauthorized(
            f"hf.co/{name.repo} does not exist, or is private or gated, and {have}: check the spelling, accept the "
            f"licence at https://huggingface.co/{name.repo}, and give a token by HF_TOKEN or --hf-token"
        )
    if status == 404:
        raise NotFound(f"hf.co/{name.repo}: no such repository")
    if status != 200:
        raise BadAnswer(f"hf.co/{name.repo}: the Hub answered {status}")
    return body, headers.get("link", "")


def _commit(session: Session, name: HubName) -> str:
    body, _ = _get(session, name, f"{session.endpoint}/api/models/{name.repo}/refs", _MAX_REFS)
    try:
        branches = msgspec.json.decode(body, type=_Refs).branches
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadAnswer(f"hf.co/{name.repo}: the Hub's list of branches cannot be read") from None
    branches.sort(key=lambda ref: ref.name != "main")
    if not branches or not _COMMIT.fullmatch(branches[0].targetCommit):
        raise BadAnswer(f"hf.co/{name.repo}: the Hub names no commit")
    return branches[0].targetCommit


def _tree(session: Session, name: HubName, commit: str) -> list[RepoFile]:
    """All files of a commit whose paths are safe, following the pages."""
    url = f"{session.endpoint}/api/models/{name.repo}/tree/{commit}?recursive=true"
    origin = Origin.of(parse_url(url))
    left, files = _MAX_TREE, []
    while url:
        body, link = _get(session, name, url, left)
        left -= len(body)
        try:
            page = msgspec.json.decode(body, type=list[_File])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadAnswer(f"hf.co/{name.repo}: the Hub's list of files cannot be read") from None
        files += [_checked(file) for file in page if file.type == "file" and file.path.lower().endswith(".gguf")]
        if len(files) > _MAX_FILES or left <= 0:
            raise BadAnswer(f"hf.co/{name.repo}: the list of files is absurdly long")
        following = re.search(r'<([^>]+)>;\s*rel="next"', link)
        url = following[1] if following and page else ""
        if url and Origin.of(parse_url(url)) != origin:
            raise BadAnswer(f"hf.co/{name.repo}: the list of files continues on another host")
    return files


def _checked(file: _File) -> RepoFile:
    try:
        path = check_subpath(file.path)
    except NameResolutionError as error:
        raise BadAnswer(str(error)) from None
    size = file.lfs.size if file.lfs is not None else file.size
    if not 0 <= size <= MAX_SIZE:
        raise BadAnswer(f"the Hub gives '{path}' the size {size}")
    return RepoFile(path, size, Digest(file.lfs.oid) if file.lfs is not None else GitOid(file.oid))
