"""One HTTP client for registries and the Hub: redirects, credentials, retries and limits, by rules of our own.

- A credential goes to the exact origin (scheme, host, port) it was given for, and to nothing that it redirects to.
- https never becomes http by a redirect; plain http is for this machine, unless asked for.
- A public host may not redirect into a private network (our own pull API would become a way in).
- No body is read without a limit.
- 408, 429, 5xx and broken connections are tried again with growing pauses; `Retry-After` is obeyed.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import NamedTuple, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from ftgguf import __version__
from ftgguf.pull.errors import BadAnswer, Cancelled, Offline, PullError, Refused, Unreachable
from ftgguf.quoting import shown

T = TypeVar("T")

MAX_REDIRECTS = 10
USER_AGENT = (
    f"ftgguf/{__version__} ({platform.machine()} {platform.system().lower()}) Python/{platform.python_version()}"
)
_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
_MAX_WAIT = 300.0
"""Seconds of `Retry-After` that are waited for; a longer wait is an error that names it."""


class Origin(NamedTuple):
    """Where a credential may go."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: httpx.URL) -> Origin:
        return cls(url.scheme, url.host.lower(), url.port or (443 if url.scheme == "https" else 80))


@dataclass(frozen=True, slots=True)
class NetOptions:
    """How to talk to the network. Times in seconds."""

    offline: bool = False
    insecure: bool = False
    """Plain http to other machines."""
    connections: int = 8
    """Parallel ranges of one file."""
    segment: int = 0
    """Bytes asked for in one range; 0: by the file's size."""
    stall: float = 30.0
    """A connection that brings nothing for so long is given up and tried again."""
    connect: float = 15.0
    tries: int = 6
    """Failures in a row, without a byte in between, that end the download."""
    backoff: float = 1.0
    """Pause after the first failure; it doubles, up to 30 times this."""

    def segment_of(self, total: int) -> int:
        """A 64th of the file, from 32 to 128 MiB: connections open seldom, and the hash stays close behind."""
        return self.segment or min(max(total >> 6, 32 << 20), 128 << 20)


