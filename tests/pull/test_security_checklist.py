"""The security checklist for pulls, entry by entry: what each known way in would have to do here, and that it does not.

The entries and the reports that they come from: CVE-2024-37032 and ollama#17178 (digests as paths), ollama#10750
(tokens to other hosts), ollama#16236 (the pull API as a way into a network; over HTTP it is in test_ollama.py),
ollama#13223 (paths in errors), llama.cpp#25378 and CVE-2026-7482 (hostile GGUF files). Details of each rule are tested
where the rule is; here every entry is tried from outside: by a command, a name, a server.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.registry import FakeSource, Faults, Running, running
from ftgguf.pull import commands
from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import BadAnswer, NameResolutionError, PullError, Refused
from ftgguf.pull.hub import pull_hub
from ftgguf.pull.manifest import encode_manifest, parse_manifest
from ftgguf.pull.names import HubName, OllamaName, check_subpath, parse
from ftgguf.pull.registry import pull_ollama
from ftgguf.pull.session import Session
from ftgguf.pull.store import Store, name_of

ROOT = Path(__file__).parents[2]
WEIGHTS = random.Random(3).randbytes(300_000)
MODEL = "application/vnd.ollama.image.model"
Make = Callable[..., Session]

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def model(source: FakeSource, server: Running, stories: bytes) -> str:
    """The name of a good model at the fake registry."""
    source.add_model("library/tiny:latest", [("model", stories), ("template", b"{{ .Prompt }}")])
    return f"{server.host}/library/tiny:latest"


@pytest.fixture(scope="session")
def stories() -> bytes:
    from ftgguf.pull.demo import resolve_stories

    return resolve_stories().read_bytes()


def tree(folder: Path) -> set[str]:
    """Every file below `folder`, by its path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def manifest(digest: str = "sha256:" + "a" * 64, **fields: object) -> bytes:
    layer = {"mediaType": MODEL, "digest": digest, "size": 10, **fields}
    config = {"mediaType": "c", "digest": "sha256:" + "c" * 64, "size": 2}
    return json.dumps({"schemaVersion": 2, "config": config, "layers": [layer]}).encode()


# ------------------------------------------------------------------------------------------------ paths from outside

DIGESTS = (
    "sha256:../../../../../../tmp/evil",
    "sha256-" + "a" * 64,
    "sha256:" + "a" * 63,
    "sha256:" + "a" * 64 + "/../x",
    "sha256:" + "A" * 64,
    "sha256:" + "a" * 64 + "\n",
    "../" + "a" * 64,
    "",
)


