"""Names: against Ollama's published grammar (its types/model/name.go), transcribed here step by step."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftgguf.pull.digest import Digest, GitOid
from ftgguf.pull.errors import BadAnswer, NameResolutionError
from ftgguf.pull.names import (
    BlobName,
    BuiltinName,
    HubName,
    OllamaName,
    PathName,
    UrlName,
    check_subpath,
    parse,
    parse_hub,
    parse_model_url,
    parse_ollama,
)

WORD = string.ascii_letters + string.digits + "_"


def ollama_parse(text: str) -> tuple[str, str, str, str] | None:
    """Ollama's ParseName and IsValid: (host, namespace, model, tag), or None for an invalid name."""

    def cut(text: str, mark: str) -> tuple[str, str, bool]:
        at = text.rfind(mark)
        if at < 0:
            return text, "", False
        return text[:at] or "!MISSING!", text[at + len(mark) :] or "!MISSING!", True

    tag = "latest"
    if text.rfind(":") > text.rfind("/"):
        text, tag, _ = cut(text, ":")
    text, model, more = cut(text, "/")
    host, namespace = "registry.ollama.ai", "library"
    if not more:
        model = text
    else:
        text, namespace, more = cut(text, "/")
        if not more:
            namespace = text
        else:
            before, mark, after = text.partition("://")
            host = after if mark else before
    limits = {"host": (350, "-_.:"), "namespace": (80, "-_"), "model": (80, "-_."), "tag": (80, "-_.")}
    for kind, part in (("host", host), ("namespace", namespace), ("model", model), ("tag", tag)):
        limit, others = limits[kind]
        if not 1 <= len(part) <= limit or part[0] not in WORD or any(c not in WORD + others for c in part[1:]):
            return None
    return host, namespace, model, tag


@pytest.mark.parametrize(
    ("text", "parts", "shortest"),
    [
        ("qwen3", ("registry.ollama.ai", "library", "qwen3", "latest"), "qwen3:latest"),
        ("qwen3:30b", ("registry.ollama.ai", "library", "qwen3", "30b"), "qwen3:30b"),
        ("user/model:tag", ("registry.ollama.ai", "user", "model", "tag"), "user/model:tag"),
        ("host:5000/ns/m", ("host:5000", "ns", "m", "latest"), "host:5000/ns/m:latest"),
        ("host/library/m:t", ("host", "library", "m", "t"), "host/library/m:t"),
        ("registry.ollama.ai/library/m", ("registry.ollama.ai", "library", "m", "latest"), "m:latest"),
        ("a..b", ("registry.ollama.ai", "library", "a..b", "latest"), "a..b:latest"),
        ("qwen3:30b:local", ("registry.ollama.ai", "library", "qwen3", "30b"), "qwen3:30b"),
        ("https://ollama.com/library/qwen3:30b", ("registry.ollama.ai", "library", "qwen3", "30b"), "qwen3:30b"),
    ],
)
def test_registry_names(text: str, parts: tuple[str, ...], shortest: str) -> None:
    """The examples of Ollama's name_test.go and of its documentation; the shortest spelling means the same again."""
    name = parse(text)
    assert isinstance(name, OllamaName)
    assert name.parts == parts
    assert str(name) == shortest
    assert parse(shortest) == name


@pytest.mark.parametrize("text", ["mm:", "nn//mm", "host//mm:t", ":t", "a b", "m:t/x:y", "é", "n.s/m", "-a", "m:-t"])
def test_invalid_registry_names(text: str) -> None:
    """Names that Ollama's grammar refuses get one line."""
    assert ollama_parse(text) is None
    with pytest.raises(NameResolutionError) as caught:
        parse_ollama(text)
    assert "\n" not in str(caught.value)


@given(st.one_of(st.text(alphabet="ab0_-./:!é ", max_size=30), st.text(max_size=20)))
@example("http://h/n/m:t")
@example("h:1/n/m:t")
@example("a" * 81)
@example("/")
def test_grammar_is_ollamas(text: str) -> None:
    """Any text: accepted with the same parts, or refused, exactly as by the transcription of Ollama's parser."""
    if "@" in text or text.endswith(":local") or text.lower().endswith("cloud"):
        return
    expected = ollama_parse(text)
    try:
        found: tuple[str, str, str, str] | None = parse_ollama(text).parts
    except NameResolutionError:
        found = None
    if expected is not None and "://" in text and not text.startswith(("http://", "https://")):
        expected = None  # we know two protocols only
    assert found == expected


