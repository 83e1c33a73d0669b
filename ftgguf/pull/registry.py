"""Pulls from an Ollama registry: the manifest, then its blobs, then the name.

The protocol is the Docker registry's, as far as Ollama uses it; the lines reported are Ollama's.
"""

from __future__ import annotations

import difflib
import re
import time
from base64 import urlsafe_b64encode
from os import urandom

import httpx
import msgspec

from ftgguf.pull import account
from ftgguf.pull.client import Client, is_loopback
from ftgguf.pull.errors import BadAnswer, NotFound, PullError, Refused, Unauthorized
from ftgguf.pull.manifest import (
    MANIFEST_TYPE,
    MAX_LAYERS,
    MAX_MANIFEST,
    Manifest,
    check_runnable,
    parse_config,
    parse_manifest,
)
from ftgguf.pull.names import DEFAULT_HOST, OllamaName, StoredName
from ftgguf.pull.session import Event, Session
from ftgguf.pull.store import Entry
from ftgguf.quoting import shown

_MAX_JSON = 1 << 20
_IGNORED = ("embed",)
"""Layer kinds that nothing reads any more."""


def pull_ollama(session: Session, name: OllamaName) -> Entry:
    """Fetch the model, or what is missing of it. Raises PullError."""
    session.check_host(name)
    session.report(Event("pulling manifest"))
    base = name.base_url
    if session.options.insecure:
        base = re.sub(r"^https:", "http:", base)
    session.client.challenge = lambda response: _token(session.client, response, name)
    manifest = _manifest(session, name, base)

    def url(digest: object) -> str:
        return f"{base}/blobs/{digest}"

    session.fetch(url(manifest.config.digest), manifest.config.digest, manifest.config.size)
    config = parse_config(session.store.read_blob(manifest.config, _MAX_JSON * 8))
    check_runnable(str(name), manifest, config)
    wanted = tuple(layer for layer in manifest.all_layers if layer.kind not in _IGNORED)
    session.check_space(wanted, str(name))
    for layer in wanted:
        session.fetch(url(layer.digest), layer.digest, layer.size)
    for layer in manifest.of_kind(*_IGNORED):
        session.say(f"ignoring an obsolete layer ({layer.kind})")
    return finish_any(session, name, manifest.raw)


def finish_any(session: Session, name: StoredName, raw: bytes) -> Entry:
    """Give the model its name; remove what only its earlier version needed."""
    session.report(Event("verifying sha256 digest"))
    before = session.store.get(name)
    session.report(Event("writing manifest"))
    entry = session.store.put(name, raw)
    if before is not None and before.owner == "ftgguf" and before.manifest.id != entry.manifest.id:
        session.report(Event("removing unused layers"))
        session.store.forget(before.manifest)
    session.store.remove_stale()
    session.report(Event("success"))
    return entry


def _manifest(session: Session, name: OllamaName, base: str) -> Manifest:
    status, _, body = session.client.read(f"{base}/manifests/{name.tag}", MAX_MANIFEST, {"Accept": MANIFEST_TYPE})
    if status == 404:
        raise NotFound(_not_found(session, name, base))
    if status in (401, 403):
        raise Unauthorized(f"{name}: {name.host} refuses it ({status}); {_key_hint(name)}")
    if status != 200:
        raise BadAnswer(f"{name}: pull model manifest: {status}: {shown(body[:400])}")
    return parse_manifest(body, MAX_LAYERS)


def _not_found(session: Session, name: OllamaName, base: str) -> str:
    """404: the tags that do exist, as far as the registry or this disk knows them."""
    known: list[str] = []
    try:
        status, _, body = session.client.read(f"{base}/tags/list", _MAX_JSON)
        if status == 200:
            found = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("tags", msgspec.Raw(b"[]"))
            known = [tag for tag in msgspec.json.decode(found, type=list[str] | None) or [] if len(tag) <= 80]
    except (PullError, msgspec.DecodeError):
        known = []
    same = name.namespace.lower(), name.model.lower()
    for entry in session.store.entries():
        if isinstance(entry.name, OllamaName) and (entry.name.namespace.lower(), entry.name.model.lower()) == same:
            known.append(entry.name.tag)
    known = sorted({tag for tag in known if tag.isprintable()})
    near = difflib.get_close_matches(name.tag, known, 8, 0.4) or known[:8]
    page = ""
    if name.host.lower() == DEFAULT_HOST:
        path = name.model if name.namespace == "library" else f"{name.namespace}/{name.model}"
        page = f"; all tags: https://ollama.com/{'library/' if path == name.model else ''}{path}/tags"
    hint = f"; near it: {', '.join(near)}" if near else ""
    return f"{name}: no such model or tag at {name.host}{hint}{page}"


# -------------------------------------------------------------------------------------------------------------- auth

_FIELD = re.compile(r'(\w+)="([^"]*)"')


def _token(client: Client, response: httpx.Response, name: OllamaName) -> str | None:
    """The `Authorization` that a 401's challenge leads to; None where there is no challenge.

    The realm must be on the host that asked: a token request is signed, and a signature is worth stealing.
    """
    challenge = response.headers.get("www-authenticate", "")
    if not challenge.lower().startswith("bearer ") or len(challenge) > 4096:
        return None
    fields = dict(_FIELD.findall(challenge))
    realm = httpx.URL(fields.get("realm", ""))
    if realm.host.lower() != response.url.host.lower() or realm.userinfo:
        raise Refused(f"{response.url.host} sends for a token to another host ({realm.host or 'none'}): refused")
    if realm.scheme != "https" and not (realm.scheme == "http" and is_loopback(realm.host)):
        raise Refused(f"{response.url.host} sends for a token over plain http: refused")
    query = [("service", fields.get("service", ""))]
    query += [("scope", scope) for scope in fields.get("scope", "").split()]
    query += [("ts", str(int(time.time()))), ("nonce", urlsafe_b64encode(urandom(16)).decode().rstrip("="))]
    url = str(realm.copy_merge_params(query))
    signature = account.sign("GET", url)
    headers = {"Authorization": signature} if signature else {}
    status, _, body = client.read(url, _MAX_JSON, headers, challenge=False)
    if status != 200:
        raise Unauthorized(f"{name}: {realm.host} gives no token ({status}); {_key_hint(name)}")
    try:
        token = msgspec.json.decode(body, type=dict[str, msgspec.Raw])["token"]
        text = msgspec.json.decode(token, type=str)
    except (msgspec.DecodeError, KeyError):
        raise BadAnswer(f"{realm.host} answered a token request with something else") from None
    if not re.fullmatch(r"[\x21-\x7e]{1,16384}", text):
        raise BadAnswer(f"{realm.host} sent a token with odd characters")
    return f"Bearer {text}"


def _key_hint(name: OllamaName) -> str:
    if account.key_path().is_file():
        return f"the Ollama account of this machine's key may not read {name.namespace}/{name.model}"
    return "this model needs an Ollama account key (~/.ollama/id_ed25519, made by 'ollama signin')"
