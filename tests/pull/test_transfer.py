"""One file from the fake source, with every fault; what is under test is real HTTP on loopback."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compat.registry import FAST, FakeSource, Faults, Running, running, speed
from ftgguf.pull import body as body_module
from ftgguf.pull import transfer as transfer_module
from ftgguf.pull.client import Client, NetOptions
from ftgguf.pull.digest import Digest, GitOid
from ftgguf.pull.errors import (
    BadAnswer,
    Cancelled,
    DigestMismatch,
    NoSpace,
    NotFound,
    Offline,
    PullError,
    Refused,
    Unauthorized,
    Unreachable,
)
from ftgguf.pull.journal import Spans
from ftgguf.pull.transfer import Item, Transfer

DATA = random.Random(7).randbytes(1_000_003)
DIGEST = Digest.of(DATA)

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(params=[False, True], ids=["parser", "socket"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to read a body: by the HTTP parser, and past it as bodies of 1 MiB and more are."""
    if request.param:
        monkeypatch.setattr(body_module, "_DIRECT", 1)


Get = Callable[..., tuple[Transfer, list[str]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "partial"
    path.mkdir()
    return path


@pytest.fixture
def get(source: FakeSource, server: Running, folder: Path) -> Get:
    """`get(faults, options)` downloads DATA and returns the transfer and what was said about pauses."""
    source.add_blob(DATA)

    def run(faults: Faults | None = None, options: NetOptions = FAST, **item: object) -> tuple[Transfer, list[str]]:
        source.faults = faults or Faults()
        said: list[str] = []
        fields = {"url": f"{server.url}/v2/a/b/blobs/{DIGEST}", "label": "blob", "size": len(DATA), "check": DIGEST}
        with Client(options) as client:
            client.notice = said.append
            transfer = Transfer(client, Item(**(fields | item)), folder, "key", lambda _done, _total: None)  # type: ignore[arg-type]
            assert transfer.run() == (DIGEST, len(DATA))
        assert transfer.partial.read_bytes() == DATA
        assert not transfer.journal.exists()
        return transfer, said

    return run


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(redirect="same"),
        Faults(redirect="cross"),
        Faults(redirect="cross", expire_cdn=3),
        Faults(ranges="ignored"),
        Faults(ranges="wrong"),
        Faults(ranges="shifted"),
        Faults(ranges="short"),
        Faults(ranges="refused"),
        Faults(no_length=True),
        Faults(cut=5, cut_at=0.3),
        Faults(cut=3, cut_at=0.0),
        Faults(stall=2),
        Faults(drip=1),
        Faults(extra=2),
        Faults(flip=1),
        Faults(statuses=[503, 429, 500, 502, 504]),
        Faults(ranges="ignored", cut=2),
        Faults(ranges="ignored", flip=1),
        Faults(no_length=True, cut=1),
    ],
    ids=lambda faults: ",".join(f"{k}={v}" for k, v in vars(faults).items() if v != getattr(Faults(), k)) or "none",
)
@pytest.mark.usefixtures("way")
def test_faults_that_pass(get: Get, faults: Faults) -> None:
    """Each fault of the network, a server or a proxy ends in the right bytes, by hash and by comparison."""
    get(replace(faults, statuses=list(faults.statuses)))


