"""The app: what a registry and the Hub answer, and how they can misbehave.

Routes: `/v2/{ns}/{model}/manifests/{tag}`, `/v2/{ns}/{model}/blobs/{digest}`, `/v2/{ns}/{model}/tags/list`, `/token`,
`/api/models/{user}/{repo}/refs`, `/api/models/{user}/{repo}/tree/{commit}`, `/{user}/{repo}/resolve/{commit}/{path}`,
`/cdn/{digest}` (where redirects lead), `/files/{name}` (plain URLs). Shapes follow the Docker registry API v2 as
Ollama uses it, and the Hub's public API. Nothing is checked about callers unless a switch says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Faults:
    """Everything off is a well-behaved server. Counters go down each time their fault is shown; -1 is for ever."""

    redirect: str = ""
    """Blobs and files redirect: `same` host, `cross` (to `cdn_base`), `loop`, `downgrade` (to the same host by plain
    http), or a literal address."""
    need_token: bool = False
    """401 with a Bearer challenge until the token of /token comes."""
    realm: str = ""
    """Challenge's realm instead of our own /token."""
    token_status: int = 200
    need_bearer: str = ""
    """The Hub's token; 401 without it."""
    ranges: str = "ok"
    """`ok`, `ignored` (200 and everything), `wrong` (Content-Range lies), `shifted` (bytes from elsewhere, honestly
    labelled), `short` (less than asked, honestly labelled), `refused` (416)."""
    no_length: bool = False
    """Bodies go out chunked, without a length; ranges are ignored."""
    statuses: list[int] = field(default_factory=list)
    """Blob and file requests answer these first, one each."""
    meta_statuses: list[int] = field(default_factory=list)
    """The same for manifests and the Hub's API."""
    retry_after: str = ""
    cut: int = 0
    """Bodies that end in the middle."""
    cut_at: float = 0.5
    stall: int = 0
    """Bodies that stop in the middle and hang for `stall_seconds`."""
    stall_seconds: float = 30.0
    drip: int = 0
    """Bodies that send one byte every 50 ms."""
    flip: int = 0
    """Bodies that have one bit wrong."""
    extra: int = 0
    """Bodies that go on beyond what was announced (chunked)."""
    compress: bool = False
    pause: float = 0.0
    """Seconds before each 64 KiB of a body."""
    expire_cdn: int = 0
    """Times that the redirect's target answers 403."""
    manifest: bytes | None = None
    """Sent as the manifest, whatever was asked for."""
    manifest_padding: int = 0
    """Bytes of blanks behind the manifest."""
    tree: bytes | None = None


@dataclass
class Seen:
    """One request, for assertions."""

    method: str
    path: str
    host: str
    headers: dict[str, str]


