"""What does a model's name mean? The grammar only: no disk, no network.

| written | means |
|---|---|
| `qwen3:30b`, `user/model:tag`, `host:port/ns/model:tag` | Ollama registry, by Ollama's grammar and defaults |
| `hf.co/user/repo[:quant]`, `huggingface.co/...` | Hugging Face Hub |
| `hf.co/user/repo:file.gguf`, `hf.co/user/repo/folder/file.gguf` | one file of a repository |
| `https://.../model.gguf` | a URL |
| `sha256:<64 hex>` | a blob that is on this disk |
| `demo`, `stories` | the built-in models |
| `./x`, `/x`, `~/x`, `x.gguf` | a file |

Ollama's grammar is `[scheme://]host/namespace/model:tag`, cut from the right (its `types/model/name.go`); a
separator with nothing on one side is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import NameResolutionError
from ftgguf.quoting import shown

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
BUILTIN = ("demo", "stories")

_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}
_HUB_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_QUANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")


@dataclass(frozen=True, slots=True)
class OllamaName:
    """A model in an Ollama registry; all parts are valid."""

    host: str
    namespace: str
    model: str
    tag: str
    scheme: str = "https"

    def __post_init__(self) -> None:
        for part, pattern in _PARTS.items():
            value = getattr(self, part)
            if not pattern.fullmatch(value):
                raise NameResolutionError(_invalid(self, part, value))
        if self.scheme not in ("http", "https"):
            raise NameResolutionError(f"{shown(self.scheme)} is no protocol of a registry: leave it out, or https://")

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """The four folders and file of its manifest."""
        return self.host, self.namespace, self.model, self.tag

    @property
    def base_url(self) -> str:
        return f"{self.scheme}://{self.host}/v2/{self.namespace}/{self.model}"

    def __str__(self) -> str:
        """The shortest spelling, as Ollama displays it: without default host and namespace, always with the tag."""
        name = f"{self.model}:{self.tag}"
        if self.host.lower() != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{name}"
        return name if self.namespace.lower() == DEFAULT_NAMESPACE else f"{self.namespace}/{name}"


@dataclass(frozen=True, slots=True)
class HubName:
    """Files of a repository on the Hub. `quant` is a tag (`Q4_K_M`), `file` a path in the repository; one at most."""

    repo: str
    """`user/name`, by the Hub's rules."""
    quant: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        if len(self.repo) > 256 or not valid_repo(self.repo):
            raise NameResolutionError(f"{shown(self.repo)} is not a repository of the Hub (user/name)")
        if self.quant and not _QUANT.fullmatch(self.quant):
            raise NameResolutionError(f"{shown(self.quant)} cannot be a quantisation: for example {self.repo}:Q4_K_M")
        if self.file:
            check_subpath(self.file)

    @property
    def tag(self) -> str:
        """What stands for it in a store: the quant, a file's name without its suffix, or `latest`."""
        if not self.file:
            return self.quant or DEFAULT_TAG
        stem = self.file.rsplit("/", 1)[-1].removesuffix(".gguf")
        return stem if _QUANT.fullmatch(stem) else f"file-{Digest.of(self.file.encode()).short}"

    @property
    def parts(self) -> tuple[str, str, str, str]:
        user, repo = self.repo.split("/")
        return "hf.co", user, repo, self.tag

    def __str__(self) -> str:
        if self.file:
            return f"hf.co/{self.repo}/{self.file}"
        return f"hf.co/{self.repo}" + (f":{self.quant}" if self.quant else "")


@dataclass(frozen=True, slots=True)
class UrlName:
    """A GGUF file at an http(s) address, as `-mu` gives it."""

    url: str

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good or any(ord(c) <= 32 or ord(c) == 127 for c in self.url):
            raise NameResolutionError(f"{shown(self.url)} is not an http or https address")

    @property
    def file_name(self) -> str:
        """The last part of the path, made safe for a file name; `model.gguf` where there is none."""
        name = unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]
        return name if _file_name_ok(name) else "model.gguf"

    @property
    def stored(self) -> OllamaName:
        """The name under which a store lists it: host, a hash of the address, the file's name without its suffix."""
        netloc = (urlsplit(self.url).hostname or "") + (f":{port}" if (port := urlsplit(self.url).port) else "")
        host = netloc if _PARTS["host"].fullmatch(netloc) else "url"
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", self.file_name.removesuffix(".gguf"))
        model = stem if _PARTS["model"].fullmatch(stem) else "model"
        return OllamaName(host, Digest.of(self.url.encode()).short, model, DEFAULT_TAG)

    def __str__(self) -> str:
        parts = urlsplit(self.url)  # query strings hold signatures, user infos passwords
        host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
        return f"{parts.scheme}://{host}{parts.path}"