class Failed(Exception):
    """An answer or a broken connection that may be tried again. `wait`: what the server asked for; `absent`: there
    was no connection at all, which a request that begins something tries twice only."""

    def __init__(self, reason: str, wait: float | None = None, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent
        self.reason = reason
        self.wait = wait


class Client:
    """httpx with our rules. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, options: NetOptions | None = None) -> None:
        self.options = options or NetOptions()
        self.cancelled: Callable[[], bool] = lambda: False
        self.notice: Callable[[str], None] = lambda _line: None
        """Called with one line whenever a pause is made before another try."""
        self.challenge: Callable[[httpx.Response], str | None] | None = None
        """Answers a 401 of the origin asked with a new `Authorization`, or None; tried once a request."""
        self._credentials: dict[Origin, str] = {}
        self._http: httpx.Client | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._http is not None:
            self._http.close()

    def allow_credential(self, url: str, authorization: str) -> None:
        """Send this `Authorization` to the origin of `url`, and only there. Https, or this machine."""
        if not re.fullmatch(r"[\x20-\x7e]+", authorization):
            raise Refused("the token has characters that no token has: look at HF_TOKEN or --hf-token")
        origin = Origin.of(httpx.URL(url))
        if origin.scheme == "http" and not is_loopback(origin.host):
            raise Refused(f"a token is not sent to {origin.host} over plain http: use https")
        self._credentials[origin] = authorization

    def _client(self) -> httpx.Client:
        if self._http is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            timeout = httpx.Timeout(self.options.stall, connect=self.options.connect)
            headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
            trust = httpx.create_ssl_context()  # one for both: reading the certificates takes a while
            direct = httpx.HTTPTransport(verify=trust, limits=limits)  # a proxy cannot reach this machine's loopback
            mounts = {f"all://{host}": direct for host in ("127.0.0.1", "localhost", "[::1]")}
            try:
                self._http = httpx.Client(verify=trust, headers=headers, timeout=timeout, limits=limits, mounts=mounts)
            except (ImportError, ValueError) as error:
                raise PullError(
                    f"the proxy in the environment cannot be used ({error}): set HTTPS_PROXY anew"
                ) from None
        return self._http

    # ------------------------------------------------------------------------------------------------- one request

    @contextmanager
    def open(
        self, method: str, url: str, headers: dict[str, str] | None = None, challenge: bool = True
    ) -> Iterator[httpx.Response]:
        """The answer to one request with its body unread, redirects followed; `.url` is where it came from.

        Raises Failed (may be tried again), Refused, Offline, BadAnswer. Error statuses that are final are returned.
        """
        if self.options.offline:
            raise Offline(f"{host_of(url)} is needed, and --offline forbids the network")
        client = self._client()
        target = parse_url(url)
        self._check_scheme(target)
        challenged = not challenge
        for _ in range(MAX_REDIRECTS + 1):
            sent = dict(headers or {})
            credential = self._credentials.get(Origin.of(target))
            if credential is not None:
                sent["Authorization"] = credential
            response = _send(client, method, target, sent)
            try:
                if response.status_code == 401 and not challenged and self._answer_challenge(target, response):
                    challenged, following = True, target
                elif not response.has_redirect_location:
                    _check_answer(response)
                    yield response
                    return
                else:
                    following = self._redirect(target, response)
            finally:
                response.close()
            target = following
        raise BadAnswer(f"{host_of(url)} redirects more than {MAX_REDIRECTS} times")

    def _answer_challenge(self, target: httpx.URL, response: httpx.Response) -> bool:
        authorization = self.challenge(response) if self.challenge is not None else None
        if authorization is not None:
            self.allow_credential(str(target), authorization)
        return authorization is not None

    def _redirect(self, source: httpx.URL, response: httpx.Response) -> httpx.URL:
        try:
            target = source.join(response.headers["location"])
        except (httpx.InvalidURL, ValueError):
            raise BadAnswer(f"{source.host} redirects to something that is not an address") from None
        if target.scheme not in ("http", "https") or not target.host or target.userinfo:
            raise Refused(f"{source.host} redirects to {shown(str(target.copy_with(query=None)))}: refused")
        if source.scheme == "https" and target.scheme == "http":
            raise Refused(f"{source.host} redirects from https to plain http ({target.host}): refused")
        self._check_scheme(target)
        if target.host.lower() != source.host.lower() and is_private(target) and not is_private(source):
            raise Refused(f"{source.host} redirects into a private network ({target.host}): refused")
        if target.host.lower() != source.host.lower() and any(each.is_link_local for each in addresses_of(target)):
            raise Refused(
                f"{source.host} redirects to a link-local address ({target.host}): refused"
            )  # clouds' secrets
        return target

    def _check_scheme(self, url: httpx.URL) -> None:
        if url.scheme == "http" and not self.options.insecure and not is_loopback(url.host):
            raise Refused(f"{url.host} would be reached over plain http: use https, or allow it with --insecure")

    # ---------------------------------------------------------------------------------------------- with tries

    def read(
        self, url: str, limit: int, headers: dict[str, str] | None = None, challenge: bool = True
    ) -> tuple[int, httpx.Headers, bytes]:
        """(status, headers, body) of a small answer; tried again as the module says. Redirects followed.

        Raises BadAnswer if the body is longer than `limit` bytes, Unreachable after the last try.
        """

        def once() -> tuple[int, httpx.Headers, bytes]:
            with self.open("GET", url, headers, challenge) as response:
                body = read_limited(response, limit, host_of(url))
                return response.status_code, response.headers, body

        return self.again(once, host_of(url))

    def again(self, action: Callable[[], T], what: str) -> T:
        """`action()`, repeated while it raises Failed. Raises Unreachable after `options.tries` times."""
        for attempt in range(1, self.options.tries + 1):
            try:
                return action()
            except Failed as failure:
                if attempt == self.options.tries or (failure.absent and attempt > 1):
                    raise Unreachable(f"{what}: {failure.reason}; gave up after {attempt} tries") from None
                self.pause(what, failure, attempt)
        raise AssertionError("no tries")

    def pause(self, what: str, failure: Failed, attempt: int) -> None:
        """Wait before try number `attempt` + 1. Raises Unreachable if the server asks for more than we wait."""
        seconds = self.options.backoff * min(2.0 ** (attempt - 1), 30.0) * random.uniform(0.75, 1.0)
        if failure.wait is not None:
            if failure.wait > _MAX_WAIT:
                raise Unreachable(f"{what}: {failure.reason}, and asks to wait {failure.wait:.0f} s: try again later")
            seconds = failure.wait
        self.notice(f"{what}: {failure.reason}, trying again in {seconds:.0f} s")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.cancelled():
                raise Cancelled("cancelled")
            time.sleep(min(left, 0.1))


def _send(client: httpx.Client, method: str, url: httpx.URL, headers: dict[str, str]) -> httpx.Response:
    request = client.build_request(method, url, headers=headers)
    try:
        return client.send(request, stream=True, follow_redirects=False)
    except httpx.TransportError as error:
        raise transport_failure(error, url.host) from None
    except httpx.InvalidURL as error:
        raise BadAnswer(f"{url.host}: {error}") from None


def _check_answer(response: httpx.Response) -> None:
    """Raise Failed for a status that may be tried again, BadAnswer for a body in an encoding that was not asked for."""
    status = response.status_code
    if status in _AGAIN:
        raise Failed(f"answered {status} {response.reason_phrase}".rstrip(), retry_after(response.headers))
    if response.headers.get("content-encoding", "identity") != "identity":
        raise BadAnswer(f"{response.url.host} sent a compressed body that was not asked for (a proxy?)")


def transport_failure(error: httpx.TransportError, host: str) -> Failed:
    """What a broken connection is called."""
    if isinstance(error, httpx.ConnectTimeout):
        return Failed(f"no connection to {host} in time", absent=True)
    if isinstance(error, httpx.TimeoutException):
        return Failed("nothing came in time (stalled)")
    if isinstance(error, httpx.ConnectError):
        return Failed(f"no connection to {host} ({error})", absent=True)
    if isinstance(error, httpx.ProxyError):
        return Failed(f"the proxy failed ({error})")
    return Failed(f"the connection broke ({str(error) or type(error).__name__})")


def retry_after(headers: httpx.Headers) -> float | None:
    """Seconds of `Retry-After`, given as a number or a date; None without one."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time()) if text else None
    except (ValueError, OverflowError):
        return None


def read_limited(response: httpx.Response, limit: int, host: str) -> bytes:
    """The body, at most `limit` bytes. Raises BadAnswer beyond, Failed if the connection breaks."""
    body = bytearray()
    try:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > limit:
                raise BadAnswer(f"{host} sent more than the {limit} bytes that such an answer may have")
    except httpx.TransportError as error:
        raise transport_failure(error, host) from None
    return bytes(body)


# -------------------------------------------------------------------------------------------------------- addresses


def parse_url(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL:
        raise BadAnswer(f"{shown(url)} is not an address") from None


def host_of(url: str) -> str:
    """Host and port, for messages (a whole address may hold secrets)."""
    parsed = parse_url(url)
    return parsed.netloc.decode("ascii", "replace")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by its spelling: `localhost` or an address of 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def addresses_of(url: httpx.URL) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a host is or resolves to; empty where only a proxy will know, or nobody."""
    host = url.host.strip("[]")
    try:
        return [_unmapped(ipaddress.ip_address(host))]
    except ValueError:
        pass
    proxies = getproxies()
    if (url.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return []
    try:
        found = socket.getaddrinfo(host, url.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []  # the connection will say so
    return [_unmapped(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found]


def _unmapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """`::ffff:10.0.0.1` is 10.0.0.1."""
    return getattr(address, "ipv4_mapped", None) or address


def is_private(url: httpx.URL) -> bool:
    """Whether the host is, or resolves to, an address that is not public. Names go unresolved where a proxy will."""
    host = url.host.lower()
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    return any(not address.is_global for address in addresses_of(url))


def hub_endpoint() -> str:
    """The Hub's address without a closing slash: `MODEL_ENDPOINT`, else `HF_ENDPOINT`, else huggingface.co."""
    value = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return value.rstrip("/")
