"""One file from one address to disk: parallel ranges, resumed, hashed while they come, verified at the end.

Worker threads take segments in ascending order; the caller's thread hashes what is complete from the start of the
file, reading it back from the page cache, so that the hash ends with the download. A server that ignores ranges, or
answers with wrong ones, is read from one connection instead. The result is a partial file that is verified and
flushed; giving it its final name is the store's work.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import httpx

from ftgguf.pull.body import body_pieces, socket_of
from ftgguf.pull.client import Client, Failed, host_of
from ftgguf.pull.digest import Digest, GitOid
from ftgguf.pull.disk import Hasher, check_space, disk_error, flush, write_at
from ftgguf.pull.errors import (
    BadAnswer,
    Cancelled,
    DigestMismatch,
    NotFound,
    PullError,
    Refused,
    Unauthorized,
    Unreachable,
)
from ftgguf.pull.journal import Spans, remove
from ftgguf.pull.sizes import human

MAX_SIZE = 1 << 44
"""Bytes of one file (16 TiB)."""
RAMP = 0.25
"""Seconds until another connection is opened."""
SAVE_EVERY = 0.25
"""Seconds between two journals; a tenth of it when 2 % of the file came meanwhile."""
REPORT_EVERY = 0.06
"""Seconds between two reports, as Ollama's."""
_READ = 1 << 20
_FLUSH = 128 << 20
"""Bytes between two flushes."""
_MIN_RATE = 256
"""Bytes a second, over the stall time, below which a connection counts as stalled."""
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")

Report = Callable[[int, int], None]
"""(bytes there, bytes in all; 0 while unknown). It may raise to cancel."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is fetched. `size` and `check` are None where the source does not say."""

    url: str
    label: str
    """How messages call it."""
    size: int | None = None
    check: Digest | GitOid | None = None


class RangesIgnored(Exception):
    """The server does not serve ranges of this file, or not correctly."""


class _Stopped(Exception):
    """Another thread failed or the caller gave up."""