@dataclass(frozen=True, slots=True)
class BlobName:
    """Content that must be on this disk already."""

    digest: Digest

    def __str__(self) -> str:
        return str(self.digest)


@dataclass(frozen=True, slots=True)
class BuiltinName:
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class PathName:
    """A file's path, as written."""

    path: str

    def __str__(self) -> str:
        return self.path


Name = OllamaName | HubName | UrlName | BlobName | BuiltinName | PathName
StoredName = OllamaName | HubName


def parse(text: str) -> Name:
    """What `text` means as `-m TEXT`, `run TEXT` or `pull TEXT`. Raises NameResolutionError."""
    if not text:
        raise NameResolutionError("the model's name is empty: for example qwen3:30b, or hf.co/user/repo:Q4_K_M")
    if text in BUILTIN:
        return BuiltinName(text)
    if re.fullmatch(r"sha256[:-][0-9a-f]{64}", text):
        return BlobName(Digest(text[7:]))
    bare = re.sub(r"^https?://", "", text)
    host, _, rest = bare.partition("/")
    if host.lower() in HUB_HOSTS:
        return _parse_hub(text, rest)
    if bare != text:
        return _parse_url(text)
    if text[0] in "/~." or "\\" in text or "\0" in text or text.lower().endswith(".gguf"):
        return PathName(text)
    return parse_ollama(text)


def parse_ollama(text: str) -> OllamaName:
    """Ollama's grammar with its defaults. Raises NameResolutionError."""
    if "@" in text:
        raise NameResolutionError(f"{shown(text)}: names with a digest (@sha256:...) are not supported, give a tag")
    cut = text.removesuffix(":local")  # a source selector of newer Ollamas: this machine, which is all we do
    head, tag = cut, DEFAULT_TAG
    if cut.rfind(":") > cut.rfind("/"):
        head, tag = cut.rsplit(":", 1)
    if tag.lower() == "cloud" or tag.lower().endswith("-cloud"):
        raise NameResolutionError(f"{shown(text)}: remote (cloud) models are not supported: pull a tag without 'cloud'")
    scheme, parts = "", head.rsplit("/", 2)
    if len(parts) == 3 and "://" in parts[0]:
        scheme, parts[0] = parts[0].split("://", 1)
    if len(parts) < 3:
        parts = [*(DEFAULT_HOST, DEFAULT_NAMESPACE)[: 3 - len(parts)], *parts]
    host, namespace, model = parts
    local = re.fullmatch(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?", host, re.IGNORECASE)
    return OllamaName(host, namespace, model, tag, scheme or ("http" if local else "https"))


def parse_hub(repo: str, file: str = "") -> HubName:
    """`-hf REPO[:QUANT]` with `-hff FILE`; a leading `hf.co/` or `https://huggingface.co/` is taken off.

    Raises NameResolutionError.
    """
    bare = re.sub(r"^https?://", "", repo)
    host, _, rest = bare.partition("/")
    name = _parse_hub(repo, rest if host.lower() in HUB_HOSTS else bare)
    return HubName(name.repo, "", file) if file else name


def parse_model_url(url: str) -> HubName | UrlName:
    """`-mu URL`: a file of a repository's main branch on the Hub is verified as one, all else is a plain address."""
    name = UrlName(url)
    parts = urlsplit(url)
    found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+\.gguf)", unquote(parts.path))
    if found and (parts.hostname or "").lower() in HUB_HOSTS and parts.scheme == "https" and valid_repo(found[1]):
        return HubName(found[1], "", found[2])
    return name


