"""Pulls from the fake Ollama registry: protocol, progress, faults, and what a hostile registry may not do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compat.registry import FAST, FakeSource, Faults, Running
from compat.registry.app import MANIFEST_TYPE
from ftgguf.pull import account
from ftgguf.pull.client import NetOptions
from ftgguf.pull.digest import Digest
from ftgguf.pull.errors import (
    BadAnswer,
    Cancelled,
    NoSpace,
    NotFound,
    PullError,
    Refused,
    Unauthorized,
    Unreachable,
    Unsupported,
)
from ftgguf.pull.names import OllamaName
from ftgguf.pull.registry import pull_ollama
from ftgguf.pull.resolve import locate
from ftgguf.pull.session import Event, Session
from ftgguf.pull.store import Store

pytestmark = pytest.mark.usefixtures("home")
Make = Callable[..., Session]
WEIGHTS = bytes(range(256)) * 2000
LAYERS = [
    ("model", WEIGHTS),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"temperature":0.6,"stop":["<|im_end|>"]}'),
    ("license", b"Apache License\nVersion 2.0"),
]


@pytest.fixture
def name(source: FakeSource, server: Running) -> OllamaName:
    source.add_model("library/tiny:latest", LAYERS)
    source.add_model("library/tiny:q8", LAYERS)
    return OllamaName(server.host, "library", "tiny", "latest", "http")


def test_a_pull_in_ollamas_words(name: OllamaName, session: Make, source: FakeSource, store: Store) -> None:
    """Status lines in the order of Ollama's PullModel; the manifest is kept byte for byte; blobs have their hashes."""
    events: list[Event] = []
    entry = pull_ollama(session(events.append), name)
    order = list(dict.fromkeys(event.status for event in events))
    model = Digest.of(WEIGHTS)
    assert order[0] == "pulling manifest"
    assert f"pulling {model.short}" in order
    assert order[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    last = [event for event in events if event.digest == str(model)][-1]
    assert last.total == last.completed == len(WEIGHTS)
    raw = source.manifests["library/tiny:latest"]
    assert store.root.joinpath("manifests", *name.parts).read_bytes() == raw
    assert entry.id == Digest.of(raw).short
    assert store.model_path(entry).read_bytes() == WEIGHTS
    for path in (store.root / "blobs").iterdir():
        assert path.name == Digest.of(path.read_bytes()).file_name
    assert source.requests("manifests")[0].headers["accept"] == MANIFEST_TYPE
    assert source.requests("manifests")[0].headers["user-agent"].startswith("ftgguf/")


def test_nothing_is_fetched_twice(name: OllamaName, session: Make, source: FakeSource) -> None:
    """A second pull asks for the manifest only; another tag with the same layers for its manifest only."""
    pull_ollama(session(), name)
    source.seen.clear()
    pull_ollama(session(), name)
    pull_ollama(session(), replace(name, tag="q8"))
    assert [seen.path for seen in source.seen] == ["/v2/library/tiny/manifests/latest", "/v2/library/tiny/manifests/q8"]
    source.seen.clear()
    assert locate(session(), name).path.read_bytes() == WEIGHTS
    assert source.seen == []


def test_an_update_removes_what_only_the_old_version_had(name: OllamaName, session: Make, source: FakeSource) -> None:
    """Re-pull after the tag moved: Ollama says 'removing unused layers'."""
    before = pull_ollama(session(), name)
    source.add_model("library/tiny:latest", [("model", b"GGUF" + WEIGHTS), *LAYERS[1:]])
    events: list[Event] = []
    current = session(events.append)
    pull_ollama(current, name)
    assert "removing unused layers" in [event.status for event in events]
    assert current.store.find_blob(before.manifest.model[0].digest) is None
    assert current.store.find_blob(before.manifest.of_kind("license")[0].digest) is not None


def test_ollamas_own_store_is_read_and_not_written(
    name: OllamaName, session: Make, source: FakeSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OLLAMA_MODELS: a model there needs no network; a blob there is not fetched; nothing there changes."""
    ollama = home / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama))
    blobs = ollama / "blobs"
    blobs.mkdir(parents=True)
    (blobs / Digest.of(WEIGHTS).file_name).write_bytes(WEIGHTS)
    manifest = ollama.joinpath("manifests", *replace(name, tag="there").parts)
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(source.manifests["library/tiny:latest"])
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in ollama.rglob("*")}
    own = Session(Store(home / "store"), FAST)
    entry = pull_ollama(own, name)
    assert not source.requests(Digest.of(WEIGHTS).hex)
    assert own.store.model_path(entry).is_relative_to(ollama)
    source.seen.clear()
    found = locate(own, replace(name, tag="there"))
    assert found.origin == "in Ollama's store"
    with pytest.raises(PullError, match="ollama rm"):
        own.store.delete(replace(name, tag="there"))
    own.store.delete(name)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in ollama.rglob("*")} == before
    own.client.close()


def test_unknown_tag_names_near_ones(name: OllamaName, session: Make) -> None:
    """404 with the tags that exist (registry API v2, tags/list)."""
    with pytest.raises(NotFound, match=r"no such model or tag.*near it: latest"):
        pull_ollama(session(), replace(name, tag="lates"))


@pytest.mark.parametrize(
    ("statuses", "error"),
    [([500] * 9, Unreachable), ([429] * 9, Unreachable), ([418], BadAnswer), ([403], Unauthorized)],
)
def test_manifest_errors(
    name: OllamaName, session: Make, source: FakeSource, statuses: list[int], error: type[PullError]
) -> None:
    """Each has one line; nothing is written."""
    source.faults.meta_statuses = statuses
    current = session()
    with pytest.raises(error):
        pull_ollama(current, name)
    assert current.store.entries() == []


def test_retry_after_is_obeyed_and_said(name: OllamaName, session: Make, source: FakeSource) -> None:
    """429 once with Retry-After: 0, then all is well."""
    source.faults = Faults(meta_statuses=[429, 503], retry_after="0")
    events: list[Event] = []
    pull_ollama(session(events.append), name)
    assert any("429" in event.status and "trying again" in event.status for event in events)


# -------------------------------------------------------------------------------------------------------------- auth


def test_token_dance(name: OllamaName, session: Make, source: FakeSource) -> None:
    """401, a token from the realm with service, scope, time and nonce, then the Bearer token (Docker's token spec)."""
    source.faults.need_token = True
    pull_ollama(session(), name)
    asked = source.requests("/token")
    assert len(asked) == 1
    assert "authorization" not in asked[0].headers  # no key on this machine


def test_token_request_is_signed_with_the_key(name: OllamaName, session: Make, source: FakeSource, home: Path) -> None:
    """With ~/.ollama/id_ed25519 the request carries `public key:signature`; ssh-keygen made the key."""
    (home / ".ollama").mkdir()
    key = home / ".ollama" / "id_ed25519"
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    except FileNotFoundError:
        pytest.skip("no ssh-keygen here")
    source.faults.need_token = True
    pull_ollama(session(), name)
    public, _, signature = source.requests("/token")[0].headers["authorization"].partition(":")
    assert public == key.with_suffix(".pub").read_text().split()[1]
    assert len(signature) == 88


def test_ed25519_against_rfc_8032() -> None:
    """Section 7.1, tests 1 and 3."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert account.ed25519_sign(seed, b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe"
        "24655141438e7a100b"
    )
    seed = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
    assert account.ed25519_sign(seed, bytes.fromhex("af82")).hex() == (
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed2"
        "8dc027beceea1ec40a"
    )


def test_token_never_goes_to_another_host(name: OllamaName, session: Make, source: FakeSource, server: Running) -> None:
    """The realm must be on the host that asked (ollama#10750); a redirect's target gets no Authorization."""
    source.faults = Faults(need_token=True, realm=f"http://{server.other}/token")
    with pytest.raises(Refused, match="another host"):
        pull_ollama(session(), name)
    assert not source.requests("/token")
    source.faults = Faults(need_token=True, redirect="cross")
    pull_ollama(session(), name)
    followed = source.requests("/cdn/")
    assert followed
    assert all("authorization" not in seen.headers for seen in followed)
    assert {seen.host for seen in followed} == {server.other}
    assert all("authorization" in seen.headers for seen in source.requests("/blobs/")[1:])


def test_refused_token(name: OllamaName, session: Make, source: FakeSource) -> None:
    """The message names the key that would help."""
    source.faults = Faults(need_token=True, token_status=401)
    with pytest.raises(Unauthorized, match="id_ed25519"):
        pull_ollama(session(), name)


# ----------------------------------------------------------------------------------------------------------- hostile


def _manifest(**change: object) -> bytes:
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'a' * 64}", "size": 10}
    body = {"schemaVersion": 2, "config": layer | {"mediaType": "c"}, "layers": [layer]}
    return json.dumps(body | change).encode()


_LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'b' * 64}", "size": 10}


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"null",
        b"[]",
        b"{" * 100_000,
        b"[" * 900_000,
        b"\xff\xfe",
        b'{"layers":' * 1000,
        _manifest(layers=[_LAYER | {"digest": "sha256:../../../../etc/passwd"}]),
        _manifest(layers=[_LAYER | {"digest": "sha256:" + "A" * 64}]),
        _manifest(layers=[_LAYER | {"digest": "md5:" + "a" * 32}]),
        _manifest(layers=[_LAYER | {"size": -1}]),
        _manifest(layers=[_LAYER | {"size": 1 << 62}]),
        _manifest(layers=[_LAYER | {"size": "10"}]),
        _manifest(layers=[_LAYER | {"size": 1 << 80}]),
        _manifest(layers=[_LAYER | {"mediaType": "application/vnd.ollama.image.template", "size": 1 << 30}]),
        _manifest(layers=[_LAYER | {"name": "../../x"}]),
        _manifest(layers=[_LAYER] * 65),
        _manifest(layers=[_LAYER, _LAYER | {"size": 11}]),
        _manifest(layers=7),
    ],
    ids=range(19),
)
def test_hostile_manifests(name: OllamaName, session: Make, source: FakeSource, home: Path, manifest: bytes) -> None:
    """Refused with one line before anything is fetched or written outside the store (CVE-2024-37032 among them)."""
    source.faults.manifest = manifest
    with pytest.raises(BadAnswer) as caught:
        pull_ollama(session(), name)
    assert len(str(caught.value)) < 400
    assert not source.requests("/blobs/")
    assert {path.name for path in home.iterdir()} <= {"store"}