@pytest.mark.parametrize(
    ("faults", "error", "words"),
    [
        (Faults(flip=-1), DigestMismatch, "mismatch twice: want sha256"),
        (Faults(cut=-1, cut_at=0.0), Unreachable, "gave up after 6 tries"),
        (Faults(stall=-1, stall_seconds=1.0, cut_at=0.0), Unreachable, "stalled"),
        (Faults(statuses=[503] * 50), Unreachable, "503"),
        (Faults(statuses=[429] * 50, retry_after="7200"), Unreachable, "asks to wait 7200 s"),
        (Faults(statuses=[404] * 9), NotFound, "does not have it"),
        (Faults(statuses=[401] * 9), Unauthorized, "token"),
        (Faults(statuses=[403] * 9), Unauthorized, "token"),
        (Faults(statuses=[418] * 9), BadAnswer, "418"),
        (Faults(compress=True), BadAnswer, "compressed"),
        (Faults(redirect="loop"), BadAnswer, "redirects more than"),
        (Faults(redirect="ftp://127.0.0.1/x"), Refused, "refused"),
        (Faults(redirect="http://192.0.2.1/x"), Refused, "plain http"),
        (Faults(redirect="http://user:pass@127.0.0.1/x"), Refused, "refused"),
    ],
    ids=lambda value: (
        ",".join(f"{k}={v}" for k, v in vars(value).items() if v != getattr(Faults(), k))[:40]
        if isinstance(value, Faults)
        else ""
    ),
)
@pytest.mark.usefixtures("way")
def test_faults_that_end_it(get: Get, folder: Path, faults: Faults, error: type[PullError], words: str) -> None:
    """One line with the cause; nothing but the partial file and its journal is left."""
    with pytest.raises(error, match=words) as caught:
        get(replace(faults, statuses=list(faults.statuses)))
    assert "\n" not in str(caught.value)
    assert str(folder) not in str(caught.value)
    assert {path.name for path in folder.iterdir()} <= {"key", "key.json"}