class FakeSource:
    """The ASGI app. Fill it with `add_model`, `add_repo`, `add_file`; `seen` lists what was asked."""

    def __init__(self) -> None:
        self.generation = 0
        self.cdn_base = ""
        """Where `redirect="cross"` leads: this server under its other address."""
        self.reset()

    def reset(self) -> None:
        """Empty it and turn every fault off; answers still under way are abandoned."""
        self.generation += 1
        self.faults = Faults()
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.repos: dict[str, dict[str, bytes]] = {}
        self.git_files: set[str] = set()
        """Paths of repositories that are not in LFS."""
        self.files: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.page = 1000
        """Entries of a tree on one page."""

    # ------------------------------------------------------------------------------------------------------ content

    def add_blob(self, data: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def add_model(self, name: str, layers: list[tuple[str, bytes]], config: dict[str, Any] | None = None) -> bytes:
        """`name` is `ns/model:tag`; a layer is (last part of its media type, content). Returns the manifest."""
        blob = json.dumps(config if config is not None else {"model_format": "gguf"}).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "digest": self.add_blob(blob),
                "size": len(blob),
            },
            "layers": [
                {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": self.add_blob(data), "size": len(data)}
                for kind, data in layers
            ],
        }
        self.manifests[name] = json.dumps(manifest).encode()
        return self.manifests[name]

    def add_repo(self, repo: str, files: dict[str, bytes]) -> None:
        self.repos[repo] = files

    def requests(self, pattern: str) -> list[Seen]:
        return [seen for seen in self.seen if re.search(pattern, seen.path)]

    def bytes_asked(self) -> int:
        """Bytes that all requests with a `Range` asked for, together."""
        ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", seen.headers.get("range", "")) for seen in self.seen]
        return sum(int(found[2]) - int(found[1]) + 1 for found in ranges if found)

    # ------------------------------------------------------------------------------------------------------- routes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        target = scope["raw_path"].decode("latin-1").partition("?")[0]
        path = unquote(re.sub(r"^https?://[^/]+", "", target))  # a proxy is asked for whole addresses
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.seen.append(Seen(scope["method"], path, headers.get("host", ""), headers))
        reply = Reply(self, send, scope["method"], headers, scope["scheme"])
        for pattern, handler in self._routes():
            found = re.fullmatch(pattern, path)
            if found:
                await handler(reply, parse_qs(scope.get("query_string", b"").decode()), *found.groups())
                return
        await reply.small(404, b'{"errors":[{"code":"NOT_FOUND"}]}')

    def _routes(self) -> list[tuple[str, Callable[..., Awaitable[None]]]]:
        return [
            (r"/v2/([^/]+/[^/]+)/manifests/([^/]+)", self._manifest),
            (r"/v2/([^/]+/[^/]+)/tags/list", self._tags),
            (r"/v2/[^/]+/[^/]+/blobs/(.+)", self._blob),
            (r"/token", self._token),
            (r"/cdn/(.+)", self._cdn),
            (r"/files/(.+)", self._file),
            (r"/api/models/([^/]+/[^/]+)/refs", self._refs),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ]

    async def _manifest(self, reply: Reply, _: Any, model: str, tag: str) -> None:
        faults = self.faults
        if await reply.denied() or await reply.scripted(faults.meta_statuses):
            return
        body = faults.manifest if faults.manifest is not None else self.manifests.get(f"{model}:{tag}")
        if body is None:
            await reply.small(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
            return
        await reply.small(200, body, MANIFEST_TYPE, faults.manifest_padding)

    async def _tags(self, reply: Reply, _: Any, model: str) -> None:
        tags = [name.split(":")[1] for name in self.manifests if name.startswith(model + ":")]
        await reply.json(200 if tags else 404, {"name": model, "tags": tags})

    async def _token(self, reply: Reply, query: dict[str, list[str]]) -> None:
        await reply.json(self.faults.token_status, {"token": "good-token", "asked": query})

    async def _blob(self, reply: Reply, _: Any, digest: str) -> None:
        if not await reply.denied():
            await self._content(reply, digest, self.blobs.get(digest))

    async def _file(self, reply: Reply, _: Any, name: str) -> None:
        data = self.files.get(name)
        if data is not None:
            reply.extra["etag"] = f'"{hashlib.md5(data).hexdigest()}"'
        await self._content(reply, f"file/{name}", data)

    async def _resolve(self, reply: Reply, _: Any, repo: str, commit: str, path: str) -> None:
        if await reply.denied():
            return
        data = self.repos.get(repo, {}).get(path) if commit in (COMMIT, "main") else None
        if data is not None:
            reply.extra["x-linked-etag"] = f'"{hashlib.sha256(data).hexdigest()}"'
            reply.extra["x-linked-size"] = str(len(data))
        await self._content(reply, f"repo/{repo}/{path}", data)

    async def _content(self, reply: Reply, key: str, data: bytes | None) -> None:
        faults = self.faults
        if await reply.scripted(faults.statuses):
            return
        if data is None:
            await reply.small(404, b"not here")
        elif faults.redirect:
            host = reply.headers.get("host", "")
            bases = {"same": f"{reply.scheme}://{host}", "cross": self.cdn_base, "downgrade": f"http://{host}"}
            base = bases.get(faults.redirect)
            target = f"{base}/cdn/{key}?signature=abc" if base is not None else faults.redirect
            if faults.redirect == "loop":
                target = self.seen[-1].path
            await reply.redirect(target)
        else:
            await reply.content(data)

    async def _cdn(self, reply: Reply, _: Any, key: str) -> None:
        if self.faults.expire_cdn:
            self.faults.expire_cdn -= 1
            await reply.small(403, b"expired")
            return
        kind, _, rest = key.partition("/")
        data = self.blobs.get(key)
        if kind == "file":
            data = self.files.get(rest)
        elif kind == "repo":
            user, repo, path = rest.split("/", 2)
            data = self.repos.get(f"{user}/{repo}", {}).get(path)
        await (reply.content(data) if data is not None else reply.small(404, b"not here"))

    async def _refs(self, reply: Reply, _: Any, repo: str) -> None:
        if await reply.denied() or await reply.scripted(self.faults.meta_statuses):
            return
        if repo not in self.repos:
            await reply.json(401, {"error": "Invalid username or password."})  # as the Hub says for a missing one
            return
        branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}
        await reply.json(200, {"tags": [], "branches": [branch], "converts": []})

    async def _tree(self, reply: Reply, query: dict[str, list[str]], repo: str, commit: str) -> None:
        if await reply.denied() or await reply.scripted(self.faults.meta_statuses):
            return
        if self.faults.tree is not None:
            await reply.small(200, self.faults.tree, "application/json")
            return
        entries: list[dict[str, Any]] = []
        for path, data in self.repos.get(repo, {}).items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"type": "file", "oid": git, "size": len(data), "path": path}
            if path.endswith(".gguf") and path not in self.git_files:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            entries.append(entry)
        start = int(query.get("cursor", ["0"])[0])
        if start + self.page < len(entries):
            base = f"http://{reply.headers.get('host', '')}/api/models/{repo}/tree/{commit}"
            reply.extra["link"] = f'<{base}?recursive=true&cursor={start + self.page}>; rel="next"'
        await reply.json(200, entries[start : start + self.page])