def test_an_endless_manifest_is_cut_off(name: OllamaName, session: Make, source: FakeSource) -> None:
    """1 GiB of manifest: reading ends at its limit."""
    source.faults.manifest_padding = 1 << 30
    with pytest.raises(BadAnswer, match="sent more than the 1048576 bytes"):
        pull_ollama(session(), name)


def test_a_blob_with_another_content_never_gets_its_name(name: OllamaName, session: Make, source: FakeSource) -> None:
    """The registry sends other bytes of the right length: no blob, no manifest."""
    digest = str(Digest.of(WEIGHTS))
    source.blobs[digest] = b"x" * len(WEIGHTS)
    current = session()
    with pytest.raises(PullError, match="digest mismatch"):
        pull_ollama(current, name)
    assert current.store.find_blob(Digest.of(WEIGHTS)) is None
    assert current.store.entries() == []


def test_what_cannot_run_is_known_from_the_config(name: OllamaName, session: Make, source: FakeSource) -> None:
    """Cloud stubs and safetensors are refused before their weights are fetched."""
    source.add_model("library/tiny:latest", LAYERS, {"remote_host": "https://ollama.com", "remote_model": "x"})
    with pytest.raises(Unsupported, match="remote models"):
        pull_ollama(session(), name)
    source.add_model("library/tiny:latest", LAYERS, {"model_format": "safetensors"})
    with pytest.raises(Unsupported, match="not GGUF"):
        pull_ollama(session(), name)
    source.add_model("library/tiny:latest", LAYERS[1:])
    with pytest.raises(Unsupported, match="no model layer"):
        pull_ollama(session(), name)
    assert not source.requests(Digest.of(WEIGHTS).hex)