def test_ranges_are_parallel_and_ask_for_each_byte_once(get: Get, source: FakeSource) -> None:
    """Without faults exactly the file's size in bytes is asked for, in segments."""
    get()
    assert source.bytes_asked() == len(DATA)
    asked = [seen.headers["range"] for seen in source.requests("/blobs/")]
    assert len(asked) == len(set(asked)) == -(-len(DATA) // FAST.segment)


def test_over_tls(source: FakeSource, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a TLS connection are read past the parser too; the certificate is checked."""
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "tls.key", "-out", folder / "tls.pem"],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("needs the openssl command to make a certificate")
    monkeypatch.setattr(body_module, "_DIRECT", 1)
    seen, original = [], body_module._records
    monkeypatch.setattr(body_module, "_records", lambda *args: seen.append(args) or original(*args))
    source.add_blob(DATA)
    source.faults = Faults(cut=2)
    item = f"/v2/a/b/blobs/{DIGEST}"
    with running(source, tls=(folder / "tls.key", folder / "tls.pem")) as secure:
        with Client(FAST) as client, pytest.raises(Unreachable, match=r"no connection to 127.0.0.1"):
            Transfer(client, Item(secure.url + item, "blob", len(DATA), DIGEST), folder, "key", print).run()
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "tls.pem"))
        with Client(FAST) as client:
            transfer = Transfer(client, Item(secure.url + item, "blob", len(DATA), DIGEST), folder, "key", print)
            assert transfer.run() == (DIGEST, len(DATA))
    assert transfer.partial.read_bytes() == DATA
    assert len(seen) >= len(DATA) // FAST.segment


def test_a_size_that_is_not_the_announced_one(get: Get) -> None:
    """The manifest's size counts, whatever the source has."""
    with pytest.raises(BadAnswer, match=r"were announced"):
        get(size=len(DATA) + 1)
    with pytest.raises(BadAnswer, match=r"were announced"):
        get(Faults(ranges="ignored"), size=len(DATA) - 1)


def test_git_object_ids(get: Get) -> None:
    """git's own hash: sha1 of the header and the content (git hash-object)."""
    oid = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()
    get(check=GitOid(oid))
    with pytest.raises(DigestMismatch):
        get(check=GitOid("0" * 40))


@pytest.mark.usefixtures("way")
def test_unknown_size_and_digest(get: Get, source: FakeSource, server: Running) -> None:
    """A plain address: ranges where the server has them with an ETag, else one connection."""
    source.files["m.gguf"] = DATA
    url = f"{server.url}/files/m.gguf"
    get(url=url, size=None, check=None)
    assert len(source.requests("/files/")) > 2
    get(Faults(no_length=True), url=url, size=None, check=None)
    get(Faults(ranges="ignored"), url=url, size=None, check=None)


def test_offline_asks_nobody(get: Get, source: FakeSource) -> None:
    """`--offline` fails before a connection."""
    with pytest.raises(Offline):
        get(options=replace(FAST, offline=True))
    assert source.seen == []


# ------------------------------------------------------------------------------------------------------------ resume


class Kill(BaseException):
    """Stands for a kill: nothing of ours runs after it, least of all a tidy end."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, len(DATA) - 1),
    torn=st.booleans(),
    connections=st.sampled_from([1, 4]),
    direct=st.sampled_from([1, 1 << 20]),
)
def test_killed_at_any_byte(
    source: FakeSource, server: Running, at: int, torn: bool, connections: int, direct: int
) -> None:
    """Stop after any number of bytes, with a fresh, a stale or a torn journal: the next run ends with the right file
    and fetches again no more than what the journal did not claim."""
    source.add_blob(DATA)
    source.faults = Faults()
    url = f"{server.url}/v2/a/b/blobs/{DIGEST}"
    with tempfile.TemporaryDirectory() as name, Client(replace(FAST, connections=connections)) as client:
        folder = Path(name)
        written = [0]
        original = transfer_module.write_at

        def write(handle: int, data: bytes, position: int) -> None:
            room = at - written[0]
            original(handle, data[: max(room, 0)], position)
            if room < len(data):
                raise Kill
            written[0] += len(data)

        transfer_module.write_at = write
        usual, body_module._DIRECT = body_module._DIRECT, direct
        try:
            with pytest.raises(Kill):
                Transfer(client, Item(url, "blob", len(DATA), DIGEST), folder, "key", lambda _a, _b: None).run()
        finally:
            transfer_module.write_at, body_module._DIRECT = original, usual
        if torn:
            journal = folder / "key.json"
            journal.write_bytes(journal.read_bytes()[: at % 40])
        spans = Spans.load(folder / "key.json", folder / "key")
        claimed = spans.completed if spans is not None else 0
        source.seen.clear()
        again = Transfer(client, Item(url, "blob", len(DATA), DIGEST), folder, "key", lambda _a, _b: None)
        assert again.run() == (DIGEST, len(DATA))
        assert again.partial.read_bytes() == DATA
        assert source.bytes_asked() == len(DATA) - claimed
        assert torn or claimed == written[0]


_CHILD = """
import sys
from pathlib import Path
from ftgguf.pull.client import Client, NetOptions
from ftgguf.pull.digest import Digest
from ftgguf.pull.transfer import Item, Transfer
url, digest, size, folder = sys.argv[1:]
def report(done, total):
    print(done, flush=True)
with Client(NetOptions(segment=1 << 20, connections=2)) as client:
    Transfer(client, Item(url, "blob", int(size), Digest(digest)), Path(folder), "key", report).run()
"""


def test_kill_9_keeps_nine_tenths(source: FakeSource, server: Running, folder: Path) -> None:
    """R74: a process killed at 60 %; the next one fetches at most a tenth of that again."""
    data = random.Random(8).randbytes(12 << 20)
    digest = Digest(source.add_blob(data)[7:])
    source.faults = Faults(pause=0.02)  # 64 KiB each 20 ms and connection: two seconds in all
    url = f"{server.url}/v2/a/b/blobs/{digest}"
    command = [sys.executable, "-c", _CHILD, url, digest.hex, str(len(data)), str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    done = 0
    for line in child.stdout:
        done = int(line)
        if done > 0.6 * len(data):
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    source.faults = Faults()
    source.seen.clear()
    with Client(NetOptions(segment=1 << 20)) as client:
        again = Transfer(client, Item(url, "blob", len(data), digest), folder, "key", lambda _a, _b: None)
        assert again.run() == (digest, len(data))
    assert again.partial.read_bytes() == data
    assert len(data) - source.bytes_asked() >= 0.9 * done


def test_a_damaged_partial_file_is_found_and_fetched_again(get: Get, folder: Path) -> None:
    """A power cut may leave a journal that claims more than the disk has: the digest finds it."""
    spans = Spans(len(DATA), FAST.segment)
    spans.done = [min(FAST.segment, len(DATA) - i * FAST.segment) for i in range(len(spans.done))]
    (folder / "key").write_bytes(b"\0" * len(DATA))
    spans.save(folder / "key.json")
    _, said = get()
    assert any("not what was asked for" in line for line in said)


def test_changed_content_behind_an_address_starts_anew(
    get: Get, source: FakeSource, server: Running, folder: Path
) -> None:
    """Without a digest the ETag guards a resumed download (RFC 9110, If-Range)."""
    source.files["m.gguf"] = DATA
    spans = Spans(len(DATA), FAST.segment, validator='"of another version"')
    spans.done[0] = FAST.segment
    (folder / "key").write_bytes(b"x" * len(DATA))
    spans.save(folder / "key.json")
    get(url=f"{server.url}/files/m.gguf", size=None, check=None)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"total":-1,"segment":1,"done":[]}', '{"total":1000003,"segment":0,"done":[]}',
     '{"total":1000003,"segment":65536,"done":[1]}', '{"total":1000003,"segment":500002,"done":[500003,0]}',
     '{"total":1000003,"segment":500002,"done":[-1,0]}'],
)  # fmt: skip
def test_a_broken_journal_is_no_journal(folder: Path, text: str) -> None:
    """Whatever is wrong with it, the download begins anew."""
    (folder / "key").write_bytes(b"\0" * len(DATA))
    (folder / "key.json").write_text(text)
    assert Spans.load(folder / "key.json", folder / "key") is None


# --------------------------------------------------------------------------------------------------- disk and cancel


def test_no_space_is_known_before_the_first_byte(
    get: Get, source: FakeSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free space is compared with the size; nothing is asked, nothing is written."""
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=len(DATA)))
    with pytest.raises(NoSpace, match="free some space"):
        get()
    assert source.seen == []
    assert list(folder.iterdir()) == []