class Reply:
    """One answer, with the faults applied."""

    def __init__(
        self, source: FakeSource, send: Send, method: str, headers: dict[str, str], scheme: str = "http"
    ) -> None:
        self.source = source
        self.faults = source.faults
        self.generation = source.generation
        self.send = send
        self.scheme = scheme
        self.method = method
        self.headers = headers
        self.extra: dict[str, str] = {}

    async def start(self, status: int, headers: dict[str, str]) -> None:
        raw = [(k.encode(), v.encode("latin-1")) for k, v in (headers | self.extra).items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, data: bytes, more: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def small(self, status: int, data: bytes, kind: str = "text/plain", padding: int = 0) -> None:
        await self.start(status, {"content-type": kind, "content-length": str(len(data) + padding)})
        await self.body(data, padding > 0)
        while padding > 0:
            n = min(padding, 1 << 20)
            padding -= n
            await self.body(b" " * n, padding > 0)

    async def json(self, status: int, value: Any) -> None:
        await self.small(status, json.dumps(value).encode(), "application/json")

    async def redirect(self, target: str) -> None:
        await self.start(307, {"location": target, "content-length": "0"})
        await self.body(b"")

    async def scripted(self, statuses: list[int]) -> bool:
        """Answer the next status of a script; False if there is none."""
        if not statuses:
            return False
        if self.faults.retry_after:
            self.extra["retry-after"] = self.faults.retry_after
        await self.small(statuses.pop(0), b"scripted")
        return True

    async def denied(self) -> bool:
        """401 where a switch asks for a token that did not come."""
        given = self.headers.get("authorization", "")
        if self.faults.need_token and given != "Bearer good-token":
            realm = self.faults.realm or f"http://{self.headers.get('host', '')}/token"
            self.extra["www-authenticate"] = f'Bearer realm="{realm}",service="fake",scope="repository:x:pull"'
            await self.json(401, {"errors": [{"code": "UNAUTHORIZED"}]})
            return True
        if self.faults.need_bearer and given != f"Bearer {self.faults.need_bearer}":
            await self.json(401, {"error": "Access to model is restricted"})
            return True
        return False

    # ------------------------------------------------------------------------------------------------------ content

    async def content(self, data: bytes) -> None:
        """A file, whole or the range asked for."""
        faults, start, end, status = self.faults, 0, len(data), 200
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        changed = "if-range" in self.headers and self.headers["if-range"] != self.extra.get("etag")
        headers = {"content-type": "application/octet-stream", "accept-ranges": "bytes"}
        if found and faults.ranges != "ignored" and not faults.no_length and not changed:
            start, end, status = int(found[1]), min(int(found[2] or len(data)) + 1, len(data)), 206
            if start >= len(data) or faults.ranges == "refused":
                self.extra["content-range"] = f"bytes */{len(data)}"
                await self.small(416, b"")
                return
            if faults.ranges == "short":
                end = min(end, start + max(5000, (end - start) // 3))
            shift = 1 if faults.ranges in ("wrong", "shifted") else 0
            headers["content-range"] = f"bytes {start + shift}-{end - 1 + shift}/{len(data)}"
            if faults.ranges == "shifted":
                start, end = start + 1, min(end + 1, len(data))
        body = data[start:end]
        if not (faults.no_length or faults.extra):
            headers["content-length"] = str(len(body))
        if faults.compress:
            headers["content-encoding"] = "gzip"
        await self.start(status, headers)
        if self.method == "HEAD":
            await self.body(b"")
            return
        await self._send_body(body)

    def _take(self, fault: str) -> bool:
        left: int = getattr(self.faults, fault)
        if left > 0:
            setattr(self.faults, fault, left - 1)
        return left != 0

    async def _send_body(self, body: bytes) -> None:
        faults = self.faults
        if body and self._take("flip"):
            at = len(body) * 2 // 3
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        if self._take("extra"):
            body += b"more than was announced"
        cut = self._take("cut")
        stall = not cut and self._take("stall")
        drip = self._take("drip")
        stop = int(len(body) * faults.cut_at) if cut or stall else len(body)
        step = 1 if drip else 1 << 16
        for at in range(0, stop, step):
            if faults.pause or drip:
                await asyncio.sleep(0.05 if drip else faults.pause)
            if self.generation != self.source.generation:
                raise ConnectionAbortedError("the test is over")
            await self.body(body[at : min(at + step, stop)], True)
        if stall:
            await asyncio.sleep(faults.stall_seconds)
        if stop < len(body):
            raise ConnectionAbortedError("cut by a switch")  # the server closes the connection
        await self.body(b"")