def test_plain_http_to_other_machines_needs_leave(source: FakeSource, session: Make) -> None:
    """`http://` names: this machine only, unless --insecure (192.0.2.1 is a documentation address: never reached)."""
    other = OllamaName("192.0.2.1:5000", "library", "tiny", "latest", "http")
    with pytest.raises(Refused, match="plain http"):
        pull_ollama(session(), other)
    quick = NetOptions(insecure=True, connect=0.2, tries=1, backoff=0.01)
    with pytest.raises(Unreachable):
        pull_ollama(session(options=quick), other)


def test_hosts_that_may_be_asked(name: OllamaName, session: Make, source: FakeSource) -> None:
    """The list for pulls that come in over HTTP (ollama#16236)."""
    with pytest.raises(Refused, match="--pull-hosts"):
        pull_ollama(session(hosts=("registry.ollama.ai",)), name)
    assert source.seen == []
    pull_ollama(session(hosts=(name.host,)), name)


def test_space_for_the_whole_model_is_checked_first(
    name: OllamaName, session: Make, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers together, before the first large one."""
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=(64 << 20) + len(WEIGHTS) // 2))
    with pytest.raises(NoSpace, match=r"needs 512 KB"):
        pull_ollama(session(), name)
    assert not source.requests(Digest.of(WEIGHTS).hex)


# ------------------------------------------------------------------------------------------------------- concurrency


def test_several_threads_one_download(name: OllamaName, session: Make, source: FakeSource) -> None:
    """Four pulls at once: each byte is asked for once, all see progress to the end."""
    source.faults.pause = 0.01
    events: list[list[Event]] = [[] for _ in range(4)]
    sessions = [session(each.append) for each in events]
    threads = [threading.Thread(target=pull_ollama, args=(each, name)) for each in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(each[-1].status == "success" for each in events)
    config = source.manifests["library/tiny:latest"]
    total = sum(layer["size"] for layer in (*json.loads(config)["layers"], json.loads(config)["config"]))
    assert source.bytes_asked() == total
    assert list((sessions[0].store.root / "locks").iterdir()) == []
    assert list((sessions[0].store.root / "partial").iterdir()) == []


_CHILD = """
import sys
from pathlib import Path
from compat.registry import FAST
from ftgguf.pull.names import OllamaName
from ftgguf.pull.registry import pull_ollama
from ftgguf.pull.session import Session
from ftgguf.pull.store import Store
with Session(Store(Path(sys.argv[1])), FAST) as session:
    pull_ollama(session, OllamaName(sys.argv[2], "library", "tiny", "latest", "http"))
"""


def test_several_processes_one_download(name: OllamaName, source: FakeSource, store: Store) -> None:
    """Two processes on one store."""
    source.faults.pause = 0.02
    command = [sys.executable, "-c", _CHILD, str(store.root), name.host]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(child.communicate(timeout=60)[1], child.returncode) for child in children] == [(b"", 0)] * 2
    assert len(source.requests(Digest.of(WEIGHTS).hex)) == -(-len(WEIGHTS) // FAST.segment)


def test_the_waiter_takes_over(name: OllamaName, session: Make, source: FakeSource) -> None:
    """The one that downloads gives up; the one that waits goes on from there."""
    source.faults.pause = 0.05
    seen = threading.Event()

    def give_up(event: Event) -> None:
        if event.digest == str(Digest.of(WEIGHTS)) and event.completed:
            seen.set()
            if event.completed > len(WEIGHTS) // 3:
                raise Cancelled("enough")

    def first() -> None:
        with pytest.raises(Cancelled):
            pull_ollama(session(give_up), name)

    thread = threading.Thread(target=first)
    thread.start()
    assert seen.wait(20)
    entry = pull_ollama(session(), name)
    thread.join(20)
    assert Store(session().store.root).model_path(entry).read_bytes() == WEIGHTS