@pytest.mark.parametrize("text", ["m:cloud", "m:20b-cloud", "m@sha256:" + "0" * 64])
def test_what_we_do_not_have_is_named(text: str) -> None:
    """Ollama's remote models, and digests, which its own parser refuses as well."""
    with pytest.raises(NameResolutionError, match="not supported"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf.co/u/r", HubName("u/r")),
        ("hf.co/u/r:latest", HubName("u/r")),
        ("HF.co/u.x/r-GGUF:Q4_K_M", HubName("u.x/r-GGUF", "Q4_K_M")),
        ("huggingface.co/u/r:UD-Q4_K_XL", HubName("u/r", "UD-Q4_K_XL")),
        ("hf.co/u/r:model-Q4_0.gguf", HubName("u/r", "", "model-Q4_0.gguf")),
        ("hf.co/u/r/sub/m.gguf", HubName("u/r", "", "sub/m.gguf")),
        ("https://huggingface.co/u/r", HubName("u/r")),
        ("https://huggingface.co/u/r/blob/main/sub/m.gguf", HubName("u/r", "", "sub/m.gguf")),
        ("https://huggingface.co/u/r/tree/main", HubName("u/r")),
    ],
)
def test_hub_names(text: str, name: HubName) -> None:
    """Spellings from the Hub's pages and from Ollama's and llama.cpp's documentation."""
    assert parse(text) == name


def test_hf_flag() -> None:
    """`-hf`: the bare repository is meant for the Hub; `-hff` wins over a quant (llama-server's help)."""
    assert parse_hub("u/r:Q8_0") == HubName("u/r", "Q8_0")
    assert parse_hub("hf.co/u/r:Q8_0") == HubName("u/r", "Q8_0")
    assert parse_hub("u/r:Q8_0", "a/b.gguf") == HubName("u/r", "", "a/b.gguf")
    assert parse_model_url("https://huggingface.co/u/r/resolve/main/a.gguf") == HubName("u/r", "", "a.gguf")
    assert isinstance(parse_model_url("https://huggingface.co/u/r/resolve/v2/a.gguf"), UrlName)


@pytest.mark.parametrize(
    "text", ["hf.co/u", "hf.co/u/r:", "hf.co/../r", "hf.co/u/..", "hf.co/u/r/x.txt", "hf.co/u/a..b"]
)
def test_invalid_hub_names(text: str) -> None:
    """The Hub's own rules for repositories, and our own for what can follow."""
    with pytest.raises(NameResolutionError):
        parse(text)


def test_other_kinds() -> None:
    """Paths, addresses, blobs, built-in models; an address's text hides signature and password."""
    assert parse("./x.gguf") == PathName("./x.gguf")
    assert parse("dir/x.GGUF") == PathName("dir/x.GGUF")
    assert parse("demo") == BuiltinName("demo")
    assert parse("sha256:" + "a" * 64) == BlobName(Digest("a" * 64))
    url = parse("https://user:secret@h.example/d/m.gguf?sig=abc")
    assert isinstance(url, UrlName)
    assert str(url) == "https://h.example/d/m.gguf"
    assert url.file_name == "m.gguf"
    assert url.stored.host == "h.example"
    local = parse("127.0.0.1:5000/library/tiny")
    assert isinstance(local, OllamaName)
    assert local.base_url == "http://127.0.0.1:5000/v2/library/tiny"


@given(st.text(max_size=40))
def test_names_never_lead_out_of_a_folder(text: str) -> None:
    """Whatever is accepted has four path parts without separators, none of them `.` or `..`."""
    try:
        name = parse(text)
    except NameResolutionError:
        return
    if isinstance(name, OllamaName | HubName):
        for part in name.parts:
            assert part not in ("", ".", "..")
            assert not set(part) & set("/\\\0")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "../a",
        "a/../b",
        "a//b",
        "a/./b",
        "a\\b",
        "C:/a",
        "a\0b",
        "a\nb",
        "a/",
        "x.",
        "x ",
        "\x85",
        "a/" * 40 + "b",
    ],
)
def test_unsafe_paths(path: str) -> None:
    """Ways out of a folder on Linux, macOS or Windows."""
    with pytest.raises(NameResolutionError, match="not a safe path"):
        check_subpath(path)


def test_safe_paths() -> None:
    """Names that repositories really have."""
    for path in ("m.gguf", "UD-Q4_K_XL/model-00001-of-00002.gguf", "a b/Modell ü.gguf", "..a", "a...b"):
        assert check_subpath(path) == path


@given(st.text(max_size=80))
@example("sha256:" + "A" * 64)
@example("sha256:" + "a" * 64 + "\n")
@example("sha256-" + "a" * 64)
@example("sha256:" + "../" * 20 + "aaaa")
def test_a_digest_is_strict(text: str) -> None:
    """CVE-2024-37032: nothing but `sha256:` and 64 lower-case hexadecimal digits."""
    good = len(text) == 71 and text.startswith("sha256:") and set(text[7:]) <= set("0123456789abcdef")
    if good:
        assert str(Digest.parse(text)) == text
    else:
        with pytest.raises(BadAnswer):
            Digest.parse(text)


def test_digest_constructors_check_too() -> None:
    """No way around the check."""
    for bad in ("", "a" * 63, "A" * 64, "../../etc/passwd"):
        with pytest.raises(BadAnswer):
            Digest(bad)
        with pytest.raises(BadAnswer):
            GitOid(bad)
