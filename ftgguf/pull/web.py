"""Pulls from a plain address (`-mu URL`). No digest is known beforehand: size and a valid GGUF header must do."""

from __future__ import annotations

import re

from ftgguf.pull.client import host_of
from ftgguf.pull.errors import BadAnswer
from ftgguf.pull.hub import describe
from ftgguf.pull.manifest import Layer, encode_manifest
from ftgguf.pull.names import UrlName
from ftgguf.pull.registry import finish_any
from ftgguf.pull.session import Event, Session
from ftgguf.pull.store import Entry

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")


def pull_url(session: Session, name: UrlName) -> Entry:
    """Fetch the file, and the other parts if its name is one of a split model's. Raises PullError."""
    session.check_host(name)
    layers = []
    for url in _parts(name):
        part = UrlName(url)
        session.report(Event(f"pulling {part.file_name} from {host_of(url)}"))
        digest, size = session.fetch(url, None, None, part.file_name)
        layers.append(Layer("model", digest, size, part.file_name))
    source = {"kind": "url", "url": str(name)}
    try:
        config = describe(session.store, layers)
    except BadAnswer as error:
        for layer in layers:
            session.store.drop_unused(layer.digest)
        raise BadAnswer(f"{name}: {error}") from None
    return finish_any(session, name.stored, encode_manifest(config, layers, source))


def _parts(name: UrlName) -> list[str]:
    """The addresses of all parts: the number in the last part of the path counts up."""
    found = _SHARD.search(name.file_name)
    if found is None or name.url.count(found[0]) != 1 or not 0 < int(found[2]) <= 1000:
        return [name.url]
    return [name.url.replace(found[0], f"-{no:05d}-of-{found[2]}.gguf") for no in range(1, int(found[2]) + 1)]
