"""Redirects, credentials, proxies and pauses, by the client's rules."""

from __future__ import annotations

import time
from email.utils import formatdate

import httpx
import pytest

from compat.registry import FAST, FakeSource, Running
from ftgguf.pull.client import Client, NetOptions, is_loopback, retry_after
from ftgguf.pull.errors import BadAnswer, Refused, Unreachable
from ftgguf.pull.names import OllamaName
from ftgguf.pull.registry import pull_ollama
from ftgguf.pull.session import Session
from ftgguf.pull.store import Store

pytestmark = pytest.mark.usefixtures("home")


def follow(source: str, location: str, insecure: bool = False) -> str:
    """Where a redirect from `source` leads; nothing is sent."""
    response = httpx.Response(302, headers={"location": location})
    with Client(NetOptions(insecure=insecure)) as client:
        return str(client._redirect(httpx.URL(source), response))


@pytest.mark.parametrize(
    ("source", "location", "words"),
    [
        ("https://8.8.8.8/a", "http://8.8.8.8/b", "from https to plain http"),
        ("https://8.8.8.8/a", "https://127.0.0.1/b", "private network"),
        ("https://8.8.8.8/a", "https://10.0.0.1/b", "private network"),
        ("https://8.8.8.8/a", "https://169.254.169.254/latest/meta-data", "private network"),
        ("https://8.8.8.8/a", "https://[::1]/b", "private network"),
        ("https://8.8.8.8/a", "https://[fd00::1]/b", "private network"),
        ("https://8.8.8.8/a", "https://localhost/b", "private network"),
        ("https://8.8.8.8/a", "https://server.local/b", "private network"),
        ("https://8.8.8.8/a", "https://[::ffff:10.0.0.1]/b", "private network"),
        ("https://8.8.8.8/a", "https://2130706433/b", "private network"),
        ("https://10.0.0.1/a", "https://169.254.169.254/latest/meta-data", "link-local"),
        ("https://10.0.0.1/a", "https://[fe80::1]/b", "link-local"),
        ("https://8.8.8.8/a", "file:///etc/passwd", "refused"),
        ("https://8.8.8.8/a", "https://user:pw@8.8.4.4/b", "refused"),
        ("http://127.0.0.1/a", "http://8.8.8.8/b", "plain http"),
    ],
)
def test_redirects_that_are_refused(source: str, location: str, words: str) -> None:
    """Downgrades, ways into a private network (ollama#16236), other protocols, credentials in addresses."""
    with pytest.raises(Refused, match=words):
        follow(source, location)


def test_redirects_that_are_followed() -> None:
    """Relative ones, public ones, and those within a private network (a mirror in a company)."""
    assert follow("https://8.8.8.8/a/b", "../c?x=1") == "https://8.8.8.8/c?x=1"
    assert follow("https://8.8.8.8/a", "https://8.8.4.4/b") == "https://8.8.4.4/b"
    assert follow("https://10.0.0.1/a", "https://10.0.0.2/b") == "https://10.0.0.2/b"
    assert follow("http://8.8.8.8/a", "http://8.8.8.8/b", insecure=True) == "http://8.8.8.8/b"


def test_loopback_is_told_by_its_spelling() -> None:
    """Only what cannot be another machine."""
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "[::1]"):
        assert is_loopback(host)
    for host in ("127.0.0.1.example.org", "10.0.0.1", "0.0.0.0", "localhost.example.org", "::2"):
        assert not is_loopback(host)


def test_retry_after() -> None:
    """Seconds or a date (RFC 9110, 10.2.3); nonsense is none."""
    assert retry_after(httpx.Headers({"retry-after": "7"})) == 7.0
    later = retry_after(httpx.Headers({"retry-after": formatdate(time.time() + 60, usegmt=True)}))
    assert later is not None
    assert 50 < later < 70
    for text in ("", "soon", "-1", "9" * 30):
        assert retry_after(httpx.Headers({"retry-after": text})) is None


def test_a_credential_goes_to_its_origin_only(source: FakeSource, server: Running) -> None:
    """Another address of the same server is another origin."""
    with Client(FAST) as client:
        client.allow_credential(server.url, "Bearer secret")
        client.read(f"{server.url}/x", 1000)
        client.read(f"http://{server.other}/x", 1000)
        with pytest.raises(Refused, match="plain http"):
            client.allow_credential("http://192.0.2.1/", "Bearer secret")
        with pytest.raises(Refused, match="characters that no token has"):
            client.allow_credential(server.url, "Bearer x\r\nHost: y")
    assert [seen.headers.get("authorization") for seen in source.seen] == ["Bearer secret", None]


def test_bodies_have_limits(source: FakeSource, server: Running) -> None:
    """One byte too many is too many."""
    source.files["x"] = b"x" * 1000
    with Client(FAST) as client:
        assert client.read(f"{server.url}/files/x", 1000)[2] == b"x" * 1000
        with pytest.raises(BadAnswer, match="more than the 999 bytes"):
            client.read(f"{server.url}/files/x", 999)


def test_a_host_that_is_not_there_is_given_up_soon() -> None:
    """A name typed wrong on a machine without network must not cost half a minute: two tries."""
    said: list[str] = []
    with Client(FAST) as client:
        client.notice = said.append
        with pytest.raises(Unreachable, match=r"no connection to 127\.0\.0\.1 .*gave up after 2 tries"):
            client.read("http://127.0.0.1:9/x", 10)  # the discard port: nobody listens
    assert len(said) == 1


def test_proxies_of_the_environment(
    source: FakeSource, server: Running, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP_PROXY is asked for another machine's address, and not for this machine's (192.0.2.1 is never reached)."""
    source.add_model("library/tiny:latest", [("model", b"GGUF" * 1000)])
    monkeypatch.setenv("HTTP_PROXY", f"http://{server.other}")
    monkeypatch.setenv("http_proxy", f"http://{server.other}")
    options = NetOptions(insecure=True, tries=1, segment=1 << 16)
    with Session(store, options) as session:
        pull_ollama(session, OllamaName("192.0.2.1:5000", "library", "tiny", "latest", "http"))
        assert {seen.host for seen in source.seen} == {"192.0.2.1:5000"}
        source.seen.clear()
        pull_ollama(session, OllamaName(server.host, "library", "tiny", "latest", "http"))
        assert {seen.host for seen in source.seen} == {server.host}