@pytest.mark.parametrize("digest", DIGESTS)
def test_traversal_by_digest(
    digest: str, home: Path, source: FakeSource, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """CVE-2024-37032, ollama#17178. In a registry's manifest, and in one that lies in Ollama's store on this disk."""
    source.faults.manifest = manifest(digest)
    assert commands.pull([model]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("Error: ")
    assert not source.requests("/blobs/")
    planted = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "evil" / "latest"
    planted.parent.mkdir(parents=True)
    (home / ".ollama" / "models" / "blobs").mkdir()
    planted.write_bytes(manifest(digest))
    assert [str(entry.name) for entry in Store().entries()] == []
    assert commands.show(["evil"]) == 1
    with pytest.raises(BadAnswer):
        Digest.parse(digest)


@pytest.mark.parametrize(
    "path",
    [
        "../x.gguf",
        "/x.gguf",
        "a/../../x.gguf",
        "a\\x.gguf",
        "C:x.gguf",
        "a\x00.gguf",
        "a\x1b.gguf",
        "a//x.gguf",
        "./x.gguf",
    ],
)
def test_traversal_by_file_name(path: str, source: FakeSource, session: Make, home: Path) -> None:
    """In the Hub's tree, in a manifest's layer, and by a link that was laid into the store."""
    with pytest.raises(NameResolutionError):
        check_subpath(path)
    source.add_repo("user/repo", {"good-Q4_K_M.gguf": b"GGUF"})
    source.faults.tree = json.dumps([{"type": "file", "path": path, "size": 4, "oid": "a" * 40}]).encode()
    with pytest.raises((BadAnswer, NameResolutionError)):
        pull_hub(session(), HubName("user/repo"))
    with pytest.raises(BadAnswer):
        parse_manifest(manifest(name=path))
    assert not source.requests("/resolve/")
    assert tree(home) <= {name for name in tree(home) if name.startswith("store/")}


def test_a_link_in_the_store_is_not_followed_out_of_it(
    source: FakeSource, session: Make, home: Path, stories: bytes
) -> None:
    """manifests/ and files/ replaced by links to another folder: nothing is written there."""
    outside = home / "outside"
    outside.mkdir()
    source.add_repo("user/repo", {"m-Q4_K_M.gguf": stories})
    for name in ("manifests", "files"):
        current = session()
        shutil.rmtree(current.store.root, ignore_errors=True)
        current.store.root.mkdir(parents=True)
        (current.store.root / name).symlink_to(outside)
        with pytest.raises(PullError, match="leads out of it"):
            current.store.model_path(pull_hub(current, HubName("user/repo")))
        assert tree(outside) == set()


@given(st.text(max_size=60) | st.from_regex(r"\A[a-z./:@\\%-]{1,40}\Z"))
def test_name_parts(text: str) -> None:
    """Whatever is accepted stays below the store as a path, and at its host with its four parts as an address."""
    try:
        name = parse(text)
    except NameResolutionError:
        return
    if not isinstance(name, OllamaName | HubName):
        return
    root = Path("/store/manifests")
    path = root.joinpath(*name.parts)
    assert Path(os.path.normpath(path)) == path
    assert path.parts[:3] == ("/", "store", "manifests")
    assert len(path.parts) == 7
    assert name_of(name.parts) is not None
    if isinstance(name, OllamaName):
        try:
            parts = urlsplit(name.base_url)
            port = parts.port
        except ValueError:  # `a:b:c` is a host by Ollama's grammar, and no address: nothing can be asked there
            return
        assert parts.username is None
        assert parts.path == f"/v2/{name.namespace}/{name.model}"
        assert not parts.query
        assert not parts.fragment
        assert (parts.hostname or "") + (f":{port}" if port is not None else "") in (
            name.host.lower(),
            name.host.lower().rstrip(":"),
        )


# -------------------------------------------------------------------------------------------------------- content


def test_digest_mismatch(source: FakeSource, session: Make, server: Running) -> None:
    """Hashed while it streams: a blob has its name only when every byte is right, and the size is the manifest's."""
    source.add_model("library/big:latest", [("model", WEIGHTS)])
    digest = Digest.of(WEIGHTS)
    current = session()
    name = parse(f"{server.host}/library/big")
    assert isinstance(name, OllamaName)
    seen: list[bool] = []
    current.report = lambda event: seen.append(current.store.blob_path(digest).exists()) if (
        event.digest == str(digest) and 0 < event.completed < event.total) else None  # fmt: skip
    current.client.notice = lambda _line: None
    source.faults.pause = 0.02
    pull_ollama(current, name)
    assert seen
    assert not any(seen)
    current.store.delete(name)
    for faults in (Faults(flip=-1), Faults(ranges="ignored", flip=-1)):
        source.faults = faults
        with pytest.raises(PullError, match="digest mismatch"):
            pull_ollama(current, name)
        assert current.store.find_blob(digest) is None
        assert current.store.entries() == []
    source.faults = Faults()
    body = json.loads(source.manifests["library/big:latest"])
    body["layers"][0]["size"] += 1
    source.faults.manifest = json.dumps(body).encode()
    with pytest.raises(PullError, match="announced"):
        pull_ollama(current, name)
    assert current.store.find_blob(digest) is None


# -------------------------------------------------------------------------------------------------------- network


def test_token_to_another_host(source: FakeSource, session: Make, server: Running, stories: bytes) -> None:
    """ollama#10750: scheme, host and port must be those it was given for. Here the other origin is another port."""
    source.add_repo("user/repo", {"m-Q4_K_M.gguf": stories})
    with running(FakeSource()) as elsewhere:
        elsewhere.source.add_repo("user/repo", {"m-Q4_K_M.gguf": stories})
        target = f"{elsewhere.url}/user/repo/resolve/main/m-Q4_K_M.gguf"
        source.faults = Faults(need_bearer="hf_secret", redirect=target)
        pull_hub(session(hf_token="hf_secret"), HubName("user/repo"))
        asked = elsewhere.source.requests("/resolve/")
        assert asked
        assert all("authorization" not in seen.headers for seen in elsewhere.source.seen)
        assert all(seen.headers["authorization"] == "Bearer hf_secret" for seen in source.seen)
        # a challenge that sends to another port of the same host is the host's own affair; to another host it is not
        source.add_model("library/tiny:latest", [("model", stories)])
        source.faults = Faults(need_token=True, realm=f"http://{server.other}/token")
        name = parse(f"{server.host}/library/tiny")
        assert isinstance(name, OllamaName)
        with pytest.raises(Refused, match="another host"):
            pull_ollama(session(), name)
        assert not source.requests("/token")


def test_downgrade(
    source: FakeSource, server: Running, session: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An https source that redirects to plain http is refused, although the target is this machine; --insecure does
    not change that."""
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key", "-out", tmp_path / "pem"],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("needs the openssl command to make a certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pem"))
    source.add_model("library/tiny:latest", [("model", WEIGHTS)])
    with running(FakeSource(), tls=(tmp_path / "key", tmp_path / "pem")) as secure:
        secure.source.add_model("library/tiny:latest", [("model", WEIGHTS)])
        digest = Digest.of(WEIGHTS)
        secure.source.faults.redirect = "downgrade"
        for insecure in (False, True):
            options = replace(session().options, insecure=insecure)
            with pytest.raises(Refused, match="from https to plain http"):
                session(options=options).fetch(f"{secure.url}/v2/library/tiny/blobs/{digest}", digest, len(WEIGHTS))
    assert source.seen == []


def test_oversized_answers(source: FakeSource, model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """1 MiB of manifest, 64 layers, 32 MiB of tree, JSON nested without end: each ends in one line, soon."""
    many = json.loads(manifest())
    many["layers"] = many["layers"] * 65
    for faults in (
        Faults(manifest_padding=1 << 30),
        Faults(manifest=json.dumps(many).encode()),
        Faults(manifest=b'{"config":' * 50_000),
        Faults(manifest=b'{"source":' + b"[" * 500_000),
    ):
        source.faults = faults
        assert commands.pull([model]) == 1
        assert len(capfd.readouterr().err.splitlines()[-1]) < 400
    source.add_repo("user/repo", {"m-Q4_K_M.gguf": b"GGUF"})
    for answer in (b'["' + b"a" * (33 << 20) + b'"]', b"[" * 1_000_000, b'[{"path":' * 100_000):
        source.faults = Faults(tree=answer)
        assert commands.pull(["hf.co/user/repo"]) == 1
        assert len(capfd.readouterr().err.splitlines()[-1]) < 400
    assert not source.requests("/blobs/|/resolve/")


def test_disk_fill(
    source: FakeSource, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing large is begun that the disk cannot hold; a manifest that claims terabytes costs no byte."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 30))
    huge = [{"mediaType": MODEL, "digest": f"sha256:{no:064x}", "size": 1 << 40} for no in range(8)]
    good = json.loads(source.manifests["library/tiny:latest"])
    source.faults.manifest = json.dumps(good | {"layers": huge}).encode()
    assert commands.pull([model]) == 1
    assert "needs 8.8 TB more and" in capfd.readouterr().err
    assert len(source.requests("/blobs/")) == 1  # the config, 24 bytes
    source.faults.manifest = json.dumps(good | {"layers": huge * 8}).encode()
    assert commands.pull([model]) == 1


def test_path_leak_in_errors(source: FakeSource, model: str, home: Path, session: Make) -> None:
    """ollama#13223: what can go out over HTTP names models, hosts and digests, never folders of this machine."""
    name = parse(model)
    assert isinstance(name, OllamaName)
    told: list[str] = []

    def failing(store: Store) -> None:
        with pytest.raises(PullError) as caught, Session(store, session().options) as current:
            current.store.model_path(pull_ollama(current, name))
        told.append(str(caught.value))

    (home / "file").write_text("no folder")
    failing(Store(home / "file"))
    failing(Store(home / "file" / "below"))
    for faults in (Faults(flip=-1), Faults(cut=-1, cut_at=0.0), Faults(statuses=[404] * 9), Faults(compress=True)):
        source.faults = faults
        failing(Store(home / "store"))
    source.faults = Faults()
    store = Store(home / "store")
    with Session(store, session().options) as current:
        entry = pull_ollama(current, name)
    for layer in entry.manifest.layers:
        store.blob_path(layer.digest).unlink()
    with pytest.raises(PullError) as caught:
        store.model_path(entry)
    told.append(str(caught.value))
    assert len(told) == 7
    assert not [line for line in told if str(home) in line or "store/" in line or "/tmp" in line], told


# -------------------------------------------------------------------------------------------------------- hostile files


def test_malicious_gguf(
    source: FakeSource, session: Make, server: Running, stories: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the Hub it gets no name and no place; from a registry it is stored as any content is, and every command
    that opens it ends with one line: the header is checked before anything is made of it."""
    hostile = {
        "strings": b"GGUF\x03\0\0\0" + (1).to_bytes(8, "little") + (1 << 60).to_bytes(8, "little"),
        "counts": b"GGUF\x03\0\0\0" + b"\xff" * 16 + b"\0" * 64,
        "cut": stories[:700],
        "flipped": bytes(b ^ 0xFF if 24 <= i < 90 else b for i, b in enumerate(stories[:4000])),
    }
    for what, data in hostile.items():
        source.add_repo("user/repo", {"m-Q4_K_M.gguf": data})
        current = session()
        with pytest.raises(BadAnswer, match="not a usable GGUF file"):
            pull_hub(current, HubName("user/repo"))
        assert current.store.entries() == []
        source.add_model(f"library/bad:{what}", [("model", data)])
        name = parse(f"{server.host}/library/bad:{what}")
        assert isinstance(name, OllamaName)
        path = current.store.model_path(pull_ollama(current, name))
        assert commands.show([str(path)]) == 1
        out, err = capfd.readouterr()
        assert (out, len(err.splitlines())) == ("", 1), err
        current.store.delete(name)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
    ids=["internals", "endless", "huge", "files"],
)
def test_malicious_template(template: str) -> None:
    """The file's own template, as a pulled model brings it: the chat ends in one line, with status 1."""
    command = [sys.executable, "-m", "ftgguf", "run", "stories", "hi", "-t", "1", "-n", "4"]
    command += ["--override-kv", f"tokenizer.chat_template=str:{template}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    assert "root:" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_manifest_of_our_own_says_nothing_of_this_machine(source: FakeSource, session: Make, stories: bytes) -> None:
    """What is stored beside a pulled model (and copied with the store) names its source, not a folder or a token."""
    source.add_repo("user/repo", {"m-Q4_K_M.gguf": stories})
    entry = pull_hub(session(hf_token="hf_secret"), HubName("user/repo"))
    assert b"hf_secret" not in entry.manifest.raw
    assert str(Path.home()).encode() not in entry.manifest.raw
    assert encode_manifest(entry.manifest.config, list(entry.manifest.layers), entry.manifest.source) == (
        entry.manifest.raw
    )