class Transfer:
    """One download into `folder`/`key`; `key`.json beside it is the journal. Hold the item's lock while it runs."""

    def __init__(self, client: Client, item: Item, folder: Path, key: str, report: Report) -> None:
        self.client = client
        self.item = item
        self.partial = folder / key
        self.journal = folder / f"{key}.json"
        self.report = report
        self.validator = ""
        """ETag, from the first answer."""
        self._outer_cancelled = client.cancelled
        self._direct: str | None = None
        self._stop = threading.Event()
        self._ranged = threading.Event()
        self._failure: BaseException | None = None
        self._sockets: set[socket.socket] = set()
        self._wrong_ranges = 0
        self._reported = 0.0
        self._saved = (0.0, 0)
        self._ticked = 0.0

    def run(self) -> tuple[Digest, int]:
        """Fetch, or go on fetching, and verify: the content's sha256 and size; `self.partial` holds it, flushed.

        Raises PullError; what was fetched stays for the next time unless it turned out wrong.
        """
        for attempt in (1, 2):
            digest, oid, size = self._fetch()
            if (self.item.size is None or size == self.item.size) and self._matches(digest, oid):
                return digest, size
            remove(self.partial, self.journal)  # one wrong byte cannot be found among the right ones
            if attempt == 1:
                self.client.notice(f"{self.item.label}: what came is not what was asked for, fetching it again")
        raise DigestMismatch(
            f"{self.item.label}: digest mismatch twice: want {self.item.check}, got {digest}; the source or something "
            "on the way is broken"
        )

    def _matches(self, digest: Digest, oid: str) -> bool:
        check = self.item.check
        return check is None or (check == digest if isinstance(check, Digest) else check.hex == oid)

    def _fetch(self) -> tuple[Digest, str, int]:
        spans = Spans.load(self.journal, self.partial)
        if spans is not None and self.item.size is not None and spans.total != self.item.size:
            spans = None
        if spans is None or (spans.validator == "" and self.item.check is None):
            total = self.item.size if self.item.size is not None else self._probe()
            if total is None:
                return self._sequential()
            spans = Spans(total, self.client.options.segment_of(total), validator=self.validator)
            self._create(total)
        if spans.total == 0:
            return Digest.of(b""), hashlib.sha1(b"blob 0\0").hexdigest(), 0
        try:
            return self._parallel(spans)
        except RangesIgnored:
            return self._sequential()

    def _probe(self) -> int | None:
        """The size, where nothing but the server knows it; None: ranges are not served, or not with a size."""

        def ask() -> int | None:
            with self.client.open("GET", self.item.url, {"Range": "bytes=0-0"}) as response:
                if response.status_code == 200:
                    return None
                if response.status_code != 206:
                    self._final_status(response)
                found = _RANGE.fullmatch(response.headers.get("content-range", ""))
                etag = response.headers.get("etag", "")
                if not found or found[1] != "0" or found[2] != "0" or found[3] == "*" or not etag.startswith('"'):
                    return None  # without a strong validator two ranges may come from two versions
                self.validator = etag
                return int(found[3])

        total = self.client.again(ask, host_of(self.item.url))
        return total if total else None

    def _create(self, total: int) -> None:
        """The sparse partial file, after checking that the disk will hold it."""
        if total > MAX_SIZE:
            raise Refused(f"{self.item.label}: a size of {human(total)} is absurd")
        remove(self.partial, self.journal)
        check_space(self.partial.parent, total, self.item.label)
        with self._disk_errors(), self.partial.open("xb") as file:
            file.truncate(total)

    # ---------------------------------------------------------------------------------------------- parallel ranges

    def _parallel(self, spans: Spans) -> tuple[Digest, str, int]:
        check_space(self.partial.parent, spans.total - spans.completed, self.item.label)
        self._stop.clear()
        self._ranged.clear()
        self._failure = None
        threads: list[threading.Thread] = []
        self.client.cancelled = lambda: self._stop.is_set() or self._outer_cancelled()
        with (
            self._disk_errors(),
            self.partial.open("r+b", buffering=0) as file,
            ThreadPoolExecutor(1, "flush") as flusher,
        ):
            try:
                self._start(threads, spans, file.fileno(), 1)
                result = self._hash_along(threads, spans, file.fileno(), flusher)
                os.fsync(file.fileno())
                remove(self.journal)
                return result
            finally:
                self._halt(threads)
                self.client.cancelled = self._outer_cancelled
                if self.journal.exists() or spans.completed < spans.total:
                    with suppress(OSError):
                        spans.save(self.journal)

    def _start(self, threads: list[threading.Thread], spans: Spans, handle: int, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._work, args=(spans, handle), name="pull", daemon=True)
            threads.append(thread)
            thread.start()

    def _halt(self, threads: list[threading.Thread]) -> None:
        """End the workers at once: a shut-down socket wakes a thread that waits in it."""
        self._stop.set()
        while any(thread.is_alive() for thread in threads):
            for connection in list(self._sockets):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(0.05)

    def _hash_along(
        self, threads: list[threading.Thread], spans: Spans, handle: int, flusher: ThreadPoolExecutor
    ) -> tuple[Digest, str, int]:
        """Hash the file behind the workers, start more of them once ranges are seen to work, report.

        What was hashed is flushed meanwhile, so that the disk is busy with the network and not after it.
        """
        hasher = Hasher(self.item.check, spans.total, self.item.label)
        buffer = memoryview(bytearray(_READ))
        hashed, begun = 0, time.monotonic()
        while hashed < spans.total:
            working = any(thread.is_alive() for thread in threads)
            if self._failure is not None:
                raise self._failure
            if self._outer_cancelled():
                raise Cancelled(f"{self.item.label}: cancelled, what came is kept")
            if not working and spans.frontier < spans.total:
                raise PullError(f"{self.item.label}: the download ended without its last bytes: try again")
            if len(threads) < self.client.options.connections and self._ranged.is_set():
                self._start(threads, spans, handle, self._wanted(spans, begun) - len(threads))
            ready = min(spans.frontier - hashed, _READ)
            if ready == _READ or hashed + ready == spans.total:
                n = os.preadv(handle, [buffer[:ready]], hashed)
                if n == 0:
                    raise PullError(f"{self.item.label}: the partial file was cut by another program: try again")
                hasher.update(buffer[:n])
                if hashed // _FLUSH != (hashed + n) // _FLUSH:
                    flusher.submit(flush, handle)
                hashed += n
            else:
                self._stop.wait(0.01)
            self._tick(spans, hashed)
        self.report(spans.total, spans.total)
        return hasher.result()

    def _wanted(self, spans: Spans, begun: float) -> int:
        """Connections by now: two at once, and one more every quarter of a second, since a fast source needs no more
        than two and every further one costs work."""
        now = 2 + int((time.monotonic() - begun) / RAMP)
        return min(self.client.options.connections, now, spans.missing)

    def _tick(self, spans: Spans, hashed: int) -> None:
        now = time.monotonic()
        if now - self._ticked < SAVE_EVERY / 10:
            return
        self._ticked = now
        completed = spans.completed
        if now - self._reported >= REPORT_EVERY:
            self._reported = now
            self.report(min(completed, hashed) if completed == spans.total else completed, spans.total)
        age, news = now - self._saved[0], completed - self._saved[1]
        if age >= SAVE_EVERY or (age >= SAVE_EVERY / 10 and news * 50 > spans.total):
            self._saved = (now, completed)
            spans.save(self.journal)

    def _work(self, spans: Spans, handle: int) -> None:
        """A worker: segments until none is left."""
        try:
            while not self._stop.is_set() and (index := spans.take()) is not None:
                self._segment(spans, index, handle)
        except (_Stopped, Cancelled):
            pass
        except BaseException as error:
            if not self._stop.is_set():
                self._failure = self._failure or error
                self._stop.set()

    def _segment(self, spans: Spans, index: int, handle: int) -> None:
        """Fill one segment, however many connections it takes."""
        start, end = spans.bounds(index)
        fruitless = 0
        while spans.done[index] < end - start:
            before = spans.done[index]
            try:
                self._range(spans, index, handle)
            except Failed as failure:
                if self._stop.is_set():
                    raise _Stopped from None
                self._direct = None  # a signed address may have expired: ask for a new one
                fruitless = 1 if spans.done[index] > before else fruitless + 1
                if fruitless >= self.client.options.tries:
                    raise Unreachable(
                        f"{self.item.label}: {failure.reason}; gave up after {fruitless} tries, what came is kept"
                    ) from None
                self.client.pause(self.item.label, failure, fruitless)

    def _range(self, spans: Spans, index: int, handle: int) -> None:
        """One request for the rest of a segment."""
        start, end = spans.bounds(index)
        at = start + spans.done[index]
        headers = {"Range": f"bytes={at}-{end - 1}"}
        if spans.validator:
            headers["If-Range"] = spans.validator
        with self.client.open("GET", self._direct or self.item.url, headers) as response:
            moved = str(response.url) != self.item.url
            if moved and response.status_code in (400, 401, 403, 410):
                raise Failed(f"{response.url.host} refuses the address it was given ({response.status_code})")
            until = self._check_range(response, at, end, spans.total)
            if moved:
                self._direct = str(response.url)
            self._ranged.set()
            with self._interruptible(response):
                for chunk in self._chunks(response):
                    if len(chunk) > until - at:
                        raise Failed("more bytes came than were announced")
                    write_at(handle, chunk, at)
                    at += len(chunk)
                    spans.done[index] += len(chunk)
            if at < until:
                raise Failed("the body ended early")

    def _check_range(self, response: httpx.Response, at: int, end: int, total: int) -> int:
        """Where the answer to a range ends; raises unless it is what was asked for, or a beginning of it."""
        if response.status_code == 416 and response.headers.get("content-range", "") in ("", f"bytes */{total}"):
            raise RangesIgnored
        if response.status_code == 200:
            raise RangesIgnored
        if response.status_code != 206:
            self._final_status(response, total)
        found = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if found and int(found[1]) == at and at <= int(found[2]) < end:
            if found[3] not in ("*", str(total)):
                raise BadAnswer(f"{self.item.label}: the source has {found[3]} bytes, {total} were announced")
            return int(found[2]) + 1
        self._wrong_ranges += 1
        if self._wrong_ranges > 1:
            raise RangesIgnored
        raise Failed(f"another range came than was asked for ({response.headers.get('content-range', 'none')[:80]})")

    def _chunks(self, response: httpx.Response) -> Iterator[bytes | memoryview]:
        """The body's pieces; Failed when the connection breaks, brings nothing, or next to nothing."""
        stall = self.client.options.stall
        window, came = time.monotonic(), 0
        for chunk in body_pieces(response, stall):
            if self._stop.is_set():
                raise _Stopped
            yield chunk
            came += len(chunk)
            now = time.monotonic()
            if now - window > stall:
                if came < _MIN_RATE * stall:
                    raise Failed(f"only {came} bytes came in {stall:.0f} s (stalled)")
                window, came = now, 0

    @contextmanager
    def _interruptible(self, response: httpx.Response) -> Iterator[None]:
        connection = socket_of(response)
        if connection is None:
            yield
            return
        self._sockets.add(connection)
        try:
            yield
        finally:
            self._sockets.discard(connection)

    # ---------------------------------------------------------------------------------------------- one connection

    def _sequential(self) -> tuple[Digest, str, int]:
        """The whole file from one connection, from its beginning at each try."""
        remove(self.partial, self.journal)
        self._stop.clear()
        self.client.notice(f"{self.item.label}: the source serves no ranges: one connection, no resuming")
        return self.client.again(self._stream, self.item.label)

    def _stream(self) -> tuple[Digest, str, int]:
        with self.client.open("GET", self.item.url) as response:
            if response.status_code != 200:
                self._final_status(response)
            length = response.headers.get("content-length", "")
            announced = int(length) if length.isdecimal() and len(length) < 19 else None
            size = self.item.size
            if announced is not None and size is not None and announced != size:
                raise BadAnswer(f"{self.item.label}: the source has {announced} bytes, {size} were announced")
            limit = size if size is not None else announced
            if limit is not None and limit > MAX_SIZE:
                raise Refused(f"{self.item.label}: a size of {human(limit)} is absurd")
            check_space(self.partial.parent, limit or 0, self.item.label)
            self.validator = response.headers.get("etag", "")
            with self._disk_errors(), self.partial.open("wb", buffering=0) as file:
                hasher, at = self._copy(response, file.fileno(), limit)
                os.fsync(file.fileno())
        if limit is not None and at < limit:
            raise Failed(f"the body ended after {at} of {limit} bytes")
        digest, oid, _ = hasher.result()
        return digest, oid, at

    def _copy(self, response: httpx.Response, handle: int, limit: int | None) -> tuple[Hasher, int]:
        hasher, at = Hasher(self.item.check, limit, self.item.label), 0
        for chunk in self._chunks(response):
            if at + len(chunk) > (MAX_SIZE if limit is None else limit):
                raise BadAnswer(f"{self.item.label}: more bytes came than the {limit} that were announced")
            if limit is None and at >> 26 != (at + len(chunk)) >> 26:  # every 64 MiB
                check_space(self.partial.parent, 0, self.item.label)
            write_at(handle, chunk, at)
            hasher.update(chunk)
            at += len(chunk)
            if time.monotonic() - self._reported >= REPORT_EVERY:
                self._reported = time.monotonic()
                self.report(at, limit or 0)
        self.report(at, limit or at)
        return hasher, at

    # ------------------------------------------------------------------------------------------------------ errors

    def _final_status(self, response: httpx.Response, total: int | None = None) -> NoReturn:
        """Raise what an answer means that no further try will change."""
        status, host = response.status_code, response.url.host
        if status in (401, 403):
            raise Unauthorized(f"{self.item.label}: {host} refuses it ({status}): a token or an account is needed")
        if status in (404, 410):
            raise NotFound(f"{self.item.label}: {host} does not have it ({status})")
        if status == 416:
            raise BadAnswer(f"{self.item.label}: the source has fewer bytes than the {total} that were announced")
        raise BadAnswer(f"{self.item.label}: {host} answered {status} {response.reason_phrase}".rstrip())

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self.item.label) from None