def test_a_disk_that_fills_up_keeps_what_came(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in the middle: one line, and the next pull goes on from there."""
    original, written = os.pwrite, [0]

    def pwrite(handle: int, data: bytes, at: int) -> int:
        written[0] += len(data)
        if written[0] > len(DATA) // 2:
            raise OSError(28, "No space left on device")
        return original(handle, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(NoSpace, match="the disk is full"):
        get()
    monkeypatch.setattr(os, "pwrite", original)
    get()


@pytest.mark.parametrize("faults", [Faults(pause=0.05), Faults(stall=-1), Faults(ranges="ignored", pause=0.05)])
def test_cancel_ends_at_once(source: FakeSource, server: Running, folder: Path, faults: Faults) -> None:
    """A report that raises ends the download, also while every connection hangs; threads are gone."""
    source.add_blob(DATA)
    source.faults = faults
    begun = time.monotonic()

    def report(_done: int, _total: int) -> None:
        if time.monotonic() - begun > 0.2:
            raise Cancelled("enough")

    with Client(replace(FAST, stall=60.0)) as client:
        item = Item(f"{server.url}/v2/a/b/blobs/{DIGEST}", "blob", len(DATA), DIGEST)
        with pytest.raises(Cancelled):
            Transfer(client, item, folder, "key", report).run()
    assert time.monotonic() - begun < 20
    begun = time.monotonic()
    with Client(replace(FAST, stall=60.0)) as client:  # nobody reports while every answer says 503: asked instead
        source.faults = Faults(statuses=[503] * 99, retry_after="200")
        client.cancelled = lambda: time.monotonic() - begun > 0.2
        with pytest.raises(Cancelled):
            Transfer(client, item, folder, "other", lambda _a, _b: None).run()
    assert time.monotonic() - begun < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "pull"]


@pytest.mark.slow
def test_memory_stays_under_150_mb(tmp_path: Path) -> None:
    """300 MB from a server that sends as fast as it can, by a process of its own: nothing of the file is kept."""
    path, hasher = tmp_path / "file", hashlib.sha256()
    with path.open("wb") as file:
        for seed in range(300):
            block = random.Random(seed).randbytes(1_000_000)
            hasher.update(block)
            file.write(block)
    url = f"http://127.0.0.1:{speed.serve(path)}/file"
    (tmp_path / "target").mkdir()
    code = speed._PULL + "import resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    command = [sys.executable, "-c", code, url, hasher.hexdigest(), "300000000", str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert int(done.stdout.split()[-1]) < 150_000  # KiB, as Linux gives it