def _parse_hub(text: str, rest: str) -> HubName:
    """`user/repo`, then `:quant`, `:file.gguf`, `/path/file.gguf` or what the Hub's pages have in their addresses."""
    rest = rest.partition("?")[0].rstrip("/")
    pieces = rest.split("/", 2)
    if len(pieces) < 2:
        raise NameResolutionError(f"{shown(text)}: a model on the Hub is hf.co/user/repo or hf.co/user/repo:quant")
    if len(pieces) == 3:
        file = re.sub(r"^(?:resolve|blob|raw)/main/", "", unquote(pieces[2]))
        if re.match(r"(?:resolve|blob|raw)/", file):
            raise NameResolutionError(f"{shown(text)}: only a repository's main branch has a name; use -mu with a URL")
        if file.lower().endswith(".gguf"):
            return HubName(f"{pieces[0]}/{pieces[1]}", "", file)
        if not re.fullmatch(r"tree/[^/]+", file):
            raise NameResolutionError(f"{shown(text)}: after user/repo comes a .gguf file's path, or :quant")
    model, _, quant = pieces[1].partition(":")
    if pieces[1].endswith(":"):
        raise NameResolutionError(f"{shown(text)}: the quantisation after ':' is missing, for example :Q4_K_M")
    if quant.lower().endswith(".gguf"):
        return HubName(f"{pieces[0]}/{model}", "", quant)
    return HubName(f"{pieces[0]}/{model}", "" if quant.lower() == DEFAULT_TAG else quant)


def _parse_url(text: str) -> Name:
    """A file's URL, a page of Ollama's library, or a registry name with its protocol."""
    parts = urlsplit(text)
    if parts.path.lower().endswith(".gguf") or parts.query:
        return UrlName(text)
    if (parts.hostname or "") in ("ollama.com", "www.ollama.com"):
        return parse_ollama(parts.path.strip("/").removeprefix("library/"))
    if parts.path.strip("/").count("/") == 1:
        return parse_ollama(text)
    return UrlName(text)


# ------------------------------------------------------------------------------------------------------------ checks


def valid_repo(repo: str) -> bool:
    """Exactly one `/`; parts of `[A-Za-z0-9_.-]` that begin with a letter, digit or `_`; no `..`.

    The Hub's own rule (huggingface_hub `validate_repo_id`): no `..`, no `--`, not ending in `-`, `.` or `.git`; `--`
    is let through, since user names of old accounts have it and it cannot hurt a path.
    """
    user, slash, name = repo.partition("/")
    return (
        bool(slash)
        and bool(_HUB_PART.fullmatch(user))
        and bool(_HUB_PART.fullmatch(name))
        and ".." not in repo
        and not name.endswith((".", "-", ".git"))
        and not user.endswith((".", "-"))
    )


def check_subpath(path: str) -> str:
    """`path` if it is a relative path that stays below its root on every system. Raises NameResolutionError.

    Refused: absolute, empty or `.`/`..` parts, backslashes, drives and streams (`:`), control characters, parts that
    end in a dot or blank (Windows drops those), over 4096 characters or 32 parts.
    """
    parts = path.split("/")
    if not path or len(path) > 4096 or len(parts) > 32 or not all(_file_name_ok(part) for part in parts):
        raise NameResolutionError(f"{shown(path)} is not a safe path inside a repository")
    return path


def _file_name_ok(name: str) -> bool:
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 240
        and name not in (".", "..")
        and name[-1] not in ". "
        and not any(c in '\\/:*?"<>|' or ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in name)
    )


def _invalid(name: OllamaName, part: str, value: str) -> str:
    if not value:
        return f"the {part} of the model's name is empty: names are [host/][namespace/]model[:tag]"
    limit = 350 if part == "host" else 80
    if len(value) > limit:
        return f"the {part} {shown(value)} has {len(value)} characters, at most {limit} are allowed"
    others = {"host": "'-', '_', '.', ':'", "namespace": "'-', '_'"}.get(part, "'-', '_', '.'")
    return (
        f"{shown(value)} cannot be the {part} of a model's name: letters, digits and {others}, beginning with a "
        "letter, a digit or '_'"
    )
